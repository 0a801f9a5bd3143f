"""What all devices that hold the same layers can do: they must agree on precision and kernels.

Ranks of a data-parallel ring average gradients of the same computation. Where one of them has no fused attention or no
bf16, the ring falls back to what all have.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetplan.plan.records import Layout
from hetplan.plan.sync import stages_over
from hetplan.specs.cluster import Cluster, Feature, Group


def common_features(groups: Iterable[Group]) -> frozenset[Feature]:
    """Return the features that the devices of all groups have."""
    sets = [group.device.features for group in groups]
    return frozenset.intersection(*sets) if sets else frozenset()


def lost_features(groups: Iterable[Group]) -> dict[str, tuple[str, ...]]:
    """Return, for each feature some but not all devices have, the groups that lack it."""
    known = list(groups)
    common = common_features(known)
    some = frozenset().union(*(group.device.features for group in known)) - common
    return {
        feature: tuple(group.name for group in known if feature not in group.device.features)
        for feature in sorted(some)
    }


def ring_features(layout: Layout, cluster: Cluster, layer: int) -> frozenset[Feature]:
    """Return the features that all devices holding one layer have."""
    names = dict.fromkeys(layout.replicas[row].stages[v].group for row, v in stages_over(layout, layer))
    return common_features(cluster.group(name) for name in names)
