"""Rules about where stages run: devices that exist and are used once, tp groups near, everyone reachable, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, combinations_with_replacement, pairwise

import numpy as np

from hetplan.costs.links import link_between
from hetplan.costs.prices import Prices
from hetplan.costs.records import MemoryUse
from hetplan.plan.estimate import estimate
from hetplan.plan.memory import mesh_memory
from hetplan.plan.placement import mesh_devices, places_of
from hetplan.plan.records import Stage
from hetplan.plan.rules import Case, Violation, listed, row_place, stage_place
from hetplan.plan.stages import tied_tables
from hetplan.plan.sync import stages_over
from hetplan.units import format_bytes, hint

GIB = 2.0**30


def groups_exist(case: Case) -> Iterator[Violation]:
    """Every stage names a group of the cluster that can compute in the workload's precision."""
    cluster, precision = case.prices.cluster, case.prices.workload.precision
    groups = {group.name: group for group in cluster.groups}
    for where, _, stage in case.stages():
        group = groups.get(stage.group)
        if group is None:
            message = f"the cluster has no group {stage.group!r}{hint(stage.group, groups)}"
            yield Violation(rule="groups exist", where=where, message=message, unpriceable=True)
        elif precision not in group.device.peak_flop_per_s:
            able = listed(group.device.peak_flop_per_s)
            message = f"{group.device.name} (group {group.name}) does not compute in {precision}, only in {able}"
            yield Violation(rule="precision", where=where, message=message, unpriceable=True)


def enough_devices(case: Case) -> Iterator[Violation]:
    """All stages together need no more devices than each group has."""
    needed: dict[str, int] = {}
    for replica in case.layout.replicas:
        for stage in replica.stages[: replica.pp]:
            needed[stage.group] = needed.get(stage.group, 0) + replica.copies * stage.mesh_size
    for group in case.prices.cluster.groups:
        count = needed.get(group.name, 0)
        if count > group.num_devices:
            message = f"group {group.name} has {group.num_devices} devices, the layout needs {count}"
            yield Violation(rule="enough devices", where="", message=message, unpriceable=True)


def devices_exist(case: Case) -> Iterator[Violation]:
    """Each stage's ranges hold one mesh a copy, of devices that exist."""

    def broken(where: str, message: str) -> Violation:
        return Violation(rule="devices exist", where=where, message=message, unpriceable=True)

    for where, replica, stage in case.stages():
        available = case.prices.cluster.group(stage.group).num_devices
        count = sum(end - first for first, end in stage.devices)
        wanted = replica.copies * stage.mesh_size
        outside = [(first, end) for first, end in stage.devices if not 0 <= first < end <= available]
        if outside:
            first, end = outside[0]
            yield broken(where, f"devices {first} to {end} are not among the {available} of group {stage.group}")
        elif count != wanted:
            yield broken(where, f"{replica.copies} copies of {stage.mesh_size} devices need {wanted}, not {count}")


def devices_once(case: Case) -> Iterator[Violation]:
    """No device is used twice."""
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for row, replica in enumerate(case.layout.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            entries = ranges.setdefault(stage.group, [])
            entries.extend((first, end, stage_place(row, q)) for first, end in stage.devices)
    for group, entries in ranges.items():
        for (_, end, before), (first, _, after) in pairwise(sorted(entries)):
            if first < end:
                yield Violation(
                    rule="devices used once",
                    where=after,
                    message=f"device {first} of group {group} is also used by {before}",
                    unpriceable=True,
                )


def tp_in_one_domain(case: Case) -> Iterator[Violation]:
    """Tensor-parallel groups stay inside one node or fast-link domain."""
    if not case.limits.tp_within_node:
        return
    places = places_of(case.prices)
    for row, replica in enumerate(case.layout.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            if stage.tp == 1:
                continue
            domain_gt = places[stage.group].domain_d[mesh_devices(stage, replica.copies)].reshape(-1, stage.tp)
            split = int(np.count_nonzero(domain_gt.min(axis=1) != domain_gt.max(axis=1)))
            if split:
                group = case.prices.cluster.group(stage.group)
                size = group.devices_per_node * group.domain_nodes
                yield Violation(
                    rule="tp inside a node",
                    where=stage_place(row, q),
                    message=f"{split} tp groups of {stage.tp} reach beyond a fast-link domain of {size} devices "
                    f"of group {group.name}",
                )


@lru_cache(maxsize=4096)
def _joined(prices: Prices, first: str, second: str) -> bool:
    return link_between(prices.cluster, first, second, prices.calibration) is not None


def stages_reachable(case: Case) -> Iterator[Violation]:
    """Neighbouring stages, and stages that hold tied weights, share a node or a network."""
    for row, replica in enumerate(case.layout.replicas):
        pairs = [(v, v + 1, "of the next stage") for v in range(len(replica.stages) - 1)]
        for table, head, _ in tied_tables(case.prices):
            holders = sorted(v for layer in (table, head) for at, v in stages_over(case.layout, layer) if at == row)
            pairs.append((holders[0], holders[-1], f"of stage {holders[-1]}, which holds a weight tied to one here"))
        for v, other, words in pairs:
            if not _meet(case, replica.stages[v], replica.stages[other], replica.copies):
                first, second = replica.stages[v].group, replica.stages[other].group
                message = f"no network joins group {first} with group {second} {words}"
                yield Violation(rule="stages reachable", where=stage_place(row, v), message=message)


def _meet(case: Case, first: Stage, second: Stage, copies: int) -> bool:
    """Whether every copy of two stages lies on one node or in one fast-link domain, or a network joins their groups."""
    if _joined(case.prices, first.group, second.group):
        return True
    places = places_of(case.prices)
    devices = [mesh_devices(stage, copies) for stage in (first, second)]
    groups = [places[stage.group] for stage in (first, second)]
    node_cd = np.concatenate([one.node_d[d] for one, d in zip(groups, devices, strict=True)], axis=1)
    domain_cd = np.concatenate([one.domain_d[d] for one, d in zip(groups, devices, strict=True)], axis=1)
    return any(bool(np.all(place_cd == place_cd[:, :1])) for place_cd in (node_cd, domain_cd))


def holders_reachable(case: Case) -> Iterator[Violation]:
    """All ranks whose gradients meet are joined by networks, if need be over a third of them."""
    for groups, layer in _gradient_groups(case):
        together = {groups[0]}
        while True:
            reached = {name for name in groups if any(_joined(case.prices, name, other) for other in together)}
            if reached <= together:
                break
            together |= reached
        if len(together) < len(groups):
            apart = next(name for name in groups if name not in together)
            yield Violation(
                rule="gradients reachable",
                where=f"layer {layer}",
                message=f"no network joins group {apart} with group {groups[0]}, which hold the same layer",
            )
            return
    yield from _unjoined_meshes(case)


def _unjoined_meshes(case: Case) -> Iterator[Violation]:
    """A stage that lies on several nodes, not in one fast-link domain, needs a network of its group."""
    places = places_of(case.prices)
    for row, replica in enumerate(case.layout.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            if _joined(case.prices, stage.group, stage.group):
                continue
            domain_cd = places[stage.group].domain_d[mesh_devices(stage, replica.copies)]
            if domain_cd.min() != domain_cd.max():
                yield Violation(
                    rule="gradients reachable",
                    where=stage_place(row, q),
                    message=f"no network joins the nodes of group {stage.group}",
                )


def step_ends(case: Case) -> Iterator[Violation]:
    """No time is without end: where some places are not joined, what other rules do not see shows in the price."""
    prices = case.prices
    names = list(dict.fromkeys(stage.group for _, _, stage in case.stages()))
    if all(_joined(prices, first, second) for first, second in combinations_with_replacement(names, 2)):
        return
    seen = any(True for rule in (stages_reachable, holders_reachable) for _ in rule(case))
    if not seen and not math.isfinite(estimate(case.layout, prices).step_s):
        message = "devices that exchange activations or gradients are joined by no network: a step would never end"
        yield Violation(rule="a step ends", where="", message=message)


def _gradient_groups(case: Case) -> Iterator[tuple[list[str], int]]:
    """Yield the groups that hold the same layers, with the first such layer."""
    cuts = {stage.first_layer for _, _, stage in case.stages()}
    seen: set[tuple[str, ...]] = set()
    for layer in sorted(cuts):
        holders = stages_over(case.layout, layer)
        names = tuple(dict.fromkeys(case.layout.replicas[row].stages[v].group for row, v in holders))
        if len(names) > 1 and names not in seen:
            seen.add(names)
            yield list(names), layer


def one_vendor(case: Case) -> Iterator[Violation]:
    """Where the limits say so, ranks that exchange data are of one vendor (NCCL and RCCL do not talk to each other)."""
    if case.limits.allow_mixed_vendors:
        return
    vendor = {group.name: group.device.vendor for group in case.prices.cluster.groups}
    for names, layer in _gradient_groups(case):
        for first, second in combinations(names, 2):
            if vendor[first] != vendor[second]:
                yield _mixed(f"layer {layer}", f"gradients of {vendor[first]} and {vendor[second]} devices would meet")
                break
    for row, replica in enumerate(case.layout.replicas):
        vendors = list(dict.fromkeys(vendor[stage.group] for stage in replica.stages))
        if len(vendors) > 1:
            yield _mixed(row_place(row), f"stages run on devices of {' and '.join(vendors)}")


def _mixed(where: str, message: str) -> Violation:
    return Violation(rule="one vendor", where=where, message=message)


def memory_fits(case: Case) -> Iterator[Violation]:
    """The peak of every stage is within what its devices offer."""
    for row, replica in enumerate(case.layout.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            in_flight, use = mesh_memory(case.layout, case.prices, (row, q))
            capacity = case.prices.capacity_bytes(stage.group)
            if use.total_bytes > capacity:
                message = shortfall(use, capacity, in_flight, stage)
                yield Violation(rule="memory", where=stage_place(row, q), message=message)


def shortfall(use: MemoryUse, capacity_bytes: float, in_flight: int, stage: Stage) -> str:
    """Return how much a stage lacks and what takes most."""
    parts = {name.removesuffix("_bytes"): getattr(use, name) for name in use.__slots__}
    largest = max(parts, key=lambda name: parts[name])
    held = f" of {in_flight} microbatches" if largest == "activations" else ""
    missing = (use.total_bytes - capacity_bytes) / GIB
    offered = f"a device of group {stage.group} offers {format_bytes(capacity_bytes)}"
    most = f"most is {largest}{held} ({format_bytes(parts[largest])})"
    return f"needs {format_bytes(use.total_bytes)}, {offered}: {missing:.2f} GiB short; {most}"


GROUP_RULES = (groups_exist, enough_devices)
DEVICE_RULES = (devices_exist, devices_once)
PLACE_RULES = (tp_in_one_domain, stages_reachable, holders_reachable, step_ends, one_vendor, memory_fits)
