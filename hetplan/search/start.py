"""First answers, outside the solver: single-shape plans made of the patterns that look best.

For every pattern the closed form of `patterns` is turned round: with as many copies as the devices allow and the
batch shared out evenly, how long would a step take at least? The best few of every kind (sharding, groups used, tp)
get whole-layer cuts and are priced by `estimate`. One of them is often the answer; all of them tell the later steps
which columns are worth keeping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.costs.records import Floats
from hetplan.plan.records import Layout, ScheduleName
from hetplan.search.columns import Column, make_columns
from hetplan.search.patterns import Ints, Patterns
from hetplan.search.problem import Problem, Tables
from hetplan.specs.workload import Sharding

PER_KIND = 2
MOST_STARTS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A pattern worth pricing: where it is, under which sharding, and how long a step should take."""

    size: int
    """Index of the microbatch size."""
    row: int
    sharding: Sharding
    step_s: float
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All patterns of one microbatch size under one sharding, and what follows their pipelines."""

    size: int
    sharding: Sharding
    tables: Tables
    patterns: Patterns
    after: After


def pattern_step_s(field: Field, num_microbatches: Ints) -> Floats:
    """Return the closed form of a step with `num_microbatches` each, balanced over whole layers."""
    patterns, tables = field.patterns, field.tables
    order = np.argsort(patterns.unit_s, axis=1, kind="stable")
    unit = np.take_along_axis(patterns.unit_s, order, axis=1)
    count = np.take_along_axis(patterns.count, order, axis=1)
    work = float(tables.weight_l.sum())
    rate = np.where(count > 0, count / np.where(np.isfinite(unit), unit, 1.0), 0.0).sum(axis=1)
    balanced = work / rate
    # The busiest stage of p stages holds at least ceil(L / p) of L layers.
    layers = len(tables.weight_l)
    tau = balanced * np.ceil(layers / patterns.stages) * patterns.stages / layers
    each = np.where(np.isfinite(patterns.unit_s), balanced[:, None] / patterns.unit_s, 0.0)
    after = (np.append(field.after.first_m, 0.0)[patterns.mesh] * each).max(axis=1)
    filled_s = np.minimum(balanced * patterns.stages, (unit[:, :1] * work).ravel() * 4)
    return np.asarray(patterns.comm_s + filled_s + (num_microbatches - 1) * tau + after)


def best_starts(problem: Problem, fields: Sequence[Field]) -> list[Start]:
    """Return the best single-shape candidates of every kind, best first."""
    found: list[Start] = []
    devices = np.array(problem.devices_g)
    tps = np.array([mesh.tp for mesh in problem.meshes] + [0])
    for field in fields:
        patterns = field.patterns
        if not len(patterns):
            continue
        room = np.where(patterns.used > 0, devices[None, :] // np.maximum(patterns.used, 1), 1 << 30).min(axis=1)
        parts = max(1, problem.batch // field.tables.microbatch)
        copies = np.minimum(room, parts)
        count = np.ceil(parts / np.maximum(copies, 1)).astype(np.int64)
        seconds = np.where(copies > 0, pattern_step_s(field, count), np.inf)
        kind = (patterns.used > 0) @ (1 << np.arange(len(devices))) * 1000 + tps[patterns.mesh[:, 0]]
        order = np.argsort(seconds, kind="stable")
        for value in np.unique(kind).tolist():
            best = [row for row in order[kind[order] == value][:PER_KIND].tolist() if np.isfinite(seconds[row])]
            found += [
                Start(
                    size=field.size,
                    row=row,
                    sharding=field.sharding,
                    step_s=float(seconds[row]),
                    copies=int(copies[row]),
                )
                for row in best
            ]
    found.sort(key=lambda start: start.step_s)
    return found[:MOST_STARTS]


def even_layouts(problem: Problem, column: Column) -> Iterator[Layout]:
    """Yield layouts of one column with as many copies as fit: an even split of the batch, and all devices used."""
    room = min(devices // used for devices, used in zip(problem.devices_g, column.used_g, strict=True) if used)
    if problem.batch % column.microbatch or not room:
        return
    parts = problem.batch // column.microbatch
    copies = min(room, parts)
    even = next(c for c in range(copies, 0, -1) if parts % c == 0)
    yield layout_of([(column, parts // even, even)])
    rest = parts % copies
    if rest and not (problem.limits.uniform_microbatches or problem.limits.max_shapes == 1):
        yield layout_of([(column, parts // copies + 1, rest), (column, parts // copies, copies - rest)])


def layout_of(rows: Sequence[tuple[Column, int, int]]) -> Layout:
    """Return the layout of (column, microbatches, copies) rows; devices are not chosen yet."""
    ordered = sorted(rows, key=lambda row: (-row[2] * sum(row[0].used_g), -row[1], repr(row[0].stages)))
    return Layout(
        replicas=tuple(column.replica(count, copies) for column, count, copies in ordered),
        schedule=rows[0][0].schedule,
        sharding=rows[0][0].sharding,
    )


def columns_of(problem: Problem, tables: Tables, patterns: Patterns, schedule: ScheduleName) -> list[Column | None]:
    """Return concrete columns of patterns; where full pipelines do not fit, with fewer microbatches in flight."""
    columns = make_columns(problem, tables, patterns, 1 << 30, schedule)
    for row, column in enumerate(columns):
        if column is None and patterns.stages[row] > 1:
            held = max(1, int(patterns.stages[row]) // 2)
            columns[row] = make_columns(problem, tables, patterns.take(np.array([row])), held, schedule)[0]
    return columns
