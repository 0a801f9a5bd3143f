"""Every shipped cluster and model, every engine and launcher: emitted folders against the parsers of the real things.

For each cluster and model a plan without restrictions and one an engine can run are made; each is emitted for each
engine. What is emitted must pass bash, shellcheck and the engine's own parser, with the plan's layers and world size;
what is refused must say why. Prints a line a problem and a table; exits 1 if there is any problem. Pairs come in an
order in which every cluster and every model come early; `--journal` keeps what was found and is gone on from,
`--seconds` ends the run, `--out` writes the table.

    python scripts/validate_emit.py --python PYTHON_WITH_TORCH --megatron DIR --torchtitan DIR --flagscale DIR \\
        --jobset CRD.yaml --trainjob CRD.yaml [--cluster NAME ...] [--model NAME ...] [--engine NAME ...] \\
        [--journal FILE.jsonl] [--seconds N] [--pair-seconds N] [--out FILE.md]

Sources: github.com/NVIDIA/Megatron-LM, pytorch/torchtitan, FlagOpen/FlagScale, kubernetes-sigs/jobset
(config/components/crd/bases), kubeflow/trainer (manifests/base/crds). What is not given is not checked, and said so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from emit_table import Outcome, reason, table
from emitted import Start, shell_problems, starts, world_problems

from hetplan.catalog.load import load_cluster, load_model
from hetplan.cli.inputs import WorkloadWords, for_engine, load_job, plan_of
from hetplan.cli.main import run
from hetplan.emit.capability import PROFILES
from hetplan.errors import HetplanError
from hetplan.plan.text import plan_text
from hetplan.search.quick import quick
from hetplan.search.records import SearchRequest

ROOT = Path(__file__).parents[1]
VIA = {"hetplan": ("torchrun", "slurm", "kubernetes", "skypilot"), "megatron": ("torchrun", "slurm", "kubernetes")}
SELF_STARTED = frozenset({"flagscale", "vllm"})
MOST_STARTED = {"torchrun": 16}
"""Nodes whose launch scripts are run; for the other launchers, whose scripts are the same, a few."""


class OutOfTimeError(BaseException):
    """A pair took longer than it may; no handler of errors takes it for its own."""


@dataclass(slots=True, kw_only=True)
class Setup:
    """Where the real things are, and a process that runs their parsers."""

    options: argparse.Namespace
    parsers: subprocess.Popen[str] | None = None
    passed: set[str] = field(default_factory=set)
    """Scripts that shellcheck passed."""

    def start(self) -> None:
        """Start the parsers (again), if there is an interpreter for them."""
        self.stop()
        if self.options.python:
            command = [self.options.python, str(Path(__file__).with_name("real_parsers.py"))]
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            self.parsers = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, text=True)

    def stop(self) -> None:
        """End the parsers."""
        if self.parsers is not None:
            self.parsers.kill()
            self.parsers.communicate()
            self.parsers = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what a real parser says."""
        if self.parsers is None or self.parsers.stdin is None or self.parsers.stdout is None:
            return {"problems": [], "facts": {}, "skipped": True}
        self.parsers.stdin.write(json.dumps(request) + "\n")
        self.parsers.stdin.flush()
        return dict(json.loads(self.parsers.stdout.readline()))


def make_plan(cluster: str, model: str, engine: str, out: Path) -> str | None:
    """Write a plan an engine can run; return why there is none."""
    length = min(2048, load_model(model)[0].max_seq_len or 2048)
    batch = max(512, 4 * load_cluster(cluster)[0].num_devices)
    try:
        job = for_engine(load_job(cluster, model, WorkloadWords(seq_len=length, global_batch=batch), None), engine)
        best = quick(job.prices, SearchRequest(limits=PROFILES[engine].limits, engine=engine, compare=False))
    except HetplanError as error:
        return str(error)
    if best is None:
        return "no plan fits"
    out.write_text(plan_text(plan_of(job, best.layout, best.estimate, None)))
    return None


def emit(plan: Path, engine: str, via: str, out: Path) -> tuple[int, str]:
    """Return exit code and message of `hetplan emit`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = run(["emit", str(plan), "--to", engine, "--via", via, "-o", str(out)])
    return code, said.getvalue().strip()


def problems_of(setup: Setup, plan: Path, folder: Path, engine: str, via: str) -> list[str]:
    """Return what is wrong with an emitted folder."""
    problems = shell_problems(folder, passed=setup.passed)
    found: list[Start] = []
    if engine not in SELF_STARTED:
        found = starts(folder, folder.parent, MOST_STARTED.get(via, 3))
        problems += world_problems(folder, found)
    document = yaml.safe_load(plan.read_text())
    asked = engine_request(setup.options, document, folder, engine, found)
    if asked:
        said = setup.ask(asked)
        problems += said["problems"]
        layers = said["facts"].get("layers")
        if engine == "megatron" and layers and sum(layers) != decoder_layers(document):
            problems.append(f"stages build {layers} layers")
    for name, source in (("jobset.yaml", setup.options.jobset), ("trainjob.yaml", setup.options.trainjob)):
        path = folder / name
        if path.exists() and source:
            document = yaml.safe_load(path.read_text())
            problems += setup.ask({"parser": "crd", "source": source, "document": document})["problems"]
    problems += kubernetes_problems(setup, folder)
    return problems


def kubernetes_problems(setup: Setup, folder: Path) -> list[str]:
    """Return what the core schemas say of the jobs inside a JobSet, and Kubeflow's classes of a PyTorchJob."""
    problems: list[str] = []
    if (folder / "jobset.yaml").exists():
        for row in yaml.safe_load((folder / "jobset.yaml").read_text())["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": row["name"]}}
            document = {**job, "spec": row["template"]["spec"]}
            problems += setup.ask({"parser": "kubernetes", "document": document})["problems"]
    if (folder / "pytorchjob.yaml").exists():
        document = yaml.safe_load((folder / "pytorchjob.yaml").read_text())
        problems += setup.ask({"parser": "pytorchjob", "document": document})["problems"]
    return problems


def decoder_layers(document: dict[str, Any]) -> int:
    """Return the decoder layers of the model a plan names."""
    model = load_model(document["model"]["name"])[0]
    return sum(layer.kind == "decoder" for layer in model.chain)


def engine_request(
    options: argparse.Namespace, document: dict[str, Any], folder: Path, engine: str, found: list[Start]
) -> dict[str, Any] | None:
    """Return what to ask an engine's own parser; None: there is none, or it is not here."""
    world = json.loads((folder / "expected.json").read_text())["world_size"] if found else 0
    source = getattr(options, engine, None)
    if engine == "deepspeed":
        stage = document["layout"]["replicas"][0]["stages"][0]
        return {"parser": engine, "folder": str(folder), "data_parallel": world // stage.get("tp", 1)}
    if not source:
        return None
    request = {"parser": engine, "source": source, "folder": str(folder), "world_size": world}
    if engine == "flagscale":
        return request
    words = list(found[0].program)
    if engine == "megatron":
        if "MEGATRON_MODEL_ARGS" in found[0].environment:
            return None
        kept = {k: v for k, v in found[0].environment.items() if k == "CUDA_DEVICE_MAX_CONNECTIONS"}
        return request | {"arguments": words[1:], "environment": kept}
    if "TITAN_MODULE" in found[0].environment:
        return None
    return request | {"arguments": words[2:]}


def main() -> int:
    """Run everything asked for."""
    options = parsed()
    setup = Setup(options=options)
    setup.start()
    signal.signal(signal.SIGALRM, _out_of_time)
    began_s = time.monotonic()
    outcomes = journal(options)
    seen = {(outcome.cluster, outcome.model) for outcome in outcomes}
    try:
        for cluster, model in pairs(options.cluster, options.model):
            if (Path(cluster).stem, Path(model).stem) in seen:
                continue
            if options.seconds and time.monotonic() - began_s > options.seconds:
                break
            found = one_pair(setup, cluster, model)
            outcomes += found
            if options.journal:
                with options.journal.open("a") as file:
                    file.writelines(json.dumps(outcome.document()) + "\n" for outcome in found)
    finally:
        setup.stop()
    text = table(outcomes, len(options.cluster) * len(options.model))
    print(text)
    if options.out:
        options.out.write_text(f"# {options.title}\n\n{text}\n")
    return 1 if any(outcome.result == "rejected" for outcome in outcomes) else 0


def _out_of_time(*_: object) -> None:
    raise OutOfTimeError


def pairs(clusters: list[str], models: list[str]) -> Iterator[tuple[str, str]]:
    """Yield every pair once, each cluster once in every round and all models spread over each round."""
    for shift in range(len(models)):
        for i, cluster in enumerate(clusters):
            yield cluster, models[(i + shift) % len(models)]


def journal(options: argparse.Namespace) -> list[Outcome]:
    """Return what earlier runs found."""
    if not options.journal or not options.journal.exists():
        return []
    return [Outcome(**json.loads(line)) for line in options.journal.read_text().splitlines()]


def one_pair(setup: Setup, cluster: str, model: str) -> list[Outcome]:
    """Emit the free plan and each engine's own plan of a cluster and model; return what came of each."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        signal.alarm(setup.options.pair_seconds)
        try:
            for engine, kind, via, result, said in emissions(setup, cluster, model, Path(name)):
                outcome = Outcome(
                    cluster=Path(cluster).stem,
                    model=Path(model).stem,
                    engine=engine,
                    kind=kind,
                    via=via,
                    result=result,
                    said=said,
                )
                found.append(outcome)
                if result == "rejected":
                    print(f"{outcome.cluster} {outcome.model} {engine} {kind} {via}: {said}", flush=True)
        except OutOfTimeError:
            said = f"after {setup.options.pair_seconds} s"
            found.append(
                Outcome(
                    cluster=Path(cluster).stem,
                    model=Path(model).stem,
                    engine="",
                    kind="",
                    via="",
                    result="cut off",
                    said=said,
                )
            )
            setup.start()
        finally:
            signal.alarm(0)
    return found


def emissions(setup: Setup, cluster: str, model: str, scratch: Path) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield engine, kind of plan, launcher, result and what was said of every folder asked for."""
    free = scratch / "free.yaml"
    no_free = make_plan(cluster, model, "hetplan", free)
    for own in (False, True):
        kind = "own" if own else "free"
        for engine in setup.options.engine:
            if no_free or engine == "hetplan":
                plan, why = free, no_free
            else:
                plan = scratch / f"{engine}.yaml" if own else free
                why = make_plan(cluster, model, engine, plan) if own else no_free
            if why:
                yield engine, kind, "", "no plan", reason(why)
                continue
            for via in VIA.get(engine, ("torchrun",)) if own else ("torchrun",):
                if engine == "hetplan" and not own:
                    continue
                yield engine, kind, via, *emission(setup, plan, engine, via, kind)


def emission(setup: Setup, plan: Path, engine: str, via: str, kind: str) -> tuple[str, str]:
    """Emit one folder; return the result and what was said."""
    folder = Path(tempfile.mkdtemp(dir=plan.parent)) / "out"
    code, message = emit(plan, engine, via, folder)
    if code == 0:
        problems = problems_of(setup, plan, folder, engine, via)
        result = "rejected" if problems else "passed"
        said = "; ".join(problems)
    else:
        problems = refusal_problems(code, message, own=kind == "own" and via == "torchrun")
        result = "rejected" if problems else "refused"
        said = "; ".join(problems) or reason(message)
    shutil.rmtree(folder.parent)
    return result, said


def refusal_problems(code: int, message: str, *, own: bool) -> list[str]:
    """Return what is wrong with a refusal: an engine's own plan may be refused for the model or precision only."""
    if code not in (2, 4):
        return [f"exit {code}: {message}"]
    if code == 4 and "cannot" not in message:
        return [f"a refusal that says not why: {message}"]
    if code == 4 and own and "nearest plan" not in message and "no plan it can run" not in message:
        return [f"its own plan is refused: {message}"]
    if code == 4 and "nearest plan" not in message and "no plan it can run" not in message:
        return [f"no nearest plan: {message}"]
    return []


def parsed() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("python", "megatron", "torchtitan", "flagscale", "jobset", "trainjob"):
        parser.add_argument(f"--{name}")
    clusters = sorted(str(path) for path in (ROOT / "cluster_specs").glob("*.yaml"))
    models = sorted(str(path) for path in (ROOT / "model_specs").glob("*.yaml"))
    parser.add_argument("--cluster", nargs="+", default=clusters)
    parser.add_argument("--model", nargs="+", default=models)
    parser.add_argument("--engine", nargs="+", default=list(PROFILES))
    parser.add_argument("--journal", type=Path, help="JSON lines of what was found; pairs in it are not done again")
    parser.add_argument("--seconds", type=int, default=0, help="begin no pair after so long")
    parser.add_argument("--pair-seconds", type=int, default=0, help="give a pair up after so long")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--title", default="Emitted folders against the real parsers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
