"""A good plan without a proof, in a fraction of the time: what comparisons and sensitivities ask for."""

from __future__ import annotations

from dataclasses import replace

from hetplan.costs.prices import Prices
from hetplan.search.book import Book
from hetplan.search.exhaustive import exhaustive
from hetplan.search.lightest import fits
from hetplan.search.patterned import PatternSearch
from hetplan.search.problem import Problem, build_problem
from hetplan.search.records import Candidate, SearchRequest
from hetplan.search.uniform import price_grids

SMALL_DEVICES = 8
SMALL_BUDGET = 20_000
MOST_VISITED = 1000


def quick(prices: Prices, request: SearchRequest, known: Problem | None = None) -> Candidate | None:
    """Return the best of the single-shape plans (of uniform grids where the limits ask for them), or None.

    `known`: a problem of the same prices, whose costs need not be worked out again.
    """
    problem = build_problem(prices, request.limits, known)
    if not problem.meshes:
        return None
    book = Book(problem, replace(request, compare=False, time_limit_s=None))
    limits = request.limits
    if limits.uniform_degrees or limits.uniform_cuts or limits.uniform_microbatches:
        price_grids(book, equal_cuts=limits.equal_cuts)
        return book.best.candidate if book.best else None
    if sum(
        d for d, g in zip(problem.devices_g, prices.cluster.groups, strict=True) if g.name not in limits.exclude
    ) <= (SMALL_DEVICES):
        found = exhaustive(prices, request, None, SMALL_BUDGET)
        if found.complete:
            return found.candidates[0] if found.candidates else None
    PatternSearch(problem, book).shapes(MOST_VISITED)
    if book.best is None and (near := fits(problem)) is not None:
        book.consider(near.layout)
    return book.best.candidate if book.best else None
