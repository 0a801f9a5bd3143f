"""In which order a node's devices must be shown so that consecutive ranks of a tensor-parallel group are alike.

Launchers number ranks by the order of ``CUDA_VISIBLE_DEVICES`` and engines take ``tp`` consecutive ranks as a group.
On a box with unlike cards the default order may put two kinds into one group; the right order puts each group's devices
side by side. Physical indices are those of the box, whatever order the cards are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetplan.errors import UsageError
from hetplan.plan.placement import cluster_places, mesh_devices, place
from hetplan.plan.records import Layout
from hetplan.plan.rules import listed
from hetplan.specs.cluster import Cluster


def homogeneous_order(kinds: Sequence[str], tp: int) -> tuple[int, ...]:
    """Return physical indices in an order in which every `tp` consecutive devices are of one kind.

    `kinds` names the kind of each physical device. Kinds keep the order in which they first appear, devices theirs.

    Raises:
        UsageError: the number of devices of some kind is no multiple of `tp`.
    """
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    odd = [f"{count} x {kind}" for kind, count in counts.items() if count % tp]
    if tp < 1 or odd:
        raise UsageError(f"tensor-parallel groups of {tp} alike devices cannot be formed from {listed(odd)}")
    return tuple(i for kind in counts for i, other in enumerate(kinds) if other == kind)


def is_homogeneous(kinds: Sequence[str], order: Sequence[int], tp: int) -> bool:
    """Return whether every `tp` consecutive devices of an order are of one kind."""
    shown = [kinds[i] for i in order]
    return len(shown) % tp == 0 and all(len(set(shown[i : i + tp])) == 1 for i in range(0, len(shown), tp))


def visible_devices(layout: Layout, cluster: Cluster) -> Mapping[str, str]:
    """Return ``CUDA_VISIBLE_DEVICES`` of every node a layout uses, ranks in the layout's order.

    Where groups share a host, the devices of the group that the cluster file names first come first in the box.
    """
    placed = place(layout, cluster)
    physical = physical_indices(cluster)
    shown: dict[str, list[int]] = {}
    for replica in placed.replicas:
        for stage in replica.stages[: replica.pp]:
            for device in mesh_devices(stage, replica.copies).ravel().tolist():
                node, index = physical[stage.group][device]
                shown.setdefault(node, []).append(index)
    return {node: ",".join(map(str, indices)) for node, indices in sorted(shown.items())}


def physical_indices(cluster: Cluster) -> dict[str, list[tuple[str, int]]]:
    """Return, for each usable device of each group, its host and its index in the box.

    Where groups share a host, the devices of the group that the cluster file names first come first.
    """
    hosts = tuple(dict.fromkeys(name for group in cluster.groups for name in group.nodes))
    places = cluster_places(cluster)
    before: dict[str, int] = {}
    found: dict[str, list[tuple[str, int]]] = {}
    for group in cluster.groups:
        left_out = group.left_out
        slots = [
            (node, slot)
            for node in range(len(group.nodes))
            for slot in range(group.devices_per_node)
            if (node, slot) not in left_out
        ]
        names = [hosts[i] for i in places[group.name].node_d.tolist()]
        found[group.name] = [(name, before.get(name, 0) + slot) for name, (_, slot) in zip(names, slots, strict=True)]
        for name in group.nodes:
            before[name] = before.get(name, 0) + group.devices_per_node
    return found
