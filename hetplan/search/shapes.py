"""Plans of one replica shape, by branch and bound: the best of them, and a proof.

For a pattern with at most c copies the batch of B samples in microbatches of b needs m = ceil(B / (b c)) microbatches a
copy, or more with fewer copies. So no such plan is faster than the bounds of `patterns` for that m, least over all cuts
(`least_step_s`):

    rate     sum_i n_i T / (m t_i + A_i) >= layers
    first    min over tau of  W + C + (m - 1) beta tau + A
    flow     min over tau of  2 W + C + (m - 1 - p) tau + A                         (m > p)
    few      C + W (1 + 1 / (1 + r)),  r = (p - m + 1) / ((m - 1) beta)             (1 < m <= p)

The last one: under 1F1B the last m - 1 stages hold fewer than m microbatches, hence T >= W + C + W_last; each of the
p - m + 1 stages before them takes at most (T - W - C) / ((m - 1) beta), hence the form above, with W least for stage
times up to (best known T) / m. Shapes are visited in the order of these bounds; each gets its best-balanced cut, the
exact critical path of that cut, and, while that is still below the best, a price by `estimate`. When the next bound
exceeds the best plan, the best is proved for all shapes of the space, each with its best-balanced cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.costs.records import Floats
from hetplan.plan.records import Layout
from hetplan.search.after import Ending
from hetplan.search.book import Book
from hetplan.search.columns import Column, finished, improve, make_columns, refitted
from hetplan.search.layouts import layout_of
from hetplan.search.patterns import Ints, Patterns, backward_share, breakpoints, fill_work_s, whole_layers_tau_s
from hetplan.search.problem import Problem, Tables
from hetplan.specs.workload import Sharding

SWEEP = 1024
"""Patterns that get their best cut in one go."""
TOLERANCE = 0.004
"""The visit ends when no bound is further below the best plan than this."""
MOST_VISITED = 7_200
IMPROVED_STAGES = 24
NEAR_BEST = 1.03
BIG_S = 1e150
MOST_DEGREE = 64
"""Sharing states wider than this is not told apart when cuts are made."""
TablesOf = Callable[[int, Sharding, int, int], Tables | None]
"""(microbatch, sharding, ranks that share memory, ranks that exchange weights) -> cost tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All patterns of one microbatch size under one sharding, with what follows pipelines of 2^k replicas."""

    sharding: Sharding
    tables: Tables
    """For bounds: states shared out as widely as one likes."""
    patterns: Patterns
    copies: Ints
    """Most copies the devices allow, (N,)."""
    after_km: Floats
    """A of a unit of layers by (log2 of the replicas, mesh)."""


def make_field(problem: Problem, tables: Tables, patterns: Patterns) -> Field:
    """Return a field; patterns that do not fit even once have no copies."""
    devices = np.array(problem.devices_g)
    used = patterns.used
    room = np.where(used > 0, devices[None, :] // np.maximum(used, 1), 1 << 40).min(axis=1)
    copies = np.minimum(room, problem.batch // tables.microbatch)
    most = int(copies.max(initial=1))
    after = [Ending(problem, tables.sharding, 1 << k).units(tables) for k in range(most.bit_length())]
    return Field(
        sharding=tables.sharding,
        tables=tables,
        patterns=patterns,
        copies=copies,
        after_km=np.array(after),
    )


def least_step_s(problem: Problem, field: Field, best_s: float) -> Floats:
    """Return, for each pattern, a step time no plan of copies of it beats (infinite where none exists), (N,)."""
    parts = problem.batch // field.tables.microbatch
    exists = (field.copies > 0) & (problem.batch % field.tables.microbatch == 0)
    copies = np.maximum(field.copies, 1)
    count = -(-parts // copies)
    half = np.maximum(copies // 2, 1)
    level = np.minimum(np.floor(np.log2(half)).astype(int), len(field.after_km) - 1)
    after = np.concatenate([field.after_km, np.zeros((len(field.after_km), 1))], axis=1)
    floor_tau_s = whole_layers_tau_s(field.patterns, field.tables, count)
    many = _bounds_s(field, count, after[level[:, None], field.patterns.mesh], (floor_tau_s, best_s))
    # With at most half the copies every one of them runs twice the microbatches.
    few = np.where(copies > 1, np.maximum(count, -(-parts // half)) * np.minimum(floor_tau_s, BIG_S), np.inf)
    return np.where(exists, np.minimum(many, few), np.inf)


def _bounds_s(field: Field, count: Ints, after: Floats, at: tuple[Floats, float]) -> Floats:
    floor_tau_s, best_s = np.minimum(at[0], BIG_S), at[1]
    patterns, tables = field.patterns, field.tables
    beta = backward_share(tables)
    there = np.isfinite(patterns.unit_s)
    unit = np.concatenate([patterns.unit_s[:, :1], patterns.unit_s], axis=1)
    held = np.concatenate([np.ones_like(patterns.count[:, :1]), patterns.count], axis=1).astype(float)
    held[:, 1] -= 1
    extra = np.zeros_like(unit)
    extra[:, 0] = after[:, 0]
    p, m, comm = patterns.stages, count, patterns.comm_s
    each = m[:, None] * np.where(there, patterns.unit_s, 1.0) + after
    rate = tables.weight_l.sum() / np.where(there, patterns.count / each, 0.0).sum(axis=1)
    tau, load = breakpoints(unit, held, extra, (tables, floor_tau_s), work_factor=1.0)
    first = comm + (load + (m - 1) * beta * tau).min(axis=0)
    tau, load = breakpoints(unit, held, extra, (tables, floor_tau_s), work_factor=2.0)
    flow = np.where(m > p, comm + (load + (m - 1 - p) * tau).min(axis=0), 0.0)
    work = fill_work_s(unit, held, tables, np.minimum(best_s, BIG_S) / m)
    share = (p - m + 1) / np.maximum((m - 1) * beta, 1e-9)
    few = np.where((m > 1) & (m <= p), comm + work * (1 + 1 / (1 + np.maximum(share, 0.0))), 0.0)
    return np.asarray(np.maximum.reduce([rate, first, flow, few, m * floor_tau_s]))


class ShapeSearch:
    """Visits shapes of all fields in the order of their bounds."""

    def __init__(self, book: Book, fields: Sequence[Field], most_visited: int = MOST_VISITED) -> None:
        self.most_visited = most_visited
        self.book = book
        self.problem = book.problem
        self.fields = fields
        self.visited = 0
        self.columns: list[Column] = []
        """Columns that came close to the best."""

    def run(self, tables_of: TablesOf) -> float:
        """Price shapes until none left can be faster; return the proved step time."""
        best_s = self.book.best_step_s
        bounds = [least_step_s(self.problem, field, best_s) for field in self.fields]
        where = np.concatenate([np.full(len(bound), f) for f, bound in enumerate(bounds)])
        rows = np.concatenate([np.arange(len(bound)) for bound in bounds])
        values = np.concatenate(bounds)
        order = np.argsort(values, kind="stable")
        at = 0
        while at < len(order):
            self.book.keep_time()
            limit = self.book.best_step_s * (1 - TOLERANCE)
            if values[order[at]] >= limit or self.visited >= self.most_visited:
                break
            sweep = order[at : at + min(SWEEP, self.most_visited)]
            sweep = sweep[values[sweep] < limit]
            for f in np.unique(where[sweep]).tolist():
                self._visit(self.fields[f], rows[sweep[where[sweep] == f]], tables_of)
            at += len(sweep)
            self.visited += len(sweep)
            self.book.tell()
        left = float(values[order[at]]) if at < len(order) else np.inf
        return min(left, self.book.best_step_s)

    def _visit(self, field: Field, rows: Ints, tables_of: TablesOf) -> None:
        parts = self.problem.batch // field.tables.microbatch
        copies = field.copies[rows]
        counts = -(-parts // copies)
        held = np.where(counts >= field.patterns.stages[rows], self.problem.num_layers, _held_class(counts))
        degree = np.minimum(4 ** np.floor(np.log2(copies) / 2).astype(int), MOST_DEGREE)
        for share, flight in sorted(set(zip(degree.tolist(), held.tolist(), strict=True))):
            tables = tables_of(field.tables.microbatch, field.sharding, share, share)
            if tables is None:
                continue
            some = rows[(degree == share) & (held == flight)]
            made = make_columns(self.problem, tables, field.patterns.take(some), flight)
            ending = Ending(self.problem, field.sharding, share)
            for row, column in zip(some.tolist(), made, strict=True):
                if column is not None:
                    self._price(finished(self.problem, column, ending), int(field.copies[row]), tables_of)

    def _price(self, column: Column, copies: int, tables_of: TablesOf) -> None:
        parts = self.problem.batch // column.microbatch
        count = -(-parts // copies)
        near_s = self.book.best_step_s * NEAR_BEST
        if column.least_s(count) > near_s or column.step_s(count) > near_s:
            return
        self.columns.append(column)
        share = 1 << (copies.bit_length() - 1)
        tables = tables_of(column.microbatch, column.sharding, share, share)
        ending = Ending(self.problem, column.sharding, share)
        better = column
        if tables is not None:
            better = finished(self.problem, refitted(self.problem, tables, column, count), ending)
            if len(column.stages) <= IMPROVED_STAGES and count * len(column.stages) <= 1500:
                better = improve(self.problem, tables, better, count, ending)
        if better.step_s(count) > self.book.best_step_s * (1 + TOLERANCE):
            return
        for layout in copies_of(self.problem, better, copies):
            self.book.consider(layout)


def _held_class(held: Ints) -> Ints:
    """Round microbatch counts in flight up to a power of two: few distinct sets of cuts."""
    return np.asarray(1 << np.ceil(np.log2(np.maximum(held, 1))).astype(int))


def copies_of(problem: Problem, column: Column, copies: int) -> Iterator[Layout]:
    """Yield layouts of one column: the batch split evenly, and split as evenly as the most copies allow."""
    parts = problem.batch // column.microbatch
    count = -(-parts // copies)
    if parts % count == 0:
        yield layout_of([(column, count, parts // count)])
        return
    rows_allowed = problem.limits.max_shapes is None or problem.limits.max_shapes > 1
    if rows_allowed and not problem.limits.uniform_microbatches:
        fewest = -(-parts // count)
        rest = fewest * count - parts
        yield layout_of([(column, count, fewest - rest), (column, count - 1, rest)])
        return
    even = next(c for c in range(copies, 0, -1) if parts % c == 0)
    yield layout_of([(column, parts // even, even)])
