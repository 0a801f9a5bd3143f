"""The best assignment of a batch that a given effort finds.

Without a budget: the better of LPT and differencing, improved by a fixed number of steps; every process that calls it
with the same batch gets the same answer. With one: more steps, then CP-SAT, until the seconds are over; what was found
before is never lost.
"""

from __future__ import annotations

import time

import numpy as np

from hetplan.balance.bounds import lower_bound
from hetplan.balance.exact import solve_exactly
from hetplan.balance.greedy import karmarkar_karp, lpt
from hetplan.balance.improve import improve
from hetplan.balance.problem import Assignment, Ints, Problem
from hetplan.errors import InfeasibleError, UsageError

QUICK_STEPS = 120
STEPS_A_ROUND = 100
SOLVER_SHARE = 0.4
"""Part of the budget that CP-SAT gets, where the batch is small enough for it."""
MOST_SOLVER_CELLS = 8192
"""Samples x bins beyond which building the model alone takes longer than a trainer waits."""


def balance(
    problem: Problem, *, budget_s: float = 0.0, start: Ints | None = None, seed: int = 0, steps: int = QUICK_STEPS
) -> Assignment:
    """Return the best assignment found, never worse than LPT and never worse than a complete `start`.

    Raises:
        UsageError: `start` is not complete or exceeds a cap.
        InfeasibleError: the samples do not fit into the bins, or no way to fit them was found.
    """
    begin_s = time.perf_counter()
    if start is not None and not problem.is_complete(start):
        raise UsageError("the assignment to start from leaves out a sample or exceeds a cap")
    bound_s = lower_bound(problem)
    given = {} if start is None else {"given": start}
    found = {"lpt": lpt(problem), "karmarkar-karp": karmarkar_karp(problem), **given}
    known = {name: bin_s for name, bin_s in found.items() if bin_s is not None}
    if not known:
        raise InfeasibleError(_shortage(problem))
    method = min(known, key=lambda name: problem.largest_s(known[name]))
    best = known[method]
    for candidate in sorted(known.values(), key=problem.largest_s)[:2]:
        better = improve(problem, candidate, steps=steps // 2, seed=seed, target_s=bound_s)
        if problem.largest_s(better) < problem.largest_s(best):
            best, method = better, "improved"
    left_s = budget_s - (time.perf_counter() - begin_s)
    if left_s > 0:
        best, method = _spend(problem, best, method, begin_s + budget_s, seed, bound_s)
    return Assignment(bin_s=best, largest_s=problem.largest_s(best), bound_s=bound_s, method=method)


def _spend(problem: Problem, best: Ints, method: str, end_s: float, seed: int, bound_s: float) -> tuple[Ints, str]:
    """Return what is found until the clock shows `end_s`."""
    value = problem.largest_s(best)
    budget_s = end_s - time.perf_counter()
    solves = problem.num_samples * problem.num_bins <= MOST_SOLVER_CELLS
    switch_s = end_s - (SOLVER_SHARE * budget_s if solves else 0.0)
    step_s = 0.0
    while (now_s := time.perf_counter()) + step_s < switch_s and value > bound_s * (1 + 1e-9):
        seed += 1
        better = improve(problem, best, steps=STEPS_A_ROUND, seed=seed, target_s=bound_s)
        step_s = time.perf_counter() - now_s
        if problem.largest_s(better) < value:
            best, method, value = better, "improved", problem.largest_s(better)
    left_s = end_s - time.perf_counter()
    if solves and left_s > 0.05 and value > bound_s * (1 + 1e-9):
        exact = solve_exactly(problem, best, budget_s=left_s * 0.7, bound_s=bound_s)
        if exact is not None and problem.is_complete(exact) and problem.largest_s(exact) < value:
            best, method = exact, "cp-sat"
    return best, method


def _shortage(problem: Problem) -> str:
    need, room = float(problem.sizes_s.sum()), float(problem.caps_b.sum())
    largest, most = float(problem.sizes_s.max()), float(problem.caps_b.max())
    if largest > most:
        return f"the largest sample takes {largest:.0f}, a microbatch holds {most:.0f}: raise the cap or leave it out"
    more = int(np.ceil((need - room) / most)) if need > room else 1
    return f"samples take {need:.0f} together, the microbatches hold {room:.0f}: use at least {max(1, more)} more"
