"""Whether every two devices of a cluster can talk: over a network that joins both, inside one host, or one domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement

from hetplan.specs.cluster import Group, Network
from hetplan.specs.decode import Fields
from hetplan.units import show


def require_connected(groups: Sequence[Group], networks: Sequence[Network], table: Mapping[str, Fields]) -> None:
    """Refuse a cluster with two devices that cannot talk.

    Groups on the same networks are alike here, so the work grows with the number of different sets of networks.

    Raises:
        SpecError: located at a group in question; it names the two groups, or nodes.
    """
    networks_of: dict[str, set[str]] = {group.name: set() for group in groups}
    for network in networks:
        for name in network.joins:
            networks_of[name].add(network.name)
    if set[str].intersection(*networks_of.values()):
        return
    classes: dict[frozenset[str], list[Group]] = {}
    for group in groups:
        classes.setdefault(frozenset(networks_of[group.name]), []).append(group)
    for group in classes.get(frozenset(), ()):
        if len(group.nodes) > max(1, group.domain_nodes):
            nodes = f"nodes {show(group.nodes[0])} and {show(group.nodes[-1])}"
            raise table[group.name].error(f"{nodes} are joined by no network; list the group in 'joins' of one")
    for (here, some), (there, others) in combinations_with_replacement(classes.items(), 2):
        if here.isdisjoint(there):
            _require_one_host(some, others, table)


def _require_one_host(some: Sequence[Group], others: Sequence[Group], table: Mapping[str, Fields]) -> None:
    """Each of `some` must be on one and the same host as each of `others`."""
    pairs = [(some[0], other) for other in others] + [(group, others[0]) for group in some]
    for first, second in pairs:
        one_host = len(first.nodes) == 1 and first.nodes == second.nodes
        if first is not second and not one_host:
            message = f"groups '{first.name}' and '{second.name}' are joined by no network"
            raise table[second.name].error(f"{message}; list both in 'joins' of one")
