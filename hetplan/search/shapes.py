"""Plans of one replica shape, by branch and bound: the best of them, and a proof over all their cuts.

Shapes are visited in the order of their relaxed bounds (`pattern_fields`). A sweep of them gets the bound of `blocks`,
which looks at every division of the chain between blocks of stages; the few still below the best plan get a cut
(`recut`), the exact critical path of that cut, and a price by `estimate`. No plan of one shape, whatever its cut, is
below the least bound of the shapes not visited or not ruled out.

Copies: an entry stands for more than half of its copies and up to all of them; where fewer could still be better, an
entry of half the copies follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hetplan.costs.records import Floats
from hetplan.plan.records import Layout
from hetplan.search.after import Ending
from hetplan.search.book import Book
from hetplan.search.columns import Column, column_of, finished
from hetplan.search.cuts import best_cuts
from hetplan.search.every_cut import EveryCut
from hetplan.search.layouts import layout_of
from hetplan.search.pattern_fields import (
    Field,
    least_step_s,
    microbatches_each,
)
from hetplan.search.patterns import Ints, Patterns
from hetplan.search.problem import Problem
from hetplan.search.recut import Recut, even_cuts
from hetplan.search.shape_bounds import TOLERANCE, Entry, Open, ShapeBounds, TablesOf

SWEEP, FIRST_SWEEP = 4096, 256
"""Patterns bounded in one go, with and without a best plan to compare with."""
MOST_VISITED = 40_000
"""Patterns visited at the default effort of 10."""
STARTS = ((2, 384), (3, 48))
"""Patterns of at most so many blocks looked at first, to have a plan to compare with."""
FIRST_PRICED = 10
BRIEF = 10_000
"""Searches that may visit fewer patterns price fewer as well and prove nothing."""
WANTED_GAP = TOLERANCE
"""Patterns whose bound is further below the best plan than this are looked at cut by cut."""
VISITS_A_SETTLED = 1000
MOST_SETTLED_STAGES = 16
NEAR_BEST = 1.01
LIKELY_DIVISIONS = 24
"""Divisions of the chain between blocks, of the best bounds, that cuts start from."""
HOPELESS = 1.06
"""Even and balanced cuts that are slower than the best plan by this factor do not become better than it."""
FEWEST_PRICES, PATIENCE = 32, 80
VISITS_A_PRICE = 200
"""One layout may be priced for every so many patterns that may be visited."""
FEW_COPIES, NEXT_COPIES = 16, 2
"""Where devices cost, copies below are tried one by one; else so many below the most."""
MOST_DEGREE = 64
"""Sharing states wider than this is not told apart when cuts are made."""
FEW_DEGREE = 8
"""States shared by up to so many are told apart one by one: whether a cut fits at all may depend on it."""


class ShapeSearch:
    """Visits shapes of all fields in the order of their bounds."""

    def __init__(
        self, book: Book, fields: Sequence[Field], tables_of: TablesOf, most_visited: int = MOST_VISITED
    ) -> None:
        self.most_visited = most_visited
        self.brief = most_visited < BRIEF
        self.book = book
        self.problem = book.problem
        self.fields = fields
        self.visited = 0
        self.priced = 0
        self.columns: list[tuple[float, Column]] = []
        """Columns that were priced, with their step times."""
        self._tables_of = tables_of
        self.bounds = ShapeBounds(book, fields, tables_of)
        self.rates_g = self.bounds.rates_g
        self._settled: list[Open] = []
        """Patterns that were not ruled out."""
        self._done: set[tuple[int, int, int]] = set()

    def run(self) -> float:
        """Price shapes until none left can be better; return a value of the objective none of them beats."""
        waiting = self._entries()
        order = np.argsort(waiting.value, kind="stable")
        self._start(waiting, order)
        at = 0
        while at < len(order):
            self.book.keep_time()
            limit = self.book.best_value * (1 - TOLERANCE)
            if waiting.value[order[at]] >= limit or self.visited >= self.most_visited:
                break
            size = SWEEP if np.isfinite(limit) else FIRST_SWEEP
            sweep = order[at : at + min(size, max(1, self.most_visited // 4))]
            sweep = sweep[waiting.value[sweep] < limit]
            self._visit(waiting.take(sweep), most_priced=None)
            self.visited += len(sweep)
            at += len(sweep)
            self.book.tell()
        left = float(waiting.value[order[at]]) if at < len(order) else np.inf
        return min(left, self._settle(left), self.book.best_value)

    def _start(self, waiting: Entry, order: Ints) -> None:
        """Price some patterns that promise most among those of few blocks, so that there is a plan to compare with."""
        order = order[np.isfinite(waiting.value[order])][: max(1000, self.most_visited)]
        blocks = np.array([0] * len(waiting.row))
        for f, field in enumerate(self.fields):
            mine = waiting.field == f
            blocks[mine] = (field.patterns.count[waiting.row[mine]] > 0).sum(axis=1)
        for most, many in STARTS:
            many = many // 4 if self.brief else many
            some = order[blocks[order] <= most][:many] if most < 3 else order[blocks[order] == most][:many]
            self._visit(waiting.take(some), most_priced=FIRST_PRICED // 2 if self.brief else FIRST_PRICED)

    def _visit(self, entries: Entry, most_priced: int | None) -> None:
        """Bound entries, and price those not ruled out, best bound first; only some where `most_priced` is given."""
        found = sorted(self.bounds.open_of(entries), key=lambda one: (one.value, one.field, one.row, one.copies))
        last_useful, patience = self.priced, PATIENCE // 4 if self.brief else PATIENCE
        for number, one in enumerate(found):
            if most_priced is not None and number >= most_priced:
                return
            if one.value < self.book.best_value * (1 - TOLERANCE) and self.priced < last_useful + patience:
                before = self.book.best_value
                self._price(one)
                last_useful = self.priced if self.book.best_value < before else last_useful
            if most_priced is None:
                self._settled.append(one)

    def _settle(self, left: float) -> float:
        """Return the least bound of the patterns not ruled out, each looked at cut by cut while that raises it."""
        if self.brief:
            return min((one.value for one in self._settled), default=np.inf)
        waiting = sorted(self._settled, key=lambda one: (one.value, one.field, one.row, one.copies))
        settled = np.inf
        for number, one in enumerate(waiting):
            if one.value >= min(settled, left, self.book.best_value * (1 - WANTED_GAP)):
                return min(settled, one.value)
            if self.rates_g is not None or number >= self.most_visited // VISITS_A_SETTLED:
                return min(settled, one.value)
            self.book.keep_time()
            settled = min(settled, self._settled_s(one))
        return settled

    def _settled_s(self, one: Open) -> float:
        """Return the least step time of an open pattern over all its cuts, as far as it is below the best plan."""
        limit_s = self.book.best_value * (1 - TOLERANCE)
        pattern = self.fields[one.field].patterns.take(np.array([one.row]))
        mesh_p = _meshes(pattern)
        if len(mesh_p) > MOST_SETTLED_STAGES:
            return one.value
        tables, ending = self.bounds.tables_at(one)
        divisions = self.bounds.divisions(one, limit_s)
        cutter = EveryCut(self.problem, tables, mesh_p, (one.count, float(pattern.comm_s[0])), ending)
        cuts = cutter.below(divisions, limit_s)
        if cuts is None:
            return one.value
        recut = Recut(self.problem, tables, mesh_p, one.count, ending)
        return recut.least_of(cuts, limit_s, proved=True)[0]

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
                    value = value * rate * copies[rows] + self.bounds.least_work(field, rows)
                keep = np.isfinite(value)
                parts.append((np.full(int(keep.sum()), f), rows[keep], copies[rows][keep], value[keep]))
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return Entry(field=none, row=none, copies=none, value=np.zeros(0))
        field_of, rows, copies, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Entry(field=field_of, row=rows, copies=copies, value=values)

    def _slowest_s(self) -> float:
        """Return the slowest step time worth telling apart."""
        return self.book.best_step_s if self.rates_g is None else np.inf

    def _copies(self, field: Field) -> Iterator[Ints]:
        yield field.copies
        if self.rates_g is not None:
            powers = {1 << k for k in range(int(field.copies.max(initial=1)).bit_length())}
            for few in sorted(powers | set(range(1, FEW_COPIES))):
                yield np.where(field.copies > few, few, 0)

    def _price(self, one: Open) -> None:
        """Price an open pattern with its copies, and with the next few numbers of copies below."""
        if (one.field, one.row, one.copies) in self._done:
            return
        self._done.add((one.field, one.row, one.copies))
        if self.priced >= max(FEWEST_PRICES, self.most_visited // VISITS_A_PRICE):
            return
        column = self._consider(one, one.copies, one.count)
        if column is None or self.rates_g is not None:
            return
        field = self.fields[one.field]
        for copies in range(one.copies - 1, max(one.copies // 2, one.copies - 1 - NEXT_COPIES), -1):
            count = int(microbatches_each(self.problem, field, np.array(copies)))
            if count != one.count and column.least_s(count) < self.book.best_step_s:
                self._consider(one, copies, count)

    def _consider(self, one: Open, copies: int, count: int) -> Column | None:
        """Make the best cut, and price it where it comes near the best plan; None where no cut fits."""
        field = self.fields[one.field]
        share = _shared_by(copies)
        tables = self._tables_of(field.tables.microbatch, field.sharding, share, share)
        if tables is None:
            return None
        self.priced += 1
        ending = Ending(self.problem, field.sharding, share, copies)
        pattern = field.patterns.take(np.array([one.row]))
        mesh_p = _meshes(pattern)
        recut = Recut(self.problem, tables, mesh_p, count, ending)
        near = self.bounds.divisions(one, self.book.best_value * NEAR_BEST, LIKELY_DIVISIONS)
        starts = np.unique(
            np.concatenate([even_cuts(recut.decoders, mesh_p, ends) for ends in (np.array(one.ends), *near)]), axis=0
        )
        hopeless_s = float(self.bounds.limits_s(field, np.array([one.row]), np.array([copies]))[0][0]) * HOPELESS
        if not recut.any_fits(starts):
            starts = best_cuts(self.problem, tables, pattern, count).ends[:, : len(mesh_p)]
        if not recut.least_of(starts, hopeless_s)[1].size:
            return None
        places = recut.best(starts)
        if places is None:
            return None
        column = finished(self.problem, column_of(self.problem, tables, places, "1f1b"), ending)
        self.columns.append((column.step_s(count), column))
        if column.step_s(count) <= self._near_s(column, copies):
            for layout in copies_of(self.problem, column, copies):
                self.book.consider(layout)
        return column

    def _near_s(self, column: Column, copies: int) -> float:
        """Return the step time beyond which a column is of no use."""
        if self.rates_g is None:
            return self.book.best_step_s * NEAR_BEST
        rate, work = self._cost_of(column)
        return (self.book.best_value - work) / (rate * copies) * NEAR_BEST if rate > 0 else np.inf

    def _cost_of(self, column: Column) -> tuple[float, float]:
        """Return what a second of one copy costs, and what a step's work costs on top."""
        rates = [] if self.rates_g is None else self.rates_g.tolist()
        rate = sum(used * rate for used, rate in zip(column.used_g, rates, strict=True) if used)
        work = 0.0
        if self.book.request.objective == "energy":
            times = zip(column.stages, column.durations.forward_s, column.durations.backward_s, strict=True)
            work = sum(self.bounds.busy_rate(stage.mesh) * stage.mesh.size * (f + b) for stage, f, b in times)
            work *= self.problem.batch / column.microbatch
        return rate, work


def _meshes(pattern: Patterns) -> Ints:
    """Return the mesh of every stage of a single pattern."""
    return np.repeat(pattern.mesh[0], np.where(pattern.mesh[0] >= 0, pattern.count[0], 0))


def _shared_by(copies: int) -> int:
    """Return over how many ranks cuts take states to be shared: all copies while few, then a power of two below."""
    return copies if copies <= FEW_DEGREE else min(1 << (copies.bit_length() - 1), MOST_DEGREE)


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
