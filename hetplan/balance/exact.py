"""CP-SAT on one batch, for a given time.

Variables `x[s][b]` (sample `s` in bin `b`) and `largest`; loads are rounded up to parts of the present answer, so what
the solver finds is no better on paper than in truth. `minimise largest` subject to

    every sample has one bin                                          solve_exactly
    sum(load[s, m] x[s][b]) <= speed[b, m] largest                    _fit_time
    sum(size[s] x[s][b]) <= cap[b]                                    _fit_size

The answer it starts from is a hint and stays outside: the caller keeps the better of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hetplan.balance.problem import Ints, Problem

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

SCALE = 100_000
"""Steps into which the present answer is divided."""


def solve_exactly(problem: Problem, start: Ints, *, budget_s: float, bound_s: float) -> Ints | None:
    """Return the assignment found in `budget_s` seconds, None where there is none."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    best_s = problem.largest_s(start)
    x = [[model.new_bool_var("") for _ in range(problem.num_bins)] for _ in range(problem.num_samples)]
    largest = model.new_int_var(int(SCALE * bound_s / best_s), SCALE + problem.num_samples, "largest")
    for s, row in enumerate(x):
        model.add_exactly_one(row)
        for b, variable in enumerate(row):
            model.add_hint(variable, int(start[s] == b))
    for b in range(problem.num_bins):
        column = [row[b] for row in x]
        _fit_time(model, problem, b, column, (largest, SCALE / best_s))
        _fit_size(model, problem, b, column)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = budget_s
    solver.parameters.num_workers = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    chosen = [next(b for b, variable in enumerate(row) if solver.boolean_value(variable)) for row in x]
    return np.array(chosen, dtype=np.int64)


def _fit_time(model: CpModel, problem: Problem, b: int, column: Sequence[IntVar], limit: tuple[IntVar, float]) -> None:
    largest, steps_per_s = limit
    for m in range(problem.loads_sm.shape[1]):
        loads = np.ceil(problem.loads_sm[:, m] / problem.speeds_bm[b, m] * steps_per_s).astype(np.int64).tolist()
        model.add(sum(load * variable for load, variable in zip(loads, column, strict=True)) <= largest)


def _fit_size(model: CpModel, problem: Problem, b: int, column: Sequence[IntVar]) -> None:
    if np.isfinite(problem.caps_b[b]):
        sizes = np.ceil(problem.sizes_s).astype(np.int64).tolist()
        held = sum(size * variable for size, variable in zip(sizes, column, strict=True))
        model.add(held <= int(problem.caps_b[b]))
