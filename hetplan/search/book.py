"""The book of a search: every layout that was priced, the best so far, what was dropped and why, and the clock."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from hetplan.errors import UsageError
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.placement import PlaceOrder, place
from hetplan.plan.records import Layout
from hetplan.search.exhaustive_price import ORDERS, Priced, objective_value
from hetplan.search.problem import Problem
from hetplan.search.records import Candidate, Progress, SearchRequest
from hetplan.search.variants import variants

KEPT = 64


class TimeLimitError(Exception):
    """The wall-clock limit has passed."""


class Book:
    """Prices layouts through the one objective and the one rule book, and keeps the best."""

    def __init__(
        self, problem: Problem, request: SearchRequest, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.problem = problem
        self.request = request
        self.bound = 0.0
        self.floor = 0.0
        """Bound of plans of any number of shapes."""
        self.effort = 0.0
        self.phase = "start"
        self._dropped: Counter[str] = Counter()
        self._seen: dict[Layout, float] = {}
        self._kept: list[Priced] = []
        self._progress = progress
        self._started_s = time.monotonic()

    @property
    def best(self) -> Priced | None:
        """The best valid layout so far."""
        return self._kept[0] if self._kept else None

    @property
    def best_value(self) -> float:
        """Its value, infinite before there is one."""
        return self._kept[0].value if self._kept else math.inf

    @property
    def best_step_s(self) -> float:
        """The least step time among the kept layouts."""
        return min((priced.candidate.estimate.step_s for priced in self._kept), default=math.inf)

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> number of candidates dropped for it."""
        return {**self.problem.dropped, **dict(sorted(self._dropped.items()))}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._started_s

    def kept(self) -> Iterator[Priced]:
        """Yield the best layouts, best first."""
        yield from self._kept

    def consider(self, layout: Layout) -> float:
        """Return the value of a layout under its best placement, infinite where it is not valid."""
        if layout in self._seen:
            return self._seen[layout]
        self.keep_time()
        schedules = self.request.limits.schedules
        found = [
            priced
            for variant in variants(layout, schedules)
            for order in ORDERS
            for priced in self._price(variant, order)
        ]
        value = min((priced.value for priced in found), default=math.inf)
        self._seen[layout] = value
        for priced in found:
            self.add(priced)
        return value

    def _price(self, layout: Layout, order: PlaceOrder) -> Iterator[Priced]:
        """Yield the layout placed in one way, if the rule book accepts it."""
        prices = self.problem.prices
        try:
            placed = place(layout, prices.cluster, order)
        except UsageError:
            self._dropped["devices do not suffice"] += 1
            return
        violations = check(placed, prices, self.request.limits)
        if violations:
            self._dropped[violations[0].rule] += 1
            return
        found = estimate(placed, prices)
        value = objective_value(found, self.request, placed.num_devices)
        if value is not None and math.isfinite(value):
            yield Priced(value=value, candidate=Candidate(layout=placed, estimate=found))

    def add_candidate(self, candidate: Candidate) -> None:
        """Keep a valid candidate found elsewhere."""
        value = objective_value(candidate.estimate, self.request, candidate.layout.num_devices)
        if value is not None:
            self.add(Priced(value=value, candidate=candidate))

    def add(self, priced: Priced) -> None:
        """Keep a priced layout when it is among the best."""
        if any(priced.candidate.layout == other.candidate.layout for other in self._kept):
            return
        improved = priced.value < self.best_value
        self._kept.append(priced)
        self._kept.sort(key=lambda one: (one.value, len(one.candidate.layout.replicas)))
        del self._kept[KEPT:]
        if improved:
            self.tell()

    def raise_bound(self, bound: float) -> None:
        """Remember a proved bound."""
        self.bound = max(self.bound, min(bound, self.best_value))
        self.tell()

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.tell()

    def tell(self) -> None:
        """Report where the search stands."""
        if self._progress is None:
            return
        best = None if math.isinf(self.best_value) else self.best_value
        self._progress(Progress(best=best, bound=self.bound, elapsed_s=self.elapsed_s, phase=self.phase))

    def keep_time(self) -> None:
        """Raise TimeLimitError when the wall-clock limit has passed."""
        limit = self.request.time_limit_s
        if limit is not None and self.elapsed_s > limit:
            raise TimeLimitError
