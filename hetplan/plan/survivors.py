"""What is left of a cluster, and what is left of a plan on it.

A device is named by its group, node and slot, which stay when nodes around it go or come; indices within a group do
not. `carried_over` says where a layout's devices are under another cluster's indices. `resized` keeps every copy of a
pipeline whose devices are all left, builds more copies from free devices, and divides the batch anew: each copy's
share in proportion to what it took before, whole microbatches, the batch met exactly.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hetplan.errors import UsageError
from hetplan.plan.placement import Indices, cluster_places, device_ranges, is_placed, mesh_devices
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.cluster import Cluster, Group
from hetplan.units import hint, show

DeviceName = tuple[str, str, int]
"""(group, node, slot)."""
GONE = -1


def device_names(cluster: Cluster) -> dict[str, tuple[DeviceName, ...]]:
    """Return, for each group, the name of every usable device in the order of their indices."""
    return {
        group.name: tuple(
            (group.name, node, slot)
            for i, node in enumerate(group.nodes)
            for slot in range(group.devices_per_node)
            if (i, slot) not in group.left_out
        )
        for group in cluster.groups
    }


def without(cluster: Cluster, lost: Iterable[str]) -> Cluster:
    """Return the cluster without nodes (`node`) or devices (`node:slot`); groups with nothing left are gone.

    Raises:
        UsageError: there is no such node or slot, or nothing is left.
    """
    lost = tuple(lost)
    for word in lost:
        _require_known(cluster, word)
    groups = tuple(_group_without(group, lost) for group in cluster.groups)
    left = {group.name for group in groups if group.num_devices > 0}
    if not left:
        raise UsageError("nothing is left of the cluster")
    return replace(
        cluster,
        groups=tuple(group for group in groups if group.name in left),
        networks=tuple(
            replace(network, joins=tuple(name for name in network.joins if name in left))
            for network in cluster.networks
            if left.intersection(network.joins)
        ),
    )


def _require_known(cluster: Cluster, word: str) -> None:
    node, _, slot = word.partition(":")
    groups = [group for group in cluster.groups if node in group.nodes]
    if not groups:
        nodes = [name for group in cluster.groups for name in group.nodes]
        raise UsageError(f"there is no node {show(node)} in {cluster.name}{hint(node, nodes)}")
    if slot and not any(slot.isdecimal() and int(slot) < group.devices_per_node for group in groups):
        raise UsageError(f"node {node} has no slot {show(slot)}")


def _group_without(group: Group, lost: Sequence[str]) -> Group:
    slots = {
        (group.nodes.index(node), slot)
        for word in lost
        for node, _, which in (word.partition(":"),)
        if node in group.nodes
        for slot in ([int(which)] if which else range(group.devices_per_node))
        if slot < group.devices_per_node
    }
    return replace(group, left_out=group.left_out | slots)


def carried_over(layout: Layout, before: Cluster, after: Cluster) -> Layout:
    """Return a placed layout on the same devices under the indices of another cluster.

    Raises:
        UsageError: devices it runs on are gone; the message names their nodes.
    """
    moved = _indices(layout, before, after)
    names = device_names(before)
    gone: Counter[str] = Counter()
    for row, replica in enumerate(layout.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            old_cd = mesh_devices(stage, replica.copies)
            for index in old_cd[moved[row, q] == GONE].tolist():
                gone[names[stage.group][index][1]] += 1
    if gone:
        words = ", ".join(f"{node} ({count})" for node, count in sorted(gone.items())[:8])
        raise UsageError(f"{sum(gone.values())} devices it runs on are gone: {words}")
    rows = [[moved[row, q] for q in range(replica.pp)] for row, replica in enumerate(layout.replicas)]
    return replace(layout, replicas=tuple(_placed(old, cd) for old, cd in zip(layout.replicas, rows, strict=True)))


def _indices(layout: Layout, before: Cluster, after: Cluster) -> dict[tuple[int, int], Indices]:
    """Return, for each (row, physical stage), the new index of each device, `GONE` where there is none."""
    number = {name: i for names in device_names(after).values() for i, name in enumerate(names)}
    new_d = {
        group: np.array([number.get(name, GONE) for name in names], dtype=np.int64)
        for group, names in device_names(before).items()
    }
    return {
        (row, q): new_d[stage.group][mesh_devices(stage, replica.copies)]
        for row, replica in enumerate(layout.replicas)
        for q, stage in enumerate(replica.stages[: replica.pp])
    }


def _placed(replica: Replica, devices_q: Sequence[Indices]) -> Replica:
    ranges = [device_ranges(devices_cd) for devices_cd in devices_q]
    stages = tuple(replace(stage, devices=ranges[v % replica.pp]) for v, stage in enumerate(replica.stages))
    return replace(replica, stages=stages, copies=len(devices_q[0]))


def resized(layout: Layout, before: Cluster, after: Cluster, batch: int) -> Iterator[Layout]:
    """Yield the layout's pipelines on another cluster, placed on what they keep, then left to be placed anew."""
    groups = {group.name for group in after.groups}
    if any(stage.group not in groups for replica in layout.replicas for stage in replica.stages):
        return
    rows: list[tuple[Replica, list[Indices]]] = []
    if is_placed(layout):
        moved = _indices(layout, before, after)
        for row, replica in enumerate(layout.replicas):
            devices_q = [moved[row, q] for q in range(replica.pp)]
            alive_c = np.all([np.all(cd != GONE, axis=1) for cd in devices_q], axis=0)
            rows.append((replica, [cd[alive_c] for cd in devices_q]))
        yield from _divided(layout, _grown(rows, after), batch)
    counts = _fitting_copies(layout, {group.name: group.num_devices for group in after.groups})
    free = [(row, [np.zeros((n, 0), dtype=np.int64)] * row.pp) for row, n in zip(layout.replicas, counts, strict=True)]
    yield from _divided(layout, free, batch)


def _grown(rows: Sequence[tuple[Replica, list[Indices]]], cluster: Cluster) -> list[tuple[Replica, list[Indices]]]:
    """Return the rows with as many more copies as free devices make, rows in their order."""
    domains = {name: places.domain_d for name, places in cluster_places(cluster).items()}
    free = {name: list(range(len(domain_d))) for name, domain_d in domains.items()}
    for replica, devices_q in rows:
        for stage, cd in zip(replica.stages, devices_q, strict=False):
            taken = set(cd.ravel().tolist())
            free[stage.group] = [i for i in free[stage.group] if i not in taken]
    grown = []
    for replica, devices_q in rows:
        stages = replica.stages[: replica.pp]
        needed = Counter[str]()
        for stage in stages:
            needed[stage.group] += stage.mesh_size
        while all(len(free[group]) >= count for group, count in needed.items()):
            more = [_take(free, stage, domains[stage.group]) for stage in stages]
            devices_q = [np.concatenate([cd, one[None, :]]) for cd, one in zip(devices_q, more, strict=True)]
        grown.append((replica, devices_q))
    return grown


def _take(free: dict[str, list[int]], stage: Stage, domain_d: Indices) -> Indices:
    """Take a mesh's devices, from one fast-link domain where one has enough."""
    left = free[stage.group]
    room = Counter(int(domain_d[i]) for i in left)
    whole = [domain for domain, count in room.items() if count >= stage.mesh_size]
    best = min(whole, key=lambda domain: room[domain]) if whole else None
    chosen = [i for i in left if best is None or int(domain_d[i]) == best][: stage.mesh_size]
    taken = set(chosen)
    free[stage.group] = [i for i in left if i not in taken]
    return np.array(chosen, dtype=np.int64)


def _fitting_copies(layout: Layout, devices: dict[str, int]) -> list[int]:
    """Return copies of each row that the devices are enough for: fewer of the last rows, then more of the first."""
    left = dict(devices)
    needed = [Counter({s.group: 0 for s in row.stages}) for row in layout.replicas]
    for need, row in zip(needed, layout.replicas, strict=True):
        for stage in row.stages[: row.pp]:
            need[stage.group] += stage.mesh_size
    counts: list[int] = []
    for most in ([row.copies for row in layout.replicas], [max(devices.values())] * len(layout.replicas)):
        for index, need in enumerate(needed):
            room = min(left[group] // count for group, count in need.items() if count)
            if len(counts) <= index:
                counts.append(0)
            more = min(most[index] - counts[index], room)
            counts[index] += more
            for group, count in need.items():
                left[group] -= more * count
    return counts


def _divided(layout: Layout, rows: Sequence[tuple[Replica, list[Indices]]], batch: int) -> Iterator[Layout]:
    """Yield the layout of some copies (devices of each, or none) with the batch divided over them, if it divides."""
    copies = [len(devices_q[0]) for _, devices_q in rows]
    shares = _shares([(row.microbatch, row.num_microbatches) for row, _ in rows], copies, batch)
    if shares is None:
        return
    replicas = []
    for (replica, devices_q), counts in zip(rows, shares, strict=True):
        for count in sorted(set(counts), reverse=True):
            chosen = [c for c, number in enumerate(counts) if number == count]
            part = replace(replica, num_microbatches=count, copies=len(chosen))
            if devices_q[0].shape[1]:
                replicas.append(_placed(part, [cd[chosen] for cd in devices_q]))
            else:
                stages = tuple(replace(stage, devices=()) for stage in part.stages)
                replicas.append(replace(part, stages=stages))
    yield replace(layout, replicas=tuple(replicas))


def _shares(sizes: Sequence[tuple[int, int]], copies: Sequence[int], batch: int) -> list[list[int]] | None:
    """Return microbatches of each copy of each row of (microbatch, microbatches before); None: no exact division."""
    total = sum(size * count * number for (size, count), number in zip(sizes, copies, strict=True))
    if not total:
        return None
    shares = [[max(1, batch * count // total)] * number for (_, count), number in zip(sizes, copies, strict=True)]
    left = batch - sum(size * sum(counts) for (size, _), counts in zip(sizes, shares, strict=True))
    queue = [((counts[c] + 1) / sizes[row][1], row, c) for row, counts in enumerate(shares) for c in range(len(counts))]
    heapq.heapify(queue)
    while left > 0 and queue:
        _, row, c = heapq.heappop(queue)
        if sizes[row][0] <= left:
            shares[row][c] += 1
            left -= sizes[row][0]
            heapq.heappush(queue, ((shares[row][c] + 1) / sizes[row][1], row, c))
    return shares if left == 0 else None
