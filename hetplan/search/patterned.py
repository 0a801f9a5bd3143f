"""The pattern search: for clusters too large to try everything.

First plans of one shape, with their proof (`shapes`). Then the bound of mixes (`bound`): where it leaves room for a
better plan, CP-SAT looks for mixes of the columns the linear program values most (`mixes`) at step times between the
bound and the best plan. Every layout is priced by `estimate`; what follows the pipelines (gradients, optimizer) is
learned from the mixes priced so far and taken off the time a mix may use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hetplan.search.after import Ending, bare_weight
from hetplan.search.book import Book
from hetplan.search.bound import BoundSearch, Pool, device_seconds_s
from hetplan.search.columns import Column, distinct, finished, improve, make_columns
from hetplan.search.layouts import layout_of
from hetplan.search.mixes import choices_within, solve_mix
from hetplan.search.pattern_fields import Field, make_field
from hetplan.search.patterns import Patterns, enumerate_patterns
from hetplan.search.problem import MANY_RANKS, Problem, Tables, build_tables, travelling
from hetplan.search.shapes import MOST_VISITED, ShapeSearch
from hetplan.specs.workload import SHARDINGS, Sharding

MOST_COLUMNS = 40
NEAR_BEST = 16
MIX_EFFORT = 0.2
MIX_ROUNDS = 4
MIX_STEP = 0.6
"""Where between the bound and the best plan the next mix is asked for."""
MIXED_SHARDINGS = 1
LARGER_MICROBATCH_GAIN = 4e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """One sharding's linear program, and a step time no mix beats."""

    sharding: Sharding
    ranks: int
    step_s: float
    bounds: BoundSearch


class PatternSearch:
    """Tables and patterns of one problem, made when they are first needed."""

    def __init__(self, problem: Problem, book: Book) -> None:
        self.problem = problem
        self.book = book
        self._tables: dict[tuple[int, Sharding, int, int], Tables | None] = {}
        self._patterns: dict[tuple[int, Sharding, int], Patterns] = {}
        self.sizes = self._useful_sizes()
        self.proved: list[Proved] = []
        self.near_best: list[Column] = []
        self.num_shapes = 0

    def tables(self, microbatch: int, sharding: Sharding, degree: int, ranks: int = 1) -> Tables | None:
        """Return the cost tables, built once."""
        moving = ranks if sharding in ("gradients", "full") else 1
        key = (microbatch, sharding, 1 if sharding == "none" else degree, moving)
        if key not in self._tables:
            base = self.tables(microbatch, sharding, degree) if moving > 1 else None
            if moving == 1:
                self._tables[key] = build_tables(self.problem, *key[:3])
            else:
                self._tables[key] = None if base is None else travelling(self.problem, base, moving)
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

    def shapes(self, most_visited: int | None = None) -> float:
        """Price plans of one shape, at most so many stages of them (None: by the effort); return a value none beats."""
        self.book.enter("single shapes")
        most = int(MOST_VISITED * self.book.request.effort / 10) if most_visited is None else most_visited
        search = ShapeSearch(self.book, self.fields(), self.tables, most)
        bound_s = search.run()
        self.near_best = [column for _, column in sorted(search.columns, key=lambda one: one[0])[:NEAR_BEST]]
        self.num_shapes = sum(int((field.copies > 0).sum()) for field in search.fields)
        return bound_s

    def fields(self) -> list[Field]:
        """Return the patterns of every sharding and microbatch size.

        Tables of weights or gradients that travel are those of two ranks, so they say nothing of a replica that has
        no one to share with; such a replica is one of `none`, and has a field of its own where that is not allowed.
        """
        shardings = self.problem.limits.sharding
        kinds = [(sharding, 2) for sharding in shardings]
        if "none" not in shardings:
            kinds += [(sharding, 1) for sharding in shardings if sharding in ("gradients", "full")]
        fields = []
        for (sharding, ranks), size in product(kinds, self.sizes):
            tables = self.tables(size, sharding, MANY_RANKS, ranks)
            if tables is not None and tables.usable_m.any():
                most = self.problem.batch if ranks > 1 else 1
                fields.append(make_field(self.problem, tables, self.patterns(size, sharding, ranks), most))
        return fields

    def prove_mixes(self) -> float:
        """Return a step time no plan of the patterns beats, of however many shapes, under whatever sharding."""
        self.book.enter("bound of mixes")
        floor_s = device_seconds_s(self.problem, self.bound_tables())
        bound_s = self.book.best_step_s
        if not np.isfinite(bound_s):
            return floor_s
        loosest = [Pool(t, self.patterns(t.microbatch, self.loosest, 1)) for t in self.bound_tables()]
        step_s = BoundSearch(self.problem, loosest).least_step_s(bound_s, floor_s)
        most = max((int(pool.samples(bound_s).max(initial=0)) for pool in loosest), default=1)
        ranks = max(1, -(-self.problem.batch // max(1, most)))
        for sharding in self._by_promise()[:MIXED_SHARDINGS]:
            self.book.keep_time()
            self.proved.append(
                Proved(sharding=sharding, ranks=ranks, step_s=step_s, bounds=self._bounds_of(sharding, ranks))
            )
        return max(floor_s, step_s)

    def _by_promise(self) -> list[Sharding]:
        """Return the allowed shardings, those of the best layouts so far first."""
        best: dict[Sharding, float] = {}
        for priced in self.book.kept():
            best.setdefault(priced.candidate.layout.sharding, priced.value)
        ranked = sorted(best, key=lambda sharding: best[sharding])
        return [*ranked, *(s for s in self.problem.limits.sharding if s not in best)]

    def _bounds_of(self, sharding: Sharding, ranks: int) -> BoundSearch:
        ending = Ending(self.problem, sharding, ranks)
        pools = []
        for size in self.sizes:
            tables = self.tables(size, sharding, MANY_RANKS, 2)
            if tables is not None and tables.usable_m.any():
                after = (ending.units(tables), bare_weight(self.problem, tables))
                pools.append(Pool(tables, self.patterns(size, sharding, 2), after))
        return BoundSearch(self.problem, pools)

    def mix(self, effort: float) -> None:
        """Price mixes of several shapes for step times between the bound and the best plan."""
        self.book.enter("mixes")
        for proved in self.proved:
            columns = self._columns(proved)
            if columns:
                self._mix_columns(columns, proved, effort / len(self.proved))

    def _columns(self, proved: Proved) -> list[Column]:
        """Return the best cuts of the patterns nearest to the linear program's optimum for the best step time."""
        step_s = self.book.best_step_s
        if not proved.bounds.possible(step_s) or proved.bounds.mix is None:
            return []
        mix = proved.bounds.mix
        ranked: list[tuple[float, int, int, int]] = []
        for index, pool in enumerate(proved.bounds.pools):
            samples = pool.samples(step_s)
            cost = pool.patterns.used @ mix.prices_g
            slack = (cost - samples) / np.maximum(cost, 1e-12)
            best = np.argsort(np.where(samples > 0, slack, np.inf), kind="stable")[:MOST_COLUMNS]
            size = pool.tables.microbatch
            ranked += [(float(slack[r]), index, int(r), int(samples[r]) // size) for r in best if samples[r] > 0]
        ranked.sort()
        copies = degree_class(proved.ranks)
        wanted: dict[tuple[int, int], list[int]] = {}
        for _, index, row, count in ranked[:MOST_COLUMNS]:
            held = degree_class(2 * min(count, int(proved.bounds.pools[index].patterns.stages[row])) - 1)
            wanted.setdefault((index, held), []).append(row)
        found: list[Column | None] = []
        for (index, held), rows in wanted.items():
            pool = proved.bounds.pools[index]
            tables = self.tables(pool.tables.microbatch, proved.sharding, copies, copies)
            if tables is not None:
                found += make_columns(self.problem, tables, pool.patterns.take(np.array(rows)), held)
        return distinct([*found, *(c for c in self.near_best if c.sharding == proved.sharding)])

    def _mix_columns(self, columns: list[Column], proved: Proved, effort: float) -> None:
        """Bisect on the step time asked of a mix; learn from each price what follows the pipelines."""
        ending = Ending(self.problem, proved.sharding, proved.ranks)
        factor, spent = 1.0, 0.0
        low_s, high_s = proved.step_s, self.book.best_step_s
        for _ in range(MIX_ROUNDS):
            if spent >= effort or high_s - low_s < 2e-3 * high_s:
                return
            self.book.keep_time()
            step_s = low_s + (high_s - low_s) * MIX_STEP
            slower = [finished(self.problem, column, ending, factor) for column in columns]
            choices = choices_within(self.problem, slower, [step_s] * len(columns))
            answer = solve_mix(self.problem, columns, choices, min(MIX_EFFORT, effort - spent), self.book.request.seed)
            spent += answer.effort if answer else 0.0
            self.book.effort += answer.effort if answer else 0.0
            if answer is None or not answer.rows:
                low_s = step_s
                continue
            learned = self._price_mix([(slower[j], n, c) for j, n, c in answer.rows], ending, factor)
            if learned > factor * 1.02:
                factor = learned
            else:
                high_s = step_s

    def _price_mix(self, mix: Sequence[tuple[Column, int, int]], ending: Ending, factor: float) -> float:
        """Price a mix, and the same with its cuts improved; return the factor by which endings were too short."""
        better = []
        for column, count, copies in mix:
            tables = self.tables(column.microbatch, column.sharding, degree_class(copies), degree_class(copies))
            few = len(column.stages) <= 16 and count <= 256
            improved = improve(self.problem, tables, column, count, ending) if tables is not None and few else column
            better.append((improved, count, copies))
        for rows in (mix, better):
            value = self.book.consider(layout_of(rows))
            planned = max(column.step_s(count) for column, count, _ in rows)
            if self.book.request.objective == "time" and np.isfinite(value) and value > planned * 1.002:
                tails = max(max(column.after_s) for column, _, _ in rows) / factor
                if tails > 0:
                    factor = min(6.0, factor + (value - planned) / tails)
        return factor


def degree_class(copies: int) -> int:
    """Return the largest power of two that is at most `copies`."""
    return 1 << (max(1, copies).bit_length() - 1)
