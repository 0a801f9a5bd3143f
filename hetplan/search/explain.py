"""What a plan does, what holds it back, and what would help: records and sentences for whoever prints them.

Everything is a difference of two estimates: the same layout priced with one thing changed (`explain_changes`), or the
best quick plan of a cluster with one node more against the best quick plan of the cluster as it is. Where the layout
itself beats the quick plan, the layout is the yardstick, so that a poor yardstick never looks like a gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from hetplan.costs.prices import Prices
from hetplan.costs.records import MemoryUse
from hetplan.plan.estimate import estimate
from hetplan.plan.records import Estimate, Layout, StageEstimate, TimeParts
from hetplan.plan.rules import row_place, stage_place
from hetplan.search.explain_changes import Gain, WhatIf, best_known, node_gains, what_ifs
from hetplan.search.explain_links import Crossing, gradient_crossings, slowest, stage_crossings
from hetplan.search.explain_support import remarks
from hetplan.search.records import SearchRequest
from hetplan.units import format_bytes, format_seconds

BindingKind = Literal["stage", "replica", "memory", "gradients", "links", "bubble", "tensor parallel", "optimizer"]

FULL_FRACTION = 0.95
"""A stage above this fraction of its memory counts as full."""
LEAST_SHARE = 0.02
"""Parts of the step below this share bind nothing."""
GIB = 2.0**30

PART_WORDS = {
    "compute_s": "compute",
    "tp_s": "tensor-parallel communication",
    "cp_s": "context-parallel communication",
    "ep_s": "expert-parallel communication",
    "pp_s": "transfers between stages",
    "bubble_s": "idleness (bubble)",
    "dp_s": "gradient traffic that nothing hides",
    "optimizer_s": "optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What the devices of one physical stage do."""

    replica: int
    stage: int
    group: str
    num_devices: int
    """All copies together."""
    first_layer: int
    end_layer: int
    """Layers of the chain, of the stage's first virtual stage."""
    num_decoder_layers: int
    """All its virtual stages together."""
    has_embedding: bool
    has_head: bool
    samples_per_step: int
    """Samples all copies of its replica take in a step."""
    busy_fraction: float
    """Part of the step its devices work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """One part of the step."""

    part: str
    seconds: float
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """Memory of one physical stage."""

    replica: int
    stage: int
    group: str
    use: MemoryUse
    capacity_bytes: float

    @property
    def headroom_bytes(self) -> float:
        """Bytes a device has left at the peak."""
        return self.capacity_bytes - self.use.total_bytes

    @property
    def largest(self) -> tuple[str, float]:
        """What takes most, and its bytes."""
        return max(memory_parts(self.use), key=lambda part: part[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One thing that keeps the step from being shorter, with the seconds it stands for."""

    kind: BindingKind
    seconds: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All there is to say about a plan."""

    roles: tuple[Role, ...]
    unused: tuple[tuple[str, int], ...]
    """Groups with devices the plan leaves idle."""
    time: tuple[TimeShare, ...]
    memory: tuple[StageRoom, ...]
    bindings: tuple[Binding, ...]
    """Most seconds first."""
    gains: tuple[Gain, ...]
    """One more node of each group."""
    what_ifs: tuple[WhatIf, ...]
    """Single changes, most helpful first."""
    remarks: tuple[str, ...]
    """Which engines can run it, and what to know before launching it."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """What binds, what would help, what more nodes would bring."""
        return (
            *(binding.sentence for binding in self.bindings),
            *(change.sentence for change in self.what_ifs),
            *(gain.sentence for gain in self.gains),
            *self.remarks,
        )


def explain(
    layout: Layout, prices: Prices, request: SearchRequest | None = None, *, replan: bool = True
) -> Explanation:
    """Return what a layout does and what holds it back.

    `replan`: also plan again with one more node of each group and with more memory, which takes seconds.
    """
    wanted = request or SearchRequest()
    found = estimate(layout, prices)
    best = best_known(layout, prices, wanted) if replan else None
    return Explanation(
        roles=tuple(_roles(layout, prices, found)),
        unused=tuple(_unused(layout, prices)),
        time=time_shares(found),
        memory=tuple(_room(stage) for stage in found.stages),
        bindings=bindings(layout, prices, found),
        gains=node_gains(best, prices, wanted) if best is not None else (),
        what_ifs=what_ifs(layout, prices, wanted, best),
        remarks=remarks(layout, prices),
    )


def time_shares(found: Estimate) -> tuple[TimeShare, ...]:
    """Return where a step's seconds go, most first; they sum to the step."""
    parts = ((PART_WORDS[name], seconds) for name, seconds in _parts(found.parts))
    shares = (TimeShare(part=part, seconds=s, fraction=s / found.step_s) for part, s in parts if s > 0)
    return tuple(sorted(shares, key=lambda share: -share.seconds))


def memory_parts(use: MemoryUse) -> tuple[tuple[str, float], ...]:
    """Return (component, bytes) of a stage's peak."""
    return tuple((f.name.removesuffix("_bytes"), float(getattr(use, f.name))) for f in fields(use))


def why_lost(best: Estimate, other: Estimate) -> str:
    """Return by how much `other` is slower than `best` and which parts of the step grew, most first."""
    change = other.step_s / best.step_s - 1.0
    if abs(change) <= 1e-9:
        return "takes as long"
    before = dict(_parts(best.parts))
    moved = sorted(
        ((seconds - before[name], PART_WORDS[name]) for name, seconds in _parts(other.parts)),
        key=lambda entry: -abs(entry[0]),
    )
    same_way = [(more, words) for more, words in moved if more * change > 0][:2]
    against = [(more, words) for more, words in moved if more * change < 0 and abs(more) > 0.01 * best.step_s][:1]
    text = "; ".join(f"{words} {_signed(more)}" for more, words in same_way)
    made_up = f", partly made up by {against[0][1]} {_signed(against[0][0])}" if against else ""
    faster = "slower" if change > 0 else "faster"
    return f"{100 * abs(change):.1f} % {faster}: {text}{made_up}"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def bindings(layout: Layout, prices: Prices, found: Estimate) -> tuple[Binding, ...]:
    """Return what keeps the step from being shorter, most seconds first."""
    entries = [*_busiest(layout, found), *_slowest_replica(layout, found), *_parts_that_bind(layout, prices, found)]
    entries += _full_stages(found)
    return tuple(sorted(entries, key=lambda binding: -binding.seconds))


def _roles(layout: Layout, prices: Prices, found: Estimate) -> Iterator[Role]:
    kinds = [layer.kind for layer in prices.model.chain]
    for use in found.stages:
        replica = layout.replicas[use.replica]
        parts = replica.stages[use.stage :: replica.pp]
        held = [kind for part in parts for kind in kinds[part.first_layer : part.end_layer]]
        yield Role(
            replica=use.replica,
            stage=use.stage,
            group=use.group,
            num_devices=replica.copies * parts[0].mesh_size,
            first_layer=parts[0].first_layer,
            end_layer=parts[0].end_layer,
            num_decoder_layers=held.count("decoder"),
            has_embedding="embedding" in held,
            has_head="head" in held,
            samples_per_step=replica.num_samples,
            busy_fraction=use.busy_s / found.step_s,
        )


def _unused(layout: Layout, prices: Prices) -> Iterator[tuple[str, int]]:
    for group in prices.cluster.groups:
        used = sum(
            replica.copies * stage.mesh_size
            for replica in layout.replicas
            for stage in replica.stages[: replica.pp]
            if stage.group == group.name
        )
        if used < group.num_devices:
            yield group.name, group.num_devices - used


def _room(stage: StageEstimate) -> StageRoom:
    return StageRoom(
        replica=stage.replica,
        stage=stage.stage,
        group=stage.group,
        use=stage.memory,
        capacity_bytes=stage.capacity_bytes,
    )


def _parts(parts: TimeParts) -> list[tuple[str, float]]:
    return [(field.name, float(getattr(parts, field.name))) for field in fields(parts)]


def _busiest(layout: Layout, found: Estimate) -> Iterator[Binding]:
    ordered = sorted(found.stages, key=lambda stage: -stage.busy_s)
    first = ordered[0]
    others = [stage for stage in ordered if stage.busy_s < first.busy_s * (1 - 1e-9)]
    idle = f"; the least busy works {100 * others[-1].busy_s / found.step_s:.0f} %" if others else ""
    yield Binding(
        kind="stage",
        seconds=first.busy_s,
        sentence=f"{stage_place(first.replica, first.stage)} on group {first.group} is the busiest: it works "
        f"{format_seconds(first.busy_s)} of {format_seconds(found.step_s)} "
        f"({100 * first.busy_s / found.step_s:.0f} %){idle}",
    )


def _slowest_replica(layout: Layout, found: Estimate) -> Iterator[Binding]:
    ends = found.replica_s
    if len(ends) < 2:
        return
    slowest = max(range(len(ends)), key=lambda row: ends[row])
    margin_s = ends[slowest] - min(ends)
    if margin_s > LEAST_SHARE * found.step_s:
        fastest = min(range(len(ends)), key=lambda row: ends[row])
        yield Binding(
            kind="replica",
            seconds=margin_s,
            sentence=f"{row_place(slowest)} ends last, {format_seconds(margin_s)} after {row_place(fastest)}: "
            "its share of the batch is one microbatch too large or too small to be evened out",
        )


def _parts_that_bind(layout: Layout, prices: Prices, found: Estimate) -> Iterator[Binding]:
    step_s, parts = found.step_s, found.parts
    row = max(range(len(found.replica_s)), key=lambda r: found.replica_s[r])
    replica = layout.replicas[row]
    bubble = (replica.pp - 1) / (replica.num_microbatches + replica.pp - 1)
    named: Sequence[tuple[BindingKind, float, str]] = (
        (
            "bubble",
            parts.bubble_s,
            f"idle for {format_seconds(parts.bubble_s)} ({100 * parts.bubble_s / step_s:.0f} %): "
            f"{replica.num_microbatches} microbatches on {replica.pp} stages leave (p - 1)/(m + p - 1) = "
            f"{100 * bubble:.0f} % even where all stages are equal",
        ),
        (
            "gradients",
            parts.dp_s,
            f"gradient traffic that nothing hides takes {format_seconds(parts.dp_s)} "
            f"({100 * parts.dp_s / step_s:.0f} %; {format_seconds(found.dp_overlapped_s)} is hidden)"
            f"{_over(gradient_crossings(layout, prices))}",
        ),
        (
            "links",
            parts.pp_s,
            f"transfers between stages take {format_seconds(parts.pp_s)} ({100 * parts.pp_s / step_s:.0f} %)"
            f"{_over(stage_crossings(layout, prices))}",
        ),
        ("tensor parallel", parts.tp_s, f"tensor-parallel communication takes {format_seconds(parts.tp_s)}"),
        ("optimizer", parts.optimizer_s, f"the optimizer takes {format_seconds(parts.optimizer_s)}"),
    )
    for kind, seconds, sentence in named:
        if seconds >= LEAST_SHARE * step_s:
            yield Binding(kind=kind, seconds=seconds, sentence=sentence)


def _over(crossings: Sequence[Crossing]) -> str:
    link = slowest(crossings)
    return f"; the slowest link is {link.words}" if link is not None else ""


def _full_stages(found: Estimate) -> Iterator[Binding]:
    fullest = max(found.stages, key=lambda stage: stage.memory.total_bytes / stage.capacity_bytes)
    fraction = fullest.memory.total_bytes / fullest.capacity_bytes
    if fraction < FULL_FRACTION:
        return
    name, num_bytes = _room(fullest).largest
    left = fullest.capacity_bytes - fullest.memory.total_bytes
    room = f"{left / GIB:.2f} GiB are left" if left >= 0 else f"{-left / GIB:.2f} GiB are missing"
    yield Binding(
        kind="memory",
        seconds=0.0,
        sentence=f"{stage_place(fullest.replica, fullest.stage)} on group {fullest.group} is full: {room} of "
        f"{format_bytes(fullest.capacity_bytes)}, most is {name} ({format_bytes(num_bytes)})",
    )
