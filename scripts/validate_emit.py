"""Every shipped cluster and model, every engine and launcher: emitted folders against the parsers of the real things.

For each cluster and model a plan without restrictions and one an engine can run are made; each is emitted for each
engine. What is emitted must pass bash, shellcheck and the engine's own parser, with the plan's layers and world size;
what is refused must say why. Prints a line a problem and a table; exits 1 if there is any problem.

    python scripts/validate_emit.py --python PYTHON_WITH_TORCH --megatron DIR --torchtitan DIR --flagscale DIR \\
        --jobset CRD.yaml --trainjob CRD.yaml [--cluster NAME ...] [--model NAME ...] [--engine NAME ...]

Sources: github.com/NVIDIA/Megatron-LM, pytorch/torchtitan, FlagOpen/FlagScale, kubernetes-sigs/jobset
(config/components/crd/bases), kubeflow/trainer (manifests/base/crds). What is not given is not checked, and said so.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where the real things are, and a process that runs their parsers."""

    options: argparse.Namespace
    parsers: subprocess.Popen[str] | None

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


def problems_of(setup: Setup, plan: Path, folder: Path, engine: str, scratch: Path) -> list[str]:
    """Return what is wrong with an emitted folder."""
    problems = shell_problems(folder)
    found: list[Start] = []
    if engine not in SELF_STARTED:
        found = starts(folder, scratch)
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
    world = sum(start.num_processes for start in found)
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
    python = options.python
    command = [python, str(Path(__file__).with_name("real_parsers.py"))]
    pipe = subprocess.PIPE
    parsers = None
    if python:
        parsers = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    setup = Setup(options=options, parsers=parsers)
    counts: Counter[tuple[str, str]] = Counter()
    problems = 0
    with tempfile.TemporaryDirectory() as name:
        for cluster in options.cluster:
            for model in options.model:
                problems += one_pair(setup, cluster, model, Path(name), counts)
    if parsers and parsers.stdin:
        parsers.stdin.close()
        parsers.wait()
    for (engine, what), count in sorted(counts.items()):
        print(f"{engine:12s} {what:28s} {count}")
    print(f"{problems} problems")
    return 1 if problems else 0


def one_pair(setup: Setup, cluster: str, model: str, scratch: Path, counts: Counter[tuple[str, str]]) -> int:
    """Emit the free plan and each engine's own plan of a cluster and model; return the number of problems."""
    problems = 0
    free = scratch / "free.yaml"
    no_free = make_plan(cluster, model, "hetplan", free)
    for own in (False, True):
        for engine in setup.options.engine:
            plan = scratch / "plan.yaml" if own else free
            why = make_plan(cluster, model, engine, plan) if own else no_free
            if why:
                counts[engine, "no plan on the cluster"] += 1
                continue
            for via in VIA.get(engine, ("torchrun",)) if own else ("torchrun",):
                folder = Path(tempfile.mkdtemp(dir=scratch)) / "out"
                code, message = emit(plan, engine, via, folder)
                if code == 0:
                    counts[engine, f"emitted {'own' if own else 'free'} {via}"] += 1
                    found = problems_of(setup, plan, folder, engine, scratch)
                else:
                    counts[engine, f"refused {'own' if own else 'free'} {via}"] += 1
                    found = refusal_problems(code, message, own=own and via == "torchrun")
                for problem in found:
                    print(f"{cluster} {model} {engine} {via}: {problem}", flush=True)
                problems += len(found)
    return problems


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
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
