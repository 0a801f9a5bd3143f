"""The search: one door, two ways through.

Small instances are tried exhaustively (`exhaustive`): the answer is optimal among all valid plans. Larger ones go the
way of patterns (`patterned`): its bound speaks of all plans whose replicas use each group in one run of equal stages.
Where the limits ask for uniform plans only, `grids` enumerates them. Every layout is priced by `plan.estimate` and
held to `plan.check`; the best of all ways wins, and a plan with fewer shapes is preferred where it costs next to
nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from hetplan.costs.prices import Prices
from hetplan.errors import EffortError, InfeasibleError, InterruptedSearchError, UsageError
from hetplan.plan.records import Layout, Proof, Status
from hetplan.search.book import Book, TimeLimitError
from hetplan.search.classes import asks_for_equal_shares, price_equal_shares
from hetplan.search.compare import alternatives_of, hetero_efficiency
from hetplan.search.exhaustive import exhaustive
from hetplan.search.exhaustive_space import microbatch_sizes
from hetplan.search.floors import value_floor
from hetplan.search.infeasible import diagnose, diagnosis_text
from hetplan.search.lightest import fits
from hetplan.search.one_stage import price_one_stage
from hetplan.search.patterned import PatternSearch
from hetplan.search.patterns import MAX_BLOCKS
from hetplan.search.problem import build_problem
from hetplan.search.records import Alternative, Candidate, Progress, SearchRequest, SearchResult
from hetplan.search.uniform import price_grids

SMALL_DEVICES = 12
TINY_DEVICES = 6
SMALL_BUDGET, TINY_BUDGET = 2_000_000, 8_000_000
"""Visits of the exhaustive search at the default effort of 10, on up to so many devices."""
SPACE_EQUAL = "plans of one replica shape, all replicas with equal shares, stages of equal devices side by side"
SPACE_ALL = "all plans the rules and limits allow"


def search(prices: Prices, request: SearchRequest, progress: Callable[[Progress], None] | None = None) -> SearchResult:
    """Return the best plan found with its proof.

    Raises:
        InfeasibleError: nothing of the space is valid; the message says what binds.
        EffortError: the time limit passed before a plan was found.
        InterruptedSearchError: the user interrupted; `result` holds the best so far, if any.
    """
    _check_request(request)
    problem = build_problem(prices, request.limits)
    book = Book(problem, request, progress)
    status: Status = "feasible"
    space = SPACE_ALL
    alternatives: tuple[Alternative, ...] = ()
    try:
        if not problem.meshes:
            raise _infeasible(book)
        space, complete = _explore(book)
        if book.best is None and not complete and (near := fits(problem)) is not None:
            book.consider(near.layout)
        if complete:
            status = "optimal"
        if request.compare and book.best is not None:
            alternatives = alternatives_of(book)
    except TimeLimitError:
        status = "limit"
    except KeyboardInterrupt:
        result = _result(book, ("interrupted", space), ()) if book.best else None
        raise InterruptedSearchError("interrupted", result) from None
    if book.best is None:
        if status == "limit":
            raise EffortError("the time limit passed before any plan was found; allow more with --time-limit")
        raise _infeasible(book)
    return _result(book, (status, space), alternatives)


def _check_request(request: SearchRequest) -> None:
    if request.objective in ("cost-within-time", "devices") and request.time_budget_s is None:
        raise UsageError(f"the objective {request.objective} needs a time budget (--within)")
    if not (request.effort > 0 and math.isfinite(request.effort)):
        raise UsageError("effort must be positive and finite")
    if not 0 <= request.seed < 1 << 31:
        raise UsageError("the seed must be a whole number below 2,147,483,648")


def _explore(book: Book) -> tuple[str, bool]:
    """Fill the book; return the space its bound speaks of and whether that space was searched to the end."""
    problem, limits = book.problem, book.problem.limits
    devices = sum(problem.devices_g)
    if asks_for_equal_shares(book.request):
        bound = price_equal_shares(book)
        price_one_stage(book)
        if book.best is None:
            price_grids(book, equal_cuts=False)
        book.raise_bound(bound)
        book.floor = book.bound
        return SPACE_EQUAL, False
    if limits.uniform_degrees or limits.uniform_cuts or limits.equal_cuts or limits.uniform_microbatches:
        price_grids(book, equal_cuts=limits.equal_cuts)
        space, floor = "uniform grids", value_floor(book.problem, book.request, [])
    else:
        space, floor = _explore_patterns(book)
    if devices <= SMALL_DEVICES:
        book.enter("exhaustive")
        budget = int((TINY_BUDGET if devices <= TINY_DEVICES else SMALL_BUDGET) * book.request.effort / 10)
        best = book.best.candidate if book.best else None
        found = exhaustive(problem.prices, book.request, best, budget)
        for candidate in found.candidates:
            book.add_candidate(candidate)
        if found.complete:
            book.raise_bound(found.bound)
            book.floor = found.bound
            sizes = ", ".join(str(size) for size in microbatch_sizes(limits, problem.batch))
            return f"{SPACE_ALL}, microbatches of {sizes}", True
    book.raise_bound(floor)
    return space, False


def _explore_patterns(book: Book) -> tuple[str, float]:
    """Fill the book with plans of one shape and of several; return the space and its bound."""
    problem, limits = book.problem, book.problem.limits
    patterned = PatternSearch(problem, book)
    shapes_bound = patterned.shapes()
    sizes = ", ".join(str(size) for size in patterned.sizes)
    space = (
        f"{patterned.num_shapes} replica shapes with all their cuts (at most {MAX_BLOCKS} groups, one run of "
        f"stages of equal degrees each; microbatches of {sizes}; {', '.join(limits.schedules)})"
    )
    one_shape = f"plans of one shape out of {space}"
    book.floor = value_floor(problem, book.request, patterned.bound_tables())
    if set(limits.schedules) != {"1f1b"}:
        return one_shape, book.floor
    if problem.prices.calibration.overlap.pipeline != "exact":
        # The bounds of shapes are paths of the exact pipeline; another form of it may be shorter.
        patterned.prove_mixes()
        patterned.mix(book.request.effort)
        return one_shape, book.floor
    if book.best is None or limits.max_shapes == 1 or book.request.objective != "time":
        return one_shape, max(shapes_bound, book.floor)
    mixes_s = min(shapes_bound, patterned.prove_mixes())
    book.floor = max(book.floor, mixes_s)
    if mixes_s < book.best_step_s * (1 - book.request.simplicity):
        patterned.mix(book.request.effort)
    if num_shapes(simplest(book).layout) > 1:
        return f"all mixes of {space}", book.floor
    return one_shape, shapes_bound


def _result(book: Book, ended: tuple[Status, str], alternatives: tuple[Alternative, ...]) -> SearchResult:
    status, space = ended
    chosen = simplest(book)
    others = [priced.candidate for priced in book.kept() if priced.candidate.layout != chosen.layout]
    value = next(priced.value for priced in book.kept() if priced.candidate.layout == chosen.layout)
    proof = Proof(
        objective=book.request.objective,
        value=value,
        bound=min(book.bound, value),
        floor=min(book.floor, book.bound, value) if book.floor else min(book.bound, value),
        status=status,
        effort=book.effort,
        engine=book.request.engine,
    )
    return SearchResult(
        best=chosen,
        proof=proof,
        runners_up=tuple(others[: book.request.top]),
        alternatives=alternatives,
        hetero_efficiency=hetero_efficiency(chosen, alternatives),
        dropped=book.dropped,
        space=space,
        search_s=book.elapsed_s,
    )


def simplest(book: Book) -> Candidate:
    """Return the candidate with the fewest shapes among those within the simplicity margin of the best."""
    margin = book.best_value * (1 + book.request.simplicity)
    near = [priced for priced in book.kept() if priced.value <= margin]
    best = min(near, key=lambda priced: (num_shapes(priced.candidate.layout), priced.value))
    return best.candidate


def num_shapes(layout: Layout) -> int:
    """Return how many different replica shapes a layout has; rows that differ in counts alone are one shape."""
    return len({(tuple(replace(s, devices=()) for s in row.stages), row.microbatch) for row in layout.replicas})


def _infeasible(book: Book) -> InfeasibleError:
    found = diagnose(book.problem, book.request)
    return InfeasibleError(diagnosis_text(found, book.dropped), found)
