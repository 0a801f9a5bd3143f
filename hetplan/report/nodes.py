"""The nodes a stage runs on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetplan.specs.cluster import Group

Ranges = Sequence[tuple[int, int]]


def nodes_of(group: Group, devices: Ranges) -> tuple[str, ...]:
    """Return the nodes that hold the devices of half-open `devices` ranges, counted over usable devices."""
    usable = list(_usable_devices(group)) if group.left_out else None
    indices: dict[int, None] = {}
    for first, end in devices:
        if usable is None:
            indices |= dict.fromkeys(range(first // group.devices_per_node, -(-end // group.devices_per_node)))
        else:
            indices |= dict.fromkeys(usable[first:end])
    return tuple(group.nodes[i] for i in indices if i < len(group.nodes))


def _usable_devices(group: Group) -> Iterator[int]:
    """Node index of each device that may be used, in order."""
    for node in range(len(group.nodes)):
        for slot in range(group.devices_per_node):
            if (node, slot) not in group.left_out:
                yield node
