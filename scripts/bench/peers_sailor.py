"""Sailor's scenarios (Strati 2025, SOSP; github.com/eth-easl/sailor, MIT): hetplan's plans under Sailor's evaluator.

The evaluator, re-stated: with m microbatches a replica, stages of both passes t_i (the slowest replica's), transfers
c_i (both a stage sends; an end stage's counts twice, the first's once in pipelines of at most three stages),

    T = sum(t_i + c_i) + (m - 1) max(t_i + c_i) + max update + slowest all-reduce of a stage

an all-reduce of D ranks taking 2 (D - 1) messages of 1 / D in pieces of 5e8 bytes at the pace of the slowest
neighbours, a message n / (a x^2 + b x + c) with x = log2(n / 1e6). Memory of a device: 24 B a parameter, activations x
microbatch x 4 B x (stages - i), and 2e9 B (tp 1) or 3e9 B. Plans with warnings (`warnings_of`) do not count.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers_run import DATA, Run, hetplan, read_yaml, span
from peers_sailor_cluster import CENTRAL, MEMORY_GIB, USD_PER_HOUR, ZONE, cluster_text
from peers_sailor_real import real_verdict

GIB = 1 << 30
BATCH = {"OPT-350": 1024, "GPT-Neo-2.7": 2048}
BUCKET = 5e8
TIMES, SIZES, LINKS = (DATA / f"sailor_{name}.csv" for name in ("layer_times", "layer_sizes", "links"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Devices, a model, and the best known."""

    name: str
    model: str
    groups: tuple[tuple[str, str, int], ...]
    """(device, zone, devices)."""
    best: float | None
    """Steps a second of the best plan known; None: no planner returns one."""
    of: str
    """Who found it."""
    peer_cpu_s: float | None = None
    options: tuple[str, ...] = ()
    slack: tuple[str, ...] = ()
    """Options of a second search, where the best plan known takes more samples than the batch."""


def one_zone(*groups: tuple[str, int]) -> tuple[tuple[str, str, int], ...]:
    """Return groups in the first zone."""
    return tuple((device, ZONE, count) for device, count in groups)


A, V, G = "A100-40", "V100-16", "GH-96"
SCENARIOS = (
    Scenario(name="8 A100", model="OPT-350", groups=one_zone((A, 8)), best=0.0372, of="enumeration"),
    Scenario(name="32 A100", model="OPT-350", groups=one_zone((A, 32)), best=0.1297, of="enumeration"),
    Scenario(name="128 A100", model="OPT-350", groups=one_zone((A, 128)), best=0.4175, of="Sailor", peer_cpu_s=0.25),
    Scenario(name="32 A100, Neo", model="GPT-Neo-2.7", groups=one_zone((A, 32)), best=0.02245, of="enumeration"),
    Scenario(
        name="4+4",
        model="OPT-350",
        groups=one_zone((A, 4), (V, 4)),
        best=0.02333,
        of="Sailor",
        peer_cpu_s=0.018,
        slack=("--batch-slack", "1", "--micro-batch", "1,2,4,8"),
    ),
    Scenario(name="8+24", model="OPT-350", groups=one_zone((A, 8), (V, 24)), best=0.06074, of="enumeration"),
    Scenario(name="32+96", model="OPT-350", groups=one_zone((A, 32), (V, 96)), best=0.1972, of="enumeration"),
    Scenario(name="8+24, Neo", model="GPT-Neo-2.7", groups=one_zone((A, 8), (V, 24)), best=0.00910, of="enumeration"),
    Scenario(name="8+8+8", model="OPT-350", groups=one_zone((A, 8), (V, 8), (G, 8)), best=0.1070, of="enumeration"),
    Scenario(name="128+128+128", model="OPT-350", groups=one_zone((A, 128), (V, 128), (G, 128)), best=None, of="none"),
    Scenario(
        name="5 zones x 8",
        model="OPT-350",
        groups=tuple((A, zone, 8) for zone in (*CENTRAL, "us-west1-b")),
        best=0.1249,
        of="Sailor",
        peer_cpu_s=0.064,
    ),
    Scenario(
        name="5 zones x 32",
        model="OPT-350",
        groups=tuple((A, zone, 32) for zone in (*CENTRAL, "us-west1-b")),
        best=0.4149,
        of="Sailor",
        peer_cpu_s=0.31,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the evaluator says of a plan."""

    step_s: float
    usd: float
    fits: bool
    warnings: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Result:
    """One scenario."""

    scenario: Scenario
    run: Run
    estimated_s: float
    score: Score
    neutral: dict[str, Any]
    real: Score | None = None
    notes: list[str] = field(default_factory=list)


def import_profile(model: str, folder: Path) -> tuple[Path, Path]:
    """Return calibration and model files made from the tables by `hetplan import`."""
    calibration, spec = folder / f"{model}-calibration.yaml", folder / f"{model}.yaml"
    if not calibration.exists():
        settings = ["bytes_per_param=24 B", "reserve=1:2 GB,2:3 GB", "update=stage", "pipeline=lock-step"]
        settings += ["gradients=0", "bucket=500 MB"]
        chosen = [word for setting in settings for word in ("--set", setting)]
        hetplan("import", "layer-times", TIMES, SIZES, LINKS, "--name", model, *chosen, "-o", calibration)
        hetplan("import", "layer-model", TIMES, SIZES, "--name", model, "--seq-len", 2048, "-o", spec)
    return calibration, spec


def run_scenario(scenario: Scenario, folder: Path, repo: Path | None) -> Result:
    """Search, export and score one scenario."""
    calibration, spec = import_profile(scenario.model, folder)
    slug = scenario.name.replace(" ", "-").replace(",", "").replace("+", "p")
    cluster, plan = folder / f"{slug}.cluster.yaml", folder / f"{slug}.plan.yaml"
    cluster.write_text(cluster_text(slug, scenario.groups), encoding="utf-8")
    run = hetplan(
        *("search", cluster, spec, "--calibration", calibration, "-o", plan, "--quiet", "--no-compare"),
        *("--global-batch", BATCH[scenario.model], "--seq-len", 2048, "--precision", "fp32"),
        *("--recompute", "none", "--sharding", "none", "--uniform-microbatches", "--equal-dp"),
        *scenario.options,
    )
    neutral = to_neutral(plan)
    result = Result(
        scenario=scenario,
        run=run,
        estimated_s=read_yaml(plan)["estimate"]["step_s"],
        score=evaluate(neutral),
        neutral=neutral,
    )
    if repo is not None:
        result.real = real_score(neutral, folder / f"{slug}.neutral.json", repo)
    return result


def to_neutral(path: Path) -> dict[str, Any]:
    """Return a hetplan plan in the form Sailor's evaluator reads: rows with equal cuts are one pipeline."""
    plan = read_yaml(path)
    groups = read_yaml(Path(plan["cluster"]["name"]))["groups"]
    pipelines: dict[tuple[tuple[int, ...], ...], list[list[dict[str, Any]]]] = {}
    rows = plan["layout"]["replicas"]
    for row in rows:
        cut = tuple(tuple(span(stage["layers"])) for stage in row["stages"])
        stages = pipelines.setdefault(cut, [[] for _ in cut])
        for replicas, stage in zip(stages, row["stages"], strict=True):
            group = groups[stage["group"]]
            replicas.append(
                {"gpu": group["device"], "tp": stage["tp"], "zone": group["site"], "count": row["copies"] * stage["dp"]}
            )
    return {
        "model": Path(plan["model"]["name"]).stem,
        "global_batch": plan["workload"]["global_batch"],
        "microbatch": rows[0]["microbatch"],
        "pipelines": [
            {"stages": [{"range": list(ends), "replicas": own} for ends, own in zip(cut, stages, strict=True)]}
            for cut, stages in pipelines.items()
        ],
    }


@lru_cache(maxsize=1)
def _times() -> dict[tuple[str, str, int, int], dict[int, tuple[float, float, float]]]:
    found: dict[tuple[str, str, int, int], dict[int, tuple[float, float, float]]] = {}
    for row in csv.DictReader(TIMES.open(encoding="utf-8")):
        key = (row["model"], row["gpu"], int(row["microbatch"]), int(row["tp"]))
        figures = float(row["fwd_s"]), float(row["bwd_s"]), float(row["update_s"])
        found.setdefault(key, {})[int(row["layer"])] = figures
    return found


@lru_cache(maxsize=1)
def _sizes() -> dict[tuple[str, int], dict[int, tuple[float, float, float]]]:
    found: dict[tuple[str, int], dict[int, tuple[float, float, float]]] = {}
    for row in csv.DictReader(SIZES.open(encoding="utf-8")):
        figures = float(row["params"]), float(row["saved_bytes"]), float(row["output_floats"]) * 4
        found.setdefault((row["model"], int(row["tp"])), {})[int(row["layer"])] = figures
    return found


@lru_cache(maxsize=1)
def _links() -> dict[tuple[str, str, int, str, str, int], tuple[float, float, float]]:
    return {
        (r["send_zone"], r["send_gpu"], int(r["send_gpus"]), r["recv_zone"], r["recv_gpu"], int(r["recv_gpus"])): (
            float(r["a"]),
            float(r["b"]),
            float(r["c"]),
        )
        for r in csv.DictReader(LINKS.open(encoding="utf-8"))
    }


def layer_of(rows: dict[int, tuple[float, float, float]], layer: int) -> tuple[float, float, float]:
    """Return the figures of a layer; transformer layers that are not listed are like layer 2."""
    return rows.get(layer, rows[2])


def message_s(fit: tuple[float, float, float], num_bytes: float) -> float:
    """Return the seconds of one message."""
    x = math.log2(num_bytes / 1e6)
    return num_bytes / 1e9 / (fit[0] * x * x + fit[1] * x + fit[2])


def all_reduce_s(fit: tuple[float, float, float], num_bytes: float, ranks: int) -> float:
    """Return the seconds of a ring in pieces."""
    total = 0.0
    while num_bytes > 0:
        piece = min(BUCKET, num_bytes)
        total += 2 * (ranks - 1) * message_s(fit, piece / ranks)
        num_bytes -= piece
    return total


def _written_out(stage: dict[str, Any]) -> list[dict[str, Any]]:
    return [replica for replica in stage["replicas"] for _ in range(replica.get("count", 1))]


def evaluate(plan: dict[str, Any]) -> Score:
    """Return Sailor's verdict on a plan, re-stated."""
    model, size = plan["model"], plan["microbatch"]
    pipelines = [[(stage["range"], _written_out(stage)) for stage in one["stages"]] for one in plan["pipelines"]]
    ranks = len(pipelines[-1][0][1])
    m = math.ceil(plan["global_batch"] / (size * ranks * len(pipelines)))
    step_s = max(_pipeline_s(model, size, stages, m) for stages in pipelines)
    step_s += max(_sync_s(model, stages) for stages in pipelines)
    if len(pipelines) > 1:
        step_s += _sync_across_s(model, max(pipelines, key=len), len(pipelines))
    used = [replica for stages in pipelines for _, replicas in stages for replica in replicas]
    usd_per_s = sum(replica["tp"] * USD_PER_HOUR.get(replica["gpu"], math.nan) / 3600 for replica in used)
    return Score(
        step_s=step_s,
        usd=usd_per_s * step_s,
        fits=all(_fits(model, size, stages) for stages in pipelines),
        warnings=tuple(warnings_of(plan)),
    )


Stages = list[tuple[list[int], list[dict[str, Any]]]]


def _pipeline_s(model: str, size: int, stages: Stages, m: int) -> float:
    work, update = [], 0.0
    for (first, end), replicas in stages:
        slowest = 0.0
        for gpu, tp in {(replica["gpu"], replica["tp"]) for replica in replicas}:
            rows = _times()[model, gpu, size, tp]
            slowest = max(slowest, sum(sum(layer_of(rows, layer)[:2]) for layer in range(first, end)))
            update = max(update, layer_of(rows, first)[2])
        work.append(slowest)
    sent = _sent_s(model, size, stages)
    paces = [t + c for t, c in zip(work, sent, strict=True)]
    return (m - 1) * max(paces) + sum(paces) + update


def _sent_s(model: str, size: int, stages: Stages) -> list[float]:
    """Return what each stage sends: activations forth, gradients back."""
    num = len(stages)
    forth, back = [0.0] * num, [0.0] * num
    for i, ((first, end), replicas) in enumerate(stages):
        for way, other, layer in ((forth, i + 1, end - 1), (back, i - 1, first)):
            if not 0 <= other < num:
                continue
            num_bytes = layer_of(_sizes()[model, 1], layer)[2] * size
            peers = stages[other][1]
            for j, replica in enumerate(replicas):
                way[i] = max(way[i], message_s(_fit(replica, peers[j % len(peers)]), num_bytes))
    found = [f + b for f, b in zip(forth, back, strict=True)]
    if num > 1:
        found[0] = forth[0] * (1 if num <= 3 else 2)
        found[-1] = 2 * back[-1]
    return found


def _fit(sender: dict[str, Any], receiver: dict[str, Any], ranks: int | None = None) -> tuple[float, float, float]:
    counts = [ranks or min(end["tp"], end["tp"]) for end in (sender, receiver)]
    return _links()[sender["zone"], sender["gpu"], counts[0], receiver["zone"], receiver["gpu"], counts[1]]


def _sync_s(model: str, stages: Stages) -> float:
    slowest = 0.0
    for (first, end), replicas in stages:
        tp = min([4, *(replica["tp"] for replica in replicas)])
        num_bytes = sum(layer_of(_sizes()[model, 1], layer)[0] * 4 / tp for layer in range(first, end))
        hops = {json.dumps((a, b)) for a, b in pairwise(replicas)}
        for a, b in map(json.loads, hops):
            slowest = max(slowest, all_reduce_s(_fit(a, b, 1), num_bytes, len(replicas)))
    return slowest


def _sync_across_s(model: str, stages: Stages, pipelines: int) -> float:
    slowest = 0.0
    for (first, end), replicas in stages:
        num_bytes = sum(layer_of(_sizes()[model, 1], layer)[0] * 4 for layer in range(first, end))
        for replica in replicas:
            slowest = max(slowest, all_reduce_s(_fit(replica, replica, 1), num_bytes, pipelines))
    return slowest


def stage_bytes(model: str, size: int, tp: int, ends: list[int], held: int) -> float:
    """Return the memory of one device of a stage that holds `held` microbatches."""
    rows = [layer_of(_sizes()[model, tp], layer) for layer in range(*ends)]
    reserve = 2e9 if tp == 1 else 3e9
    return 24 * sum(row[0] for row in rows) + held * size * sum(row[1] for row in rows) + reserve


def _fits(model: str, size: int, stages: Stages) -> bool:
    return all(
        stage_bytes(model, size, replica["tp"], ends, len(stages) - i) <= MEMORY_GIB[replica["gpu"]] * GIB
        for i, (ends, replicas) in enumerate(stages)
        for replica in replicas
    )


def warnings_of(plan: dict[str, Any]) -> list[str]:
    """Return the ways in which the evaluator would be misled by a plan."""
    found = []
    num = max(_sizes()[plan["model"], 1]) + 1
    counts = set()
    for one in plan["pipelines"]:
        layers = [layer for stage in one["stages"] for layer in range(*stage["range"])]
        if layers != list(range(num)):
            found.append("layers are not exactly those of the model in order")
        ranks = {len(_written_out(stage)) for stage in one["stages"]}
        counts |= ranks
        if len(ranks) > 1:
            found.append("dp differs between stages")
        for stage in one["stages"]:
            for replica in stage["replicas"]:
                if (plan["model"], replica["gpu"], plan["microbatch"], replica["tp"]) not in _times():
                    found.append(f"no profile of {replica['gpu']} at tp {replica['tp']}")
    if len(counts) > 1:
        found.append("pipelines have different dp")
    if plan["global_batch"] % (plan["microbatch"] * max(counts) * len(plan["pipelines"])):
        found.append("the batch is no multiple of what the replicas take at once")
    return sorted(set(found))


def real_score(neutral: dict[str, Any], path: Path, repo: Path) -> Score:
    """Return the verdict of the peer's own code."""
    seconds, traffic_usd, fits = real_verdict(neutral, path, repo)
    own = evaluate(neutral)
    compute_usd = own.usd / own.step_s * seconds
    return Score(step_s=seconds, usd=compute_usd + traffic_usd, fits=fits, warnings=own.warnings)
