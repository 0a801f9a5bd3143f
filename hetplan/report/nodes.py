"""The nodes a stage runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetplan.plan.placement import cluster_places
from hetplan.specs.cluster import Cluster

Ranges = Sequence[tuple[int, int]]


def node_names(cluster: Cluster) -> Mapping[str, Sequence[str]]:
    """Return, for each group, the name of the node that holds each usable device."""
    hosts = tuple(dict.fromkeys(name for group in cluster.groups for name in group.nodes))
    return {name: [hosts[i] for i in places.node_d.tolist()] for name, places in cluster_places(cluster).items()}


def nodes_of(names_d: Sequence[str], devices: Ranges) -> tuple[str, ...]:
    """Return the nodes of the devices in half-open ranges; `names_d` has one entry a usable device of their group."""
    return tuple(dict.fromkeys(name for first, end in devices for name in names_d[first:end]))
