"""`hetplan estimate`: what a layout costs, given by degrees or by a saved plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from hetplan.cli.options import (
    AttentionOption,
    CalibrationFile,
    GlobalBatch,
    GradientPrecision,
    JsonFlag,
    NoSequenceParallel,
    PrecisionOption,
    SeqLen,
    Verbose,
    WorkloadFile,
    one_of,
    refuse_given,
)

OF_A_PLAN = frozenset({"cluster", "calibration", "as_json", "verbose"})
"""Parameters that mean something where a saved plan is priced."""


def estimate(
    context: typer.Context,
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER|PLAN", help="Cluster YAML or saved plan.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Catalog name, model YAML or config.json; none: a plan is given."),
    ] = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int | None, typer.Option("--dp", min=1, help="Replicas.  [default: all devices]")] = None,
    cp: Annotated[int, typer.Option("--cp", min=1, help="Context-parallel degree.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel degree.")] = 1,
    vpp: Annotated[int, typer.Option("--vpp", min=1, help="Virtual stages a rank.")] = 1,
    micro_batch: Annotated[int, typer.Option("--micro-batch", min=1, help="Samples of a microbatch.")] = 1,
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective or full.")] = "none",
    sharding: Annotated[str, typer.Option("--sharding", help="none, optimizer, gradients or full.")] = "none",
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", help="gpipe, 1f1b, interleaved, zero-bubble.  [default: 1f1b; vpp: interleaved]"),
    ] = None,
    layers_per_stage: Annotated[
        str | None,
        typer.Option("--layers-per-stage", metavar="LIST", help="11,12,12,11, a Megatron layout, or last=13."),
    ] = None,
    groups: Annotated[
        str | None, typer.Option("--groups", metavar="LIST", help="Groups to use, in this order.  [default: all]")
    ] = None,
    precision: PrecisionOption = None,
    gradient_precision: GradientPrecision = None,
    attention: AttentionOption = None,
    no_sequence_parallel: NoSequenceParallel = False,
    workload: WorkloadFile = None,
    calibration: CalibrationFile = None,
    as_json: JsonFlag = False,
    verbose: Verbose = False,
) -> None:
    """Price a layout given by degrees, or a saved plan."""
    from hetplan.cli.inputs import WorkloadWords, load_job, load_plan
    from hetplan.cli.pricing import priced_grid, priced_plan, show_priced
    from hetplan.cli.stage_counts import stage_counts
    from hetplan.plan.layouts import Grid
    from hetplan.plan.records import SCHEDULES
    from hetplan.specs.workload import RECOMPUTES, SHARDINGS

    if model is None:
        refuse_given(context, OF_A_PLAN, "does not go with a saved plan, which holds its own; or is MODEL missing?")
        show_priced(priced_plan(load_plan(cluster, calibration=calibration)), as_json=as_json, full=verbose)
        return
    words = WorkloadWords(
        file=workload,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        gradient_precision=gradient_precision,
        attention=attention,
        sequence_parallel=False if no_sequence_parallel else None,
    )
    grid = Grid(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        vpp=vpp,
        micro_batch=micro_batch,
        recompute=one_of(recompute, "--recompute", RECOMPUTES),
        sharding=one_of(sharding, "--sharding", SHARDINGS),
        schedule=one_of(schedule, "--schedule", SCHEDULES) if schedule else None,
        groups=tuple(name.strip() for name in groups.split(",")) if groups is not None else None,
    )
    job = load_job(cluster, model, words, calibration, is_used=lambda name: name in (grid.groups or (name,)))
    job.warn()
    num_layers = sum(layer.kind == "decoder" for layer in job.model.chain)
    counts = stage_counts(layers_per_stage, "--layers-per-stage", num_layers, pp, vpp)
    show_priced(priced_grid(job, replace(grid, layers_per_stage=counts)), as_json=as_json, full=verbose)
