"""Searching again for a plan that exists: what it was asked, and a search that starts from layouts known already.

`search_again` prices the given layouts first, so that the search of plans of one shape, which passes over whatever
cannot beat the best so far, visits little; no mixes are proved and nothing is compared. Its bound is that of plans of
one shape within the limits asked for. A layout that was given with its devices is preferred, first come first, where it
costs at most the simplicity margin more: what stays in place need not move. `near` narrows a request to plans like one
that exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from hetplan.costs.prices import Prices
from hetplan.errors import InfeasibleError
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.plan.placement import is_placed
from hetplan.plan.records import Estimate, Layout, Plan, Proof
from hetplan.search.book import Book
from hetplan.search.exhaustive import exhaustive
from hetplan.search.exhaustive_price import objective_value
from hetplan.search.floors import value_floor
from hetplan.search.infeasible import diagnose, diagnosis_text
from hetplan.search.lightest import fits
from hetplan.search.patterned import PatternSearch
from hetplan.search.problem import Problem, build_problem
from hetplan.search.records import Candidate, Objective, SearchRequest
from hetplan.search.solve import simplest
from hetplan.search.uniform import price_grids

SMALL_DEVICES = 8
SMALL_BUDGET = 200_000
"""Visits of the exhaustive search on up to so many devices."""


def request_of(plan: Plan, limits: Limits, effort: float) -> SearchRequest:
    """Return a request that could find such a plan: its objective, its engine, and no narrower space.

    A plan that was to be cheap within a time may take as long as it was to take.
    """
    asked = plan.proof.objective if plan.proof is not None else "time"
    objective: Objective = next(word for word in get_args(Objective) if word == asked)
    return SearchRequest(
        objective=objective,
        time_budget_s=plan.estimate.step_s * 1.0001 if objective in ("cost-within-time", "devices") else None,
        limits=replace(limits, cp=tuple(sorted({1, *limits.cp})), stage_dp=tuple(sorted({1, *limits.stage_dp}))),
        engine=plan.proof.engine if plan.proof is not None else "hetplan",
        effort=effort,
        top=1,
        compare=False,
    )


def near(request: SearchRequest, layout: Layout, prices: Prices) -> SearchRequest:
    """Return the request narrowed to plans like a layout: its sharding and recompute, degrees at most a factor 2 away.

    Where that leaves nothing of what was allowed, what was allowed stays.
    """
    stages = [stage for replica in layout.replicas for stage in replica.stages]
    limits = request.limits
    batch = prices.workload.global_batch
    recompute = {stage.recompute for stage in stages}
    return replace(
        request,
        limits=replace(
            limits,
            tp=_within(_neighbours({stage.tp for stage in stages}), limits.tp),
            cp=tuple(sorted({stage.cp for stage in stages})),
            ep=_within(_neighbours({stage.ep for stage in stages}), limits.ep),
            microbatch=_within(
                [size for size in _neighbours({row.microbatch for row in layout.replicas}) if size <= batch],
                limits.microbatch,
            ),
            recompute=tuple(word for word in limits.recompute if word in recompute) or limits.recompute,
            sharding=(layout.sharding,) if layout.sharding in limits.sharding else limits.sharding,
        ),
    )


def _neighbours(values: set[int]) -> list[int]:
    """Return values with their halves and doubles."""
    return sorted(
        {other for value in values for other in (value, value * 2, *([value // 2] if value % 2 == 0 else []))}
    )


def _within(values: Sequence[int], allowed: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if allowed is None:
        return tuple(values)
    return tuple(value for value in values if value in allowed) or allowed


def value_of(found: Estimate, request: SearchRequest) -> float | None:
    """Return what a request minimises of an estimate; None where it has no such value."""
    return objective_value(found, replace(request, time_budget_s=None))


def search_again(prices: Prices, request: SearchRequest, known: Sequence[Layout]) -> tuple[Candidate, Proof]:
    """Return the best of the known layouts and a short search that starts from them, with its proof.

    Raises:
        InfeasibleError: nothing valid was found; the message says what binds.
    """
    problem = build_problem(prices, request.limits)
    book = Book(problem, request)
    for layout in known:
        book.consider(layout)
    bound = _explore(problem, book, request) if problem.meshes else 0.0
    if book.best is None and problem.meshes and (least := fits(problem)) is not None:
        book.consider(least.layout)
    if book.best is None:
        found = diagnose(problem, request)
        raise InfeasibleError(diagnosis_text(found, book.dropped), found)
    chosen, value = _settled(known, book) or _simplest(book)
    proof = Proof(
        objective=request.objective,
        value=value,
        bound=min(bound, value),
        floor=min(book.floor, bound, value),
        status="feasible",
        effort=book.effort,
        engine=request.engine,
    )
    return chosen, proof


def _settled(known: Sequence[Layout], book: Book) -> tuple[Candidate, float] | None:
    """Return the first known layout that stays on its devices and costs next to nothing more than the best."""
    prices, request = book.problem.prices, book.request
    for layout in known:
        if is_placed(layout) and not check(layout, prices, request.limits):
            found = estimate(layout, prices)
            value = objective_value(found, request, layout.num_devices)
            if value is not None and value <= book.best_value * (1 + request.simplicity):
                return Candidate(layout=layout, estimate=found), value
    return None


def _simplest(book: Book) -> tuple[Candidate, float]:
    chosen = simplest(book)
    return chosen, next(priced.value for priced in book.kept() if priced.candidate.layout == chosen.layout)


def _explore(problem: Problem, book: Book, request: SearchRequest) -> float:
    """Fill the book; return a value that no plan of the space visited is below."""
    limits = request.limits
    if limits.uniform_degrees or limits.uniform_cuts or limits.equal_cuts or limits.uniform_microbatches:
        price_grids(book, equal_cuts=limits.equal_cuts)
        book.floor = value_floor(problem, request, [])
        return book.floor
    patterned = PatternSearch(problem, book)
    bound = patterned.shapes()
    book.floor = value_floor(problem, request, patterned.bound_tables())
    if sum(problem.devices_g) <= SMALL_DEVICES:
        best = book.best.candidate if book.best else None
        found = exhaustive(problem.prices, request, best, SMALL_BUDGET)
        for candidate in found.candidates:
            book.add_candidate(candidate)
        if found.complete:
            book.floor = found.bound
            return found.bound
    return max(bound, book.floor)
