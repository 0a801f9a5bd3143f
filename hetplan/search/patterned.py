"""The pattern search: for clusters too large to try everything.

Single-shape plans first (`start`), then the lower bound with the patterns it rests on (`bound`), then mixes of several
shapes for step times upward from the bound (`mixes`), their cuts improved one layer at a time (`columns.improve`).
Every layout is priced by `estimate`; what follows the pipelines (gradients, optimizer) is learned from the layouts
priced so far and taken off the time a mix may use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hetplan.plan.records import ScheduleName
from hetplan.search.after import FirstStages, after_seconds, classes_of, nothing_after
from hetplan.search.book import Book
from hetplan.search.bound import BoundSearch, Pool, Refined, device_seconds_s
from hetplan.search.columns import Column, distinct, improve, make_columns
from hetplan.search.mixes import choices_within, solve_mix
from hetplan.search.patterns import Patterns, bound_lines, enumerate_patterns
from hetplan.search.problem import MANY_RANKS, Problem, Tables, build_tables
from hetplan.search.start import Field, best_starts, columns_of, even_layouts, layout_of
from hetplan.specs.workload import SHARDINGS, Sharding

MOST_COLUMNS = 96
MIX_EFFORT = 0.5
MIX_ROUNDS = 10
MIXED_CLASSES = 2
START_RANKS = 64
"""Data-parallel ranks taken for granted when single shapes are ranked."""
LARGER_MICROBATCH_GAIN = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """The bound of one class of plans, and the optimum of its linear program."""

    sharding: Sharding
    where: FirstStages
    step_s: float
    bounds: BoundSearch


class PatternSearch:
    """Tables and patterns of one problem, made when they are first needed."""

    def __init__(self, problem: Problem, book: Book) -> None:
        self.problem = problem
        self.book = book
        self.schedule: ScheduleName = problem.limits.schedules[0]
        self._tables: dict[tuple[int, Sharding, int, int], Tables | None] = {}
        self._patterns: dict[tuple[int, Sharding, int], Patterns] = {}
        self.sizes = self._useful_sizes()
        self.proved: list[Proved] = []
        self._refined: dict[tuple[int, Sharding], Refined] = {}

    def tables(self, microbatch: int, sharding: Sharding, degree: int, ranks: int = 1) -> Tables | None:
        """Return the cost tables, built once."""
        moving = ranks if sharding in ("gradients", "full") else 1
        key = (microbatch, sharding, 1 if sharding == "none" else degree, moving)
        if key not in self._tables:
            self._tables[key] = build_tables(self.problem, *key)
        return self._tables[key]

    def patterns(self, microbatch: int, sharding: Sharding, ranks: int) -> Patterns:
        """Return the patterns of a microbatch size with the seconds of a sharding."""
        key = (microbatch, sharding, ranks if sharding in ("gradients", "full") else 1)
        if key not in self._patterns:
            tables = self.tables(microbatch, sharding, MANY_RANKS, ranks)
            if tables is None:
                raise ValueError(microbatch)
            self._patterns[key] = enumerate_patterns(self.problem, tables)
        return self._patterns[key]

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

    @property
    def loosest(self) -> Sharding:
        """The allowed sharding that leaves most memory."""
        return next(s for s in reversed(SHARDINGS) if s in self.problem.limits.sharding)

    def bound_tables(self) -> list[Tables]:
        """Return the loosest tables of every microbatch size."""
        tables = (self.tables(size, self.loosest, MANY_RANKS) for size in self.sizes)
        return [table for table in tables if table is not None]

    def start(self) -> None:
        """Price the best single-shape plans."""
        self.book.enter("single shapes")
        for start in best_starts(self.problem, list(self._fields())):
            size = self.sizes[start.size]
            tables = self.tables(size, start.sharding, degree_class(start.copies), degree_class(start.copies))
            if tables is None:
                continue
            patterns = self.patterns(size, start.sharding, START_RANKS).take(np.array([start.row]))
            for column in columns_of(self.problem, tables, patterns, self.schedule):
                if column is not None:
                    for layout in even_layouts(self.problem, column):
                        self.book.consider(layout)

    def _fields(self) -> Iterator[Field]:
        everywhere = FirstStages(groups=frozenset(range(len(self.problem.devices_g))), crossing=False)
        for sharding, (index, size) in product(self.problem.limits.sharding, enumerate(self.sizes)):
            tables = self.tables(size, sharding, MANY_RANKS, START_RANKS)
            if tables is not None:
                yield Field(
                    size=index,
                    sharding=sharding,
                    tables=tables,
                    patterns=self.patterns(size, sharding, START_RANKS),
                    after=after_seconds(self.problem, tables, sharding, everywhere, START_RANKS),
                )

    def prove(self) -> float:
        """Return a step time no plan of the space beats: the least over all classes of plans."""
        self.book.enter("bound")
        floor_s = device_seconds_s(self.problem, self.bound_tables())
        high_s = self.book.best_step_s
        if not np.isfinite(high_s):
            return floor_s
        ranks = self._fewest_replicas(high_s)
        bound_s = high_s
        order = self._promising_shardings()
        rest = [s for s in self.problem.limits.sharding if s not in order]
        for sharding, where in product([*order, *rest], classes_of(self.problem)):
            self.book.keep_time()
            bounds = self._class_bounds(sharding, where, ranks)
            step_s = bounds.least_step_s(bound_s, floor_s)
            if bounds.mix is not None:
                self.proved.append(Proved(sharding=sharding, where=where, step_s=step_s, bounds=bounds))
            bound_s = min(bound_s, step_s)
        return max(floor_s, bound_s)

    def _class_bounds(self, sharding: Sharding, where: FirstStages, ranks: int) -> BoundSearch:
        pools = []
        for size in self.sizes:
            tables = self.tables(size, sharding, MANY_RANKS, ranks)
            if tables is None:
                continue
            patterns = self.patterns(size, sharding, ranks)
            after = after_seconds(self.problem, tables, sharding, where, ranks)
            pool = Pool(self.problem, tables, patterns, after, self._refined.setdefault((size, sharding), {}))
            groups = np.array([mesh.group for mesh in self.problem.meshes])
            pool.inside = np.isin(groups[patterns.mesh[:, 0]], np.array(sorted(where.groups)))
            pools.append(pool)
        return BoundSearch(self.problem, pools)

    def _fewest_replicas(self, step_s: float) -> int:
        """Return how many replicas it takes at least to meet the batch within `step_s`."""
        most = 1
        for size in self.sizes:
            tables = self.tables(size, self.loosest, MANY_RANKS)
            if tables is not None:
                lines = bound_lines(self.patterns(size, self.loosest, 1), tables, nothing_after(self.problem))
                most = max(most, int(lines.most_microbatches(step_s).max(initial=0)) * size)
        return max(1, -(-self.problem.batch // most))

    def mix(self, effort: float) -> None:
        """Price mixes of several shapes for step times from the bounds upward."""
        self.book.enter("mixes")
        ranked = sorted(self.proved, key=lambda proved: proved.step_s)[:MIXED_CLASSES]
        for proved in ranked:
            columns = self._columns(proved)
            if columns:
                self._mix_columns(columns, proved, effort / len(ranked))

    def _promising_shardings(self) -> list[Sharding]:
        """Return the shardings of the best layouts so far, best first, two at most."""
        best: dict[Sharding, float] = {}
        for priced in self.book.kept():
            best.setdefault(priced.candidate.layout.sharding, priced.value)
        ranked = sorted(best, key=lambda sharding: best[sharding])
        return ranked[:2] or list(self.problem.limits.sharding[:1])

    def _columns(self, proved: Proved) -> list[Column]:
        """Return concrete columns of the patterns nearest to the linear program's optimum."""
        mix = proved.bounds.mix
        if mix is None:
            return []
        step_s = proved.step_s * 1.005
        ranked: list[tuple[float, int, int, int]] = []
        for index, pool in enumerate(proved.bounds.pools):
            rows = np.array(sorted(proved.bounds.working[index]), dtype=np.int64)
            samples = pool.samples(step_s)[rows]
            cost = pool.patterns.used[rows] @ mix.prices_g
            slack = (cost - samples) / np.maximum(cost, 1e-12)
            for row in np.flatnonzero(samples > 0).tolist():
                ranked.append((float(slack[row]), index, int(rows[row]), int(samples[row]) // pool.tables.microbatch))
        ranked.sort()
        copies = degree_class(max(1, int(mix.copies.sum() * 0.9)))
        found: list[Column | None] = []
        wanted: dict[tuple[int, int], list[int]] = {}
        for _, index, row, most in ranked[:MOST_COLUMNS]:
            stages = int(proved.bounds.pools[index].patterns.stages[row])
            wanted.setdefault((index, min(most, stages)), []).append(row)
        for (index, held), rows in wanted.items():
            pool = proved.bounds.pools[index]
            tables = self.tables(pool.tables.microbatch, proved.sharding, copies, copies)
            if tables is not None:
                patterns = pool.patterns.take(np.array(rows))
                found += make_columns(self.problem, tables, patterns, held, self.schedule)
        return distinct(found)

    def _mix_columns(self, columns: list[Column], proved: Proved, effort: float) -> None:
        """Ask for mixes within ever longer step times until one meets its price; learn what follows the pipelines."""
        after = self._after_columns(columns, proved)
        factor, step_s, spent = 1.0, proved.step_s * 1.001, 0.0
        for _ in range(MIX_ROUNDS):
            if spent >= effort or step_s >= self.book.best_step_s * 1.01:
                return
            self.book.keep_time()
            choices = choices_within(self.problem, columns, [step_s - factor * a for a in after])
            answer = solve_mix(self.problem, columns, choices, min(MIX_EFFORT, effort - spent), self.book.request.seed)
            if answer is None or not answer.rows:
                spent += answer.effort if answer else 0.0
                self.book.effort += answer.effort if answer else 0.0
                step_s *= 1.008
                continue
            spent += answer.effort
            self.book.effort += answer.effort
            step_s, factor = self._price_mix(columns, answer.rows, after, (step_s, factor))

    def _price_mix(
        self,
        columns: list[Column],
        rows: Sequence[tuple[int, int, int]],
        after: Sequence[float],
        at: tuple[float, float],
    ) -> tuple[float, float]:
        """Price a mix with its cuts improved; return the next step time to ask for and the learned factor."""
        step_s, factor = at
        better = []
        for j, count, copies in rows:
            column = columns[j]
            tables = self.tables(column.microbatch, column.sharding, degree_class(copies), degree_class(copies))
            few = len(column.stages) <= 16 and count <= 512
            improved = improve(self.problem, tables, column, count) if tables is not None and few else column
            better.append((improved, count, copies))
        for mix in ([(columns[j], count, copies) for j, count, copies in rows], better):
            value = self.book.consider(layout_of(mix))
            if self.book.request.objective == "time" and np.isfinite(value):
                slowest = max(range(len(mix)), key=lambda i: mix[i][0].pipeline_s(mix[i][1]) + after[rows[i][0]])
                tail_s = value - mix[slowest][0].pipeline_s(mix[slowest][1])
                if after[rows[slowest][0]] > 0 and tail_s > factor * after[rows[slowest][0]] * 1.02:
                    factor = min(8.0, tail_s / after[rows[slowest][0]])
        return step_s * 1.006, factor

    def _after_columns(self, columns: Sequence[Column], proved: Proved) -> list[float]:
        """Return what should follow each column's pipeline: its first stage's layers at the class's pace."""
        index = {mesh: m for m, mesh in enumerate(self.problem.meshes)}
        pools = {pool.tables.microbatch: pool for pool in proved.bounds.pools}
        found = []
        for column in columns:
            pool = pools[column.microbatch]
            first = column.stages[0]
            share = float(pool.tables.weight_l[first.first_layer : first.end_layer].sum())
            found.append(share * float(pool.after.first_m[index[first.mesh]]))
        return found


def degree_class(copies: int) -> int:
    """Return the largest power of two that is at most `copies`."""
    return 1 << (max(1, copies).bit_length() - 1)
