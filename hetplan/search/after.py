"""What must follow the pipelines, for each unit of layers on a first stage: the A of the bounds in `patterns`.

The first stage's gradients are complete only when the step's last backward pass ends. Of their reduction at most
`overlap.gradients` of that pass is hidden; then come the optimizer and, where states are shared out, the gather of new
weights. How fast gradients meet depends on who holds the first layers, so there is a *class* of plans for every group
(all first stages on that group: the ring may stay inside it) and one for the rest (first stages on several groups: the
ring crosses the fastest network between some two of them).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, Holders
from hetplan.plan.stages import whole_params
from hetplan.search.problem import Mesh, Problem, Tables
from hetplan.specs.workload import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStages:
    """A class of plans: the groups their first stages may be on; `crossing` where there are several."""

    groups: frozenset[int]
    crossing: bool


def classes_of(problem: Problem) -> list[FirstStages]:
    """Return every class of plans."""
    groups = sorted({mesh.group for mesh in problem.meshes})
    found = [FirstStages(groups=frozenset({g}), crossing=False) for g in groups]
    if len(groups) > 1:
        found.append(FirstStages(groups=frozenset(groups), crossing=True))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """A of a unit of layers for each mesh, on a first stage and on a later one."""

    first_m: Floats
    later_m: Floats


def after_seconds(problem: Problem, tables: Tables, sharding: Sharding, where: FirstStages, ranks: int) -> After:
    """Return A when at least `ranks` replicas exist, never too much; later stages' rings may stay in their group."""
    inside = FirstStages(groups=where.groups, crossing=False)
    usable = [m for m in range(len(problem.meshes)) if tables.usable_m[m]]
    later = np.zeros(len(problem.meshes))
    later[usable] = [_unit_after(problem, tables, (sharding, inside, ranks), m) for m in usable]
    first = later.copy()
    if where.crossing:
        first[usable] = [_unit_after(problem, tables, (sharding, where, ranks), m) for m in usable]
    return After(first_m=first, later_m=later)


def nothing_after(problem: Problem) -> After:
    """Return A = 0 everywhere."""
    zero = np.zeros(len(problem.meshes))
    return After(first_m=zero, later_m=zero)


def _unit_after(problem: Problem, tables: Tables, setting: tuple[Sharding, FirstStages, int], m: int) -> float:
    sharding, where, ranks = setting
    prices, mesh = problem.prices, problem.meshes[m]
    dense_l, _ = whole_params(prices)
    reduce_s, gather_s = _sync_per_param(problem, mesh, sharding, where, ranks)
    hidden = prices.calibration.overlap.gradients
    backward_l = tables.backward_mrl[m].min(axis=0)
    seconds_l = dense_l * reduce_s - hidden * backward_l if sharding in ("none", "optimizer") else 0.0 * dense_l
    seconds_l = seconds_l + dense_l * gather_s
    if sharding == "none":
        seconds_l = seconds_l + dense_l / mesh.tp * _optimizer_per_param(prices, mesh)
    weight = np.maximum(tables.weight_l, 1e-12)
    return max(0.0, float(np.min(seconds_l / weight)))


def _optimizer_per_param(prices: Prices, mesh: Mesh) -> float:
    return max(0.0, (prices.optimizer_s(mesh.name, 2e9) - prices.optimizer_s(mesh.name, 1e9)) / 1e9)


def _sync_per_param(
    problem: Problem, mesh: Mesh, sharding: Sharding, where: FirstStages, ranks: int
) -> tuple[float, float]:
    """Return seconds for each parameter (before tp) to reduce its gradient and to gather it, latency left out."""
    if ranks * mesh.dp * mesh.cp < 2:
        return 0.0, 0.0
    best = (np.inf, np.inf)
    for holders in _rings(problem, mesh, where, max(2, ranks * mesh.dp * mesh.cp)):
        small, large = (problem.prices.sync(size, holders, sharding) for size in (1e9, 2e9))
        cost = ((large.reduce_s - small.reduce_s) / 1e9, (large.gather_s - small.gather_s) / 1e9)
        if np.isfinite(sum(cost)) and sum(cost) < sum(best):
            best = cost
    gather_s = best[1] if sharding in ("optimizer", "gradients") else 0.0
    return (best[0], gather_s) if np.isfinite(best[0]) else (0.0, 0.0)


def _rings(problem: Problem, mesh: Mesh, where: FirstStages, ranks: int) -> list[tuple[Holders, ...]]:
    packed = max(1, problem.domain_g[mesh.group] // mesh.tp)
    own = [
        Holders(group=mesh.name, num_ranks=n, ranks_per_node=min(near, n), tp=mesh.tp)
        for n in {ranks if not where.crossing else max(1, ranks // 2)}
        for near in {1, packed}
    ]
    if not where.crossing:
        return [(holders,) for holders in own]
    found = []
    names = {other.group: other.name for other in problem.meshes}
    for g, h in combinations(sorted(where.groups), 2):
        if mesh.group in (g, h):
            other = h if mesh.group == g else g
            for holders in own:
                found.append(
                    (
                        holders,
                        Holders(
                            group=names[other],
                            num_ranks=max(1, ranks - ranks // 2),
                            ranks_per_node=holders.ranks_per_node,
                            tp=mesh.tp,
                        ),
                    )
                )
    return found
