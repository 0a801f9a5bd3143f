"""Every set of replicas that could beat a given time: an exact-cover knapsack prunes, a depth-first walk lists.

Let `a(c, T)` be the most samples column `c` takes with a bound below `T`, `u(c)` the devices it uses and

    most[v] = max over multisets of columns that use exactly v of  sum of a(c, T)

(a knapsack over the few device vectors `v` of a small cluster). A set of replicas that uses `U`, takes the batch `B`
and contains `c` can beat `T` only if `a(c, T) + most[U - u(c)] >= B`; with `most[U] < B` nothing on `U` does. The walk
adds replicas in one order (column, microbatch count) and applies the same test to what is left at each node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hetplan.search.exhaustive_columns import Columns
from hetplan.search.exhaustive_shapes import Flags, Ints

NONE_SAMPLES = -(1 << 40)
"""Stands for 'cannot be done'; adding a batch to it leaves it far below zero."""

Combination = tuple[tuple[int, int], ...]
"""(column, microbatches) of each replica, in order."""


class BudgetSpentError(Exception):
    """Control flow inside the exact search: there is more to visit than the budget allows."""


NODE_VISITS = 50
"""A node of the walk counts as so many visits; a set of replicas found counts one."""


class Budget:
    """Visits left; the one counter of the exact search. A visit stands for about a microsecond."""

    def __init__(self, *, left: int) -> None:
        self.left = left

    def spend(self, visits: int) -> None:
        """Count visits.

        Raises:
            BudgetSpentError: none are left.
        """
        self.left -= visits
        if self.left < 0:
            raise BudgetSpentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the replicas of one layout must have in common."""

    same_cut: bool = False
    same_microbatches: bool = False
    max_rows: int | None = None
    alone: bool = False
    """One replica takes the whole batch; else there are at least two."""


class DeviceVectors:
    """Numbers the vectors of device counts up to `capacity`: `v` is number `v @ radix`, differences subtract."""

    def __init__(self, capacity: tuple[int, ...]) -> None:
        sizes = [count + 1 for count in capacity]
        self.radix = np.cumprod([1, *sizes[:-1]])
        grid = np.meshgrid(*[np.arange(size) for size in sizes], indexing="ij")
        vectors = np.stack([axis.ravel() for axis in grid], axis=1)
        self.vectors: Ints = vectors[np.argsort(vectors @ self.radix)]

    def __len__(self) -> int:
        return len(self.vectors)

    @cached_property
    def inside(self) -> Flags:
        """Whether vector `u` is at most vector `v` everywhere, at [v, u]."""
        return np.asarray((self.vectors[None, :, :] <= self.vectors[:, None, :]).all(axis=2))

    def most_samples(self, best_u: Ints) -> Ints:
        """Return the knapsack `most[v]`, given the most samples one column of exactly `u` devices takes."""
        most = np.full(len(self), NONE_SAMPLES, dtype=np.int64)
        most[0] = 0
        usable = np.flatnonzero(best_u > 0)
        for v in range(1, len(self)):
            inner = usable[self.inside[v, usable]]
            if len(inner):
                most[v] = max(int((best_u[inner] + most[v - inner]).max()), NONE_SAMPLES)
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What can be done within some seconds."""

    samples: Ints
    """The most samples each column takes."""
    most: Ints
    """The most samples any set of columns takes that uses exactly a device vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Columns that may be combined, and the vectors of what they use."""

    columns: Columns
    vectors: DeviceVectors
    used: Ints
    """Number of each column's device vector."""
    family: Ints
    """Equal where the chain is cut alike."""
    rules: Rules
    batch: int

    def reach(self, limit_s: float) -> Reach:
        """Return what can be done within `limit_s`."""
        samples = self.columns.microbatch * self.columns.most_microbatches(limit_s)
        best_u = np.zeros(len(self.vectors), dtype=np.int64)
        np.maximum.at(best_u, self.used, samples)
        return Reach(samples=samples, most=self.vectors.most_samples(best_u))


@dataclass(slots=True)
class _Walk:
    """One depth-first walk over multisets of columns that use exactly the devices given."""

    pool: Pool
    budget: Budget
    from_s: float
    rows: Ints
    """Columns that can take part, in order."""
    samples: Ints
    most: Ints
    found: list[tuple[float, Combination]] = field(default_factory=list)

    def extend(self, chosen: Combination, first: int, left: tuple[int, int], bound_s: float) -> None:
        """List every way to give `left` (device vector, samples) to columns from position `first` on."""
        vector, batch = left
        self.budget.spend(NODE_VISITS)
        rows = self.rows[first:]
        used = self.pool.used[rows]
        fits = self.pool.vectors.inside[vector, used]
        rest = np.where(fits, vector - used, 0)
        fits &= self.samples[rows] + self.most[rest] >= batch
        if chosen:
            fits &= self._alike(rows, chosen[0])
        if chosen or self.pool.rules.alone:
            self._finish(chosen, rows[fits & (used == vector)], batch, bound_s)
        for position in np.flatnonzero(fits & (used != vector)):
            row = int(rows[position])
            for m in self._counts(row, chosen, batch, int(self.most[rest[position]])):
                bound = max(bound_s, float(self.pool.columns.bound_s(np.array([row]), np.array([m]))[0]))
                taken = m * int(self.pool.columns.microbatch[row])
                self.extend((*chosen, (row, m)), first + int(position), (int(rest[position]), batch - taken), bound)

    def _counts(self, row: int, chosen: Combination, batch: int, rest_takes: int) -> Iterator[int]:
        """Yield the microbatch counts column `row` may take while others still follow."""
        columns = self.pool.columns
        size = int(columns.microbatch[row])
        least = max(int(columns.first_m[row]), -(-(batch - rest_takes) // size))
        most = min(int(self.samples[row]) // size, (batch - 1) // size)
        if chosen and chosen[-1][0] == row:
            least = max(least, chosen[-1][1])
        if chosen and self.pool.rules.same_microbatches:
            least, most = max(least, chosen[0][1]), min(most, chosen[0][1])
        yield from range(least, most + 1)

    def _finish(self, chosen: Combination, rows: Ints, batch: int, bound_s: float) -> None:
        """Record every column that takes all that is left."""
        columns = self.pool.columns
        counts = batch // columns.microbatch[rows]
        whole = (counts * columns.microbatch[rows] == batch) & (counts >= columns.first_m[rows])
        whole &= counts * columns.microbatch[rows] <= self.samples[rows]
        if chosen:
            whole &= (rows != chosen[-1][0]) | (counts >= chosen[-1][1])
            if self.pool.rules.same_microbatches:
                whole &= counts == chosen[0][1]
        rows, counts = rows[whole], counts[whole]
        bounds = np.maximum(columns.bound_s(rows, counts), bound_s)
        late = bounds >= self.from_s
        self.budget.spend(int(late.sum()))
        for row, m, bound in zip(rows[late].tolist(), counts[late].tolist(), bounds[late].tolist(), strict=True):
            combination = (*chosen, (row, m))
            if self._few_rows(combination):
                self.found.append((bound, combination))

    def _few_rows(self, combination: Combination) -> bool:
        most = self.pool.rules.max_rows
        return most is None or len(set(combination)) <= most

    def _alike(self, rows: Ints, first: tuple[int, int]) -> Flags:
        columns, rules = self.pool.columns, self.pool.rules
        alike = np.ones(len(rows), dtype=bool)
        if rules.same_cut:
            alike &= self.pool.family[rows] == self.pool.family[first[0]]
        if rules.same_microbatches:
            alike &= columns.microbatch[rows] == columns.microbatch[first[0]]
        return alike


def combinations_within(
    pool: Pool, vector: int, reach: Reach, from_s: float, budget: Budget
) -> list[tuple[float, Combination]]:
    """Return (bound, replicas) of every set within reach that uses exactly `vector` and is bounded by `from_s` or more.

    Raises:
        BudgetSpentError: there are too many.
    """
    samples, most = reach.samples, reach.most
    if most[vector] < pool.batch:
        return []
    fits = pool.vectors.inside[vector, pool.used] & (samples > 0)
    rest = np.where(fits, vector - pool.used, 0)
    fits &= samples + most[rest] >= pool.batch
    walk = _Walk(pool=pool, budget=budget, from_s=from_s, rows=np.flatnonzero(fits), samples=samples, most=most)
    walk.extend((), 0, (vector, pool.batch), 0.0)
    return walk.found
