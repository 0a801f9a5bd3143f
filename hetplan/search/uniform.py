"""Prices uniform grids: all of them by a closed form, the best by `estimate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetplan.search.book import Book
from hetplan.search.grids import Grid, Rows, grid_layout_of, grid_rows, grid_score_s, grids
from hetplan.search.problem import Problem, Tables, build_tables
from hetplan.specs.workload import Sharding

MOST_PRICED = 20
MOST_SCORED = 4000
MOST_DEGREE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A grid laid over groups under one sharding, with its closed-form step time."""

    step_s: float
    sharding: Sharding
    grid: Grid
    rows: Rows

    @property
    def degree(self) -> int:
        """Ranks that share states."""
        ranks = self.grid.replicas * self.grid.stage_dp * self.grid.cp
        return 1 if self.sharding == "none" else min(ranks, MOST_DEGREE)


class GridSearch:
    """Uniform plans of one problem; keeps cost tables."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._tables: dict[tuple[int, Sharding, int], Tables | None] = {}

    def tables(self, microbatch: int, sharding: Sharding, degree: int) -> Tables | None:
        """Return the cost tables, built once."""
        key = (microbatch, sharding, degree)
        if key not in self._tables:
            self._tables[key] = build_tables(self.problem, *key)
        return self._tables[key]

    def scored(self) -> Iterator[Scored]:
        """Yield every grid with its closed-form step time."""
        for size in self.problem.microbatches:
            table = self.tables(size, "none", 1)
            if table is None:
                continue
            for grid in grids(self.problem, size):
                for rows in grid_rows(self.problem, grid):
                    step_s = grid_score_s(self.problem, table, grid, rows)
                    for sharding in self.problem.limits.sharding:
                        if sharding == "none" or grid.replicas * grid.stage_dp * grid.cp > 1:
                            yield Scored(step_s=step_s, sharding=sharding, grid=grid, rows=rows)


def price_grids(book: Book, *, equal_cuts: bool) -> None:
    """Put the best uniform plans of the problem into the book."""
    book.enter("uniform grids")
    search = GridSearch(book.problem)
    ranked = sorted(search.scored(), key=lambda one: one.step_s)
    priced = 0
    for one in ranked[:MOST_SCORED]:
        if one.step_s > book.best_step_s or priced >= MOST_PRICED:
            return
        table = search.tables(one.grid.microbatch, one.sharding, one.degree)
        layout = grid_layout_of(book.problem, table, one.grid, one.rows, equal_cuts=equal_cuts) if table else None
        if layout is not None:
            book.consider(layout)
            priced += 1
