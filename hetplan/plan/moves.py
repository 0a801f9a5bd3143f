"""What must travel when a job goes on under another plan: weights and optimizer states, between devices.

Layers between two cuts of either plan are a *segment*; the finest tp (for experts ep x tp) split of either plan cuts
its parameters into *slices*; a *cell* is a slice of a segment. A device that holds a cell holds all of it, or, where
data-parallel ranks share it out, the part ``[d / D, (d + 1) / D)`` of the `D` holders' `d`-th, holders counted in the
order of rows, copies and ranks. What a device needs and did not hold comes from a device that did: one in its node
where there is one, else the holders in turn. What no device left holds must come from a checkpoint.

The time is a lower estimate: all transfers side by side, each node as fast as its NICs,
``max over nodes of sum(bytes / bandwidth)`` out and in, and over shared lines; copies inside a node take no time.
Every weight is taken to be split by tp, norms too, though they are copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, lcm
from typing import Literal

from hetplan.costs.prices import Prices
from hetplan.plan.placement import mesh_devices
from hetplan.plan.records import Layout, Stage
from hetplan.plan.stages import whole_params
from hetplan.plan.survivors import DeviceName, device_names
from hetplan.specs.cluster import Cluster

CHECKPOINT = "checkpoint"
EPSILON = 1e-9

Kind = Literal["dense", "expert"]
KINDS: tuple[Kind, ...] = ("dense", "expert")
Cell = tuple[int, int]
"""(segment, slice)."""
Holders = dict[Cell, list[DeviceName]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """State of neighbouring layers that goes from devices of one group to devices of one group."""

    first_layer: int
    end_layer: int
    sender: str
    """A group, or `checkpoint`."""
    receiver: str
    num_bytes: float
    num_devices: int
    """Devices that receive some of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """All that must move."""

    moves: tuple[Move, ...]
    moved_bytes: float
    """Between devices."""
    kept_bytes: float
    """Stays where it is."""
    checkpoint_bytes: float
    """Held by no device that is left (or none that can be reached): read from a checkpoint."""
    transfer_s: float
    busiest: str
    """The node or shared line that takes that long; empty: nothing crosses the network."""


@dataclass(slots=True)
class _Ledger:
    """Bytes that flow, as they are found."""

    moved: dict[tuple[int, str, str], float] = field(default_factory=lambda: defaultdict(float))
    receivers: dict[tuple[int, str, str], set[DeviceName]] = field(default_factory=lambda: defaultdict(set))
    nodes: dict[tuple[str, str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    """(sending group, node, receiving group, node) -> bytes."""
    needed: float = 0.0

    def add(self, segment: int, sender: DeviceName | None, receiver: DeviceName, num_bytes: float) -> None:
        """Enter one flow; no sender: from a checkpoint."""
        key = (segment, sender[0] if sender else CHECKPOINT, receiver[0])
        self.moved[key] += num_bytes
        self.receivers[key].add(receiver)
        if sender and sender[1] != receiver[1]:
            self.nodes[sender[0], sender[1], receiver[0], receiver[1]] += num_bytes


def moves(before: tuple[Layout, Cluster], after: tuple[Layout, Cluster], prices: Prices) -> Moves:
    """Return what must move from one placed layout to another; `prices` are those of the cluster it moves to."""
    layouts = (before[0], after[0])
    cuts = sorted({cut for layout in layouts for _, stage in _stages(layout) for cut in _span(stage)})
    segments = list(pairwise(cuts))
    alive = {name for names in device_names(after[1]).values() for name in names}
    ledger = _Ledger()
    for kind, params_l in zip(KINDS, whole_params(prices), strict=True):
        if not params_l.any():
            continue
        num_slices = lcm(*(_ways(stage, kind) for layout in layouts for _, stage in _stages(layout)))
        old = _holders(*before, segments, (kind, num_slices))
        new = _holders(*after, segments, (kind, num_slices))
        for cell, devices in new.items():
            first, end = segments[cell[0]]
            params = float(params_l[first:end].sum()) / num_slices
            if params > 0:
                for num_bytes, shared in _states(layouts, prices):
                    flow = _Flow(old=old.get(cell, []), new=devices, shared=shared, alive=alive)
                    _enter(ledger, cell[0], flow, params * num_bytes)
    return _summed(ledger, segments, prices)


def _span(stage: Stage) -> tuple[int, int]:
    return stage.first_layer, stage.end_layer


def _stages(layout: Layout) -> Iterator[tuple[int, Stage]]:
    for row, replica in enumerate(layout.replicas):
        for stage in replica.stages:
            yield row, stage


def _ways(stage: Stage, kind: Kind) -> int:
    return stage.tp if kind == "dense" else stage.tp * stage.ep


def _states(layouts: tuple[Layout, Layout], prices: Prices) -> Iterator[tuple[float, tuple[bool, bool]]]:
    """Yield bytes a parameter of weights and of optimizer states, and whether each plan shares them out."""
    workload = prices.workload
    yield workload.weight_bytes, (layouts[0].sharding == "full", layouts[1].sharding == "full")
    yield workload.optimizer_bytes, (layouts[0].sharding != "none", layouts[1].sharding != "none")


def _holders(layout: Layout, cluster: Cluster, segments: Sequence[tuple[int, int]], split: tuple[Kind, int]) -> Holders:
    """Return the devices that hold each cell, in order."""
    kind, num_slices = split
    names = device_names(cluster)
    found: Holders = defaultdict(list)
    for replica in layout.replicas:
        for v, stage in enumerate(replica.stages):
            inside = [s for s, (first, end) in enumerate(segments) if stage.first_layer <= first < stage.end_layer]
            width = num_slices // _ways(stage, kind)
            for row in mesh_devices(replica.stages[v % replica.pp], replica.copies).tolist():
                for m, index in enumerate(row):
                    which = m % stage.tp
                    if kind == "expert":
                        which += m // stage.tp % stage.ep * stage.tp
                    for s in inside:
                        for k in range(which * width, (which + 1) * width):
                            found[s, k].append(names[stage.group][index])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Who held a cell's state, who needs it, and whether either share it out."""

    old: list[DeviceName]
    new: list[DeviceName]
    shared: tuple[bool, bool]
    alive: set[DeviceName]


def _enter(ledger: _Ledger, segment: int, flow: _Flow, cell_bytes: float) -> None:
    """Enter what every new holder of a cell lacks."""
    index = {name: d for d, name in enumerate(flow.old)}
    living = [name for name in flow.old if name in flow.alive]
    near = {name[1]: name for name in living}
    for n, receiver in enumerate(flow.new):
        wanted = _part(n, len(flow.new), shared=flow.shared[1])
        own = index.get(receiver)
        had = (0.0, 0.0) if own is None else _part(own, len(flow.old), shared=flow.shared[0])
        ledger.needed += (wanted[1] - wanted[0]) * cell_bytes
        for piece in _lacking(wanted, had):
            if flow.shared[0]:
                for sender, fraction in _shards(flow, piece):
                    ledger.add(segment, sender, receiver, fraction * cell_bytes)
            else:
                source = near.get(receiver[1]) or (living[n % len(living)] if living else None)
                ledger.add(segment, source, receiver, (piece[1] - piece[0]) * cell_bytes)


def _part(index: int, number: int, *, shared: bool) -> tuple[float, float]:
    return (index / number, (index + 1) / number) if shared else (0.0, 1.0)


def _lacking(wanted: tuple[float, float], had: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """Yield what of `wanted` is not in `had`."""
    if min(wanted[1], had[1]) - max(wanted[0], had[0]) <= EPSILON:
        yield wanted
        return
    for first, end in ((wanted[0], had[0]), (had[1], wanted[1])):
        if end - first > EPSILON:
            yield first, end


def _shards(flow: _Flow, piece: tuple[float, float]) -> Iterator[tuple[DeviceName | None, float]]:
    """Yield who held each part of a piece that was shared out; None: gone."""
    number = len(flow.old)
    if not number:
        yield None, piece[1] - piece[0]
    for d in range(int(piece[0] * number + EPSILON), min(number, ceil(piece[1] * number - EPSILON))):
        part = min(piece[1], (d + 1) / number) - max(piece[0], d / number)
        if part > EPSILON / number:
            yield (flow.old[d] if flow.old[d] in flow.alive else None), part


def _summed(ledger: _Ledger, segments: Sequence[tuple[int, int]], prices: Prices) -> Moves:
    found = [
        Move(
            first_layer=segments[segment][0],
            end_layer=segments[segment][1],
            sender=sender,
            receiver=receiver,
            num_bytes=num_bytes,
            num_devices=len(ledger.receivers[segment, sender, receiver]),
        )
        for (segment, sender, receiver), num_bytes in sorted(ledger.moved.items())
        if num_bytes > 0
    ]
    checkpoint = sum(move.num_bytes for move in found if move.sender == CHECKPOINT)
    moved = sum(move.num_bytes for move in found) - checkpoint
    seconds = _seconds(ledger, prices)
    busiest = max(seconds, key=lambda name: seconds[name], default="")
    return Moves(
        moves=tuple(found),
        moved_bytes=moved,
        kept_bytes=max(0.0, ledger.needed - moved - checkpoint),
        checkpoint_bytes=checkpoint,
        transfer_s=seconds.get(busiest, 0.0),
        busiest=busiest,
    )


def _seconds(ledger: _Ledger, prices: Prices) -> dict[str, float]:
    """Return how long each node sends and receives, and each shared line is in use."""
    seconds: dict[str, float] = defaultdict(float)
    for (sender, from_node, receiver, to_node), num_bytes in ledger.nodes.items():
        link = prices.link(sender, receiver)
        if link is None:
            seconds[f"no network joins {sender} and {receiver}"] = float("inf")
            continue
        taken_s = num_bytes / link.bandwidth_bytes_per_s
        for name in (f"{link.network}",) if link.shared else (f"{from_node} (out)", f"{to_node} (in)"):
            seconds[name] += taken_s
    return dict(seconds)
