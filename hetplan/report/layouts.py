"""Who does what: a layout as one table, a section for each replica shape, a row for each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap

from hetplan.plan.records import Estimate, Layout, Replica, Stage, StageEstimate
from hetplan.plan.rules import row_place
from hetplan.report.nodes import node_names, nodes_of
from hetplan.report.tables import WIDTH, bar, percent, table
from hetplan.specs.cluster import Cluster
from hetplan.specs.hostlist import hostlist_text
from hetplan.specs.model import Model
from hetplan.specs.workload import Workload
from hetplan.units import format_seconds

MOST_ROWS = 24
"""Above this many stages, neighbours that differ only in their nodes share a row."""

_HEADERS = ("stage", "group", "nodes", "layers", "tp", "dp", "cp", "ep", "recompute", "a microbatch", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageRow:
    """One physical stage, or a run of stages that look alike."""

    first: int
    last: int
    stage: Stage
    nodes: tuple[str, ...]
    layers: tuple[int, ...]
    """Decoder layers of each virtual stage."""
    microbatch_s: float
    memory: float
    """Peak over capacity."""

    @property
    def looks(self) -> tuple[object, ...]:
        """What stages of one run have in common."""
        stage = self.stage
        return (stage.group, stage.tp, stage.dp, stage.cp, stage.ep, stage.recompute, self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained, on what."""

    cluster: Cluster
    model: Model
    workload: Workload


def headline(layout: Layout, setting: Setting) -> str:
    """Return what the layout is for and what holds for all of it, in two lines (more where names are long)."""
    return "\n".join(line for text in headline_parts(layout, setting) for line in wrap(text, WIDTH))


def headline_parts(layout: Layout, setting: Setting) -> tuple[str, str]:
    """Return what the layout is for, and what holds for all of it."""
    workload = setting.workload
    batch = f"{workload.global_batch:,} samples of {workload.seq_len:,} tokens a step"
    used, there_are = layout.num_devices, setting.cluster.num_devices
    sharding = "nothing sharded" if layout.sharding == "none" else f"sharding {layout.sharding}"
    return (
        f"{setting.model.name} on {setting.cluster.name}: {batch}",
        f"{workload.precision}, {layout.schedule}, {sharding}, {used:,} of {there_are:,} devices",
    )


def layout_table(layout: Layout, estimate: Estimate, setting: Setting, *, full: bool = False) -> str:
    """Return the table of replica shapes and stages; `full` joins no rows and cuts no names, however wide that is.

    Where the table is wider than a report, memory has no bars; only then are names of nodes cut.
    """
    cluster, model = setting.cluster, setting.model
    found = {(use.replica, use.stage): use for use in estimate.stages}
    names = node_names(cluster)
    shapes = [
        [_stage_row(replica, i, found[shape, i], names, model) for i in range(replica.pp)]
        for shape, replica in enumerate(layout.replicas)
    ]
    if not full and sum(map(len, shapes)) > MOST_ROWS:
        shapes = [_join(rows) for rows in shapes]
    shown = _shown_degrees(layout)

    def text(*, bars: bool, shrink: str = "") -> str:
        rows: list[Sequence[str] | str] = []
        for i, (replica, stages) in enumerate(zip(layout.replicas, shapes, strict=True)):
            rows.append(f"{shape_name(i)}: {replica_text(replica)}")
            rows += [_cells(row, shown, bars=bars) for row in stages]
        return table(_HEADERS, rows, shrink=shrink)

    found_text = text(bars=True)
    if max(map(len, found_text.splitlines())) <= WIDTH:
        return found_text
    return text(bars=False, shrink="" if full else "nodes")


def shape_name(index: int) -> str:
    """Return the letter a replica shape goes by, the one messages of `check` use."""
    return row_place(index).removeprefix("replica ")


def replica_text(replica: Replica) -> str:
    """Return what one replica shape does in words."""
    copies = f"{replica.copies} copies, each" if replica.copies > 1 else "1 copy with"
    samples = count_text(replica.microbatch, "sample")
    parts = f", {replica.vpp} parts a stage" if replica.vpp > 1 else ""
    return f"{copies} {count_text(replica.num_microbatches, 'microbatch', 'es')} of {samples}{parts}"


def count_text(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun, in the plural where it is not 1."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def decoder_layers(model: Model, stage: Stage) -> int:
    """Return how many decoder layers a stage holds."""
    return sum(layer.kind == "decoder" for layer in model.chain[stage.first_layer : stage.end_layer])


def _stage_row(
    replica: Replica, index: int, use: StageEstimate, names: Mapping[str, Sequence[str]], model: Model
) -> _StageRow:
    stage = replica.stages[index]
    return _StageRow(
        first=index,
        last=index,
        stage=stage,
        nodes=nodes_of(names[stage.group], stage.devices),
        layers=tuple(decoder_layers(model, part) for part in replica.stages[index :: replica.pp]),
        microbatch_s=use.forward_s + use.backward_s,
        memory=use.memory.total_bytes / use.capacity_bytes,
    )


def _join(rows: list[_StageRow]) -> list[_StageRow]:
    """Return runs of stages that look alike as one row with the slowest time and the fullest memory."""
    joined = []
    for _, run in groupby(rows, key=lambda row: row.looks):
        alike = list(run)
        joined.append(
            _StageRow(
                first=alike[0].first,
                last=alike[-1].last,
                stage=alike[0].stage,
                nodes=tuple(dict.fromkeys(node for row in alike for node in row.nodes)),
                layers=alike[0].layers,
                microbatch_s=max(row.microbatch_s for row in alike),
                memory=max(row.memory for row in alike),
            )
        )
    return joined


def _shown_degrees(layout: Layout) -> set[str]:
    """Degrees that are not 1 everywhere; tp is always shown."""
    stages = [stage for replica in layout.replicas for stage in replica.stages]
    return {"tp"} | {name for name in ("dp", "cp", "ep") if any(getattr(stage, name) > 1 for stage in stages)}


def _cells(row: _StageRow, shown: set[str], *, bars: bool) -> tuple[str, ...]:
    degrees = (str(getattr(row.stage, name)) if name in shown else "" for name in ("tp", "dp", "cp", "ep"))
    return (
        str(row.first) if row.first == row.last else f"{row.first}-{row.last}",
        row.stage.group,
        hostlist_text(row.nodes),
        "+".join(map(str, row.layers)),
        *degrees,
        row.stage.recompute,
        format_seconds(row.microbatch_s),
        f"{percent(row.memory).rjust(5)} {bar(row.memory, 8)}" if bars else percent(row.memory),
    )
