"""The pattern search: for clusters too large to try everything.

Single-shape plans first (`start`), then the lower bound with the patterns it rests on (`bound`), then mixes of several
shapes for step times upward from the bound (`mixes`), their cuts improved one layer at a time (`columns.improve`).
Every layout is priced by `estimate`; what follows the pipelines (gradients, optimizer) is learned from the layouts
priced so far and taken off the time a mix may use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.plan.records import ScheduleName
from hetplan.search.book import Book
from hetplan.search.bound import BoundSearch, Pool, device_seconds_s
from hetplan.search.columns import Column, distinct, improve
from hetplan.search.mixes import choices_within, solve_mix
from hetplan.search.patterns import enumerate_patterns, most_microbatches
from hetplan.search.problem import MANY_RANKS, Problem, Tables, build_tables
from hetplan.search.start import best_patterns, columns_of, even_layouts, layout_of
from hetplan.specs.workload import SHARDINGS, Sharding

MOST_COLUMNS = 96
MIX_EFFORT = 0.5
MIX_ROUNDS = 10
LARGER_MICROBATCH_GAIN = 1e-3


class PatternSearch:
    """Tables and pools of one problem, made when they are first needed."""

    def __init__(self, problem: Problem, book: Book) -> None:
        self.problem = problem
        self.book = book
        self.schedule: ScheduleName = problem.limits.schedules[0]
        self._tables: dict[tuple[int, Sharding, int], Tables | None] = {}
        allowed = problem.limits.sharding
        self.loosest: Sharding = next(s for s in reversed(SHARDINGS) if s in allowed)
        self.sizes = self._useful_sizes()
        self.pools = [self._pool(size) for size in self.sizes]
        self.bounds = BoundSearch(problem, self.pools)

    def tables(self, microbatch: int, sharding: Sharding, degree: int) -> Tables | None:
        """Return the cost tables, built once."""
        key = (microbatch, sharding, 1 if sharding == "none" else degree)
        if key not in self._tables:
            self._tables[key] = build_tables(self.problem, *key)
        return self._tables[key]

    def _useful_sizes(self) -> tuple[int, ...]:
        """Return the microbatch sizes worth trying: larger ones only while some mesh gets faster for each sample."""
        chosen: list[int] = []
        before: np.ndarray | None = None
        for size in self.problem.microbatches:
            tables = self.tables(size, self.loosest, MANY_RANKS)
            if tables is None or not tables.usable_m.any():
                continue
            pace = np.where(tables.usable_m, tables.unit_m / size, np.inf)
            if before is not None and self.problem.limits.microbatch is None:
                both = np.isfinite(pace)
                gained = (pace[both] < before[both] * (1 - LARGER_MICROBATCH_GAIN)) | ~np.isfinite(before[both])
                if not gained.any():
                    break
            chosen.append(size)
            before = pace if before is None else np.minimum(pace, before)
        return tuple(chosen)

    def _pool(self, size: int) -> Pool:
        tables = self.tables(size, self.loosest, MANY_RANKS)
        if tables is None:
            raise ValueError(size)
        return Pool(problem=self.problem, tables=tables, patterns=enumerate_patterns(self.problem, tables))

    def start(self) -> None:
        """Price the best single-shape plans."""
        self.book.enter("single shapes")
        for index, row, seconds in best_patterns(self.problem, self.pools):
            patterns = self.pools[index].patterns.take(np.array([row]))
            room = min(d // u for d, u in zip(self.problem.devices_g, patterns.used[0].tolist(), strict=True) if u)
            for sharding in self.problem.limits.sharding:
                tables = self.tables(self.sizes[index], sharding, _degree_class(room))
                if tables is None or (sharding != "none" and room == 1):
                    continue
                for column in columns_of(self.problem, tables, patterns, seconds, self.schedule):
                    if column is not None:
                        for layout in even_layouts(self.problem, column):
                            self.book.consider(layout)

    def prove(self) -> float:
        """Return a step time no plan of the space beats."""
        self.book.enter("bound")
        floor_s = device_seconds_s(self.problem, [pool.tables for pool in self.pools])
        upper_s = self.book.best_step_s
        if not np.isfinite(upper_s):
            upper_s = max(floor_s, 1e-9)
            while not self.bounds.possible(upper_s) and upper_s < 1e9:
                upper_s *= 4
        return max(floor_s, self.bounds.least_step_s(upper_s, floor_s))

    def mix(self, bound_s: float, effort: float) -> None:
        """Price mixes of several shapes for step times from the bound upward."""
        self.book.enter("mixes")
        shardings = self._promising_shardings()
        for sharding in shardings:
            columns = self._columns(sharding, bound_s)
            if columns:
                self._mix_columns(columns, bound_s, effort / len(shardings))

    def _promising_shardings(self) -> list[Sharding]:
        """Return the shardings of the best layouts so far, best first, two at most."""
        best: dict[Sharding, float] = {}
        for priced in self.book.kept():
            best.setdefault(priced.candidate.layout.sharding, priced.value)
        ranked = sorted(best, key=lambda sharding: best[sharding])
        return ranked[:2] or list(self.problem.limits.sharding[:1])

    def _columns(self, sharding: Sharding, bound_s: float) -> list[Column]:
        """Return concrete columns of the patterns nearest to the linear program's optimum."""
        mix = self.bounds.mix
        if mix is None:
            return []
        step_s = bound_s * 1.005
        ranked: list[tuple[float, int, int]] = []
        for index, pool in enumerate(self.pools):
            rows = np.array(sorted(self.bounds.working[index]), dtype=np.int64)
            if not len(rows):
                continue
            cost = pool.patterns.used[rows] @ mix.prices_g
            samples = pool.samples(step_s, rows)
            slack = (cost - samples) / np.maximum(cost, 1e-12)
            ranked += [(float(s), index, int(r)) for s, r, n in zip(slack, rows, samples, strict=True) if n > 0]
        ranked.sort()
        degree = _degree_class(max(1, int(mix.copies.sum() * 0.9)))
        found: list[Column | None] = []
        for index, size in enumerate(self.sizes):
            tables = self.tables(size, sharding, degree)
            rows = np.array([row for _, i, row in ranked[:MOST_COLUMNS] if i == index], dtype=np.int64)
            if tables is None or not len(rows):
                continue
            patterns = self.pools[index].patterns.take(rows)
            most = most_microbatches(patterns, self.pools[index].tables, step_s)
            for held in sorted(set(np.minimum(most, patterns.stages).tolist())):
                some = patterns.take(np.flatnonzero(np.minimum(most, patterns.stages) == held))
                found += self._improved(tables, columns_of(self.problem, tables, some, step_s, self.schedule), step_s)
        return distinct(found)

    def _improved(self, tables: Tables, columns: Sequence[Column | None], step_s: float) -> list[Column | None]:
        result: list[Column | None] = []
        for column in columns:
            if column is None:
                continue
            result.append(column)
            count = column.most_microbatches(step_s)
            if 1 < len(column.stages) <= 16 and 0 < count <= 512:
                self.book.keep_time()
                result.append(improve(self.problem, tables, column, count))
        return result

    def _mix_columns(self, columns: list[Column], bound_s: float, effort: float) -> None:
        tail_s = self._tail_s()
        step_s = max(bound_s * 1.001, bound_s + 0.5 * tail_s)
        spent = 0.0
        for _ in range(MIX_ROUNDS):
            if spent >= effort or step_s >= self.book.best_step_s * 1.01:
                return
            self.book.keep_time()
            choices = choices_within(self.problem, columns, [step_s - tail_s] * len(columns))
            answer = solve_mix(self.problem, columns, choices, min(MIX_EFFORT, effort - spent), self.book.request.seed)
            if answer is None or not answer.rows:
                spent += answer.effort if answer else 0.0
                self.book.effort += answer.effort if answer else 0.0
                step_s *= 1.01
                continue
            spent += answer.effort
            self.book.effort += answer.effort
            layout = layout_of([(columns[j], count, copies) for j, count, copies in answer.rows])
            value = self.book.consider(layout)
            pipelines_s = max(columns[j].pipeline_s(count) for j, count, _ in answer.rows)
            if not np.isfinite(value) or value <= step_s * 1.001:
                step_s *= 1.004
                continue
            learned = value - pipelines_s if self.book.request.objective == "time" else tail_s
            if learned > tail_s * 1.02:
                tail_s = learned
                step_s = max(step_s, pipelines_s + tail_s * 0.9)
            else:
                step_s *= 1.006

    def _tail_s(self) -> float:
        """Return the seconds that follow the pipelines in the best layout so far."""
        best = self.book.best
        if best is None:
            return 0.0
        return max(0.0, best.candidate.estimate.step_s - max(best.candidate.estimate.replica_s))


def _degree_class(copies: int) -> int:
    """Return the largest power of two that is at most `copies`."""
    return 1 << (max(1, copies).bit_length() - 1)
