"""Pipelines laid over devices that differ in nothing but where they are: traffic alone decides.

A job of S stages and R replicas moves gradients among the R devices of a stage and activations from stage to stage.
Each device sums up its share `1 / R` of the gradients for its peers and gives it back, one peer after the other; a
microbatch's activations go down the pipeline and their gradient comes back (Yuan 2022, DT-FM, arXiv:2206.01288):

    value = max over stages and members i of sum over peers j of 2 (delay_ij + gradient / (R bandwidth_ij))
          + 2 sum over neighbouring stages of the bottleneck of the best matching of their devices,
            delay_ij + activation / bandwidth_ij a pair

Devices that see all others alike form a class (`geo_network`), so that a stage is a count of devices by class. A plan
is a sequence of *segments*, runs of stages with equal counts; the search goes through the segmentations in the order
of what they cost at least (`geo_cases`) and proves each of them away or finds its best plan (`geo_segments`). Where
segmentations are too many, the effort decides how far it comes and the gap is what is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from hetplan.errors import InfeasibleError
from hetplan.plan.records import Status
from hetplan.search.geo_cases import Case, Space, cases_of, least_value, space_of
from hetplan.search.geo_network import Pairs, classes_of
from hetplan.search.geo_segments import Found, Segmentation, best_of
from hetplan.search.geo_whole import whole_search
from hetplan.specs.model import Volumes

MOST_SEGMENTATIONS = 400
"""Of one number of segments; more are left to the model of all stages at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeoResult:
    """A placement, with its proof."""

    pipelines: tuple[tuple[str, ...], ...]
    """Device of each stage, one entry a replica."""
    stage_counts: tuple[tuple[int, ...], ...]
    """Devices by class of each stage."""
    classes: tuple[tuple[str, ...], ...]
    """Names of the devices of each class."""
    value_s: float
    exchange_s: float
    """Slowest exchange of gradients."""
    path_s: float
    """Activations down the slowest path, one way."""
    bound_s: float
    status: Status
    effort: float
    search_s: float

    @property
    def gap(self) -> float:
        """(value - bound) / value."""
        return max(0.0, (self.value_s - self.bound_s) / self.value_s) if self.value_s > 0 else 0.0


def search_volumes(pairs: Pairs, volumes: Volumes, effort: float) -> GeoResult:
    """Return the best placement found, its value and a bound.

    Raises:
        InfeasibleError: there are fewer devices than stages times replicas, or some are out of each other's reach.
    """
    started_s = time.monotonic()
    wanted = volumes.stages * volumes.replicas
    if wanted > len(pairs.names):
        raise InfeasibleError(
            f"{volumes.stages} stages of {volumes.replicas} replicas need {wanted} devices, there are"
            f" {len(pairs.names)}"
        )
    classes = classes_of(pairs)
    space = space_of(pairs, classes, volumes)
    search = _Search(space, effort)
    search.run()
    if search.best is None:
        raise InfeasibleError("no placement was found: some devices do not reach each other, or the effort was too low")
    best = search.best
    bound = min(search.bound, best.value)
    names = tuple(tuple(pairs.names[i] for i in members) for members in classes)
    exchange_s, path_s = space.seconds(best.stages, best.flows)
    value_s = exchange_s + 2 * path_s
    return GeoResult(
        pipelines=_pipelines(space, best, names),
        stage_counts=best.stages,
        classes=names,
        value_s=value_s,
        exchange_s=exchange_s,
        path_s=path_s,
        bound_s=value_s if bound >= best.value else space.to_seconds(bound),
        status="optimal" if bound >= best.value else "feasible",
        effort=search.spent,
        search_s=time.monotonic() - started_s,
    )


class _Search:
    """Goes through segmentations, cheapest bound first."""

    def __init__(self, space: Space, effort: float) -> None:
        self._space = space
        self._effort = effort
        self.best: Found | None = None
        self.bound: float = 0.0
        self.spent = 0.0

    def run(self) -> None:
        """Find the best plan; `bound` is what none is below."""
        waiting = sorted(self._groups(), key=lambda item: (item[0], item[1]))
        left: list[int] = []
        for least, num, case in waiting:
            if least >= self._limit:
                break
            if math.comb(self._space.num_stages - 1, num - 1) > MOST_SEGMENTATIONS or self.spent >= self._effort:
                left.append(least)
                continue
            if not self._settle(num, case):
                left.append(least)
        self.bound = min([self._limit, *left])
        if left:
            found = whole_search(self._space, self.best, max(0.5, self._effort - self.spent))
            self.spent += found.effort
            if found.best is not None and found.best.value < self._limit:
                self.best = found.best
            self.bound = max(min([self._limit, *left]), min(self._limit, found.bound))

    @property
    def _limit(self) -> float:
        return math.inf if self.best is None else self.best.value

    def _groups(self) -> Iterator[tuple[int, int, Case]]:
        """Yield (least value, segments, case) of everything there is."""
        cases = cases_of(self._space)
        for num in range(1, self._space.num_stages + 1):
            for case in cases if num > 1 else cases[-1:]:
                least = least_value(self._space, case, num)
                if least is not None:
                    yield least, num, case

    def _settle(self, num: int, case: Case) -> bool:
        """Return whether all segmentations of one number and case were searched to the end."""
        for lengths in _lengths(self._space.num_stages, num):
            if self.spent >= self._effort:
                return False
            one = Segmentation(lengths=lengths, case=case, below=None if self.best is None else self.best.value)
            found = best_of(self._space, one, self._effort - self.spent)
            self.spent += found.effort
            if found.best is not None:
                self.best = found.best
            if not found.proved:
                return False
        return True


def _lengths(total: int, num: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to cut a path of stages into segments; a way and its mirror image are one."""
    for cuts in combinations(range(1, total), num - 1):
        lengths = tuple(b - a for a, b in pairwise((0, *cuts, total)))
        if lengths <= lengths[::-1]:
            yield lengths


def _pipelines(space: Space, best: Found, names: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Return a device of every stage for each replica, along the flows between classes."""
    free = [list(members) for members in names]
    chains: list[tuple[int, list[str]]] = []
    for member, count in enumerate(best.stages[0]):
        chains += [(member, [free[member].pop(0)]) for _ in range(count)]
    for flow in best.flows:
        left = [list(row) for row in flow]
        moved: list[tuple[int, list[str]]] = []
        for member, chain in chains:
            to = next(c for c, count in enumerate(left[member]) if count > 0)
            left[member][to] -= 1
            moved.append((to, [*chain, free[to].pop(0)]))
        chains = moved
    return tuple(tuple(chain) for _, chain in chains[: space.num_replicas])
