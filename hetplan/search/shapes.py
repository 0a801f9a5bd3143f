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
from hetplan.search.patterns import (
    Ints,
    Patterns,
    backward_share,
    breakpoints,
    fill_work_s,
    whole_layers_tau_s,
    with_first_stage,
)
from hetplan.search.problem import Mesh, Problem, Tables
from hetplan.search.records import SearchRequest
from hetplan.specs.workload import Sharding

SWEEP = 1024
"""Patterns that get their best cut in one go."""
TOLERANCE = 0.004
"""The visit ends when no bound is further below the best plan than this."""
MOST_VISITED = 160_000
"""Stages of all shapes visited at the default effort of 10."""
IMPROVED_STAGES = 24
NEAR_BEST = 1.01
FEWEST_PRICES = 32
VISITS_A_PRICE = 200
"""One layout may be priced for every so many stages that may be visited."""
FEW_COPIES = 16
"""Where devices cost, numbers of copies below are tried one by one, larger ones by powers of two."""
NEXT_COPIES = 4
"""Numbers of copies below the most that are tried one by one."""
BIG_S = 1e150
MOST_DEGREE = 64
"""Sharing states wider than this is not told apart when cuts are made."""
FEW_DEGREE = 8
"""States shared by up to so many are told apart one by one: whether a cut fits at all may depend on it."""
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


def make_field(problem: Problem, tables: Tables, patterns: Patterns, most_copies: int) -> Field:
    """Return a field with at most so many copies; patterns that do not fit even once have none."""
    devices = np.array(problem.devices_g)
    used = patterns.used
    room = np.where(used > 0, devices[None, :] // np.maximum(used, 1), 1 << 40).min(axis=1)
    copies = np.minimum(room, min(most_copies, problem.batch // tables.microbatch))
    most = int(copies.max(initial=1))
    after = [Ending(problem, tables.sharding, 1 << k).units(tables) for k in range(most.bit_length())]
    return Field(
        sharding=tables.sharding,
        tables=tables,
        patterns=patterns,
        copies=copies,
        after_km=np.array(after),
    )


def least_step_s(problem: Problem, field: Field, copies: Ints, best_s: float) -> Floats:
    """Return, for each pattern, a step time no plan of at most `copies` copies of it beats, (N,).

    Infinite where there is no such plan. `best_s`: plans slower than this need not be told apart.
    """
    parts = problem.batch // field.tables.microbatch
    exists = (copies > 0) & (copies <= field.copies) & (problem.batch % field.tables.microbatch == 0)
    copies = np.maximum(copies, 1)
    count = -(-parts // copies)
    half = np.maximum(copies // 2, 1)
    level = np.minimum(np.floor(np.log2(half)).astype(int), len(field.after_km) - 1)
    after = np.concatenate([field.after_km, np.zeros((len(field.after_km), 1))], axis=1)
    floor_tau_s = whole_layers_tau_s(field.patterns, field.tables, count)
    many = _bounds_s(field, count, after[level[:, None], field.patterns.mesh], (floor_tau_s, best_s))
    # With at most half the copies every one of them runs twice the microbatches.
    few = np.where(copies > 1, np.maximum(count, -(-parts // half)) * np.minimum(floor_tau_s, BIG_S), np.inf)
    return np.where(exists, np.minimum(many, few), np.inf)


def objective_rates(problem: Problem, request: SearchRequest) -> Floats | None:
    """Return what a second of one device of each group costs at least, (G,); None: the step time itself counts."""
    prices = problem.prices
    names = [group.name for group in prices.cluster.groups]
    match request.objective:
        case "time":
            return None
        case "energy":
            return np.array([prices.power_w(name, 0.0) for name in names])
        case _:
            return np.array([np.inf if (usd := prices.usd_per_s(name)) is None else usd for name in names])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Patterns with a number of copies, waiting to be visited; arrays (entries,)."""

    field: Ints
    row: Ints
    copies: Ints
    value: Floats
    """No plan of the entry has a lower value of the objective."""


def _bounds_s(field: Field, count: Ints, after: Floats, at: tuple[Floats, float]) -> Floats:
    floor_tau_s, best_s = np.minimum(at[0], BIG_S), at[1]
    patterns, tables = field.patterns, field.tables
    beta = backward_share(tables)
    there = np.isfinite(patterns.unit_s)
    unit, held = with_first_stage(patterns)
    extra = np.zeros_like(unit)
    extra[:, 0] = after[:, 0]
    p, m, comm = patterns.stages, count, patterns.comm_s
    each = m[:, None] * np.where(there, patterns.unit_s, 1.0) + after
    rate = tables.weight_l.sum() / np.maximum(np.where(there, patterns.count / each, 0.0).sum(axis=1), 1 / BIG_S)
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
        self.rates_g = objective_rates(book.problem, book.request)
        self.visited = 0
        self.priced = 0
        self.passed_over = np.inf
        """Least value of what was too much to price."""
        self.columns: list[Column] = []
        """Columns that came close to the best."""

    def run(self, tables_of: TablesOf) -> float:
        """Price shapes until none left can be better; return a value of the objective none of them beats."""
        waiting = self._entries()
        order = np.argsort(waiting.value, kind="stable")
        at = 0
        while at < len(order):
            self.book.keep_time()
            limit = self.book.best_value * (1 - TOLERANCE)
            if waiting.value[order[at]] >= limit or self.visited >= self.most_visited:
                break
            sweep = order[at : at + max(1, min(SWEEP, self.most_visited // 10))]
            sweep = sweep[waiting.value[sweep] < limit]
            for f in np.unique(waiting.field[sweep]).tolist():
                some = sweep[waiting.field[sweep] == f]
                self._visit(self.fields[f], waiting.row[some], waiting.copies[some], tables_of)
                self.visited += int(self.fields[f].patterns.stages[waiting.row[some]].sum())
            at += len(sweep)
            self.book.tell()
        left = float(waiting.value[order[at]]) if at < len(order) else np.inf
        return min(left, self.passed_over, self.book.best_value)

    def _entries(self) -> Entry:
        """Return every pattern with as many copies as the devices allow; where devices cost, with fewer as well."""
        nothing = np.zeros(0, dtype=np.int64)
        parts: list[tuple[Ints, Ints, Ints, Floats]] = [(nothing, nothing, nothing, np.zeros(0))]
        for f, field in enumerate(self.fields):
            for copies in self._copies(field):
                seconds = least_step_s(self.problem, field, copies, self._slowest_s())
                if self.book.request.time_budget_s is not None:
                    seconds = np.where(seconds <= self.book.request.time_budget_s, seconds, np.inf)
                rows = np.flatnonzero(np.isfinite(seconds))
                value = seconds[rows]
                if self.rates_g is not None:
                    used = field.patterns.used[rows]
                    rate = np.where(used > 0, used * np.where(used > 0, self.rates_g, 0.0), 0.0).sum(axis=1)
                    value = value * rate * copies[rows] + self._least_work(field, rows)
                keep = np.isfinite(value)
                parts.append((np.full(int(keep.sum()), f), rows[keep], copies[rows][keep], value[keep]))
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return Entry(field=none, row=none, copies=none, value=np.zeros(0))
        field_of, rows, copies, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Entry(field=field_of, row=rows, copies=copies, value=values)

    def _least_work(self, field: Field, rows: Ints) -> Floats:
        """Return what the work itself costs at least (energy of busy devices above idle), (rows,)."""
        if self.book.request.objective != "energy":
            return np.zeros(len(rows))
        each = [self._busy_rate(mesh) * mesh.size for mesh in self.problem.meshes]
        unit = np.append(np.array(each) * field.tables.unit_m / field.tables.microbatch, np.inf)
        least = unit[field.patterns.mesh[rows]].min(axis=1)
        return np.asarray(least * float(field.tables.weight_l.sum()) * self.problem.batch)

    def _busy_rate(self, mesh: Mesh) -> float:
        """Return what a busy second of a device costs above an idle one."""
        prices = self.problem.prices
        return prices.power_w(mesh.name, 1.0) - prices.power_w(mesh.name, 0.0)

    def _slowest_s(self) -> float:
        """Return the slowest step time worth telling apart."""
        return self.book.best_step_s if self.rates_g is None else np.inf

    def _copies(self, field: Field) -> Iterator[Ints]:
        yield field.copies
        if self.rates_g is not None:
            powers = {1 << k for k in range(int(field.copies.max(initial=1)).bit_length())}
            for few in sorted(powers | set(range(1, FEW_COPIES))):
                yield np.where(field.copies > few, few, 0)

    def _visit(self, field: Field, rows: Ints, copies: Ints, tables_of: TablesOf) -> None:
        parts = self.problem.batch // field.tables.microbatch
        counts = -(-parts // copies)
        held = np.where(counts >= field.patterns.stages[rows], self.problem.num_layers, _held_class(counts))
        limit_s = self._stage_limits_s(field, rows, copies, counts)
        degree = _shared_by(copies)
        for share, flight in sorted(set(zip(degree.tolist(), held.tolist(), strict=True))):
            tables = tables_of(field.tables.microbatch, field.sharding, share, share)
            if tables is None:
                continue
            some = np.flatnonzero((degree == share) & (held == flight))
            made = make_columns(self.problem, tables, field.patterns.take(rows[some]), flight, limit_s[some])
            ending = Ending(self.problem, field.sharding, share, int(copies[some].max()))
            for k, column in zip(some.tolist(), made, strict=True):
                if column is not None:
                    self._price(finished(self.problem, column, ending), int(copies[k]), tables_of)
                    for fewer in _fewer_copies(int(copies[k])):
                        self._price_fewer(column, fewer, tables_of)

    def _stage_limits_s(self, field: Field, rows: Ints, copies: Ints, counts: Ints) -> Floats:
        """Return the stage time beyond which no cut of a pattern can be near the best: m tau and the flow bound."""
        patterns, m = field.patterns.take(rows), counts
        if self.rates_g is None:
            near = np.full(len(rows), self.book.best_step_s * NEAR_BEST)
        else:
            used = patterns.used
            rate = np.where(used > 0, used * np.where(used > 0, self.rates_g, 0.0), 0.0).sum(axis=1) * copies
            near = self.book.best_value * NEAR_BEST / np.maximum(rate, 1e-300)
        near = np.minimum(near, BIG_S)
        unit, held = with_first_stage(patterns)
        work = fill_work_s(unit, held, field.tables, near / m)
        slack = m - 1 - patterns.stages
        flow = (near - patterns.comm_s - 2 * work) / np.maximum(slack, 1)
        return np.asarray(np.where(slack > 0, np.minimum(near / m, np.maximum(flow, 0.0)), near / m))

    def _price(self, column: Column, copies: int, tables_of: TablesOf) -> None:
        parts = self.problem.batch // column.microbatch
        count = -(-parts // copies)
        near_s = self._near_s(column, copies)
        if column.least_s(count) > near_s or column.step_s(count) > near_s:
            return
        if self.priced >= max(FEWEST_PRICES, self.most_visited // VISITS_A_PRICE):
            self.passed_over = min(self.passed_over, self._value(column, copies, count))
            return
        self.priced += 1
        self.columns.append(column)
        share = copies if copies <= FEW_DEGREE else 1 << (copies.bit_length() - 1)
        tables = tables_of(column.microbatch, column.sharding, share, share)
        ending = Ending(self.problem, column.sharding, share, copies)
        better = column
        if tables is not None:
            better = finished(self.problem, refitted(self.problem, tables, column, count), ending)
            if len(column.stages) <= IMPROVED_STAGES and count * len(column.stages) <= 1500:
                better = improve(self.problem, tables, better, count, ending)
        if better.step_s(count) > near_s / NEAR_BEST * (1 + TOLERANCE):
            return
        for layout in copies_of(self.problem, better, copies):
            self.book.consider(layout)

    def _price_fewer(self, column: Column, copies: int, tables_of: TablesOf) -> None:
        """Price fewer copies than there is room for: less to synchronise may outweigh more microbatches."""
        count = -(-(self.problem.batch // column.microbatch) // copies)
        if self.rates_g is None and column.least_s(count) < self.book.best_step_s:
            ending = Ending(self.problem, column.sharding, copies, copies)
            self._price(finished(self.problem, column, ending), copies, tables_of)

    def _near_s(self, column: Column, copies: int) -> float:
        """Return the step time beyond which a column is of no use."""
        if self.rates_g is None:
            return self.book.best_step_s * NEAR_BEST
        rate, work = self._cost_of(column)
        return (self.book.best_value - work) / (rate * copies) * NEAR_BEST if rate > 0 else np.inf

    def _value(self, column: Column, copies: int, count: int) -> float:
        """Return what copies of a column cost at least in the objective."""
        if self.rates_g is None:
            return column.step_s(count)
        rate, work = self._cost_of(column)
        return column.step_s(count) * rate * copies + work

    def _cost_of(self, column: Column) -> tuple[float, float]:
        """Return what a second of one copy costs, and what a step's work costs on top."""
        rates = [] if self.rates_g is None else self.rates_g.tolist()
        rate = sum(used * rate for used, rate in zip(column.used_g, rates, strict=True) if used)
        work = 0.0
        if self.book.request.objective == "energy":
            times = zip(column.stages, column.durations.forward_s, column.durations.backward_s, strict=True)
            work = sum(self._busy_rate(stage.mesh) * stage.mesh.size * (f + b) for stage, f, b in times)
            work *= self.problem.batch / column.microbatch
        return rate, work


def _fewer_copies(copies: int) -> list[int]:
    """Return some numbers of copies below `copies`: the next few, then halves."""
    near = range(copies - 1, max(0, copies - 1 - NEXT_COPIES), -1)
    halves = (copies >> k for k in range(1, copies.bit_length()))
    return sorted({*near, *halves} - {0}, reverse=True)


def _shared_by(copies: Ints) -> Ints:
    """Return over how many ranks cuts take states to be shared: all copies while few, then a power of four below."""
    wide = np.minimum(4 ** np.floor(np.log2(np.maximum(copies, 1)) / 2).astype(int), MOST_DEGREE)
    return np.asarray(np.where(copies <= FEW_DEGREE, copies, np.maximum(wide, FEW_DEGREE)))


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
