"""What else could be done with the cluster: rows that come with every answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetplan.plan.limits import Limits
from hetplan.search.book import Book
from hetplan.search.problem import build_problem
from hetplan.search.quick import quick
from hetplan.search.records import Alternative, Candidate
from hetplan.search.uniform import price_grids

UNIFORM = "best uniform"


def alternatives_of(book: Book) -> tuple[Alternative, ...]:
    """Return the best uniform plan and the best plan of each device type alone."""
    problem, request = book.problem, book.request
    names = [group.name for group in problem.prices.cluster.groups if group.name not in request.limits.exclude]
    book.enter("comparison")
    rows = [_uniform_row(book)]
    kinds: dict[str, list[str]] = {}
    for group in problem.prices.cluster.groups:
        if group.name in names:
            kinds.setdefault(group.device.name, []).append(group.name)
    if len(kinds) > 1:
        for device, own in kinds.items():
            others = frozenset(names) - frozenset(own)
            limits = replace(request.limits, exclude=request.limits.exclude | others)
            rows.append(_row(book, f"only {device}", limits))
    return tuple(rows)


def uniform(limits: Limits) -> Limits:
    """Return the limits of a plan with one grid for all replicas."""
    return replace(limits, uniform_degrees=True, uniform_cuts=True, uniform_microbatches=True)


def _uniform_row(book: Book) -> Alternative:
    """Return the best plan with one grid and stages as equal as the layers divide."""
    request = replace(book.request, limits=uniform(book.request.limits))
    problem = build_problem(book.problem.prices, request.limits, book.problem)
    own = Book(problem, replace(request, compare=False, time_limit_s=None))
    if problem.meshes:
        price_grids(own, equal_cuts=request.limits.pinned_layers is None)
    return _alternative(UNIFORM, own.best.candidate if own.best else None)


def _row(book: Book, name: str, limits: Limits) -> Alternative:
    return _alternative(name, quick(book.problem.prices, replace(book.request, limits=limits), book.problem))


def _alternative(name: str, candidate: Candidate | None) -> Alternative:
    return Alternative(name=name, candidate=candidate, reason="" if candidate else "nothing of this kind fits")


def hetero_efficiency(best: Candidate, alternatives: Sequence[Alternative]) -> float | None:
    """Return the answer's throughput over the sum of the throughputs of each device type alone."""
    alone = [row for row in alternatives if row.name != UNIFORM]
    if len(alone) < 2:
        return None
    total = sum(row.candidate.estimate.tokens_per_s for row in alone if row.candidate)
    return best.estimate.tokens_per_s / total if total else None
