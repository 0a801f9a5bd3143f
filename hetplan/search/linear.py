"""Two small linear programs, solved by OR-tools' GLOP (scipy's solvers take longer to import than these to solve)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from hetplan.costs.records import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """An optimum of `pack`."""

    value: float
    amounts: Floats
    prices_g: Floats
    """What one more unit of each resource would add."""


def pack(values: Sequence[float], used: Floats, limits: Sequence[float]) -> Packing:
    """Maximise sum_j values_j x_j subject to sum_j used_jg x_j <= limits_g, x >= 0; `used` is (columns, resources)."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    rows = [solver.RowConstraint(-solver.infinity(), float(limit), "") for limit in limits]
    objective = solver.Objective()
    variables = []
    for value, column in zip(values, used.tolist(), strict=True):
        x = solver.NumVar(0.0, solver.infinity(), "")
        objective.SetCoefficient(x, float(value))
        for row, amount in zip(rows, column, strict=True):
            if amount:
                row.SetCoefficient(x, float(amount))
        variables.append(x)
    objective.SetMaximization()
    solver.Solve()
    return Packing(
        value=float(objective.Value()),
        amounts=np.array([x.solution_value() for x in variables]),
        prices_g=np.array([max(0.0, row.dual_value()) for row in rows]),
    )


def least_makespan(cost_gl: Floats, limits: Sequence[float]) -> float:
    """Minimise T subject to sum_l cost_gl share_gl <= limits_g T and, for every l, sum_g share_gl = 1; 0: no answer."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    makespan = solver.NumVar(0.0, solver.infinity(), "")
    whole = [solver.RowConstraint(1.0, 1.0, "") for _ in range(cost_gl.shape[1])]
    for costs, limit in zip(cost_gl.tolist(), limits, strict=True):
        budget = solver.RowConstraint(-solver.infinity(), 0.0, "")
        budget.SetCoefficient(makespan, -float(limit))
        for row, cost in zip(whole, costs, strict=True):
            share = solver.NumVar(0.0, solver.infinity(), "")
            budget.SetCoefficient(share, cost)
            row.SetCoefficient(share, 1.0)
    objective = solver.Objective()
    objective.SetCoefficient(makespan, 1.0)
    objective.SetMinimization()
    return float(objective.Value()) if solver.Solve() == pywraplp.Solver.OPTIMAL else 0.0
