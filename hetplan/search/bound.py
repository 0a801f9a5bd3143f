"""The proved lower bound on the step time: a linear program over patterns, tightened where it matters.

For a step time T every pattern j can take at most a_j(T) samples (`patterns.most_microbatches`). With x_j copies of it,

    maximise sum_j a_j x_j   subject to   sum_j used_jg x_j <= devices_g  for every group g,   x_j >= 0

is at least what any mix of replicas can take in T; T is impossible when that falls short of the global batch. The
smallest possible T is found by bisection. Patterns start with their cheap bound; those the optimum uses are *refined*
(best whole-layer cut under memory, `cuts.best_cuts`) until it uses refined ones only. The program runs over a working
set; with its dual prices every other pattern is then checked, and those that would improve join the set, so that the
result holds for all patterns of the space.

A second bound needs no patterns: every layer of every sample takes device-seconds somewhere, and a group offers
`devices x T` of them (`device_seconds_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog

from hetplan.costs.records import Floats
from hetplan.search.cuts import Cuts, best_cuts
from hetplan.search.patterns import Ints, Patterns, most_microbatches
from hetplan.search.problem import Problem, Tables

HELD_LEVELS = (1, 2, 3, 5, 9, 17, 33, 65, 129)
"""First microbatch counts of classes in which a stage is taken to hold no more than that many."""
BATCH_OF_REFINEMENTS = 48
PRECISION = 2e-4


@dataclass(slots=True)
class Pool:
    """The patterns of one microbatch size, with what refinement has found out about them."""

    problem: Problem
    tables: Tables
    patterns: Patterns
    refined: dict[tuple[int, int], float] = field(default_factory=dict)
    """(pattern, held level) -> least seconds of the busiest stage."""

    def samples(self, step_s: float, rows: Ints) -> Ints:
        """Return the most samples each of the patterns `rows` can take in `step_s`, (rows,)."""
        most = most_microbatches(self.patterns.take(rows), self.tables, step_s)
        known = [k for k, row in enumerate(rows.tolist()) if any((row, q) in self.refined for q in HELD_LEVELS)]
        if known:
            most[known] = self._refined_microbatches(rows[known], most[known], step_s)
        return most * self.tables.microbatch

    def _refined_microbatches(self, rows: Ints, most: Ints, step_s: float) -> Ints:
        result = np.zeros(len(rows), dtype=np.int64)
        patterns = self.patterns.take(rows)
        for level in range(len(HELD_LEVELS) - 1, -1, -1):
            first = HELD_LEVELS[level]
            last = HELD_LEVELS[level + 1] - 1 if level + 1 < len(HELD_LEVELS) else 1 << 40
            open_rows = (result == 0) & (most >= first)
            if not open_rows.any():
                continue
            floor_s = np.array([self.refined.get((row, first), 0.0) for row in rows.tolist()])
            can = np.isfinite(floor_s)
            count = most_microbatches(patterns, self.tables, step_s, np.where(can, floor_s, 1.0))
            count = np.where(can, np.minimum(count, last), 0)
            result = np.where(open_rows & (count >= first), np.minimum(count, most), result)
        return result

    def level(self, row: int, step_s: float) -> int | None:
        """Return the held level a pattern's bound still rests on unrefined, or None where it is refined."""
        most = int(most_microbatches(self.patterns.take(np.array([row])), self.tables, step_s)[0])
        for level in range(len(HELD_LEVELS) - 1, -1, -1):
            first = HELD_LEVELS[level]
            if most < first:
                continue
            if (row, first) not in self.refined:
                return first
            floor = self.refined[row, first]
            if np.isfinite(floor):
                count = most_microbatches(self.patterns.take(np.array([row])), self.tables, step_s, np.array([floor]))[
                    0
                ]
                if count >= first:
                    return None
        return None

    def refine(self, rows: Sequence[int], held: int) -> Cuts:
        """Find the best cuts of patterns that hold at most `held` microbatches a stage, and keep their bound."""
        cuts = best_cuts(self.problem, self.tables, self.patterns.take(np.array(rows)), held)
        for row, tau in zip(rows, cuts.least_tau_s.tolist(), strict=True):
            self.refined[row, held] = tau
        return cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """An optimum of the linear program."""

    samples: float
    copies: Floats
    prices_g: Floats
    """Samples one more device of each group would take."""
    rows: tuple[tuple[int, int], ...]
    """(pool, pattern) of each column."""


class BoundSearch:
    """Bisects on the step time; keeps its working set and refinements between calls."""

    def __init__(self, problem: Problem, pools: Sequence[Pool]) -> None:
        self.problem = problem
        self.pools = pools
        self.working: list[set[int]] = [set() for _ in pools]
        self.mix: Mix | None = None

    def least_step_s(self, upper_s: float, lower_s: float) -> float:
        """Return a step time no plan of the space beats, at most `upper_s` (the value of a known plan)."""
        if not self.possible(upper_s * (1 - PRECISION)):
            return upper_s * (1 - PRECISION)
        low, high = lower_s, upper_s
        if not low > 0:
            low = high / 1e4
        while high - low > PRECISION * high:
            middle = float(np.sqrt(low * high)) if high > 2 * low else (low + high) / 2
            if self.possible(middle):
                high = middle
            else:
                low = middle
        return low

    def possible(self, step_s: float) -> bool:
        """Return whether the linear program takes the global batch within `step_s`."""
        batch = self.problem.batch
        while True:
            mix = self._solve(step_s)
            if mix.samples >= batch * (1 - 1e-9):
                if not self._refine_used(mix, step_s):
                    self.mix = mix
                    return True
                continue
            if not self._add_improving(mix, step_s, batch):
                return False

    def _solve(self, step_s: float) -> Mix:
        columns: list[tuple[int, int]] = []
        values: list[float] = []
        used: list[Ints] = []
        for index, pool in enumerate(self.pools):
            rows = np.array(sorted(self.working[index]), dtype=np.int64)
            if not len(rows):
                continue
            samples = pool.samples(step_s, rows)
            keep = samples > 0
            columns += [(index, row) for row in rows[keep].tolist()]
            values += samples[keep].tolist()
            used.append(pool.patterns.used[rows[keep]])
        num_groups = len(self.problem.devices_g)
        if not columns:
            return Mix(samples=0.0, copies=np.zeros(0), prices_g=np.zeros(num_groups), rows=())
        matrix = np.concatenate(used).T
        result = linprog(
            -np.array(values), A_ub=matrix, b_ub=np.array(self.problem.devices_g, dtype=float), method="highs-ds"
        )
        prices = -np.asarray(result.ineqlin.marginals)
        return Mix(samples=-result.fun, copies=np.asarray(result.x), prices_g=prices, rows=tuple(columns))

    def _refine_used(self, mix: Mix, step_s: float) -> bool:
        """Refine the patterns an optimum rests on; return whether there was anything to refine."""
        wanted: dict[tuple[int, int], list[int]] = {}
        for column in np.flatnonzero(mix.copies > 1e-9).tolist():
            index, row = mix.rows[column]
            level = self.pools[index].level(row, step_s)
            if level is not None:
                wanted.setdefault((index, level), []).append(row)
        if not wanted:
            return False
        for (index, level), rows in wanted.items():
            self._refine_rows(index, level, rows, (mix, step_s))
        return True

    def _refine_rows(self, index: int, level: int, rows: list[int], at: tuple[Mix, float]) -> None:
        """Refine `rows` and, in the same sweep, the unrefined patterns nearest to entering the optimum."""
        mix, step_s = at
        pool = self.pools[index]
        working = np.array(sorted(self.working[index]), dtype=np.int64)
        slack = pool.patterns.used[working] @ mix.prices_g - pool.samples(step_s, working)
        near = [row for row in working[np.argsort(slack, kind="stable")][: 3 * BATCH_OF_REFINEMENTS].tolist()]
        chosen = dict.fromkeys(rows)
        for row in near:
            if len(chosen) >= BATCH_OF_REFINEMENTS:
                break
            if (row, level) not in pool.refined and pool.level(row, step_s) == level:
                chosen[row] = None
        pool.refine([row for row in chosen if (row, level) not in pool.refined], level)

    def _add_improving(self, mix: Mix, step_s: float, batch: int) -> bool:
        """Add patterns outside the working set that the dual prices do not rule out; False proves impossibility."""
        found = False
        spare = batch / max(1.0, float(np.dot(mix.prices_g, self.problem.devices_g)))
        for index, pool in enumerate(self.pools):
            every = np.arange(len(pool.patterns))
            samples = pool.samples(step_s, every)
            gain = samples - pool.patterns.used @ mix.prices_g
            rows = np.flatnonzero((gain > 1e-9 * np.maximum(samples, 1)) & (samples > 0))
            rows = rows[~np.isin(rows, np.fromiter(self.working[index], dtype=np.int64))]
            if not len(rows):
                continue
            found = True
            order = np.argsort(
                -gain[rows] / np.maximum(pool.patterns.used[rows] @ np.ones(len(mix.prices_g)), 1), kind="stable"
            )
            self.working[index].update(rows[order[:200]].tolist())
        return found and spare > 0


def device_seconds_s(problem: Problem, tables: Sequence[Tables]) -> float:
    """Return the step time below which the groups together lack device-seconds for the batch, whatever the plan."""
    per_sample: Floats = np.full((len(problem.devices_g), problem.num_layers), np.inf)
    for table in tables:
        seconds = (table.forward_mrl + table.backward_mrl).min(axis=1) / table.microbatch
        for m, mesh in enumerate(problem.meshes):
            if table.usable_m[m]:
                per_sample[mesh.group] = np.minimum(per_sample[mesh.group], seconds[m] * mesh.size)
    alive = [g for g in range(len(problem.devices_g)) if np.isfinite(per_sample[g]).all()]
    if not alive:
        return 0.0
    cost = per_sample[alive]
    num_groups, num_layers = cost.shape
    # Variables: share of each layer's samples on each group, then T.
    objective = np.zeros(num_groups * num_layers + 1)
    objective[-1] = 1.0
    everything = np.zeros((num_layers, len(objective)))
    budget = np.zeros((num_groups, len(objective)))
    for g in range(num_groups):
        everything[np.arange(num_layers), g * num_layers + np.arange(num_layers)] = 1.0
        budget[g, g * num_layers : (g + 1) * num_layers] = cost[g] * problem.batch
        budget[g, -1] = -float(problem.devices_g[alive[g]])
    result = linprog(
        objective, A_ub=budget, b_ub=np.zeros(num_groups), A_eq=everything, b_eq=np.ones(num_layers), method="highs-ds"
    )
    return float(result.fun) * (1 - 1e-9) if result.status == 0 else 0.0
