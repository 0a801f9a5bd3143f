"""The rows a page shows of a plan: one a stage, or one a run of stages that look alike where there are many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hetplan.plan.records import Estimate, Layout, Replica, Stage, StageEstimate
from hetplan.report.estimates import fill
from hetplan.report.html import Markup, tag
from hetplan.report.layouts import shape_name
from hetplan.specs.cluster import Cluster
from hetplan.specs.model import Model

MOST_STAGES = 64
"""Above this many stages, neighbours that differ only in where they run share a row."""
MOST_ROWS = 96
NUM_GROUP_COLOURS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One physical stage, or a run of stages that look alike, shown by the fullest of them."""

    index: int
    """Position of `use` in the estimate's stages."""
    use: StageEstimate
    parts: tuple[Stage, ...]
    """Its virtual stages."""
    last: int
    """Last stage of the run."""
    first: int

    @property
    def name(self) -> str:
        """`A0`, or `A0-7` for a run."""
        run = f"-{self.last}" if self.last > self.first else ""
        return f"{shape_name(self.use.replica)}{self.first}{run}"


def stage_rows(layout: Layout, estimate: Estimate) -> list[StageRow]:
    """Return a row a stage in the order of the estimate; where there are many, runs that look alike are joined."""
    rows = [_row(layout, index, use) for index, use in enumerate(estimate.stages)]
    if len(rows) <= MOST_STAGES:
        return rows
    return [_joined(list(run)) for _, run in groupby(rows, key=_looks)]


def _row(layout: Layout, index: int, use: StageEstimate) -> StageRow:
    replica = layout.replicas[use.replica]
    parts = replica.stages[use.stage :: replica.pp]
    return StageRow(index=index, use=use, parts=parts, first=use.stage, last=use.stage)


def _looks(row: StageRow) -> tuple[object, ...]:
    stage = row.parts[0]
    layers = tuple(part.num_layers for part in row.parts)
    return (row.use.replica, stage.group, stage.tp, stage.dp, stage.cp, stage.ep, stage.recompute, layers)


def _joined(run: Sequence[StageRow]) -> StageRow:
    fullest = max(run, key=lambda row: fill(row.use))
    return StageRow(index=fullest.index, use=fullest.use, parts=fullest.parts, first=run[0].first, last=run[-1].last)


def group_class(cluster: Cluster, group: str) -> str:
    """Return the class that gives a group its colour, the same everywhere on the page."""
    names = [each.name for each in cluster.groups]
    return f"g{names.index(group) % NUM_GROUP_COLOURS}"


def swatch(class_: str) -> Markup:
    """Return a small square of a colour."""
    return tag("i", class_=f"sw {class_}")


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return (class, words) of what the colours of a figure mean."""
    return tag("p", *(tag("span", swatch(class_), words) for class_, words in entries), class_="legend")


def held_words(model: Model, parts: Sequence[Stage]) -> str:
    """Return which layers a stage holds: `embedding, decoders 0-22`."""
    before = [0]
    for layer in model.chain:
        before.append(before[-1] + (layer.kind == "decoder"))
    words: list[str] = []
    for part in parts:
        kinds = [layer.kind for layer in model.chain[part.first_layer : part.end_layer]]
        first, end = before[part.first_layer], before[part.end_layer]
        decoders = [f"decoders {first}-{end - 1}" if end - first > 1 else f"decoder {first}"] if end > first else []
        others = list(dict.fromkeys(kind for kind in kinds if kind != "decoder"))
        early = [kind for kind in others if kind != "head"]
        words += [*early, *decoders, *(kind for kind in others if kind == "head")]
    return ", ".join(words[:8]) + (" ..." if len(words) > 8 else "")


def num_decoders(model: Model, parts: Sequence[Stage]) -> int:
    """Return how many decoder layers some stages hold together."""
    return sum(layer.kind == "decoder" for part in parts for layer in model.chain[part.first_layer : part.end_layer])


def degrees(stage: Stage) -> str:
    """Return the degrees that are not 1: `tp 2, dp 4`; tp is always named."""
    named = [(name, getattr(stage, name)) for name in ("tp", "dp", "cp", "ep")]
    return ", ".join(f"{name} {degree}" for name, degree in named if degree > 1 or name == "tp")


def physical(replica: Replica) -> list[tuple[Stage, ...]]:
    """Return the virtual stages of each mesh."""
    return [replica.stages[q :: replica.pp] for q in range(replica.pp)]
