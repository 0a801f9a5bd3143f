"""Where the devices of a layout are: which share a node, and a default choice of devices where a layout names none.

A *domain* is what a fast link joins: a node, or `domain_nodes` nodes. `place` packs units into domains, large units
first, first fit, so that a unit is split over domains only where no domain has room for it. Two orders are offered:

- ``stages``: a unit is one copy of one stage, copies side by side: gradients stay near, activations travel;
- ``pipelines``: a unit is a run of neighbouring stages of one copy: activations stay near, gradients travel.

Suffixes of arrays: `_d` one entry a usable device of a group, `_cd` copies x devices of a mesh, `_b` domains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from hetplan.costs.prices import Prices
from hetplan.errors import UsageError
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.cluster import Cluster, Group

Indices = npt.NDArray[np.int64]
PlaceOrder = Literal["stages", "pipelines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where each usable device of a group sits."""

    node_d: Indices
    """Number of its host in the cluster; groups on one host share it."""
    domain_d: Indices
    """Number of its fast-link domain in the cluster."""


def cluster_places(cluster: Cluster) -> dict[str, Places]:
    """Return where the devices of each group sit."""
    numbers: dict[str, int] = {}
    for group in cluster.groups:
        for name in group.nodes:
            numbers.setdefault(name, len(numbers))
    places: dict[str, Places] = {}
    next_domain = len(numbers)
    for group in cluster.groups:
        node_d = _node_of_devices(group)
        host_d = np.array([numbers[name] for name in group.nodes], dtype=np.int64)[node_d]
        if group.domain_nodes == 1:
            places[group.name] = Places(node_d=host_d, domain_d=host_d)
            continue
        places[group.name] = Places(node_d=host_d, domain_d=next_domain + node_d // group.domain_nodes)
        next_domain += -(-len(group.nodes) // group.domain_nodes)
    return places


@lru_cache(maxsize=8)
def places_of(prices: Prices) -> dict[str, Places]:
    """Return `cluster_places` of a cost model's cluster, computed once."""
    return cluster_places(prices.cluster)


def _node_of_devices(group: Group) -> Indices:
    """Return the node (index within the group) of each usable device, in order."""
    slots = np.ones((len(group.nodes), group.devices_per_node), dtype=bool)
    for node, slot in group.left_out:
        slots[node, slot] = False
    return np.nonzero(slots)[0].astype(np.int64)


def mesh_devices(stage: Stage, copies: int) -> Indices:
    """Return the device indices of a placed stage, shape (copies, mesh).

    Raises:
        UsageError: the ranges hold another number of devices.
    """
    count = sum(end - first for first, end in stage.devices)
    if count != copies * stage.mesh_size or any(end <= first for first, end in stage.devices):
        raise UsageError(
            f"{copies} copies of a mesh of {stage.mesh_size} devices need {copies * stage.mesh_size}, "
            f"the ranges hold {count}"
        )
    ranges = [np.arange(first, end, dtype=np.int64) for first, end in stage.devices]
    return np.concatenate(ranges).reshape(copies, stage.mesh_size)


def device_ranges(indices: Indices) -> tuple[tuple[int, int], ...]:
    """Return device indices, in order, as half-open ranges."""
    flat = indices.ravel()
    breaks = np.flatnonzero(np.diff(flat) != 1) + 1
    firsts = flat[np.concatenate([[0], breaks])]
    ends = flat[np.concatenate([breaks - 1, [len(flat) - 1]])] + 1
    return tuple(zip(firsts.tolist(), ends.tolist(), strict=True))


def is_placed(layout: Layout) -> bool:
    """Return whether every stage names its devices."""
    return all(stage.devices for replica in layout.replicas for stage in replica.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Equal runs of devices that should share a domain, one a copy."""

    size: int
    copies: int
    parts: tuple[tuple[int, int, Stage], ...]
    """(row, physical stage, stage), side by side in the unit."""


class _Room:
    """Free devices of one group: a run of indices a domain, from `next_b` on, `free_b` long."""

    def __init__(self, domain_d: Indices) -> None:
        change = np.flatnonzero(np.diff(domain_d)) + 1
        self.next_b = np.concatenate([[0], change]).astype(np.int64)
        self.free_b = np.diff(np.concatenate([self.next_b, [len(domain_d)]]))

    def take(self, size: int, count: int) -> Indices:
        """Return up to `count` runs of `size` devices, none across domains; shape (found, size)."""
        fits_b = self.free_b // size
        before_b = np.cumsum(fits_b) - fits_b
        taken_b = np.clip(count - before_b, 0, fits_b)
        runs = np.repeat(np.arange(len(taken_b)), taken_b)
        within = np.arange(len(runs)) - np.repeat(np.cumsum(taken_b) - taken_b, taken_b)
        firsts = self.next_b[runs] + within * size
        self.next_b = self.next_b + taken_b * size
        self.free_b = self.free_b - taken_b * size
        return np.asarray(firsts[:, None] + np.arange(size), dtype=np.int64)

    def take_any(self, count: int) -> Indices:
        """Return the first `count` free devices wherever they are."""
        left = [np.arange(n, n + f) for n, f in zip(self.next_b.tolist(), self.free_b.tolist(), strict=True) if f]
        free = np.concatenate([np.zeros(0, dtype=np.int64), *left])
        if len(free) < count:
            raise UsageError(f"{count - len(free)} devices are missing")
        chosen = free[:count]
        taken_b = np.clip(count - (np.cumsum(self.free_b) - self.free_b), 0, self.free_b)
        self.next_b, self.free_b = self.next_b + taken_b, self.free_b - taken_b
        return np.asarray(chosen, dtype=np.int64)

    @property
    def largest(self) -> int:
        """Devices of the domain with most room."""
        return int(self.free_b.max(initial=0))


def place(layout: Layout, cluster: Cluster, order: PlaceOrder = "stages") -> Layout:
    """Return the layout with devices for every stage; one that names all its devices comes back as it is.

    Raises:
        UsageError: a group does not exist or has too few devices.
    """
    if is_placed(layout):
        return layout
    places = cluster_places(cluster)
    chosen: dict[tuple[int, int], Indices] = {}
    for name in dict.fromkeys(stage.group for replica in layout.replicas for stage in replica.stages):
        if name not in places:
            raise UsageError(f"there is no group {name!r}; the cluster has {', '.join(places)}")
        room = _Room(places[name].domain_d)
        units = _stage_units(layout, name) if order == "stages" else _pipeline_units(layout, name, room.largest)
        try:
            for unit in sorted(units, key=lambda unit: -unit.size):
                _settle(unit, room, chosen)
        except UsageError as error:
            raise UsageError(f"group {name} is too small for this layout: {error}") from None
    return replace(layout, replicas=tuple(_with_devices(row, r, chosen) for r, row in enumerate(layout.replicas)))


def _with_devices(replica: Replica, row: int, chosen: dict[tuple[int, int], Indices]) -> Replica:
    ranges = [device_ranges(chosen[row, q]) for q in range(replica.pp)]
    stages = tuple(replace(stage, devices=ranges[v % replica.pp]) for v, stage in enumerate(replica.stages))
    return replace(replica, stages=stages)


def _physical(layout: Layout) -> Iterable[tuple[int, int, Stage, int]]:
    for row, replica in enumerate(layout.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            yield row, q, stage, replica.copies


def _stage_units(layout: Layout, group: str) -> list[_Unit]:
    return [
        _Unit(size=stage.mesh_size, copies=copies, parts=((row, q, stage),))
        for row, q, stage, copies in _physical(layout)
        if stage.group == group
    ]


def _pipeline_units(layout: Layout, group: str, largest: int) -> list[_Unit]:
    units: list[_Unit] = []
    for (_, name), run in groupby(_physical(layout), key=lambda item: (item[0], item[2].group)):
        if name != group:
            continue
        parts: list[tuple[int, int, Stage]] = []
        copies = 1
        for row, q, stage, copies in run:
            if parts and sum(part[2].mesh_size for part in parts) + stage.mesh_size > largest:
                units.append(_unit(parts, copies))
                parts = []
            parts.append((row, q, stage))
        units.append(_unit(parts, copies))
    return units


def _unit(parts: Sequence[tuple[int, int, Stage]], copies: int) -> _Unit:
    return _Unit(size=sum(stage.mesh_size for _, _, stage in parts), copies=copies, parts=tuple(parts))


def _settle(unit: _Unit, room: _Room, chosen: dict[tuple[int, int], Indices]) -> None:
    """Give every copy of a unit its devices: whole, else stage by stage, else tp group by tp group, else anywhere."""
    whole = room.take(unit.size, unit.copies)
    column = 0
    for row, q, stage in unit.parts:
        mesh = stage.mesh_size
        devices_cd = whole[:, column : column + mesh]
        column += mesh
        missing = unit.copies - len(whole)
        if missing:
            devices_cd = np.concatenate([devices_cd, _in_pieces(stage, missing, room)])
        chosen[row, q] = devices_cd


def _in_pieces(stage: Stage, copies: int, room: _Room) -> Indices:
    """Return devices of `copies` meshes, in pieces as large as domains have room for; shape (copies, mesh)."""
    wanted = copies * stage.mesh_size
    found: list[Indices] = []
    tp_groups = stage.dp * stage.cp
    for num_groups in (d for d in range(tp_groups, 0, -1) if tp_groups % d == 0):
        size = num_groups * stage.tp
        pieces = room.take(size, wanted // size)
        found.append(pieces.ravel())
        wanted -= pieces.size
    found.append(room.take_any(wanted))
    return np.concatenate(found).reshape(copies, stage.mesh_size)


def same_domain(first_cd: Indices, second_cd: Indices) -> npt.NDArray[np.bool_]:
    """Return, for each copy, whether what two meshes send each other stays in a domain.

    Takes the domain of each device. Equal meshes send device to device; unequal ones must lie in one domain.
    """
    if first_cd.shape == second_cd.shape:
        return np.asarray(np.all(first_cd == second_cd, axis=1))
    low = np.minimum(first_cd.min(axis=1), second_cd.min(axis=1))
    high = np.maximum(first_cd.max(axis=1), second_cd.max(axis=1))
    return np.asarray(low == high)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """How a stage's copies share nodes with each other and with other stages."""

    ranks_per_node: int
    """Most data-parallel ranks of one tp slice on a node."""
    rings_per_node: int
    """Most rings that may leave such a node at once: one a tp slice of every stage of a row there.

    Stages of other rows that hold the same layers are in the same rings; the row with most rings counts.
    """
    ranks_n: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """(node, data-parallel ranks of one tp slice there) of every node the stage is on."""


def node_shares(layout: Layout, nodes: Mapping[tuple[int, int], Indices]) -> dict[tuple[int, int], NodeShare]:
    """Return the share of each (row, physical stage), given the node of each device of its copies."""
    num_nodes = max(int(node_cd.max()) for node_cd in nodes.values()) + 1
    counts = {mesh: np.bincount(node_cd.ravel(), minlength=num_nodes) for mesh, node_cd in nodes.items()}
    rings_n = np.zeros(num_nodes, dtype=np.int64)
    for row, replica in enumerate(layout.replicas):
        slices = [np.minimum(counts[row, q], replica.stages[q].tp) for q in range(replica.pp)]
        rings_n = np.maximum(rings_n, np.sum(slices, axis=0))
    return {
        (row, q): NodeShare(
            ranks_per_node=max(1, -(-int(count_n.max()) // layout.replicas[row].stages[q].tp)),
            rings_per_node=int(rings_n[count_n > 0].max()),
            ranks_n=tuple(
                (int(node), max(1, -(-int(count_n[node]) // layout.replicas[row].stages[q].tp)))
                for node in np.flatnonzero(count_n)
            ),
        )
        for (row, q), count_n in counts.items()
    }
