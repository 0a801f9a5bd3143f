"""The proved lower bound on the step time: a linear program over patterns, tightened where it matters.

For a step time T every pattern j can take at most a_j(T) samples (`patterns.Lines`). With x_j copies of it,

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
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from hetplan.costs.records import Floats
from hetplan.search.cuts import best_cuts
from hetplan.search.patterns import Ints, Lines, Patterns, bound_lines
from hetplan.search.problem import Problem, Tables

HELD_LEVELS = (1, 2, 3, 5, 9, 17, 33, 65, 129)
"""First microbatch counts of classes in which a stage is taken to hold no more than that many."""
BATCH_OF_REFINEMENTS = 40
PRECISION = 2e-4
NEW_COLUMNS = 120
Refined = dict[tuple[int, int], float]
"""(pattern, held level) -> least seconds of the busiest stage; infinite where no cut fits."""


class Pool:
    """The patterns of one microbatch size in one class of plans, with what refinement has found out about them.

    `refined` may be shared by pools that differ in `after` alone; `inside` masks the patterns of the class.
    """

    def __init__(self, problem: Problem, tables: Tables, patterns: Patterns, after: After, refined: Refined) -> None:
        self.problem = problem
        self.tables = tables
        self.patterns = patterns
        self.after = after
        self.refined = refined
        self.inside = np.ones(len(patterns), dtype=bool)
        self._lines = bound_lines(patterns, tables, after)
        self._known: dict[int, tuple[int, Lines, Ints]] = {}

    def samples(self, step_s: float) -> Ints:
        """Return the most samples each pattern can take in `step_s`, (N,)."""
        most = self._lines.most_microbatches(step_s)
        rows, counts = self._refined_microbatches(most, step_s)
        most[rows] = counts
        return np.asarray(np.where(self.inside, most * self.tables.microbatch, 0))

    def _refined_microbatches(self, most: Ints, step_s: float) -> tuple[Ints, Ints]:
        """Return the refined patterns and their counts: classes of counts from the largest down, first that works."""
        rows = np.array(sorted({row for row, _ in self.refined}), dtype=np.int64)
        result = np.zeros(len(rows), dtype=np.int64)
        if not len(rows):
            return rows, result
        cheap = most[rows]
        for level in range(len(HELD_LEVELS) - 1, -1, -1):
            first = HELD_LEVELS[level]
            last = HELD_LEVELS[level + 1] - 1 if level + 1 < len(HELD_LEVELS) else 1 << 40
            waiting = (result == 0) & (cheap >= first)
            if not waiting.any():
                continue
            count = np.full(len(rows), last)
            known, lines = self._lines_at(first)
            if lines is not None:
                count[np.searchsorted(rows, known)] = np.minimum(last, lines.most_microbatches(step_s))
            count = np.minimum(count, cheap)
            result = np.where(waiting & (count >= first), count, result)
        return rows, result

    def _lines_at(self, held: int) -> tuple[Ints, Lines | None]:
        """Return the patterns refined at a held level, and their bounds with whole layers."""
        known = sorted(row for row, level in self.refined if level == held)
        kept = self._known.get(held)
        if kept is not None and kept[0] == len(known):
            return kept[2], kept[1]
        rows = np.array(known, dtype=np.int64)
        if not known:
            return rows, None
        floor_s = np.array([self.refined[row, held] for row in known])
        lines = bound_lines(self.patterns.take(rows), self.tables, self.after, np.minimum(floor_s, 1e200))
        self._known[held] = (len(known), lines, rows)
        return rows, lines

    def level(self, row: int, step_s: float) -> int | None:
        """Return the held level a pattern's bound still rests on unrefined, or None where it is refined."""
        most = int(self._lines.most_microbatches(step_s)[row])
        for level in range(len(HELD_LEVELS) - 1, -1, -1):
            first = HELD_LEVELS[level]
            if most < first:
                continue
            if (row, first) not in self.refined:
                return first
            rows, lines = self._lines_at(first)
            if lines is not None and lines.most_microbatches(step_s)[int(np.searchsorted(rows, row))] >= first:
                return None
        return None

    def refine(self, rows: Sequence[int], held: int) -> None:
        """Find the best cuts of patterns that hold at most `held` microbatches a stage, and keep their bound."""
        cuts = best_cuts(self.problem, self.tables, self.patterns.take(np.array(rows)), held)
        for row, tau in zip(rows, cuts.least_tau_s.tolist(), strict=True):
            self.refined[row, held] = tau


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
    """Bisects on the step time within one class of plans; keeps its working set and refinements between calls."""

    def __init__(self, problem: Problem, pools: Sequence[Pool]) -> None:
        self.problem = problem
        self.pools = pools
        self.working: list[set[int]] = [set() for _ in pools]
        self.mix: Mix | None = None

    def least_step_s(self, upper_s: float, lower_s: float) -> float:
        """Return a step time no plan of the class beats, at most `upper_s` (less `PRECISION`)."""
        high = upper_s * (1 - PRECISION)
        if not self.possible(high):
            return high
        low = lower_s if lower_s > 0 else high / 1e4
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
            samples = [pool.samples(step_s) for pool in self.pools]
            mix = self._solve(samples)
            if mix.samples >= batch * (1 - 1e-9):
                if not self._refine_used(mix, samples, step_s):
                    self.mix = mix
                    return True
            elif not self._add_improving(mix, samples):
                return False

    def _solve(self, samples: Sequence[Ints]) -> Mix:
        columns: list[tuple[int, int]] = []
        values: list[Ints] = []
        used: list[Ints] = []
        for index, pool in enumerate(self.pools):
            rows = np.array(sorted(self.working[index]), dtype=np.int64)
            rows = rows[samples[index][rows] > 0]
            columns += [(index, row) for row in rows.tolist()]
            values.append(samples[index][rows])
            used.append(pool.patterns.used[rows])
        num_groups = len(self.problem.devices_g)
        if not columns:
            return Mix(samples=0.0, copies=np.zeros(0), prices_g=np.zeros(num_groups), rows=())
        result = linprog(
            -np.concatenate(values).astype(float),
            A_ub=np.concatenate(used).T,
            b_ub=np.array(self.problem.devices_g, dtype=float),
            method="highs-ds",
        )
        prices = -np.asarray(result.ineqlin.marginals)
        return Mix(samples=-result.fun, copies=np.asarray(result.x), prices_g=prices, rows=tuple(columns))

    def _refine_used(self, mix: Mix, samples: Sequence[Ints], step_s: float) -> bool:
        """Refine the patterns an optimum rests on; return whether there was anything to refine."""
        wanted: dict[tuple[int, int], list[int]] = {}
        for column in np.flatnonzero(mix.copies > 1e-9).tolist():
            index, row = mix.rows[column]
            level = self.pools[index].level(row, step_s)
            if level is not None:
                wanted.setdefault((index, level), []).append(row)
        for (index, level), rows in wanted.items():
            self._refine_rows((index, level), rows, mix, samples)
        return bool(wanted)

    def _refine_rows(self, where: tuple[int, int], rows: list[int], mix: Mix, samples: Sequence[Ints]) -> None:
        """Refine `rows` and, in the same sweep, the unrefined patterns nearest to entering the optimum."""
        index, level = where
        pool = self.pools[index]
        working = np.array(sorted(self.working[index]), dtype=np.int64)
        first, last = level, next((q for q in HELD_LEVELS if q > level), 1 << 40)
        count = samples[index][working] // pool.tables.microbatch
        working = working[(count >= first) & (count < last)]
        slack = pool.patterns.used[working] @ mix.prices_g - samples[index][working]
        chosen = dict.fromkeys(rows)
        for row in working[np.argsort(slack, kind="stable")].tolist():
            if len(chosen) >= BATCH_OF_REFINEMENTS:
                break
            if (row, level) not in pool.refined:
                chosen[row] = None
        pool.refine(list(chosen), level)

    def _add_improving(self, mix: Mix, samples: Sequence[Ints]) -> bool:
        """Add patterns outside the working set that the dual prices do not rule out; False proves impossibility."""
        found = False
        for index, pool in enumerate(self.pools):
            gain = samples[index] - pool.patterns.used @ mix.prices_g
            rows = np.flatnonzero((gain > 1e-9 * np.maximum(samples[index], 1)) & (samples[index] > 0))
            rows = rows[~np.isin(rows, np.fromiter(self.working[index], dtype=np.int64))]
            if not len(rows):
                continue
            found = True
            devices = np.maximum(pool.patterns.used[rows].sum(axis=1), 1)
            order = np.argsort(-gain[rows] / devices, kind="stable")
            self.working[index].update(rows[order[:NEW_COLUMNS]].tolist())
        return found


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
