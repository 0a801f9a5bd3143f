"""`hetplan sweep`: what more nodes, other batches, lengths and networks bring, and where it stops paying."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import (
    CalibrationFile,
    ClusterArgument,
    GlobalBatch,
    GradientPrecision,
    JsonFlag,
    ModelArgument,
    PrecisionOption,
    Quiet,
    SeqLen,
    WorkloadFile,
    one_of,
)
from hetplan.errors import UsageError
from hetplan.units import show as shown

if TYPE_CHECKING:
    from hetplan.cli.inputs import Job
    from hetplan.search.sweep import Axis, Sweep
    from hetplan.specs.cluster import Cluster

MOST_VALUES = 200


def sweep(
    cluster: ClusterArgument,
    model: ModelArgument,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--nodes",
            metavar="GROUP=LIST",
            help="Nodes of a group: 1,2,4 or 1-8; may be repeated.  [default: doublings of the largest group]",
        ),
    ] = None,
    batches: Annotated[str | None, typer.Option("--batches", metavar="LIST", help="Samples a step.")] = None,
    seq_lens: Annotated[str | None, typer.Option("--seq-lens", metavar="LIST", help="Tokens a sample.")] = None,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option("--bandwidth", metavar="NETWORK=LIST", help="Of a network: ib=100 Gbit/s,400 Gbit/s."),
    ] = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    workload: WorkloadFile = None,
    precision: PrecisionOption = None,
    gradient_precision: GradientPrecision = None,
    calibration: CalibrationFile = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="ENGINE", help="Only plans this engine can run.")
    ] = "hetplan",
    worth: Annotated[
        float,
        typer.Option(
            "--worth", metavar="X", min=0.0, help="Adding pays while a device brings this share of the average."
        ),
    ] = 0.5,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the points here.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write curves here, as one page of HTML.")
    ] = None,
    as_json: JsonFlag = False,
    quiet: Quiet = False,
) -> None:
    """Vary nodes, batch, sequence length and network speed: where adding hardware stops paying."""
    from hetplan.cli.inputs import WorkloadWords, for_engine, load_job
    from hetplan.cli.output import require_writable
    from hetplan.plan.limits import ENGINES

    for path in (csv, report):
        require_writable(path)
    one_of(engine, "--engine", tuple(ENGINES))
    lengths, sizes = _counts(seq_lens, "--seq-lens"), _counts(batches, "--batches")
    words = WorkloadWords(
        file=workload,
        seq_len=seq_len or (lengths[0] if lengths else None),
        global_batch=global_batch or (sizes[0] if sizes else None),
        precision=precision,
        gradient_precision=gradient_precision,
    )
    job = for_engine(load_job(cluster, model, words, calibration), engine)
    job.warn()
    axes = _axes(job.cluster, nodes or [], sizes, lengths, bandwidth or [])
    _answer(job, _swept(job, axes, engine, worth, quiet=quiet), csv, report, as_json=as_json)


def _swept(job: Job, axes: tuple[Axis, ...], engine: str, worth: float, *, quiet: bool) -> Sweep:
    from hetplan.plan.limits import ENGINES
    from hetplan.search.records import SearchRequest
    from hetplan.search.sweep import sweep as vary

    request = SearchRequest(limits=ENGINES[engine], engine=engine, compare=False)
    drawn = not quiet and sys.stderr.isatty()

    def tell(done: int, count: int) -> None:
        if drawn:
            sys.stderr.write(f"\r{done} of {count} points" + ("\r\x1b[K" if done == count else ""))
            sys.stderr.flush()

    return vary(job.prices, axes, request, worth=worth, tell=tell)


def _answer(job: Job, found: Sweep, csv: Path | None, report: Path | None, *, as_json: bool) -> None:
    from hetplan.cli.output import show, show_json, write_whole
    from hetplan.report.html_sweep import sweep_html
    from hetplan.report.sweeps import sweep_csv, sweep_document, sweep_text

    if csv is not None:
        write_whole(csv, sweep_csv(found))
    if report is not None:
        write_whole(report, sweep_html(found, job.setting))
    show_json(sweep_document(found)) if as_json else show(sweep_text(found, job.setting))


def _axes(
    cluster: Cluster,
    nodes: list[str],
    batches: tuple[int, ...] | None,
    lengths: tuple[int, ...] | None,
    bandwidth: list[str],
) -> tuple[Axis, ...]:
    from hetplan.search.sweep import Axis

    groups = [group.name for group in cluster.groups]
    networks = [network.name for network in cluster.networks]
    axes: list[Axis] = []
    for word in nodes:
        name, values = _of(word, "--nodes", groups)
        counts = _counts(values, "--nodes") or ()
        axes.append(Axis(kind="nodes", of=name, values=tuple(map(float, counts))))
    if batches:
        axes.append(Axis(kind="global_batch", values=tuple(map(float, batches))))
    if lengths:
        axes.append(Axis(kind="seq_len", values=tuple(map(float, lengths))))
    for word in bandwidth:
        name, values = _of(word, "--bandwidth", networks)
        axes.append(Axis(kind="bandwidth", of=name, values=_speeds(values)))
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise UsageError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return tuple(axes) or (_doublings(cluster),)


def _doublings(cluster: Cluster) -> Axis:
    """Return the nodes of the group with most devices: 1, 2, 4 .. up to twice as many as there are."""
    from hetplan.search.sizing import doubling
    from hetplan.search.sweep import Axis

    group = max(cluster.groups, key=lambda each: each.num_devices)
    counts = sorted({*doubling(1, 2 * len(group.nodes)), len(group.nodes)})
    return Axis(kind="nodes", of=group.name, values=tuple(map(float, counts)))


def _of(word: str, option: str, known: list[str]) -> tuple[str, str]:
    name, equals, values = word.partition("=")
    if not equals:
        raise UsageError(f"{option}: {shown(word)} is not NAME=LIST")
    return one_of(name.strip(), option, known), values


def _counts(text: str | None, option: str) -> tuple[int, ...] | None:
    """Return the whole numbers of a list, `1,2,4-8`, rising.

    Raises:
        UsageError: it is no such list.
    """
    if text is None:
        return None
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = (part.strip() for part in word.partition("-"))
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() and 1 <= len(end) <= 9 and int(end) >= 1 for end in ends):
            raise UsageError(
                f"{option}: {shown(word.strip())} is not a whole number of at least 1, nor a range of them"
            )
        if int(ends[1]) - int(ends[0]) >= MOST_VALUES:
            raise UsageError(f"{option}: {shown(word.strip())} is a range of more than {MOST_VALUES} values")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    if not found or len(found) > MOST_VALUES:
        raise UsageError(f"{option}: {shown(text)} is no list of 1 to {MOST_VALUES} values")
    return tuple(sorted(found))


def _speeds(text: str) -> tuple[float, ...]:
    from hetplan.units import parse_quantity

    values = {parse_quantity(word.strip(), "bytes/s") for word in text.split(",")}
    if any(value <= 0 for value in values):
        raise UsageError("--bandwidth: a network's bandwidth must be above 0")
    return tuple(sorted(values))
