"""How fast the everyday things are: help, a search, checks of saved plans, planning again, the cost model's kernels.

python scripts/bench/speed.py

Whole commands run in processes of their own, start-up included; the best of a few runs counts, since other programs
only ever add to a time. The figures are printed and written to scripts/bench/results/speed-<date>.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from scale import processor

from hetplan.catalog.load import load_cluster, load_model
from hetplan.cli.main import run
from hetplan.costs.prices import price
from hetplan.costs.records import StageOption
from hetplan.plan.estimate import estimate
from hetplan.plan.program import program
from hetplan.plan.read_plan import read_plan
from hetplan.specs.decode import document_from_text
from hetplan.specs.workload import RECOMPUTES, Workload

ROOT = Path(__file__).parents[2]
LAB = "cluster_specs/two-generation-lab.yaml"
EIGHT_NODES = "cluster_specs/ib-roce-8-nodes.yaml"
JOB = ("llama-3.1-8b", "--global-batch", "256", "--seq-len", "8192")
PLANS_CHECKED = 200
Figures = dict[str, float]


def main() -> None:
    """Measure everything, print the figures and write them."""
    os.chdir(ROOT)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for measure in (start_up, lab_search, many_checks, planning_again, kernels):
            found = measure(Path(folder))
            figures |= found
            for name, value in found.items():
                print(f"{name:34} {value:12,.4g}", flush=True)
    write(figures)


def start_up(_: Path) -> Figures:
    """`hetplan --help`, and `hetplan --version`."""
    return {f"{word}_s": best_s(lambda word=word: outside(f"--{word}"), 5) for word in ("help", "version")}


def lab_search(_: Path) -> Figures:
    """The README's search, comparison included."""
    return {"lab_search_s": best_s(lambda: outside("search", LAB, *JOB), 3)}


def many_checks(folder: Path) -> Figures:
    """Plans checked in one call."""
    golden = sorted(Path("tests/golden").glob("*.yaml"))
    places = [folder / f"saved-{index}.yaml" for index in range(PLANS_CHECKED)]
    for index, place in enumerate(places):
        shutil.copy(golden[index % len(golden)], place)
    return {f"{PLANS_CHECKED}_plans_checked_s": best_s(lambda: outside("check", *map(str, places)), 2)}


def planning_again(folder: Path) -> Figures:
    """A node lost: planning again beside searching what is left from nothing, in one process, imports done."""
    cluster, plan = folder / "cluster.yaml", str(folder / "plan.yaml")
    text = Path(EIGHT_NODES).read_text()
    cluster.write_text(text)
    inside("search", str(cluster), *JOB, "-q", "-o", plan)
    again_s = best_s(lambda: inside("replan", plan, "--lost", "roce-2"), 3)
    cluster.write_text(text.replace("'roce-[1-4]'", "'roce-[1,3-4]'"))
    cold_s = best_s(lambda: inside("search", str(cluster), *JOB, "-q"), 3)
    return {"replan_s": again_s, "search_of_what_is_left_s": cold_s, "replan_over_search": again_s / cold_s}


def kernels(_: Path) -> Figures:
    """Stage options priced, layouts estimated, programs and documents built, each a second."""
    cluster, _source = load_cluster("cluster_specs/ten-thousand.yaml")
    model, _source = load_model("gpt3-175b")
    prices = price(cluster, model, Workload(seq_len=2048, global_batch=4096, precision="fp16"))
    options = [
        StageOption(group=group.name, tp=tp, samples=samples, recompute=recompute)
        for group in cluster.groups
        for tp in (1, 2, 4, 8)
        for samples in range(1, 43)
        for recompute in RECOMPUTES
    ]
    saved = read_plan(Path("tests/golden/two-generation-lab.yaml"))
    lab, _source = load_cluster(LAB)
    small = price(lab, load_model("llama-3.1-8b")[0], Workload(seq_len=8192, global_batch=256, precision="fp16"))
    entry = "- {group: a100, first_layer: 10, end_layer: 20, tp: 8, dp: 4, recompute: full, devices: [0, 32]}\n"
    text = "hetplan: cluster/v1\nstages:\n" + entry * (1_000_000 // len(entry))
    return {
        "stage_options_priced_per_s": len(options) / best_s(lambda: prices.table(options), 3),
        "estimates_per_s": 1 / best_s(lambda: estimate(saved.layout, small), 20),
        "actions_of_a_program_per_s": 2 * 64 * 512 / best_s(lambda: program("1f1b", 64, 512), 3),
        "bytes_of_yaml_read_per_s": len(text) / best_s(lambda: document_from_text(text, "x.yaml", "cluster"), 3),
    }


def best_s(work: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the fastest of a few rounds."""
    seconds = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def outside(*words: str) -> None:
    """Run a command in a process of its own."""
    subprocess.run([sys.executable, "-m", "hetplan", *words], capture_output=True, check=True)


def inside(*words: str) -> None:
    """Run a command in this process."""
    with contextlib.redirect_stdout(io.StringIO()):
        if code := run(words):
            raise SystemExit(f"hetplan {' '.join(words)}: exit code {code}")


def write(figures: Figures) -> None:
    """Write the figures with what they were measured on."""
    now = datetime.now(UTC)
    document = {
        "date": now.isoformat(timespec="seconds"),
        "hardware": {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("hetplan", "numpy", "ortools")},
        },
        "figures": figures,
    }
    path = Path(__file__).parent / "results" / f"speed-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
