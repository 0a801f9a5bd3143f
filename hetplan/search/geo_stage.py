"""The cheapest stage of a case, where the ways to fill a stage are too many to list.

minimise D,   sum_c x_c = R,   x_c <= count_c,   sum of x over a component = its share (where that is fixed)
D >= sum_d w[c, d] x_d - w[c, c]   for every class c with x_c > 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ortools.sat.python import cp_model

EFFORT = 0.5
"""Deterministic time; what is not proved by then is bounded."""


def cheapest_stage(
    exchange: np.ndarray, counts: Sequence[int], size: int, shares: Mapping[tuple[int, ...], int]
) -> int | None:
    """Return microseconds no stage of `size` devices is below, None where there is none; `shares` by classes."""
    model = cp_model.CpModel()
    num = len(counts)
    x = [model.new_int_var(0, min(size, count), "") for count in counts]
    model.add(sum(x) == size)
    for members, share in shares.items():
        model.add(sum(x[c] for c in members) == share)
    slowest = model.new_int_var(0, int(exchange.max()) * size, "D")
    for c in range(num):
        held = model.new_bool_var("")
        model.add(x[c] >= 1).only_enforce_if(held)
        model.add(x[c] == 0).only_enforce_if(~held)
        spent = sum(int(exchange[c, d]) * x[d] for d in range(num))
        model.add(slowest >= spent - int(exchange[c, c])).only_enforce_if(held)
    model.minimize(slowest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = EFFORT
    status = solver.solve(model)
    return None if status == cp_model.INFEASIBLE else int(np.ceil(solver.best_objective_bound - 1e-6))
