"""Equal replicas laid over the groups of each class, sites one after the other.

Every class gives a replica the same number of devices; the replicas fill the groups of a class one by one, in the
orders in which the slowest exchange between neighbours is quickest. Replicas whose stages lie on the
same groups make one row of the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, permutations, product

from hetplan.costs.records import Holders
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.search.classes_cutting import Sequenced
from hetplan.search.problem import Problem, Tables

MOST_STARTS = 8
MOST_PERMUTED = 5
MOST_FILLINGS = 4
REACH_PARAMS = 2.5e7
"""Parameters two groups exchange to tell how far apart they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Groups of equal devices."""

    groups: tuple[str, ...]
    room: tuple[int, ...]
    """Devices of each group."""

    @property
    def devices(self) -> int:
        """Devices of all groups."""
        return sum(self.room)


def classes_of(problem: Problem, *, merge: bool) -> tuple[DeviceClass, ...]:
    """Return the groups that may be used, those with equal devices together."""
    found: dict[object, list[tuple[str, int]]] = {}
    usable = {mesh.name for mesh in problem.meshes}
    for index, group in enumerate(problem.prices.cluster.groups):
        if group.name not in usable:
            continue
        same = (
            group.device,
            group.usable_memory_bytes,
            group.speed,
            group.usd_per_device_hour,
            problem.domain_g[index],
        )
        key = tuple(map(repr, (*same, group.devices_per_node))) if merge else group.name
        found.setdefault(key, []).append((group.name, group.num_devices))
    return tuple(
        DeviceClass(groups=tuple(name for name, _ in members), room=tuple(count for _, count in members))
        for members in found.values()
    )


def layouts(
    problem: Problem, classes: Sequence[DeviceClass], tables: Tables, one: Sequenced, replicas: int
) -> Iterator[Layout]:
    """Yield the ways a cut is laid over groups."""
    used = list(dict.fromkeys(one.classes))
    ways = [_fillings(problem, classes[number], one, number, replicas) for number in used]
    seen = set()
    for chosen in product(*ways):
        rows = tuple(zip(*chosen, strict=True))
        if rows in seen:
            continue
        seen.add(rows)
        counted = tuple((groups, len(list(same))) for groups, same in groupby(sorted(rows, key=rows.index)))
        yield Layout(
            replicas=tuple(
                _row(problem, tables, one, dict(zip(used, groups, strict=True)), n) for groups, n in counted
            ),
            schedule=problem.limits.schedules[0],
            sharding=tables.sharding,
        )


def _fillings(
    problem: Problem, one_class: DeviceClass, one: Sequenced, number: int, replicas: int
) -> list[tuple[str, ...]]:
    """Return the group of every replica for the best orders of filling."""
    size = sum(problem.meshes[m].size for m, c in zip(one.meshes, one.classes, strict=True) if c == number)
    copies = {name: room // size for name, room in zip(one_class.groups, one_class.room, strict=True)}
    found: dict[tuple[str, ...], float] = {}
    for order in _orders(problem, one_class):
        labels: list[str] = []
        for name in order:
            labels += [name] * min(copies[name], replicas - len(labels))
        if len(labels) == replicas and tuple(labels) not in found:
            found[tuple(labels)] = _slowest_hop(problem, labels)
    return sorted(found, key=lambda labels: found[labels])[:MOST_FILLINGS]


def _orders(problem: Problem, one_class: DeviceClass) -> Iterator[tuple[str, ...]]:
    """Yield orders of groups: all of few; of many, from each of some on always to the nearest that is left."""
    if len(one_class.groups) <= MOST_PERMUTED:
        yield from permutations(one_class.groups)
        return
    for start in one_class.groups[:MOST_STARTS]:
        order, left = [start], [name for name in one_class.groups if name != start]
        while left:
            nearest = min(left, key=lambda name: _hop_s(problem, order[-1], name))
            order.append(nearest)
            left.remove(nearest)
        yield tuple(order)


def _slowest_hop(problem: Problem, labels: Sequence[str]) -> float:
    """Return the slowest exchange between neighbours of a ring through replicas in order."""
    return max((_hop_s(problem, a, b) for a, b in dict.fromkeys(pairwise(labels))), default=0.0)


def _hop_s(problem: Problem, first: str, second: str) -> float:
    """Return how long two ranks take to add up large gradients."""
    if first == second:
        ends: tuple[Holders, ...] = (Holders(group=first, num_ranks=2, ranks_per_node=1, tp=1),)
    else:
        ends = tuple(Holders(group=group, num_ranks=1, ranks_per_node=1, tp=1) for group in (first, second))
    return problem.prices.sync(REACH_PARAMS, ends, "none").reduce_s


def _row(problem: Problem, tables: Tables, one: Sequenced, group_of: dict[int, str], copies: int) -> Replica:
    stages = tuple(
        Stage(
            group=group_of[number],
            first_layer=span[0],
            end_layer=span[1],
            tp=problem.meshes[mesh].tp,
            recompute=tables.recomputes[mode],
        )
        for mesh, number, span, mode in zip(one.meshes, one.classes, one.spans, one.modes, strict=True)
    )
    return Replica(stages=stages, microbatch=tables.microbatch, num_microbatches=one.num_microbatches, copies=copies)
