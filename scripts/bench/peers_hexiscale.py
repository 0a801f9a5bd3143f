"""HexiScale's sample cluster (Yan 2024, FlashFlex, arXiv:2409.01143; Relaxed-System-Lab/HexiScale, Apache-2.0).

3 A100, 3 RTX 4090 and 2 RTX 3090 in one machine each, 0.5 GB/s between machines; Llama-7B, sequence 4096, 24 samples a
step in microbatches of 2 over all pipelines. Its cost function, with the microbatch a number of pipelines really uses:

    1.8 x the slowest pipeline + 1.1 x sum over layers of data-parallel time
    pipeline: sum over columns of the slowest busy stage; a stage: layers x (compute + tp) + 2 activations to the next
    compute of a layer: 96 b S H^2 (1 + S / 6 H + V / 16 L H) / (speed x tp)
    tp of a layer: 12 max_i sum_j 2 b S H / (tp x bandwidth_ij)
    dp of a layer: 2 max_i sum_j 24 H^2 / (least tp x n x bandwidth_ij)

hetplan gets the same seconds as a table of measured layers and the same links as fits, and plans under them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_run import Run, hetplan, read_yaml, span

TFLOPS = {"A100": 312.0, "4090": 165.2, "3090": 80.0}
MEMORY_GB = {"A100": 80, "4090": 24, "3090": 24}
INSIDE_GBPS = {"A100": 200.0, "4090": 2.0, "3090": 2.0}
COUNTS = {"A100": 3, "4090": 3, "3090": 2}
BETWEEN_GBPS = 0.5
H, LAYERS, VOCAB, SEQ = 4096, 32, 32000, 4096
BATCH, ALL_MICROBATCH = 24, 2
PIPELINE_FACTOR, DP_FACTOR = 1.8, 1.1
OWN_PLAN_S = 16.02
"""Its own plan there under this cost function (it reports 8.01 with the microbatch of two pipelines)."""
TERA, GIGA = 2.0**40, 2.0**30
Stage = tuple[str, int, int]
"""(device, tp, layers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The sample cluster."""

    cost_s: float
    """By the peer's cost function."""
    estimated_s: float
    bound_s: float
    pipelines: tuple[tuple[Stage, ...], ...]
    run: Run


def layer_s(device: str, tp: int, microbatch: int) -> float:
    """Return the seconds of a layer and microbatch, both passes with recomputation and tp traffic."""
    work = 96 * microbatch * SEQ * H * H * (1 + SEQ / (6 * H) + VOCAB / (16 * LAYERS * H))
    compute = work / (TFLOPS[device] * TERA * tp)
    traffic = 12 * (tp - 1) * 2 * microbatch * SEQ * H / (tp * INSIDE_GBPS[device] * GIGA)
    return compute + traffic


def activation_s(first: str, second: str, microbatch: int, tp: int) -> float:
    """Return the seconds of activations to one device of the next stage and from there to its tp group."""
    num_bytes = 2 * microbatch * SEQ * H
    rate = (INSIDE_GBPS[first] if first == second else BETWEEN_GBPS) * GIGA
    spread = (tp - 1) * num_bytes / (tp * INSIDE_GBPS[second] * GIGA)
    return num_bytes / rate + spread


def pipeline_s(stages: Sequence[Stage], microbatch: int) -> float:
    """Return the seconds of a pipeline, column by column."""
    paces = []
    for i, (device, tp, layers) in enumerate(stages):
        sent = 0.0
        if i + 1 < len(stages):
            sent = 2 * activation_s(device, stages[i + 1][0], microbatch, stages[i + 1][1])
        paces.append(layers * layer_s(device, tp, microbatch) + sent)
    m, num = BATCH // ALL_MICROBATCH, len(stages)
    return sum(max(paces[max(0, j - m + 1) : j + 1]) for j in range(m + num - 1))


def cost_s(pipelines: Sequence[Sequence[Stage]]) -> float:
    """Return the peer's cost of pipelines, each (device, tp, layers) a stage; equal shares of the batch."""
    microbatch = ALL_MICROBATCH // len(pipelines)
    slowest = max(pipeline_s(stages, microbatch) for stages in pipelines)
    return PIPELINE_FACTOR * slowest + DP_FACTOR * sum(_dp_s(pipelines, layer) for layer in range(LAYERS))


def _dp_s(pipelines: Sequence[Sequence[Stage]], layer: int) -> float:
    holders = [_holder(stages, layer) for stages in pipelines]
    if len(holders) == 1:
        return 0.0
    least_tp, n = min(tp for _, tp in holders), len(holders)

    def rate(i: int, j: int) -> float:
        same = holders[i][0] == holders[j][0]
        return (INSIDE_GBPS[holders[i][0]] if same else BETWEEN_GBPS) * GIGA

    slowest = max(sum(24 * H * H / (least_tp * n * rate(i, j)) for j in range(n) if j != i) for i in range(n))
    rings = max(tp for _, tp in holders) // least_tp
    return 2 * slowest * rings


def _holder(stages: Sequence[Stage], layer: int) -> tuple[str, int]:
    end = 0
    for device, tp, layers in stages:
        end += layers
        if layer < end:
            return device, tp
    raise ValueError("the layers do not add up")


def run_sample(folder: Path) -> Result:
    """Search the sample cluster and cost the plan."""
    cluster, model, calibration, plan = (folder / f"hexiscale-{name}.yaml" for name in ("c", "m", "k", "p"))
    times = folder / "hexiscale-times.csv"
    links = folder / "hexiscale-links.csv"
    inside = folder / "hexiscale-inside.csv"
    cluster.write_text(_cluster_text(), encoding="utf-8")
    model.write_text(
        f"hetplan: model/v1\nname: llama-7b\nlayers:\n  - {{kind: decoder, repeat: {LAYERS}, params: {12 * H * H},"
        f" width: {H}, tp: 2}}\n",
        encoding="utf-8",
    )
    times.write_text(_times_text(), encoding="utf-8")
    pairs = [(a, b) for a in COUNTS for b in COUNTS if a != b]
    gigabytes = GIGA / 1e9 / PIPELINE_FACTOR
    links.write_text(
        "\n".join(["send_gpu,recv_gpu,a,b,c", *(f"gpu-{a},gpu-{b},0,0,{BETWEEN_GBPS * gigabytes!r}" for a, b in pairs)])
        + "\n",
        encoding="utf-8",
    )
    inside.write_text(
        "\n".join(["gpu,gpus,a,b,c", *(f"gpu-{a},2,0,0,{rate * gigabytes!r}" for a, rate in INSIDE_GBPS.items())])
        + "\n",
        encoding="utf-8",
    )
    settings = ("--set", "pipeline=columns", "--set", "gradients=0", "--set", f"count={LAYERS}")
    hetplan("import", "layer-times", times, links, inside, "--name", "llama-7b", *settings, "-o", calibration)
    run = hetplan(
        *("search", cluster, model, "--calibration", calibration, "-o", plan, "--quiet", "--no-compare"),
        *("--global-batch", BATCH, "--seq-len", SEQ, "--precision", "bf16", "--micro-batch", ALL_MICROBATCH),
        *("--recompute", "none", "--sharding", "none", "--uniform-microbatches", "--replicas", "1"),
    )
    return _read(plan, run)


def _read(path: Path, run: Run) -> Result:
    plan: dict[str, Any] = read_yaml(path)
    groups = read_yaml(Path(plan["cluster"]["name"]))["groups"]
    pipelines = []
    for row in plan["layout"]["replicas"]:
        stages = []
        for stage in row["stages"]:
            first, end = span(stage["layers"])
            stages.append((str(groups[stage["group"]]["device"]).removeprefix("gpu-"), int(stage["tp"]), end - first))
        pipelines += [tuple(stages)] * row["copies"]
    return Result(
        cost_s=cost_s(pipelines),
        estimated_s=plan["estimate"]["step_s"],
        bound_s=plan["proof"]["bound"],
        pipelines=tuple(pipelines),
        run=run,
    )


def _cluster_text() -> str:
    lines = ["hetplan: cluster/v1", "name: hexiscale-sample", "devices:"]
    for name, memory in MEMORY_GB.items():
        size = f"{memory} GiB"
        lines.append(f"  gpu-{name}: {{like: A100-SXM4-80GB, memory: {size}, usable_memory: {size}}}")
    lines.append("groups:")
    for name, count in COUNTS.items():
        lines.append(f"  g-{name.lower()}: {{device: gpu-{name}, nodes: 1, devices_per_node: {count}}}")
    joined = ", ".join(f"g-{name.lower()}" for name in COUNTS)
    lines += ["networks:", f"  net: {{joins: [{joined}], kind: ethernet, bandwidth: 4 Gbit/s, latency: 100 us}}"]
    return "\n".join(lines) + "\n"


def _times_text() -> str:
    """Return the cost function as a table: a third of the seconds forward, 8 B of states a parameter."""
    rows = ["device,microbatch,tp,layer,kind,forward_s,backward_s,params,states_bytes,saved_bytes"]
    for device in TFLOPS:
        for tp in (1, 2):
            for microbatch in (1, 2):
                seconds = PIPELINE_FACTOR * layer_s(device, tp, microbatch)
                params = 12 * H * H // tp
                saved = 2 * microbatch * SEQ * H // tp
                rows.append(
                    f"gpu-{device},{microbatch},{tp},0,transformer,{seconds / 3!r},{seconds * 2 / 3!r},"
                    f"{params},{8 * params},{saved}"
                )
    return "\n".join(rows) + "\n"
