"""Which patterns of one shape the bound of their blocks does not rule out.

An entry stands for more than half of its copies and up to all of them; where fewer could still be better, an entry of
half the copies follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.costs.records import Floats
from hetplan.search.after import Ending
from hetplan.search.blocks import BlockBounder, Shapes
from hetplan.search.book import Book
from hetplan.search.pattern_fields import Field, least_with_half_s, microbatches_each, objective_rates
from hetplan.search.patterns import Ints, whole_layers_tau_s
from hetplan.search.problem import MANY_RANKS, Mesh, Tables
from hetplan.specs.workload import Sharding

TOLERANCE = 0.004
"""The visit ends when no bound is further below the best plan than this."""
TablesOf = Callable[[int, Sharding, int, int], Tables | None]
"""(microbatch, sharding, ranks that share memory, ranks that exchange weights) -> cost tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Patterns with a number of copies, waiting to be visited; arrays (entries,)."""

    field: Ints
    row: Ints
    copies: Ints
    value: Floats
    """No plan of the entry has a lower value of the objective."""

    def take(self, rows: Ints) -> Entry:
        """Return the entries at `rows`."""
        return Entry(field=self.field[rows], row=self.row[rows], copies=self.copies[rows], value=self.value[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """One pattern that its bound does not rule out."""

    value: float
    field: int
    row: int
    copies: int
    count: int
    ends: tuple[int, ...]
    """End layer of each block in the division its bound comes from."""


class ShapeBounds:
    """Bounds the patterns of all fields against the best plan so far."""

    def __init__(self, book: Book, fields: Sequence[Field], tables_of: TablesOf) -> None:
        self.book = book
        self.problem = book.problem
        self.fields = fields
        self.rates_g = objective_rates(book.problem, book.request)
        self._tables_of = tables_of
        self._bounders: dict[tuple[int, int], BlockBounder] = {}

    def open_of(self, entries: Entry) -> Iterator[Open]:
        """Yield the patterns of entries whose bounds do not rule them out."""
        for f in np.unique(entries.field).tolist():
            field = self.fields[f]
            mine = entries.field == f
            rows, copies = entries.row[mine], entries.copies[mine]
            while len(rows):
                yield from self._open_rows(f, rows, copies)
                if self.rates_g is not None:
                    break
                half = copies // 2
                some = field.patterns.take(rows)
                floor_tau_s = whole_layers_tau_s(
                    some, field.tables, microbatches_each(self.problem, field, np.maximum(half, 1))
                )
                least = least_with_half_s(self.problem, field, copies, floor_tau_s)
                again = (half > 0) & (least < self.book.best_value * (1 - TOLERANCE))
                rows, copies = rows[again], half[again]

    def limits_s(self, field: Field, rows: Ints, copies: Ints) -> tuple[Floats, Floats, Floats]:
        """Return step times from which entries are ruled out, and value = step time x scale + base."""
        limit = self.book.best_value * (1 - TOLERANCE)
        if self.rates_g is None:
            return np.full(len(rows), limit), np.ones(len(rows)), np.zeros(len(rows))
        used = field.patterns.used[rows]
        rate = np.where(used > 0, used * np.where(used > 0, self.rates_g, 0.0), 0.0).sum(axis=1) * copies
        work = self.least_work(field, rows)
        with np.errstate(divide="ignore", invalid="ignore"):
            limit_s = np.where(rate > 0, (limit - work) / rate, np.inf)
        if self.book.request.time_budget_s is not None:
            limit_s = np.minimum(limit_s, self.book.request.time_budget_s)
        return np.asarray(np.maximum(limit_s, 0.0)), rate, work

    def least_work(self, field: Field, rows: Ints) -> Floats:
        """Return what the work itself costs at least (energy of busy devices above idle), (rows,)."""
        if self.book.request.objective != "energy":
            return np.zeros(len(rows))
        each = [self.busy_rate(mesh) * mesh.size for mesh in self.problem.meshes]
        unit = np.append(np.array(each) * field.tables.unit_m / field.tables.microbatch, np.inf)
        least = unit[field.patterns.mesh[rows]].min(axis=1)
        return np.asarray(least * float(field.tables.weight_l.sum()) * self.problem.batch)

    def busy_rate(self, mesh: Mesh) -> float:
        """Return what a busy second of a device costs above an idle one."""
        prices = self.problem.prices
        return prices.power_w(mesh.name, 1.0) - prices.power_w(mesh.name, 0.0)

    def _open_rows(self, f: int, rows: Ints, copies: Ints) -> Iterator[Open]:
        field = self.fields[f]
        limit_s, scale, base = self.limits_s(field, rows, copies)
        count = microbatches_each(self.problem, field, copies)
        levels = 1 << np.floor(np.log2(np.maximum(copies // 2 if self.rates_g is None else copies, 1))).astype(int)
        blocks = (field.patterns.count[rows] > 0).sum(axis=1)
        for level, k in sorted(set(zip(levels.tolist(), blocks.tolist(), strict=True))):
            some = np.flatnonzero((levels == level) & (blocks == k))
            at = rows[some]
            shapes = Shapes(
                mesh=field.patterns.mesh[at][:, :k],
                count=field.patterns.count[at][:, :k],
                comm_s=field.patterns.comm_s[at],
                num_microbatches=count[some],
                limit_s=limit_s[some],
            )
            bounds = self._bounder(f, level).bounds(shapes)
            for j in np.flatnonzero(bounds.ends[:, 0] >= 0).tolist():
                i = some[j]
                yield Open(
                    value=float(bounds.step_s[j] * scale[i] + base[i]),
                    field=f,
                    row=int(rows[i]),
                    copies=int(copies[i]),
                    count=int(count[i]),
                    ends=tuple(bounds.ends[j].tolist()),
                )

    def _bounder(self, f: int, level: int) -> BlockBounder:
        if (f, level) not in self._bounders:
            field = self.fields[f]
            tables = self._tables_of(field.tables.microbatch, field.sharding, MANY_RANKS, level)
            ending = Ending(self.problem, field.sharding, level)
            self._bounders[f, level] = BlockBounder(self.problem, tables or field.tables, ending)
        return self._bounders[f, level]

    def tables_at(self, one: Open) -> tuple[Tables, Ending]:
        """Return the costs and the ending an open pattern's bound is made of."""
        field, level = self.fields[one.field], _level(one.copies)
        tables = self._tables_of(field.tables.microbatch, field.sharding, MANY_RANKS, level) or field.tables
        return tables, Ending(self.problem, field.sharding, level)

    def divisions(self, one: Open, limit_s: float, most: int | None = None) -> Ints:
        """Return the block ends of the divisions of an open pattern below a step time, best bound first, (D, K)."""
        pattern, k = self.fields[one.field].patterns.take(np.array([one.row])), len(one.ends)
        shapes = Shapes(
            mesh=pattern.mesh[:, :k],
            count=pattern.count[:, :k],
            comm_s=pattern.comm_s,
            num_microbatches=np.array([one.count]),
            limit_s=np.array([limit_s]),
        )
        return self._bounder(one.field, _level(one.copies)).divisions_below(shapes)[:most]


def _level(copies: int) -> int:
    """Return a power of two that no number of copies of an entry is below."""
    return 1 << (max(copies // 2, 1).bit_length() - 1)
