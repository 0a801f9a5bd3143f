"""What sets two plans apart: settings, layers, devices, and what each costs by part.

Rows (replica shapes) are compared in the order plans list them, largest share of the devices first. A layer has
moved where its *place* in the row (stage and group) is another; neighbours that moved alike are one entry; degrees
are settings. Devices are compared as sets over the whole plan, so replicas that swapped places count as no change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import groupby, pairwise, zip_longest

from hetplan.plan.records import Estimate, Input, Layout, Plan, Replica, StageEstimate
from hetplan.plan.rules import row_place

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One value that is another; None: there is none on that side."""

    what: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedLayers:
    """Neighbouring layers of one row that have another place."""

    row: int
    first_layer: int
    end_layer: int
    before: str | None
    """`stage 1 (v100)`; None: the row does not exist."""
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedDevices:
    """Devices of one group that only one of the plans uses, as half-open ranges."""

    group: str
    only_before: tuple[tuple[int, int], ...]
    only_after: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostChange:
    """One number of the estimates; None where one of them does not have it."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything that sets plan `after` apart from plan `before`."""

    inputs: tuple[Change, ...]
    """Cluster, model, calibration and workload: what the costs are under."""
    settings: tuple[Change, ...]
    layers: tuple[MovedLayers, ...]
    devices: tuple[MovedDevices, ...]
    totals: tuple[CostChange, ...]
    parts: tuple[CostChange, ...]
    memory: tuple[CostChange, ...]
    """Peak bytes by stage: `A0`, `A1` .."""

    @property
    def is_empty(self) -> bool:
        """Whether the plans train alike: the same layout of the same job."""
        return not (self.inputs or self.settings or self.layers or self.devices)


def difference(before: Plan, after: Plan) -> Difference:
    """Return what sets two plans apart, at the costs they were saved with."""
    return Difference(
        inputs=tuple(_input_changes(before, after)),
        settings=tuple(_setting_changes(before.layout, after.layout)),
        layers=tuple(_moved_layers(before.layout, after.layout)),
        devices=tuple(_moved_devices(before.layout, after.layout)),
        totals=tuple(_totals(before.estimate, after.estimate)),
        parts=tuple(
            CostChange(
                name=part.name,
                before=getattr(before.estimate.parts, part.name),
                after=getattr(after.estimate.parts, part.name),
            )
            for part in fields(before.estimate.parts)
        ),
        memory=tuple(_memory_changes(before.estimate, after.estimate)),
    )


def _input_changes(before: Plan, after: Plan) -> Iterator[Change]:
    for name in ("cluster", "model", "calibration"):
        old, new = getattr(before, name), getattr(after, name)
        if _digest(old) != _digest(new):
            same_name = old is not None and new is not None and old.name == new.name
            yield Change(what=name, before=_source(old, short=same_name), after=_source(new, short=same_name))
    for key in dict.fromkeys((*before.workload, *after.workload)):
        yield from _changed(key, before.workload.get(key), after.workload.get(key))


def _digest(source: Input | None) -> str | None:
    return source.sha256 if source is not None else None


def _source(source: Input | None, *, short: bool) -> str | None:
    if source is None:
        return None
    return f"{source.name} ({source.sha256[:8]})" if short else source.name


def _changed(what: str, old: object, new: object) -> Iterator[Change]:
    if old != new:
        yield Change(what=what, before=None if old is None else str(old), after=None if new is None else str(new))


def _setting_changes(before: Layout, after: Layout) -> Iterator[Change]:
    yield from _changed("schedule", before.schedule, after.schedule)
    yield from _changed("sharding", before.sharding, after.sharding)
    yield from _changed("devices in use", before.num_devices, after.num_devices)
    yield from _changed("replica shapes", len(before.replicas), len(after.replicas))
    for row, (old, new) in enumerate(zip_longest(before.replicas, after.replicas)):
        for name in ("copies", "pp", "vpp", "microbatch", "num_microbatches"):
            yield from _changed(f"{row_place(row)} {name}", _value(old, name), _value(new, name))
        for name in ("tp", "dp", "cp", "ep", "recompute"):
            yield from _changed(f"{row_place(row)} {name}", _of_stages(old, name), _of_stages(new, name))


def _value(replica: Replica | None, name: str) -> object:
    return getattr(replica, name) if replica is not None else None


def _of_stages(replica: Replica | None, name: str) -> str | None:
    """Return a value of every stage, once where all agree: `2` or `8, 4, 4`."""
    if replica is None:
        return None
    values = [str(getattr(stage, name)) for stage in replica.stages[: replica.pp]]
    return values[0] if len(set(values)) == 1 else ", ".join(values)


def _moved_layers(before: Layout, after: Layout) -> Iterator[MovedLayers]:
    for row, (old, new) in enumerate(zip_longest(before.replicas, after.replicas)):
        was, now = _places(old), _places(new)
        cuts = sorted({cut for first, end, _ in (*was, *now) for cut in (first, end)})
        runs = ((first, end, _place_at(was, first), _place_at(now, first)) for first, end in pairwise(cuts))
        for (old_place, new_place), run in groupby(runs, key=lambda run: run[2:]):
            joined = list(run)
            if old_place != new_place:
                yield MovedLayers(
                    row=row,
                    first_layer=joined[0][0],
                    end_layer=joined[-1][1],
                    before=old_place,
                    after=new_place,
                )


def _places(replica: Replica | None) -> list[tuple[int, int, str]]:
    """Return (first layer, end layer, place) of each stage."""
    if replica is None:
        return []
    return [
        (stage.first_layer, stage.end_layer, f"stage {v % replica.pp} ({stage.group})")
        for v, stage in enumerate(replica.stages)
    ]


def _place_at(places: list[tuple[int, int, str]], layer: int) -> str | None:
    return next((place for first, end, place in places if first <= layer < end), None)


def _moved_devices(before: Layout, after: Layout) -> Iterator[MovedDevices]:
    old, new = _devices(before), _devices(after)
    for group in dict.fromkeys((*old, *new)):
        was, now = old.get(group, []), new.get(group, [])
        only_was, only_now = tuple(_difference(was, now)), tuple(_difference(now, was))
        if only_was or only_now:
            yield MovedDevices(group=group, only_before=only_was, only_after=only_now)


def _devices(layout: Layout) -> dict[str, list[Range]]:
    """Return the devices in use of each group, as ranges in order that do not touch."""
    used: dict[str, list[Range]] = {}
    for replica in layout.replicas:
        for stage in replica.stages:
            used.setdefault(stage.group, []).extend(stage.devices)
    return {group: _joined(ranges) for group, ranges in used.items()}


def _joined(ranges: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for first, end in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((first, end))
    return joined


def _difference(ranges: list[Range], others: list[Range]) -> Iterator[Range]:
    """Yield what is in `ranges` and not in `others`; both in order."""
    for first, end in ranges:
        start = first
        for other_first, other_end in others:
            if other_end <= start or other_first >= end:
                continue
            if other_first > start:
                yield start, other_first
            start = max(start, other_end)
        if start < end:
            yield start, end


def _totals(before: Estimate, after: Estimate) -> Iterator[CostChange]:
    for name in ("step_s", "tokens_per_s", "mfu", "usd_per_step", "joules_per_step", "dp_overlapped_s"):
        yield CostChange(name=name, before=getattr(before, name), after=getattr(after, name))


def _memory_changes(before: Estimate, after: Estimate) -> Iterator[CostChange]:
    old, new = _peaks(before.stages), _peaks(after.stages)
    for place in sorted({*old, *new}):
        name = f"{row_place(place[0]).removeprefix('replica ')}{place[1]}"
        yield CostChange(name=name, before=old.get(place), after=new.get(place))


def _peaks(stages: tuple[StageEstimate, ...]) -> dict[tuple[int, int], float]:
    return {(stage.replica, stage.stage): stage.memory.total_bytes for stage in stages}
