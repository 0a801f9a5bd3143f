"""Prices uniform grids: all of them by a closed form, the best by `estimate`."""

from __future__ import annotations

from hetplan.search.book import Book
from hetplan.search.grids import Grid, grid_layout_of, grid_rows, grid_score_s, grids
from hetplan.search.problem import Tables, build_tables
from hetplan.specs.workload import Sharding

MOST_PRICED = 48
MOST_SCORED = 4000


def price_grids(book: Book, *, equal_cuts: bool) -> None:
    """Put the best uniform plans of the problem into the book."""
    problem = book.problem
    book.enter("uniform grids")
    tables: dict[tuple[int, Sharding, int], Tables | None] = {}
    scored: list[tuple[float, int, Sharding, Grid, tuple[tuple[int, ...], ...]]] = []
    for size in problem.microbatches:
        for sharding in problem.limits.sharding:
            key = (size, sharding, 1)
            tables[key] = build_tables(problem, *key)
            table = tables[key]
            if table is None:
                continue
            for grid in grids(problem, size):
                if sharding != "none" and grid.replicas * grid.stage_dp * grid.cp == 1:
                    continue
                for rows in grid_rows(problem, grid):
                    scored.append((grid_score_s(problem, table, grid, rows), len(scored), sharding, grid, rows))
    scored.sort(key=lambda entry: entry[:2])
    priced = 0
    for _, _, sharding, grid, rows in scored[:MOST_SCORED]:
        degree = grid.replicas * grid.stage_dp * grid.cp if sharding != "none" else 1
        key = (grid.microbatch, sharding, degree)
        if key not in tables:
            tables[key] = build_tables(problem, *key)
        table = tables[key]
        layout = grid_layout_of(problem, table, grid, rows, equal_cuts=equal_cuts) if table else None
        if layout is not None:
            book.consider(layout)
            priced += 1
        if priced >= MOST_PRICED:
            return
