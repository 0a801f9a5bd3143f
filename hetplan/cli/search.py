"""`hetplan search`: the best plan for a model on a cluster, with its bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hetplan.cli.modules import search_with_data
from hetplan.cli.options import (
    AttentionOption,
    CalibrationFile,
    ClusterArgument,
    GlobalBatch,
    GradientPrecision,
    JsonFlag,
    ModelArgument,
    NoSequenceParallel,
    PrecisionOption,
    Quiet,
    SeqLen,
    Verbose,
    WorkloadFile,
    refuse_given,
)
from hetplan.cli.search_volumes import search_traffic, states_volumes
from hetplan.errors import InterruptedSearchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hetplan.cli.inputs import Job, WorkloadWords
    from hetplan.search.records import SearchRequest, SearchResult

OF_DATA = frozenset({"balanced", "arrangement", "microbatches", "draws", "prices"})
"""Options that mean something only with --data."""
OF_BATCHES = frozenset({"batch_slack", "data"}) | OF_DATA
"""Options that speak of samples, which a job of traffic alone has none of."""


def search(
    context: typer.Context,
    cluster: ClusterArgument,
    model: ModelArgument,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    workload: WorkloadFile = None,
    precision: PrecisionOption = None,
    gradient_precision: GradientPrecision = None,
    attention: AttentionOption = None,
    no_sequence_parallel: NoSequenceParallel = False,
    calibration: CalibrationFile = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the plan here.")] = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="ENGINE", help="Only plans this engine can run.")
    ] = "hetplan",
    objective: Annotated[
        Literal["time", "cost", "energy", "cost-within-time", "devices"],
        typer.Option("--objective", help="What to minimise."),
    ] = "time",
    within: Annotated[
        float | None,
        typer.Option("--within", metavar="SECONDS", help="Longest step allowed (cost-within-time, devices)."),
    ] = None,
    pin: Annotated[
        str | None, typer.Option("--pin", metavar="LIST", help="Layers a stage: 11,12,12,11 or a Megatron layout.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="GROUP", help="Leave a group out; may be repeated.")
    ] = None,
    tp: Annotated[str | None, typer.Option("--tp", metavar="LIST", help="Only these tp degrees: 1,2,4.")] = None,
    pp: Annotated[str | None, typer.Option("--pp", metavar="LIST", help="Only these pp degrees.")] = None,
    cp: Annotated[str | None, typer.Option("--cp", metavar="LIST", help="These cp degrees.  [default: 1]")] = None,
    ep: Annotated[str | None, typer.Option("--ep", metavar="LIST", help="Only these ep degrees.")] = None,
    micro_batch: Annotated[
        str | None, typer.Option("--micro-batch", metavar="LIST", help="Only these microbatch sizes.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", metavar="LIST", help="Of 1f1b, gpipe, interleaved, zero-bubble.  [default: 1f1b]"),
    ] = None,
    recompute: Annotated[
        str | None, typer.Option("--recompute", metavar="LIST", help="Of none, selective, full.")
    ] = None,
    sharding: Annotated[
        str | None, typer.Option("--sharding", metavar="LIST", help="Of none, optimizer, gradients, full.")
    ] = None,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Equal degrees, cuts and batch shares everywhere.")
    ] = False,
    uniform_microbatches: Annotated[
        bool, typer.Option("--uniform-microbatches", help="Equal batch shares everywhere; degrees and cuts are free.")
    ] = False,
    replicas: Annotated[
        str | None, typer.Option("--replicas", metavar="LIST", help="Only these numbers of replicas.")
    ] = None,
    batch_slack: Annotated[
        float,
        typer.Option(
            "--batch-slack",
            metavar="PERCENT",
            min=0.0,
            max=100.0,
            help="The global batch may be up to so much larger where it then divides better (at most 8 batches are "
            "searched and share the effort); whole steps are compared, the smaller batch at a tie.",
        ),
    ] = 0.0,
    equal_dp: Annotated[bool, typer.Option("--equal-dp", help="Equal dp in all stages of a replica.")] = False,
    max_shapes: Annotated[
        int | None, typer.Option("--max-shapes", metavar="K", min=1, help="Most different replica shapes.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=0, help="Runners-up to return.")] = 5,
    effort: Annotated[
        float, typer.Option("--effort", metavar="X", min=0.0, help="Deterministic solver time to spend.")
    ] = 10.0,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", metavar="S", min=0.0, help="Wall-clock safety net; a plan it cuts is marked."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the solver.")] = 0,
    no_compare: Annotated[
        bool, typer.Option("--no-compare", help="Skip the best uniform plan and each device type alone.")
    ] = False,
    as_json: JsonFlag = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="Lengths of samples: modules get grids of their own (see README)."),
    ] = None,
    balanced: Annotated[
        bool, typer.Option("--balanced", help="With --data: samples are balanced over shards, not taken as they come.")
    ] = False,
    arrangement: Annotated[
        str | None, typer.Option("--arrangement", metavar="LIST", help="With --data: of disjoint, colocated.")
    ] = None,
    microbatches: Annotated[
        str | None, typer.Option("--microbatches", metavar="LIST", help="With --data: only these numbers a step.")
    ] = None,
    draws: Annotated[int, typer.Option("--draws", metavar="N", min=1, help="With --data: batches to draw.")] = 64,
    prices: Annotated[
        int, typer.Option("--prices", metavar="N", min=1, help="With --data: layouts to price at most.")
    ] = 400,
) -> None:
    """Find the plan with the shortest step, or the cheapest one, and prove how good it is."""
    from hetplan.cli.inputs import for_engine, load_job
    from hetplan.cli.output import require_writable
    from hetplan.cli.space import LimitWords, limits_from
    from hetplan.search.records import SearchRequest

    require_writable(out)
    if states_volumes(model):
        refuse_given(context, context.params.keys() - OF_BATCHES, "has no effect on a job of traffic alone")
        search_traffic((cluster, model), calibration, out, effort, as_json=as_json)
        return
    words = _workload_words(context.params)
    if data is not None:
        search_with_data(context, words)
        return
    refuse_given(context, context.params.keys() - OF_DATA, "needs --data")
    job = load_job(cluster, model, words, calibration, is_used=lambda name: name not in (exclude or ()))
    job = for_engine(job, engine)
    space = LimitWords(
        engine=engine,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        micro_batch=micro_batch,
        recompute=recompute,
        schedule=schedule,
        sharding=sharding,
        pin=pin,
        exclude=tuple(exclude or ()),
        uniform=uniform,
        uniform_microbatches=uniform_microbatches,
        equal_dp=equal_dp,
        replicas=replicas,
        max_shapes=max_shapes,
    )
    request = SearchRequest(
        objective=objective,
        time_budget_s=_time_budget_s(objective, within),
        limits=limits_from(space, job.cluster, job.model),
        engine=engine,
        effort=effort,
        time_limit_s=time_limit,
        seed=seed,
        top=top,
        compare=not no_compare,
    )
    result = _found(job, request, batch_slack, quiet=quiet)
    _answer(job, result, out, as_json=as_json, full=verbose)


def _workload_words(given: Mapping[str, Any]) -> WorkloadWords:
    """Return the workload options as they were given."""
    from hetplan.cli.inputs import WorkloadWords

    return WorkloadWords(
        file=given["workload"],
        seq_len=given["seq_len"],
        global_batch=given["global_batch"],
        precision=given["precision"],
        gradient_precision=given["gradient_precision"],
        attention=given["attention"],
        sequence_parallel=False if given["no_sequence_parallel"] else None,
    )


def _time_budget_s(objective: str, within: float | None) -> float | None:
    if (objective in ("cost-within-time", "devices")) != (within is not None):
        raise UsageError("--within SECONDS and --objective cost-within-time or devices go together")
    if within is not None and not 0 < within < float("inf"):
        raise UsageError(f"--within: {within} is not a number of seconds above 0")
    return within


def _found(job: Job, request: SearchRequest, batch_slack: float, *, quiet: bool) -> SearchResult:
    """Return the search's answer; when it was interrupted, the best so far, marked so.

    Raises:
        InterruptedSearchError: interrupted before any plan was found.
    """
    from hetplan.cli.progress import ProgressLine
    from hetplan.search.batch_slack import search_batches
    from hetplan.search.records import SearchResult
    from hetplan.search.solve import search as run_search

    if not quiet:
        job.warn()
    prices = job.prices
    with ProgressLine(request.objective, quiet=quiet) as progress:
        try:
            if batch_slack:
                return search_batches(prices, request, batch_slack / 100, progress)
            return run_search(prices, request, progress)
        except InterruptedSearchError as error:
            if not isinstance(error.result, SearchResult):
                raise
            return error.result


def _answer(job: Job, result: SearchResult, out: Path | None, *, as_json: bool, full: bool) -> None:
    """Write the plan, then show what was found.

    Raises:
        InterruptedSearchError: the user interrupted the search.
    """
    from hetplan.cli.inputs import plan_of
    from hetplan.cli.output import show, show_json, write_whole
    from hetplan.plan.document import plan_document
    from hetplan.plan.text import plan_text
    from hetplan.report.documents import search_document
    from hetplan.report.searches import search_text

    if result.batches:
        job = replace(job, workload=replace(job.workload, global_batch=result.best.layout.num_samples))
    plan = plan_of(job, result.best.layout, result.best.estimate, result.proof)
    if out is not None:
        write_whole(out, plan_text(plan))
    if as_json:
        show_json(search_document(result, plan_document(plan)))
    else:
        show(search_text(result, job.setting, full=full))
    if result.proof.status == "interrupted":
        raise InterruptedSearchError(f"interrupted: the best plan so far {f'is in {out}' if out else 'is shown'}")
