"""From one observed run to what hetplan prices: cluster, model, workload and layout.

What a table leaves out is filled in by rules, each a function here: they state how the trainers of a time worked, and
depend on no single row. A run that cannot be expressed raises `UsageError` with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from math import gcd

from hetplan.calibrate.architectures import model_of
from hetplan.calibrate.hardware import cluster_of
from hetplan.calibrate.runs import Run
from hetplan.calibrate.stages import Cut, cut_of
from hetplan.costs.prices import price
from hetplan.errors import UsageError
from hetplan.plan.cuts import pinned_cut
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, ScheduleName, Stage
from hetplan.specs.cluster import Cluster, Precision
from hetplan.specs.layer_table import LayerTable
from hetplan.specs.model import Model
from hetplan.specs.workload import AttentionKernel, Recompute, Sharding, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One configuration, ready to be priced."""

    run: Run
    cluster: Cluster
    model: Model
    workload: Workload
    layout: Layout
    layers: LayerTable | None = None
    """Measured layers of this model on these devices, where there are some: they stand for formulas of layers."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Kinds of device."""
        return tuple(group.device.name for group in self.cluster.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    tp: int
    pp: int
    vpp: int
    dp: int
    cp: int
    ep: int


def setup_of(run: Run) -> Setup:
    """Return a run in hetplan's words.

    Raises:
        UsageError: it cannot be expressed; the message says why.
    """
    if run.tier == "C":
        raise UsageError("a needed field is unpublished")
    if re.search(r"\bLoRA\b", run.source):
        raise UsageError("training of low-rank adapters alone cannot be expressed")
    cluster, model = cluster_of(run), model_of(run)
    degrees = _degrees(run, model)
    workload = workload_of(run, cluster)
    micro_batch = run.integer("micro_batch")
    if micro_batch is None:
        raise UsageError("the microbatch size is not given")
    schedule = schedule_of(run, degrees.vpp)
    num_layers = sum(layer.kind == "decoder" for layer in model.chain)
    cut = cut_of(run, num_layers, degrees.pp * degrees.vpp)
    grid = Grid(
        tp=degrees.tp,
        pp=degrees.pp,
        dp=degrees.dp,
        cp=degrees.cp,
        ep=degrees.ep,
        vpp=degrees.vpp,
        micro_batch=micro_batch,
        recompute=recompute_of(run),
        sharding=sharding_of(run),
        schedule=schedule,
        layers_per_stage=cut.decoders,
    )
    prices = price(cluster, model, workload)
    layout = _named_layout(grid, cut, model, workload) if cut.devices else grid_layout(prices, grid)
    return Setup(run=run, cluster=cluster, model=model, workload=workload, layout=place(layout, cluster))


def _degrees(run: Run, model: Model) -> _Degrees:
    tp, pp, cp = (run.integer(name, 1) or 1 for name in ("tp", "pp", "cp"))
    total = run.integer("n_devices") or 1
    dp = run.integer("dp") or max(1, total // (tp * pp * cp))
    vpp = run.integer("vpp")
    if vpp is None:
        vpp = assumed_vpp(run, model, pp)
    return _Degrees(tp=tp, pp=pp, vpp=vpp if pp > 1 else 1, dp=dp, cp=cp, ep=run.integer("ep", 1) or 1)


def assumed_vpp(run: Run, model: Model, pp: int) -> int:
    """Return virtual stages a rank where an interleaved schedule prints none: two, if the layers divide (assumed)."""
    if not _is_interleaved(run) or pp == 1:
        return 1
    num_layers = sum(layer.kind == "decoder" for layer in model.chain)
    return 2 if num_layers % (2 * pp) == 0 or (num_layers + 2) % (2 * pp) == 0 else 1


def _is_interleaved(run: Run) -> bool:
    return "interleaved" in run.schedule or run.schedule.strip().upper() == "1F1B-I"


def schedule_of(run: Run, vpp: int) -> ScheduleName:
    """Return the schedule of a run."""
    text = run.schedule.lower()
    if text.startswith("zb") or "zero-bubble" in text:
        return "zero-bubble"
    if "gpipe" in text:
        return "gpipe"
    return "interleaved" if vpp > 1 else "1f1b"


def workload_of(run: Run, cluster: Cluster) -> Workload:
    """Return what a run trains on.

    Raises:
        UsageError: sequence length, batch or precision are missing or cannot be expressed.
    """
    seq, batch = run.integer("seq"), run.integer("global_batch")
    if seq is None or batch is None:
        raise UsageError("the sequence length or the global batch is not given")
    precision = precision_of(run, cluster)
    return Workload(
        seq_len=seq,
        global_batch=batch,
        precision=precision,
        gradient_precision=gradient_precision_of(run, precision),
        attention=attention_of(run),
        sequence_parallel=sequence_parallel_of(run),
    )


def precision_of(run: Run, cluster: Cluster) -> Precision:
    """Return the precision of the GEMMs; fp32 with automatic mixed precision means tf32 where devices have it.

    Raises:
        UsageError: it cannot be expressed.
    """
    text = run.precision.lower()
    if "fp4" in text:
        raise UsageError("4-bit GEMMs cannot be expressed")
    if "fp8" in text or "float8" in text:
        return "fp8"
    if "fp32" in text and "amp" in text:
        return "tf32" if all("tf32" in group.device.peak_flop_per_s for group in cluster.groups) else "fp32"
    for word in ("fp16", "bf16", "tf32", "fp32"):
        if word in text:
            return "fp16" if word == "fp16" else "bf16" if word == "bf16" else "tf32" if word == "tf32" else "fp32"
    raise UsageError(f"the precision {run.precision!r} is not known")


def gradient_precision_of(run: Run, precision: Precision) -> Precision | None:
    """Return the precision gradients are kept in: fp32 beside bf16 and fp8 (trainers' default), unless notes differ."""
    if "PURE" in run.notes:
        return None
    if precision in ("bf16", "fp8") or "fp32" in run.precision:
        return "fp32"
    return None


def attention_of(run: Run) -> AttentionKernel:
    """Return whether attention scores are written out: fused kernels came into trainers in 2023."""
    if re.search(r"no flash|materiali", run.notes, re.IGNORECASE) or "DeepSpeed" in run.precision:
        return "materialised"
    if "flash" in run.notes.lower():
        return "flash"
    return "auto" if (run.integer("year") or 2024) >= 2023 else "materialised"


def sequence_parallel_of(run: Run) -> bool:
    """Return whether norms are split over the tp group: Megatron-LM does since 2023, if notes say nothing else."""
    if "sequence parallel off" in run.notes or "DeepSpeed" in run.precision:
        return False
    return "sequence parallel on" in run.notes or (run.integer("year") or 2024) >= 2023


def recompute_of(run: Run) -> Recompute:
    """Return the recompute mode; nothing stated means none."""
    text = run.recompute.lower()
    return "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"


def sharding_of(run: Run) -> Sharding:
    """Return what data-parallel ranks share.

    ZeRO-2 under a pipeline reduces once a step, as ZeRO-1 does: gradients of all microbatches meet at the end.
    """
    text = run.sharding.lower()
    if "zero3" in text or ("fsdp" in text and "grad_op" not in text):
        return "full"
    if "grad_op" in text or "zero2" in text:
        return "gradients" if (run.integer("pp", 1) or 1) == 1 else "optimizer"
    return "optimizer" if "zero1" in text else "none"


def _named_layout(grid: Grid, cut: Cut, model: Model, workload: Workload) -> Layout:
    """Return a layout whose replicas sit on named devices, equal replicas in one row."""
    cuts = pinned_cut(model, cut.decoders)
    stage_dp = grid.ep // gcd(grid.ep, grid.cp)
    replicas_total = len(cut.devices)
    size = grid.micro_batch * replicas_total
    if workload.global_batch % size:
        raise UsageError(f"a global batch of {workload.global_batch} is no multiple of {size}")
    template = Stage(group="", first_layer=0, end_layer=0, tp=grid.tp, cp=grid.cp, dp=stage_dp, ep=grid.ep)
    rows = []
    for groups, copies in Counter(cut.devices).items():
        stages = tuple(
            replace(
                template, group=group, first_layer=cuts[v], end_layer=cuts[v + 1], recompute=grid.recompute, devices=()
            )
            for v, group in enumerate(groups)
        )
        rows.append(
            Replica(
                stages=stages,
                microbatch=grid.micro_batch * stage_dp,
                num_microbatches=workload.global_batch // size,
                copies=copies,
                vpp=grid.vpp,
            )
        )
    return Layout(replicas=tuple(rows), schedule=grid.schedule or "1f1b", sharding=grid.sharding)
