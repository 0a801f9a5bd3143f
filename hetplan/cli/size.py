"""`hetplan size`: how many nodes a model needs, and what more of them bring."""

from __future__ import annotations

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
    SeqLen,
    WorkloadFile,
    one_of,
)
from hetplan.errors import UsageError

if TYPE_CHECKING:
    from hetplan.specs.cluster import Cluster

MOST_TOKENS = 1e18


def size(
    cluster: ClusterArgument,
    model: ModelArgument,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="GROUP", help="Group whose nodes are counted.  [default: the only one]"),
    ] = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    workload: WorkloadFile = None,
    precision: PrecisionOption = None,
    gradient_precision: GradientPrecision = None,
    calibration: CalibrationFile = None,
    most: Annotated[
        int | None,
        typer.Option("--most", metavar="N", min=1, help="Most nodes in the table.  [default: 16 times the fewest]"),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option("--tokens", metavar="T", help="Tokens to train on: adds days and dollars.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Count the nodes a model needs at least, and what more of them bring."""
    from hetplan.cli.inputs import WorkloadWords, load_job
    from hetplan.cli.output import show, show_json
    from hetplan.report.sizes import size_document, size_text
    from hetplan.search.sizing import MOST_NODES, doubling, sizes, smallest_count

    if tokens is not None and not 0 < tokens <= MOST_TOKENS:
        raise UsageError(f"--tokens: {tokens:g} is not a number of tokens above 0 and up to {MOST_TOKENS:g}")
    words = WorkloadWords(
        file=workload,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        gradient_precision=gradient_precision,
    )
    job = load_job(cluster, model, words, calibration)
    name = _group(group, job.cluster)
    job.warn()
    if most is not None and most > MOST_NODES:
        raise UsageError(f"--most: {most:,} nodes are more than the {MOST_NODES:,} that are tried")
    least = smallest_count(job.prices, name)
    if most is not None and most < least:
        raise UsageError(f"--most: {most} nodes are fewer than the {least} it takes")
    table = sizes(job.prices, name, doubling(least, most or min(16 * least, MOST_NODES)))
    if as_json:
        show_json(size_document(name, table, tokens))
    else:
        show(size_text(name, table, tokens, job.setting))


def _group(name: str | None, cluster: Cluster) -> str:
    names = [group.name for group in cluster.groups]
    if name is not None:
        return one_of(name, "--group", names)
    if len(names) > 1:
        raise UsageError(f"--group is needed: the cluster has {', '.join(names)}")
    return names[0]
