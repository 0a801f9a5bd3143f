"""The proved lower bound for mixes of replica shapes: a linear program over patterns.

For a step time T every pattern j can take at most a_j(T) samples (`patterns.Lines`: over all its cuts, relaxed). With
x_j copies of it,

    maximise sum_j a_j x_j   subject to   sum_j used_jg x_j <= devices_g  for every group g,   x_j >= 0

is at least what any mix of replicas can take in T; T is impossible when that falls short of the global batch. The
smallest possible T is found by bisection. The program runs over a working set; with its dual prices every other pattern
is then checked, and those that would improve join the set, so that the result holds for all patterns.

A second bound needs no patterns: every layer of every sample takes device-seconds somewhere, and a group offers
`devices x T` of them (`device_seconds_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.costs.records import Floats
from hetplan.search.after import Units
from hetplan.search.linear import least_makespan, pack
from hetplan.search.patterns import Ints, Patterns, bound_lines, whole_layers_tau_s
from hetplan.search.problem import Problem, Tables

PRECISION = 1e-3
NEW_COLUMNS = 300


class Pool:
    """The patterns of one microbatch size under one sharding, with the lines that bound them."""

    def __init__(self, tables: Tables, patterns: Patterns, after: tuple[Units, float] | None = None) -> None:
        self.tables = tables
        self.patterns = patterns
        floor_tau_s = whole_layers_tau_s(patterns, tables)
        self.possible = np.isfinite(floor_tau_s)
        self._lines = bound_lines(patterns, tables, after, np.where(self.possible, floor_tau_s, 1e150))

    def samples(self, step_s: float) -> Ints:
        """Return the most samples each pattern can take in `step_s`, (N,)."""
        most = np.where(self.possible, self._lines.most_microbatches(step_s), 0)
        return np.asarray(most * self.tables.microbatch)


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
    """Bisects on the step time under one sharding; keeps its working set between calls."""

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
        samples = [pool.samples(step_s) for pool in self.pools]
        while True:
            mix = self._solve(samples)
            if mix.samples >= self.problem.batch * (1 - 1e-9):
                self.mix = mix
                return True
            if not self._add_improving(mix, samples):
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
        found = pack(np.concatenate(values).tolist(), np.concatenate(used), self.problem.devices_g)
        return Mix(samples=found.value, copies=found.amounts, prices_g=found.prices_g, rows=tuple(columns))

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
    devices = [float(problem.devices_g[g]) for g in alive]
    return least_makespan(per_sample[alive] * problem.batch, devices) * (1 - 1e-9)
