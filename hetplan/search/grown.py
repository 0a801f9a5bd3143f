"""The same cluster with another number of nodes, another network or other memory: what sensitivities vary.

New nodes are equal to those a group has and reach what they reach. A group that no network joins to itself gets one of
the name `ASSUMED`, so that its new nodes can talk at all.
"""

from __future__ import annotations

from dataclasses import replace

from hetplan.specs.cluster import Cluster, Group, Network

ASSUMED = "assumed-network"
_BANDWIDTH_BYTES_PER_S = 50e9
"""Assumed: one 400 Gbit/s NIC a node."""
_LATENCY_S = 5e-6


def with_nodes(cluster: Cluster, name: str, count: int) -> Cluster:
    """Return the cluster with `count` nodes in group `name`: its first ones, or new ones beside them."""
    group = cluster.group(name)
    kept = group.nodes[:count]
    added = tuple(f"{name}+{k}" for k in range(1, count - len(kept) + 1))
    left_out = frozenset((node, slot) for node, slot in group.left_out if node < count)
    grown = replace(group, nodes=kept + added, left_out=left_out)
    groups = tuple(grown if other.name == name else other for other in cluster.groups)
    networks = cluster.networks
    if len(grown.nodes) > 1 and not any(name in network.joins for network in networks):
        networks = (*networks, assumed_network(cluster.groups))
    return replace(cluster, groups=groups, networks=networks)


def assumed_network(groups: tuple[Group, ...]) -> Network:
    """Return a network that joins all groups where the cluster names none."""
    return Network(
        name=ASSUMED,
        joins=tuple(group.name for group in groups),
        kind="ethernet",
        bandwidth_bytes_per_s=_BANDWIDTH_BYTES_PER_S,
        latency_s=_LATENCY_S,
    )


def with_faster_network(cluster: Cluster, name: str, factor: float) -> Cluster:
    """Return the cluster with one network `factor` times as fast."""
    return replace(
        cluster,
        networks=tuple(_faster(network, factor) if network.name == name else network for network in cluster.networks),
    )


def _faster(network: Network, factor: float) -> Network:
    pairs = {
        places: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
        for places, link in network.pairs.items()
    }
    return replace(network, bandwidth_bytes_per_s=network.bandwidth_bytes_per_s * factor, pairs=pairs)


def with_more_memory(cluster: Cluster, name: str, factor: float) -> Cluster:
    """Return the cluster with `factor` times the usable memory on each device of group `name`."""
    group = cluster.group(name)
    grown = replace(group, usable_memory_bytes=group.usable_memory_bytes * factor)
    return replace(cluster, groups=tuple(grown if other.name == name else other for other in cluster.groups))


def with_faster_devices(cluster: Cluster, name: str, factor: float) -> Cluster:
    """Return the cluster with the devices of group `name` `factor` times as fast."""
    group = cluster.group(name)
    grown = replace(group, speed=group.speed * factor)
    return replace(cluster, groups=tuple(grown if other.name == name else other for other in cluster.groups))
