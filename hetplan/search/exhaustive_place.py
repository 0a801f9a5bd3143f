"""Every choice of devices that makes a difference.

What a layout costs depends on which of its devices share a node and which share a fast-link domain, not on their
numbers: nodes of a group are alike. So a placement is judged by its *pattern*, the nodes and domains of all devices in
the order of the layout, numbered as they first appear; placements of equal patterns cost the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

import numpy as np

from hetplan.plan.placement import PlaceOrder, Places, cluster_places, device_ranges, mesh_devices, place
from hetplan.plan.records import Layout, Replica
from hetplan.specs.cluster import Cluster

ORDERS: tuple[PlaceOrder, ...] = ("stages", "pipelines")
MOST_PLACEMENTS = 120
"""A layout with more patterns than this is placed by `place` only."""

Slot = tuple[int, int, int, int]
"""(row, copy, physical stage, position in the mesh)."""
Chosen = dict[Slot, int]
"""Device of each slot."""


def placements(layout: Layout, cluster: Cluster) -> list[Layout]:
    """Return the layout with every choice of devices whose pattern differs, those of `place` first."""
    places = cluster_places(cluster)
    found: dict[tuple[int, ...], Layout] = {}
    for order in ORDERS:
        placed = place(layout, cluster, order)
        found.setdefault(_pattern(placed, places), placed)
    slots = _slots(layout)
    if all(_is_uniform(places[group], shared=_shares_hosts(cluster, group)) for group in slots):
        return list(found.values())
    choices = []
    for group, own in slots.items():
        nodes = _Nodes(places[group], shared=_shares_hosts(cluster, group))
        choices.append(list(islice(_choices(own, nodes), MOST_PLACEMENTS + 1)))
    if math.prod(len(some) for some in choices) > MOST_PLACEMENTS:
        return list(found.values())
    for parts in product(*choices):
        placed = _placed(layout, {slot: device for part in parts for slot, device in part.items()})
        found.setdefault(_pattern(placed, places), placed)
    return list(found.values())


def _slots(layout: Layout) -> dict[str, list[Slot]]:
    """Return, for each group, every device the layout needs of it."""
    slots: dict[str, list[Slot]] = {}
    for row, replica in enumerate(layout.replicas):
        for copy in range(replica.copies):
            for q, stage in enumerate(replica.stages[: replica.pp]):
                slots.setdefault(stage.group, []).extend((row, copy, q, k) for k in range(stage.mesh_size))
    return slots


def _shares_hosts(cluster: Cluster, group: str) -> bool:
    own = set(cluster.group(group).nodes)
    return any(not own.isdisjoint(other.nodes) for other in cluster.groups if other.name != group)


def _is_uniform(places: Places, *, shared: bool) -> bool:
    """Return whether all devices of a group are alike: on one node, or each on a node that no other group is on."""
    count = len(places.node_d)
    nodes, domains = len(np.unique(places.node_d)), len(np.unique(places.domain_d))
    return nodes == 1 or (nodes == count and domains == count and not shared)


def _choices(slots: Sequence[Slot], nodes: _Nodes) -> Iterator[Chosen]:
    """Yield every way to spread slots over nodes; of untouched nodes that are alike only the first is tried."""
    taken = [0] * len(nodes.devices_b)
    chosen: Chosen = {}

    def assign(number: int) -> Iterator[Chosen]:
        if number == len(slots):
            yield dict(chosen)
            return
        tried: set[tuple[object, ...]] = set()
        for node, devices in enumerate(nodes.devices_b):
            if taken[node] == len(devices) or (kind := nodes.kind(node, taken)) in tried:
                continue
            tried.add(kind)
            chosen[slots[number]] = devices[taken[node]]
            taken[node] += 1
            yield from assign(number + 1)
            taken[node] -= 1

    yield from assign(0)


class _Nodes:
    """The nodes of one group."""

    def __init__(self, places: Places, *, shared: bool) -> None:
        nodes, firsts = np.unique(places.node_d, return_index=True)
        self.devices_b: list[list[int]] = [np.flatnonzero(places.node_d == node).tolist() for node in nodes]
        self._domain_b: list[int] = places.domain_d[firsts].tolist()
        self._shared = shared

    def kind(self, node: int, taken: Sequence[int]) -> tuple[object, ...]:
        """Return equal values for nodes it makes no difference to choose between.

        Nodes that other groups share differ by what else is on them.
        """
        if self._shared or taken[node]:
            return (node,)
        domain = self._domain_b[node]
        inside = [other for other, number in enumerate(self._domain_b) if number == domain]
        if any(taken[other] for other in inside):
            return ("in", domain, len(self.devices_b[node]))
        return ("fresh", len(self.devices_b[node]), tuple(sorted(len(self.devices_b[other]) for other in inside)))


def _placed(layout: Layout, chosen: Chosen) -> Layout:
    return replace(layout, replicas=tuple(_placed_row(row, r, chosen) for r, row in enumerate(layout.replicas)))


def _placed_row(replica: Replica, row: int, chosen: Chosen) -> Replica:
    ranges = [
        device_ranges(
            np.array([chosen[row, copy, q, k] for copy in range(replica.copies) for k in range(stage.mesh_size)])
        )
        for q, stage in enumerate(replica.stages[: replica.pp])
    ]
    stages = tuple(replace(stage, devices=ranges[v % replica.pp]) for v, stage in enumerate(replica.stages))
    return replace(replica, stages=stages)


def _pattern(layout: Layout, places: dict[str, Places]) -> tuple[int, ...]:
    """Return nodes and domains of all devices, in order, numbered as they first appear."""
    numbers: dict[tuple[str, int], int] = {}
    pattern: list[int] = []
    for replica in layout.replicas:
        for stage in replica.stages[: replica.pp]:
            devices = mesh_devices(stage, replica.copies).ravel()
            where = places[stage.group]
            for node, domain in zip(where.node_d[devices].tolist(), where.domain_d[devices].tolist(), strict=True):
                pattern.append(numbers.setdefault(("node", node), len(numbers)))
                pattern.append(numbers.setdefault(("domain", domain), len(numbers)))
    return tuple(pattern)
