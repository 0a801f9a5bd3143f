"""The exact search: the best of all layouts of a small instance, proved by visiting or excluding every one.

The space is every layout the rule book accepts: any sequence of stages (group, tp, cp, dp, ep), any cut of the chain,
any recomputation of each stage, any set of such replicas with any microbatch counts that takes the global batch
exactly, one sharding and schedule for the whole plan. Where the limits name no microbatch sizes they are the powers of
two up to the global batch. Devices are chosen in every way that makes a difference (`exhaustive_place`; layouts with
very many ways by `plan.placement.place` alone).

A layout that uses devices `U` and ends after `t` seconds has a value of at least

    rate(U) * t + sum over its replicas of m * extra(column)

(time: rate 1; cost: the price of `U`; energy: idle power of `U`, and what computing draws beyond it). So a value to
beat turns into a time for every `U`. Rounds raise the value from the least the knapsack of `exhaustive_combine` allows;
each round prices, in order of their bounds, the sets of replicas no earlier round has seen, until the best value found
is no more than the round's: everything that could beat it has then been visited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats
from hetplan.plan.records import Layout
from hetplan.search.exhaustive_combine import Budget, BudgetSpentError, Combination, Reach, combinations_within
from hetplan.search.exhaustive_floor import Floors
from hetplan.search.exhaustive_price import Priced, Pricer, layout_of, objective_value
from hetplan.search.exhaustive_space import Space, free_devices, spaces
from hetplan.search.records import Candidate, SearchRequest

PRICE_VISITS = 1500
WHOLE_FLOOR_VISITS = 400
FLOOR_VISITS = 20
"""A price, a bound for a whole set and one for its slowest replica count as so many visits; measured, rounded."""
ROUNDS = tuple(0.002 * 4.0**k for k in range(7))
"""How far above the least possible value each round reaches, as a fraction of it; the last round has no limit."""
SAME_VALUE = 1e-11
"""Relative difference below which two values count as equal (sums of the same terms in another order)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaustive:
    """The answer of the exact search."""

    candidates: tuple[Candidate, ...]
    """Best first. The first is the best of all when `complete`; the others are the best that were met on the way."""
    bound: float
    """No layout of the space has a lower value; infinite when the space is empty."""
    complete: bool
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rule of the rule book -> layouts it refused."""
    num_priced: int = 0


def exhaustive(prices: Prices, request: SearchRequest, incumbent: Candidate | None, budget: int) -> Exhaustive:
    """Return the best layout of the whole space, or what is known of it when `budget` visits do not suffice.

    A visit stands for about a microsecond of work, counted, not timed. Shapes and cuts are counted before anything is
    priced, so an instance that is too large is noticed at once.
    """
    found = _Found(request, incumbent)
    pricer = Pricer(prices, request)
    left = Budget(left=budget)
    bound = 0.0
    complete = False
    try:
        rounds = _Rounds(prices, request, spaces(prices, request.limits, left), left)
        for value in rounds.values():
            rounds.visit(value, found, pricer)
            bound = value
            if found.best <= value:
                break
        bound = found.best
        complete = True
    except BudgetSpentError:
        bound = min(bound, found.best)
    return Exhaustive(
        candidates=found.candidates(),
        bound=bound,
        complete=complete,
        dropped=dict(sorted(pricer.dropped.items())),
        num_priced=pricer.num_priced,
    )


class _Found:
    """The best layouts so far."""

    def __init__(self, request: SearchRequest, incumbent: Candidate | None) -> None:
        self._most = request.top + 1
        self._kept: dict[Layout, tuple[float, int, Candidate]] = {}
        if incumbent is not None:
            value = objective_value(incumbent.estimate, request)
            if value is not None:
                self.add([Priced(value=value, candidate=incumbent)])

    @property
    def best(self) -> float:
        """The least value, infinite before there is one."""
        return min((value for value, _, _ in self._kept.values()), default=math.inf)

    def add(self, priced: Sequence[Priced]) -> None:
        """Keep what is among the best."""
        for one in priced:
            self._kept.setdefault(one.candidate.layout, (one.value, len(self._kept), one.candidate))
        ranked = sorted(self._kept.values(), key=lambda entry: entry[:2])[: self._most]
        self._kept = {entry[2].layout: (entry[0], rank, entry[2]) for rank, entry in enumerate(ranked)}

    def candidates(self) -> tuple[Candidate, ...]:
        """Return them, best first."""
        return tuple(entry[2] for entry in sorted(self._kept.values(), key=lambda entry: entry[:2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    """A set of replicas that waits for its price."""

    floor: float
    space: int
    combination: Combination
    refined: int = 0
    """How often the bound was refined."""

    def order(self) -> tuple[float, int, Combination]:
        """Return what decides whose turn it is."""
        return self.floor, self.space, self.combination

    def __lt__(self, other: _Set) -> bool:
        return self.order() < other.order()


class _Rounds:
    """Visits the space in windows of value."""

    def __init__(self, prices: Prices, request: SearchRequest, found: Sequence[Space], budget: Budget) -> None:
        self._request = request
        self._spaces = found
        self._budget = budget
        self._rates = _rates(prices, request, found)
        energy = request.objective == "energy"
        self._extra = [space.joules if energy else np.zeros(len(space.joules)) for space in found]
        self._floors = [Floors(prices, space) for space in found]
        self._done_s = [np.full(len(space.pool.vectors), -math.inf) for space in found]

    def values(self) -> Iterator[float]:
        """Yield the value each round reaches; nothing lies below the first one's start."""
        least = self._least_value()
        if 0 < least < math.inf:
            yield from (least * (1 + reach) for reach in ROUNDS)
        if self._spaces:
            yield math.inf

    def visit(self, value: float, found: _Found, pricer: Pricer) -> None:
        """Price every set of replicas that could be worth `value` or less and beat the best, once over all rounds.

        Raises:
            BudgetSpentError: there are too many.
        """
        waiting: list[_Set] = []
        for index, space in enumerate(self._spaces):
            limits_s = self._limits_s(index, min(value, found.best))
            reaches = {limit_s: space.pool.reach(limit_s) for limit_s in np.unique(limits_s[1:]).tolist()}
            for vector in range(1, len(space.pool.vectors)):
                if limits_s[vector] > self._done_s[index][vector]:
                    waiting.extend(self._sets(index, vector, reaches[float(limits_s[vector])]))
            self._done_s[index] = np.maximum(self._done_s[index], limits_s)
        heap = sorted(waiting, key=_Set.order)
        while heap and heap[0].floor < found.best * (1 - SAME_VALUE):
            one = heappop(heap)
            if one.refined < 2:
                self._budget.spend(WHOLE_FLOOR_VISITS if one.refined else FLOOR_VISITS)
                heappush(heap, self._refined(one))
                continue
            before = pricer.num_priced
            space = self._spaces[one.space]
            layout = layout_of(space.pool.columns, space.shapes, one.combination, space.context)
            found.add(pricer.price(layout, space.context))
            self._budget.spend(PRICE_VISITS * (pricer.num_priced - before))

    def _refined(self, one: _Set) -> _Set:
        """Return a set with a better bound: first of its slowest replica, then of the set as a whole."""
        floors = self._floors[one.space]
        floor_s = floors.step_s(one.combination) if one.refined else floors.slowest_s(one.combination)
        if self._request.objective == "cost-within-time" and self._request.time_budget_s is not None:
            late = floor_s > self._request.time_budget_s * (1 + SAME_VALUE)
            floor_s = math.inf if late else floor_s
        vector = sum(int(self._spaces[one.space].pool.used[row]) for row, _ in one.combination)
        floor = float(self._rates[one.space][vector]) * floor_s + self._joules(one.space, one.combination)
        return replace(one, floor=max(one.floor, floor), refined=one.refined + 1)

    def _joules(self, index: int, combination: Combination) -> float:
        return sum(m * float(self._extra[index][row]) for row, m in combination)

    def _sets(self, index: int, vector: int, reach: Reach) -> Iterator[_Set]:
        pool, from_s = self._spaces[index].pool, float(self._done_s[index][vector])
        rate = self._rates[index][vector]
        for bound_s, combination in combinations_within(pool, vector, reach, from_s, self._budget):
            floor = rate * bound_s + self._joules(index, combination)
            yield _Set(floor=floor, space=index, combination=combination)

    def _limits_s(self, index: int, value: float) -> Floats:
        """Return, for each device vector, the time a layout that uses it must beat to be worth less than `value`."""
        rates = self._rates[index]
        with np.errstate(divide="ignore", invalid="ignore"):
            limits_s = np.where(rates > 0, value / rates, math.inf)
        limits_s = np.where(np.isinf(rates), -math.inf, limits_s)
        if self._request.objective == "cost-within-time" and self._request.time_budget_s is not None:
            limits_s = np.minimum(limits_s, self._request.time_budget_s * (1 + SAME_VALUE))
        return np.asarray(limits_s)

    def _least_value(self) -> float:
        """Return a value no layout falls below, within half a percent of the most this test can tell."""
        low = high = self._trivial_value()
        if not 0 < low < math.inf:
            return 0.0
        for _ in range(400):
            if self._possible(high):
                break
            low, high = high, high * 1.3
        else:
            return low
        while high > 1.005 * low:
            middle = (low + high) / 2
            low, high = (low, middle) if self._possible(middle) else (middle, high)
        return low

    def _trivial_value(self) -> float:
        """Return the least any single column could be worth."""
        least = math.inf
        for index, space in enumerate(self._spaces):
            columns = space.pool.columns
            rows = np.arange(len(columns))
            if len(rows):
                values = self._rates[index][space.pool.used] * columns.bound_s(rows, columns.first_m)
                least = min(least, float(values.min()))
        return least

    def _possible(self, value: float) -> bool:
        """Return whether the knapsack finds room for the batch within `value` on some devices."""
        for index, space in enumerate(self._spaces):
            limits_s = self._limits_s(index, value)
            for limit_s in np.unique(limits_s[1:]):
                self._budget.spend(len(space.pool.columns) // 10)
                most = space.pool.reach(float(limit_s)).most
                if (most[1:][limits_s[1:] == limit_s] >= space.pool.batch).any():
                    return True
        return False


def _rates(prices: Prices, request: SearchRequest, found: Sequence[Space]) -> list[Floats]:
    """Return, for each pool, what a second costs by device vector; infinite where a group has no price."""
    groups = tuple(free_devices(prices, request.limits))
    if request.objective == "time":
        return [np.ones(len(space.pool.vectors)) for space in found]
    if request.objective == "energy":
        each = [prices.power_w(group, 0.0) for group in groups]
    else:
        named = [prices.usd_per_s(group) for group in groups]
        each = [math.inf if usd_per_s is None else usd_per_s for usd_per_s in named]
    with np.errstate(invalid="ignore"):
        return [np.nansum(space.pool.vectors.vectors * np.array(each), axis=1) for space in found]
