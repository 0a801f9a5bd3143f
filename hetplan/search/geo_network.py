"""Delay and bandwidth between single devices of a cluster, and which devices see all others alike.

Two devices of a node have the link of a pair inside it, others the best network that joins them: what its table says
of their nodes, else of their groups, else of their sites, else the network's own figures, as they stand (measured
tables are not scaled). Devices i and j are of one class where every other device sees both alike; that is an
equivalence, and inside a class every pair is alike as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.costs.links import inside_link
from hetplan.costs.records import Floats
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster, Group, Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """What every device sees of every other; (devices, devices)."""

    names: tuple[str, ...]
    delay_s: Floats
    bytes_per_s: Floats
    """0: out of reach."""


def pairs_of(cluster: Cluster, calibration: Calibration | None = None) -> Pairs:
    """Return the pairs of all usable devices of a cluster."""
    places: list[tuple[Group, str, str]] = []
    for group in cluster.groups:
        for index, node in enumerate(group.nodes):
            for slot in range(group.devices_per_node):
                if (index, slot) not in group.left_out:
                    name = node if group.devices_per_node == 1 else f"{node}:{slot}"
                    places.append((group, node, name))
    count = len(places)
    delay, rate = np.zeros((count, count)), np.zeros((count, count))
    seen: dict[tuple[str, str], tuple[float, float]] = {}
    for i, (first, node, _) in enumerate(places):
        for j, (second, other, _) in enumerate(places):
            if i == j:
                continue
            if node == other:
                link = inside_link(first, 2, calibration or Calibration())
                delay[i, j], rate[i, j] = link.latency_s, link.bandwidth_bytes_per_s
                continue
            if (node, other) not in seen:
                seen[node, other] = _between(cluster, (first, node), (second, other))
            delay[i, j], rate[i, j] = seen[node, other]
    return Pairs(names=tuple(name for _, _, name in places), delay_s=delay, bytes_per_s=rate)


def _between(cluster: Cluster, first: tuple[Group, str], second: tuple[Group, str]) -> tuple[float, float]:
    """Return latency and bandwidth of the best network between two nodes; (0, 0) where none joins them."""
    found = [
        _on(network, first, second)
        for network in cluster.networks
        if first[0].name in network.joins and second[0].name in network.joins
    ]
    return max(found, key=lambda link: (link[1], -link[0]), default=(0.0, 0.0))


def _on(network: Network, first: tuple[Group, str], second: tuple[Group, str]) -> tuple[float, float]:
    keys = ((first[1], second[1]), (first[0].name, second[0].name), (first[0].site, second[0].site))
    for key in keys:
        link = network.pairs.get(key)
        if link is not None:
            return link.latency_s, link.bandwidth_bytes_per_s
    return network.latency_s, network.bandwidth_bytes_per_s / network.oversubscription


def classes_of(pairs: Pairs) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each class, in the order of their first ones."""
    classes: list[list[int]] = []
    for device in range(len(pairs.names)):
        own = next((members for members in classes if _alike(pairs, members[0], device)), None)
        if own is None:
            classes.append([device])
        else:
            own.append(device)
    return tuple(tuple(members) for members in classes)


def _alike(pairs: Pairs, first: int, second: int) -> bool:
    others = np.ones(len(pairs.names), dtype=bool)
    others[[first, second]] = False
    for table in (pairs.delay_s, pairs.bytes_per_s):
        rows = np.array_equal(table[first, others], table[second, others])
        columns = np.array_equal(table[others, first], table[others, second])
        if not (rows and columns and table[first, second] == table[second, first]):
            return False
    return True


def representatives(classes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return two devices of each class, the same twice where it has but one."""
    return [(members[0], members[1] if len(members) > 1 else members[0]) for members in classes]
