"""Costs between classes in whole microseconds, and what segmentations of a path cost at least.

`w[c, d]` is what a member of class c spends on one peer of class d, `p[c, d]` one transfer (rounded to microseconds;
the answer is priced in seconds again). A stage of counts x costs `max over c with x_c > 0 of sum_d w[c, d] x_d -
w[c, c]`. Where no hop between stages is above a level, nothing crosses between the components of the pairs at or below
it: all stages hold equally many devices of each component, which, where every device is used, fixes how many. A *case*
is a run of levels with equal components in which the slowest hop lies. With K segments, S - K hops join equal stages
and K - 1 unequal ones, so a plan of the case costs at least

    least stage of the case + 2 ((S - K) min p + (K - 2) min p between classes + lowest level of the case)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.search.geo_network import Pairs, representatives
from hetplan.search.geo_stage import cheapest_stage
from hetplan.specs.model import Volumes

Ints = npt.NDArray[np.int64]
SCALE = 1e6
OUT_OF_REACH = 10**12
MOST_COMPOSITIONS = 40_000
Flow = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search decides over."""

    num_stages: int
    num_replicas: int
    counts: tuple[int, ...]
    """Devices of each class."""
    exchange: Ints
    transfer: Ints
    """Microseconds, (classes, classes)."""
    exchange_s: npt.NDArray[np.float64]
    transfer_s: npt.NDArray[np.float64]
    stages: Ints | None
    """Every way to fill a stage, (ways, classes); None where they are too many."""
    costs: Ints | None
    """Microseconds of each."""

    @property
    def num_classes(self) -> int:
        """Classes of devices."""
        return len(self.counts)

    @property
    def uses_all(self) -> bool:
        """Whether every device is needed."""
        return sum(self.counts) == self.num_stages * self.num_replicas

    @property
    def levels(self) -> tuple[int, ...]:
        """What one hop can cost, rising."""
        return tuple(sorted(set(self.transfer[self.transfer < OUT_OF_REACH].tolist())))

    @property
    def least_crossing(self) -> int:
        """The cheapest transfer between two classes."""
        apart = self.transfer[~np.eye(self.num_classes, dtype=bool)]
        return int(apart.min(initial=OUT_OF_REACH))

    def seconds(self, stages: Sequence[Sequence[int]], flows: Sequence[Flow]) -> tuple[float, float]:
        """Return the slowest exchange and the path one way, in unrounded seconds."""
        exchange_s = 0.0
        for stage in stages:
            held = np.array(stage, dtype=np.float64)
            sums = self.exchange_s @ held - np.diag(self.exchange_s)
            exchange_s = max(exchange_s, float(sums[held > 0].max(initial=0.0)))
        hops = [float(self.transfer_s[np.array(flow) > 0].max(initial=0.0)) for flow in flows]
        return exchange_s, sum(hops)

    def to_seconds(self, value: float) -> float:
        """Return seconds no plan is below whose microseconds are not below `value`."""
        rounding = self.num_replicas + 2 * self.num_stages
        return max(0.0, value - rounding) / SCALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Where the slowest hop lies, and what stages may then hold."""

    lowest: int
    highest: int
    components: tuple[int, ...]
    """Of each class: which component it is in when hops stay at or below `highest`."""
    allowed: npt.NDArray[np.bool_] | None
    """Which ways to fill a stage are left; None where they are not listed."""
    stage: int
    """Microseconds no stage that is left is below."""


def space_of(pairs: Pairs, classes: Sequence[Sequence[int]], volumes: Volumes) -> Space:
    """Return the costs between classes."""
    ends = representatives(classes)
    count = len(classes)
    exchange_s, transfer_s = np.zeros((count, count)), np.zeros((count, count))
    for a, (first, twin) in enumerate(ends):
        for b, (second, _) in enumerate(ends):
            other = twin if a == b else second
            if first == other:
                continue
            rate = float(pairs.bytes_per_s[first, other])
            delay = float(pairs.delay_s[first, other])
            share = volumes.gradient_bytes / volumes.replicas
            exchange_s[a, b] = 2 * (delay + share / rate) if rate > 0 else math.inf
            transfer_s[a, b] = delay + volumes.activation_bytes / rate if rate > 0 else math.inf
    exchange, transfer = (
        np.where(np.isfinite(table), np.rint(np.where(np.isfinite(table), table, 0) * SCALE), OUT_OF_REACH).astype(
            np.int64
        )
        for table in (exchange_s, transfer_s)
    )
    for a, members in enumerate(classes):
        if len(members) == 1:
            transfer[a, a] = OUT_OF_REACH
    counts = tuple(len(members) for members in classes)
    ways = math.comb(volumes.replicas + count - 1, count - 1)
    stages = _fillings(counts, volumes.replicas) if ways <= MOST_COMPOSITIONS else None
    costs = None
    if stages is not None:
        sums = stages @ exchange.T - np.diag(exchange)[None, :]
        costs = np.where(stages > 0, sums, 0).max(axis=1)
        reachable = costs < OUT_OF_REACH
        stages, costs = stages[reachable], costs[reachable]
    return Space(
        num_stages=volumes.stages,
        num_replicas=volumes.replicas,
        counts=counts,
        exchange=exchange,
        transfer=transfer,
        exchange_s=exchange_s,
        transfer_s=transfer_s,
        stages=stages,
        costs=costs,
    )


def _fillings(counts: Sequence[int], size: int) -> Ints:
    """Return every way to take `size` devices out of the classes."""

    def ways(at: int, left: int) -> Iterator[tuple[int, ...]]:
        if at == len(counts) - 1:
            if left <= counts[at]:
                yield (left,)
            return
        for taken in range(min(left, counts[at]) + 1):
            for rest in ways(at + 1, left - taken):
                yield (taken, *rest)

    return np.array(list(ways(0, size)), dtype=np.int64).reshape(-1, len(counts))


def components(space: Space, level: int) -> tuple[int, ...]:
    """Return the component of each class when hops at or below a level join classes."""
    found = list(range(space.num_classes))
    for a in range(space.num_classes):
        for b in range(space.num_classes):
            if a != b and space.transfer[a, b] <= level:
                old, new = found[b], found[a]
                found = [new if one == old else one for one in found]
    return tuple(found)


def cases_of(space: Space) -> list[Case]:
    """Return the runs of levels with equal components, lowest first; those no stage is left for are dropped."""
    runs: list[tuple[int, int, tuple[int, ...]]] = []
    for level in space.levels:
        joined = components(space, level)
        if runs and runs[-1][2] == joined:
            runs[-1] = (runs[-1][0], level, joined)
        else:
            runs.append((level, level, joined))
    found = []
    for lowest, highest, joined in runs:
        allowed = _allowed(space, joined)
        stage = _least_stage(space, joined, allowed) if _possible(space, joined) else None
        if stage is not None:
            found.append(Case(lowest=lowest, highest=highest, components=joined, allowed=allowed, stage=stage))
    return found


def share_of(space: Space, joined: Sequence[int], component: int) -> int | None:
    """Return how many devices of a component every stage holds, None where that is not fixed or not whole."""
    total = sum(count for count, one in zip(space.counts, joined, strict=True) if one == component)
    return total // space.num_stages if space.uses_all and total % space.num_stages == 0 else None


def _possible(space: Space, joined: Sequence[int]) -> bool:
    if not space.uses_all:
        return True
    return all(share_of(space, joined, one) is not None for one in set(joined))


def _allowed(space: Space, joined: Sequence[int]) -> npt.NDArray[np.bool_] | None:
    if space.stages is None:
        return None
    allowed = np.ones(len(space.stages), dtype=bool)
    for one in set(joined):
        share = share_of(space, joined, one)
        if share is not None:
            members = [c for c in range(space.num_classes) if joined[c] == one]
            allowed &= space.stages[:, members].sum(axis=1) == share
    return allowed


def _least_stage(space: Space, joined: Sequence[int], allowed: npt.NDArray[np.bool_] | None) -> int | None:
    if space.costs is not None and allowed is not None:
        return int(space.costs[allowed].min()) if allowed.any() else None
    shares = {}
    for one in set(joined):
        share = share_of(space, joined, one)
        if share is not None:
            shares[tuple(c for c in range(space.num_classes) if joined[c] == one)] = share
    return cheapest_stage(space.exchange, space.counts, space.num_replicas, shares)


def hops_least(space: Space, case: Case, num: int) -> int:
    """Return what all hops of `num` segments cost at least."""
    least = min(space.levels)
    if num == 1:
        return least * (space.num_stages - 1)
    crossing = space.least_crossing
    return least * (space.num_stages - num) + crossing * (num - 2) + max(case.lowest, crossing)


def least_value(space: Space, case: Case, num: int) -> int | None:
    """Return what no plan of a case with `num` segments is below, None where there is none."""
    if num > 1 and (case.highest < space.least_crossing or space.num_classes == 1):
        return None
    return case.stage + 2 * hops_least(space, case, num)
