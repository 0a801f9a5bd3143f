"""Patterns of one replica shape and the least step time each can reach, from relaxed bounds.

For a pattern with at most c copies the batch of B samples in microbatches of b needs m = ceil(B / (b c)) microbatches a
copy, or more with fewer copies. So no such plan is faster than the bounds of `patterns` for that m, least over all cuts
(`least_step_s`):

    rate     sum_i n_i T / (m t_i + A_i) >= layers
    first    min over tau of  W + C + (m - 1) beta tau + A
    flow     min over tau of  2 W + C + (m - 1 - p) tau + A                         (m > p)
    few      C + W (1 + 1 / (1 + r)),  r = (p - m + 1) / ((m - 1) beta)             (1 < m <= p)

The last one: under 1F1B the last m - 1 stages hold fewer than m microbatches, hence T >= W + C + W_last; each of the
p - m + 1 stages before them takes at most (T - W - C) / ((m - 1) beta), hence the form above, with W least for stage
times up to (best known T) / m.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.costs.records import Floats
from hetplan.search.after import Ending, bare_weight
from hetplan.search.patterns import (
    Ints,
    Patterns,
    backward_share,
    breakpoints,
    fill_work_s,
    whole_layers_tau_s,
    with_first_stage,
)
from hetplan.search.problem import Problem, Tables
from hetplan.search.records import SearchRequest
from hetplan.specs.workload import Sharding

BIG_S = 1e150


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """All patterns of one microbatch size under one sharding, with what follows pipelines of 2^k replicas."""

    sharding: Sharding
    tables: Tables
    """For bounds: states shared out as widely as one likes."""
    patterns: Patterns
    copies: Ints
    """Most copies the devices allow, (N,)."""
    first_km: Floats
    each_km: Floats
    """A of a unit of layers on the first stage and on any, by (log2 of the replicas, mesh)."""
    bare: float
    """Weight of the layers without parameters."""


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
        first_km=np.array([units.first_m for units in after]),
        each_km=np.array([units.each_m for units in after]),
        bare=bare_weight(problem, tables),
    )


def least_step_s(problem: Problem, field: Field, copies: Ints, best_s: float) -> Floats:
    """Return, for each pattern, a step time no plan of at most `copies` copies of it beats, (N,).

    Infinite where there is no such plan. `best_s`: plans slower than this need not be told apart.
    """
    exists = (copies > 0) & (copies <= field.copies) & (problem.batch % field.tables.microbatch == 0)
    copies = np.maximum(copies, 1)
    count = microbatches_each(problem, field, copies)
    level = np.minimum(np.floor(np.log2(np.maximum(copies // 2, 1))).astype(int), len(field.first_km) - 1)
    floor_tau_s = whole_layers_tau_s(field.patterns, field.tables, count)
    many = _bounds_s(field, count, level, (floor_tau_s, best_s))
    few = np.where(copies > 1, least_with_half_s(problem, field, copies, floor_tau_s), np.inf)
    return np.where(exists, np.minimum(many, few), np.inf)


def microbatches_each(problem: Problem, field: Field, copies: Ints) -> Ints:
    """Return how many microbatches the busiest of so many copies runs at least."""
    return np.asarray(-(-(problem.batch // field.tables.microbatch) // copies))


def least_with_half_s(problem: Problem, field: Field, copies: Ints, floor_tau_s: Floats) -> Floats:
    """Return a step time no plan of at most half the copies beats: each of them runs about twice the microbatches."""
    count = microbatches_each(problem, field, np.maximum(copies // 2, 1))
    return np.asarray(count * np.minimum(floor_tau_s, BIG_S))


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


def _bounds_s(field: Field, count: Ints, level: Ints, at: tuple[Floats, float]) -> Floats:
    floor_tau_s, best_s = np.minimum(at[0], BIG_S), at[1]
    patterns, tables = field.patterns, field.tables
    beta = backward_share(tables)
    there = np.isfinite(patterns.unit_s)
    unit, held = with_first_stage(patterns)
    extra = np.zeros_like(unit)
    extra[:, 0] = field.first_km[level, patterns.mesh[:, 0]]
    after = np.concatenate([field.each_km, np.zeros((len(field.each_km), 1))], axis=1)[level[:, None], patterns.mesh]
    p, m, comm = patterns.stages, count, patterns.comm_s
    each = m[:, None] * np.where(there, patterns.unit_s, 1.0) + after
    rate = (tables.weight_l.sum() - field.bare) / np.maximum(
        np.where(there, patterns.count / each, 0.0).sum(axis=1), 1 / BIG_S
    )
    tau, load = breakpoints(unit, held, extra, (tables, floor_tau_s), work_factor=1.0)
    first = comm + (load + (m - 1) * beta * tau).min(axis=0)
    tau, load = breakpoints(unit, held, extra, (tables, floor_tau_s), work_factor=2.0)
    flow = np.where(m > p, comm + (load + (m - 1 - p) * tau).min(axis=0), 0.0)
    work = fill_work_s(unit, held, tables, np.minimum(best_s, BIG_S) / m)
    share = (p - m + 1) / np.maximum((m - 1) * beta, 1e-9)
    few = np.where((m > 1) & (m <= p), comm + work * (1 + 1 / (1 + np.maximum(share, 0.0))), 0.0)
    return np.asarray(np.maximum.reduce([rate, first, flow, few, m * floor_tau_s]))
