"""Does prediction meet reality? Testbed clusters, models, layouts: predicted against measured step times.

    python scripts/bench/campaign.py [--beds NAME,..] [--models NAME,..] [--steps N] [-o FILE]

For each testbed (`scripts/testbed/beds`) and model: the cluster is profiled in the testbed, `hetplan search` picks a
plan, and it and the layouts of `LAYOUTS` are priced with that calibration and then run by hetplan's executor, a few
steps each, in two passes over all of them. Nothing is fitted to step times. Reported, beside the load of the machine:

* mean and largest error of the predicted step time, layouts with and without tensor parallelism apart;
* Kendall's tau between predicted and measured order, and of pairs whose times differ by more than 5 % how many are
  ordered right;
* the repeat error: how far the two passes lie apart, which no prediction can be held against;
* regret: how much longer the plan of the search took than the fastest of all.

Needs torch and what the testbed needs; exits 77 where it cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "testbed")]

from bed_job import Job  # noqa: E402
from bed_kernel import SKIPPED, UnsupportedError, enter_user_namespace  # noqa: E402 - found by the path above
from bed_spec import Bed, cluster_of, read_bed  # noqa: E402
from scipy.stats import kendalltau  # noqa: E402
from testbed import Testbed  # noqa: E402

from hetplan.catalog.load import load_calibration, load_cluster, load_model  # noqa: E402
from hetplan.costs.prices import Prices, price  # noqa: E402
from hetplan.plan.check import check  # noqa: E402
from hetplan.plan.estimate import estimate  # noqa: E402
from hetplan.plan.limits import ENGINES  # noqa: E402
from hetplan.plan.placement import place  # noqa: E402
from hetplan.plan.records import Layout, Replica, Stage  # noqa: E402
from hetplan.search.records import SearchRequest  # noqa: E402
from hetplan.search.solve import search  # noqa: E402
from hetplan.specs.workload import Workload  # noqa: E402

SEQ_LEN, GLOBAL_BATCH = 128, 12
CLEARLY = 0.05
"""Pairs whose times differ by less are not counted as ordered right or wrong."""
MODELS = {
    "gpt-8": "{model_type: gpt2, n_layer: 8, n_embd: 256, n_head: 8, n_positions: 256, vocab_size: 512}",
    "llama-6": (
        "{model_type: llama, num_hidden_layers: 6, hidden_size: 288, intermediate_size: 768, num_attention_heads: 8,"
        " num_key_value_heads: 4, vocab_size: 1024, max_position_embeddings: 256, tie_word_embeddings: false}"
    ),
}

LAYOUTS = {
    "three-speeds": (
        "fast:8 m1x12",
        "fast:4 fast:4 m1x12",
        "fast:5 mid:3 m1x12",
        "fast:3 fast:3 mid:2 m1x12",
        "fast:3 fast:2 mid:2 slow:1 m2x6",
        "slow:1 mid:2 fast:2 fast:3 m1x12",
        "fast:8 m1x6 | fast:8 m1x6",
        "fast:8 m2x3 | fast:8 m1x4 | mid:8 m2x1",
        "fast:5 mid:3 m1x8 | fast:8 m2x2",
        "fast/2:8 m4x3",
        "fast/2:6 mid:2 m2x6",
    ),
    "two-sites": (
        "west:8 m1x12",
        "west:4 west:4 m1x12",
        "west:5 east:3 m1x12",
        "west:3 west:2 east:2 east:1 m1x12",
        "west:5 east:3 m1x6 | west:5 east:3 m1x6",
        "west:8 m1x6 | west:8 m1x6",
        "west:3 west:3 east:2 m2x6",
        "west:8 m1x4 | west:8 m1x4 | east:8 m1x4",
        "west:5 east:3 m1x7 | west:8 m1x5",
        "west/2:8 m4x3",
        "west/2:6 east:2 m2x6",
    ),
    "two-islands": (
        "near:8 m1x12",
        "near:4 near:4 m1x12",
        "near:5 far:3 m1x12",
        "near:3 near:3 far:2 m1x12",
        "far:1 near:3 near:3 far:1 m1x12",
        "near:3 near:3 far:1 far:1 m2x6",
        "near:8 m1x6 | near:8 m1x6",
        "near:8 m1x5 | near:8 m1x5 | far:4 far:4 m1x2",
        "near:6 far:2 m1x6 | near:6 far:2 m1x6",
        "near/2:8 m4x3",
        "near/2:6 far:1 far:1 m2x6",
    ),
}
"""A row is `group:decoders ... mMICROBATCHxCOUNT`, decoders in eighths of the model's; `/2` after a group is its tp,
`|` parts replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One layout, predicted and measured."""

    name: str
    uses_tp: bool
    predicted_s: float
    passes_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """Mean of the passes."""
        return statistics.fmean(self.passes_s)

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too long."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def repeat_error(self) -> float:
        """How far the passes lie apart."""
        return (max(self.passes_s) - min(self.passes_s)) / self.measured_s


def layout_of(words: str, num_decoders: int) -> Layout:
    """Return a layout written as in `LAYOUTS`."""
    return Layout(replicas=tuple(_replica(row.split(), num_decoders) for row in words.split("|")))


def _replica(words: Sequence[str], num_decoders: int) -> Replica:
    microbatch, count = words[-1].removeprefix("m").split("x")
    parts = [word.partition(":") for word in words[:-1]]
    eighths = [int(share) for _, _, share in parts]
    ends = [round(num_decoders * sum(eighths[: i + 1]) / 8) for i in range(len(eighths))]
    stages = []
    for i, (where, _, _) in enumerate(parts):
        group, _, tp = where.partition("/")
        first = 0 if i == 0 else ends[i - 1] + 1
        end = num_decoders + 2 if i == len(parts) - 1 else ends[i] + 1
        stages.append(Stage(group=group, first_layer=first, end_layer=end, tp=int(tp or 1)))
    return Replica(stages=tuple(stages), microbatch=int(microbatch), num_microbatches=int(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A bed and a model, with the folder their files are in."""

    bed: Bed
    model_name: str
    folder: Path

    @property
    def model_path(self) -> Path:
        """The model file."""
        path = self.folder / f"{self.model_name}.yaml"
        path.write_text(f"hetplan: model/v1\nname: {self.model_name}\nconfig: {MODELS[self.model_name]}\n")
        return path

    @property
    def cluster_path(self) -> Path:
        """The cluster file."""
        path = self.folder / "cluster.yaml"
        path.write_text(cluster_of(self.bed))
        return path


def profiled(setting: Setting, up: Testbed, *, quick: bool) -> Prices:
    """Profile a bed and return the cost model with what was measured."""
    out = setting.folder / f"{setting.model_name}-calibration.yaml"
    words = ["profile", str(setting.model_path), "--cluster", str(setting.cluster_path), "-o", str(out)]
    words += [
        "--seq-len",
        str(SEQ_LEN),
        "--micro-batch",
        "1,2,4",
        "--precision",
        "fp32",
        *(["--quick"] if quick else []),
    ]
    done = up.run(words, shown=False, timeout_s=900)
    if done.returncode:
        raise SystemExit(f"profile failed: {done.stderr}")
    cluster, _ = load_cluster(setting.cluster_path)
    model, _ = load_model(setting.model_path)
    calibration, _ = load_calibration(out)
    workload = Workload(seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, precision="fp32")
    return price(cluster, model, workload, calibration)


def measured(setting: Setting, up: Testbed, prices: Prices, layouts: Sequence[Layout], num_steps: int) -> list[float]:
    """Return the median step time of each layout, run once through."""
    rank_of = {
        (group.name, group.hosts.index(host) * group.num_devices + slot): (rank, host)
        for rank, (host, slot, group) in enumerate(up.bed.ranks())
    }
    job = Job(model=prices.model, layouts=tuple(layouts), rank_of=rank_of, seq_len=SEQ_LEN, num_steps=num_steps)
    job_path, result = setting.folder / "job.pickle", setting.folder / "result.json"
    job_path.write_bytes(pickle.dumps(job))
    program = Path(__file__).parents[1] / "testbed" / "bed_steps.py"
    done = up.run([str(program), str(job_path), str(result)], shown=False, timeout_s=1800)
    if done.returncode:
        raise SystemExit(f"running layouts failed ({done.returncode}): {done.stderr}")
    return [statistics.median(each["steps_s"]) for each in json.loads(result.read_text())]


def trials_of(setting: Setting, up: Testbed, *, num_steps: int, quick: bool, raw: Path | None) -> list[Trial]:
    """Return all layouts of a setting, predicted and measured; the last is the search's plan."""
    prices = profiled(setting, up, quick=quick)
    num_decoders = sum(layer.kind == "decoder" for layer in prices.model.chain)
    named = {words: place(layout_of(words, num_decoders), prices.cluster) for words in LAYOUTS[setting.bed.name]}
    for words, layout in named.items():
        for violation in check(layout, prices, ENGINES["hetplan"]):
            raise SystemExit(f"{words}: {violation}")
    found = search(prices, SearchRequest()).best.layout
    named["search's plan"] = found
    layouts = list(named.values())
    passes = [measured(setting, up, prices, layouts, num_steps) for _ in range(2)]
    if raw is not None:
        names = json.dumps([[name, estimate(layout, prices).step_s] for name, layout in named.items()])
        stem = f"{setting.bed.name}-{setting.model_name}"
        (raw / f"{stem}-layouts.json").write_text(names)
        for path in (setting.folder / "result.json", setting.folder / f"{setting.model_name}-calibration.yaml"):
            (raw / f"{stem}-{path.name}").write_bytes(path.read_bytes())
    return [
        Trial(
            name=name,
            uses_tp=any(stage.tp > 1 for replica in layout.replicas for stage in replica.stages),
            predicted_s=estimate(layout, prices).step_s,
            passes_s=tuple(times[i] for times in passes),
        )
        for i, (name, layout) in enumerate(named.items())
    ]


def report(setting: Setting, trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the lines of one setting."""
    yield f"## {setting.bed.name}, {setting.model_name}"
    yield ""
    yield "| layout | predicted s | measured s | repeat error | error |"
    yield "|---|---|---|---|---|"
    for trial in trials:
        numbers = f"{trial.predicted_s:.3f} | {trial.measured_s:.3f} | {trial.repeat_error:.1%} | {trial.error:+.1%}"
        yield f"| {trial.name.replace('|', '&#124;')} | {numbers} |"
    yield ""
    for label, some in (
        ("without tp", [trial for trial in trials if not trial.uses_tp]),
        ("with tp", [trial for trial in trials if trial.uses_tp]),
        ("all", list(trials)),
    ):
        if some:
            yield f"- {label}: {summary_of(some)}"
    plan, fastest = trials[-1], min(trials, key=lambda trial: trial.measured_s)
    regret = plan.measured_s / fastest.measured_s - 1.0
    yield f"- the search's plan took {regret:.1%} longer than the fastest ({fastest.name.replace('|', '&#124;')})"
    yield ""


def summary_of(trials: Sequence[Trial]) -> str:
    """Return errors, order and repeat error of some trials in one sentence."""
    errors = [abs(trial.error) for trial in trials]
    repeats = [trial.repeat_error for trial in trials]
    text = f"error {statistics.fmean(errors):.1%} mean, {max(errors):.1%} most; repeat error"
    text += f" {statistics.fmean(repeats):.1%} mean, {max(repeats):.1%} most"
    if len(trials) > 2:
        tau = kendalltau([t.predicted_s for t in trials], [t.measured_s for t in trials]).statistic
        clear = [
            (a, b)
            for a, b in combinations(trials, 2)
            if abs(a.measured_s - b.measured_s) > CLEARLY * min(a.measured_s, b.measured_s)
        ]
        right = sum((a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s) for a, b in clear)
        text += f"; Kendall's tau {tau:.2f}, {right} of {len(clear)} clear pairs in order"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beds", default=",".join(LAYOUTS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="profile with --quick")
    parser.add_argument("--raw", type=Path, default=None, help="folder for calibrations and every rank's times")
    parser.add_argument("-o", "--out", type=Path, default=None)
    given = parser.parse_args()
    try:
        enter_user_namespace()
        lines = list(
            _campaign(given.beds.split(","), given.models.split(","), given.steps, quick=given.quick, raw=given.raw)
        )
    except UnsupportedError as error:
        print(f"no testbed here: {error}", file=sys.stderr)
        return SKIPPED
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _campaign(
    beds: Sequence[str], models: Sequence[str], num_steps: int, *, quick: bool, raw: Path | None
) -> Iterator[str]:
    everything: list[Trial] = []
    yield from _said(
        [f"# Predicted and measured step times ({time.strftime('%Y-%m-%d', time.gmtime())})", "", _machine(), ""]
    )
    for bed_name in beds:
        bed = read_bed(ROOT / "scripts" / "testbed" / "beds" / f"{bed_name}.yaml")
        for model_name in models:
            with tempfile.TemporaryDirectory(prefix="hetplan-campaign-") as folder, Testbed(bed) as up:
                setting = Setting(bed=bed, model_name=model_name, folder=Path(folder))
                trials = trials_of(setting, up, num_steps=num_steps, quick=quick, raw=raw)
            everything.extend(trials)
            yield from _said(report(setting, trials))
    yield from _said(["## All", "", f"- without tp: {summary_of([t for t in everything if not t.uses_tp])}"])
    with_tp = [t for t in everything if t.uses_tp]
    if with_tp:
        yield from _said([f"- with tp: {summary_of(with_tp)}"])


def _said(lines: Sequence[str] | Iterator[str]) -> Iterator[str]:
    for line in lines:
        print(line, flush=True)
        yield line


def _machine() -> str:
    from importlib.metadata import version

    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} CPUs, load before the start {load}; torch {version('torch')}, gloo; commit"
        f" {commit.stdout.strip() or 'unknown'}; {SEQ_LEN} tokens a sample, {GLOBAL_BATCH} samples a step, fp32."
    )


if __name__ == "__main__":
    sys.exit(main())
