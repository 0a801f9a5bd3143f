"""What transfers of different pipelines share: the NICs of a node, and lines that all traffic shares.

A node of a network has as many servers as NICs in each direction, a shared line has one. A transfer holds its mesh's
share of every node it leaves or reaches (`nics x devices of the mesh / devices of the node`, one NIC at least, as
`costs.boundary` prices it) from its start to its end, and starts when all of them are free: first asked, first served.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from hetplan.costs.links import Link, link_between
from hetplan.costs.prices import Prices
from hetplan.plan.placement import Indices, mesh_devices, places_of, same_domain
from hetplan.plan.records import Replica

Use = tuple[tuple[str, int], ...]
"""(resource, servers held)."""


class Servers:
    """When the servers of each resource are free again."""

    def __init__(self, capacity: dict[str, int]) -> None:
        self._free_s = {name: [0.0] * count for name, count in capacity.items()}
        self.waited_s: dict[str, float] = {}

    def run(self, use: Use, ready_s: float, seconds: float) -> tuple[float, float]:
        """Return start and end of a transfer that may start at `ready_s`."""
        start = ready_s
        for name, count in use:
            free = heapq.nsmallest(count, self._free_s[name])[-1]
            if free > ready_s:
                self.waited_s[name] = self.waited_s.get(name, 0.0) + free - ready_s
            start = max(start, free)
        end = start + seconds
        for name, count in use:
            servers = self._free_s[name]
            for _ in range(count):
                heapq.heapreplace(servers, end)
        return start, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What each transfer of a layout holds."""

    capacity: dict[str, int]
    uses: dict[tuple[int, int, int, int], Use]
    """(row, copy, sending rank, receiving rank) -> what its transfers hold."""


def shares_of(replicas: tuple[Replica, ...], copies: list[list[int]], prices: Prices) -> Shares:
    """Return what transfers of the chosen copies of placed replicas hold."""
    capacity: dict[str, int] = {}
    uses: dict[tuple[int, int, int, int], Use] = {}
    for row, replica in enumerate(replicas):
        if replica.pp == 1:
            continue
        devices = [mesh_devices(stage, replica.copies) for stage in replica.stages[: replica.pp]]
        for sender in range(replica.pp):
            for receiver in {(sender + 1) % replica.pp, (sender - 1) % replica.pp}:
                found = _pair_uses(prices, replica, (sender, receiver), devices, capacity)
                for copy in copies[row]:
                    uses[row, copy, sender, receiver] = found(copy)
    return Shares(capacity=capacity, uses=uses)


class _PairUses:
    """What transfers between two ranks of a row hold, copy by copy."""

    def __init__(self, near_c: Indices, ends: list[tuple[str, Indices, int]], line: str | None, link: Link | None):
        self._near_c = near_c
        self._ends = ends
        self._line = line
        self._link = link

    def __call__(self, copy: int) -> Use:
        if self._link is None or self._near_c[copy]:
            return ()
        if self._line is not None:
            return ((self._line, 1),)
        use: list[tuple[str, int]] = []
        nics = max(1, round(self._link.bandwidth_bytes_per_s / self._link.nic_bytes_per_s))
        for direction, node_cd, per_node in self._ends:
            nodes, counts = np.unique(node_cd[copy], return_counts=True)
            for node, count in zip(nodes.tolist(), counts.tolist(), strict=True):
                held = min(nics, max(1, int(nics * count / per_node)))
                use.append((f"{direction} node {node} {self._link.network}", held))
        return tuple(use)


def _pair_uses(
    prices: Prices, replica: Replica, pair: tuple[int, int], devices: list[Indices], capacity: dict[str, int]
) -> _PairUses:
    places = places_of(prices)
    groups = [prices.cluster.group(replica.stages[q].group) for q in pair]
    domain_cd = [places[group.name].domain_d[devices[q]] for group, q in zip(groups, pair, strict=True)]
    node_cd = [places[group.name].node_d[devices[q]] for group, q in zip(groups, pair, strict=True)]
    link = link_between(prices.cluster, groups[0].name, groups[1].name, prices.calibration)
    line = f"line {link.network}" if link is not None and link.shared else None
    if link is not None and not link.network:
        link = None
    if line is not None:
        capacity[line] = 1
    elif link is not None:
        nics = max(1, round(link.bandwidth_bytes_per_s / link.nic_bytes_per_s))
        for direction, nodes in (("from", node_cd[0]), ("to", node_cd[1])):
            for node in np.unique(nodes).tolist():
                capacity[f"{direction} node {node} {link.network}"] = nics
    ends = [
        (direction, nodes, group.devices_per_node)
        for direction, nodes, group in zip(("from", "to"), node_cd, groups, strict=True)
    ]
    return _PairUses(same_domain(*domain_cd).astype(np.int64), ends, line, link)
