"""Uniform grids: the plans an engineer writes down by hand, and all that most engines can run.

One tp, pp, dp and microbatch for every replica, the same cut everywhere. On unlike devices the grid is laid over the
groups in some order, either stage by stage (all first stages, then all second stages ...) or replica by replica, and
replicas whose stages lie on the same groups make one row. The slowest group at a stage position decides its pace, so
the cut balances over the slowest; `equal_cuts` keeps the cut near-equal instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

import numpy as np

from hetplan.plan.records import Layout, Replica, Stage
from hetplan.search.problem import Problem, Tables
from hetplan.specs.workload import Recompute

MOST_ORDERS = 6
SMALL_PP = 16
"""Deeper pipelines are tried where they divide the layers only."""
Rows = tuple[tuple[tuple[int, ...], int], ...]
"""(groups by stage, replicas that lie so) for each distinct row of a grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Degrees of a uniform plan."""

    tp: int
    cp: int
    stage_dp: int
    ep: int
    pp: int
    replicas: int
    microbatch: int

    @property
    def mesh_size(self) -> int:
        """Devices of a stage."""
        return self.tp * self.cp * self.stage_dp


def grids(problem: Problem, microbatch: int) -> Iterator[Grid]:
    """Yield every grid that the devices and the batch allow."""
    limits = problem.limits
    decoders = sum(layer.kind == "decoder" for layer in problem.prices.model.chain)
    kinds = sorted({(m.tp, m.cp, m.dp, m.ep) for m in problem.meshes if microbatch % m.dp == 0})
    if problem.batch % microbatch:
        return
    parts = problem.batch // microbatch
    for tp, cp, dp, ep in kinds:
        size = tp * cp * dp
        room = sum(_meshes_of(problem, g, tp, size) for g in _groups(problem))
        for pp in range(1, min(problem.num_layers, room) + 1):
            if (limits.pp is not None and pp not in limits.pp) or (limits.equal_cuts and decoders % pp):
                continue
            if limits.pinned_layers is not None and pp != len(limits.pinned_layers):
                continue
            if limits.pp is None and limits.pinned_layers is None and pp > SMALL_PP and decoders % pp:
                continue
            most = room // pp
            for replicas in sorted({c for c in range(1, min(most, parts) + 1) if parts % c == 0})[-2:]:
                yield Grid(tp=tp, cp=cp, stage_dp=dp, ep=ep, pp=pp, replicas=replicas, microbatch=microbatch)


def _groups(problem: Problem) -> list[int]:
    return sorted({mesh.group for mesh in problem.meshes})


def _meshes_of(problem: Problem, group: int, tp: int, size: int) -> int:
    if not any(mesh.group == group and mesh.tp == tp for mesh in problem.meshes):
        return 0
    return problem.devices_g[group] // size


def grid_rows(problem: Problem, grid: Grid) -> Iterator[Rows]:
    """Yield, for each order of groups and both ways to lay the grid out, the groups of replicas by stage."""
    seen = set()
    for order in list(permutations(_groups(problem)))[:MOST_ORDERS]:
        sizes = [_meshes_of(problem, g, grid.tp, grid.mesh_size) for g in order]
        if sum(sizes) < grid.pp * grid.replicas:
            continue
        ends = list(accumulate(sizes))
        for by_stage in (True, False):
            rows = _runs(grid, order, ends, by_stage=by_stage)
            if rows not in seen:
                seen.add(rows)
                yield rows


def _runs(grid: Grid, order: Sequence[int], ends: Sequence[int], *, by_stage: bool) -> Rows:
    """Return the replicas run by run: the groups of a replica change only where some stage enters the next group."""
    if by_stage:
        changes = {end % grid.replicas for end in ends}
    else:
        changes = {r for end in ends for r in (end // grid.pp, end // grid.pp + 1)}
    firsts = sorted({0, *(r for r in changes if r < grid.replicas)})
    rows: dict[tuple[int, ...], int] = {}
    for first, end in pairwise([*firsts, grid.replicas]):
        cells = (s * grid.replicas + first if by_stage else first * grid.pp + s for s in range(grid.pp))
        groups = tuple(order[bisect_right(ends, cell)] for cell in cells)
        rows[groups] = rows.get(groups, 0) + end - first
    return tuple(sorted(rows.items()))


def grid_layout_of(problem: Problem, tables: Tables, grid: Grid, rows: Rows, *, equal_cuts: bool) -> Layout | None:
    """Return the layout of a grid with its best cut and lightest recomputation that fits, or None."""
    index = {(m.group, m.tp, m.cp, m.dp, m.ep): i for i, m in enumerate(problem.meshes)}
    wanted = (grid.tp, grid.cp, grid.stage_dp, grid.ep)
    if any((g, *wanted) not in index for row, _ in rows for g in row):
        return None
    at = [sorted({index[(row[s], *wanted)] for row, _ in rows}) for s in range(grid.pp)]
    count = problem.batch // (grid.microbatch * grid.replicas)
    for mode in range(len(tables.recomputes)):
        ends = _equal_ends(problem, grid.pp) if equal_cuts else _balanced_ends(problem, tables, at, mode, count)
        if ends is not None and _fits(tables, at, ends, mode, count):
            return _layout(problem, tables, grid, (rows, ends, tables.recomputes[mode]))
    return None


def _equal_ends(problem: Problem, pp: int) -> list[int] | None:
    """Return the cut with equal decoder counts, earlier stages taking the rest; embedding first, head last."""
    decoder = [i for i, layer in enumerate(problem.prices.model.chain) if layer.kind == "decoder"]
    if pp > len(decoder):
        return None
    share, rest = divmod(len(decoder), pp)
    held = np.cumsum([share + (s < rest) for s in range(pp)])
    return [*(decoder[n] for n in held[:-1].tolist()), problem.num_layers]


def _balanced_ends(
    problem: Problem, tables: Tables, at: Sequence[Sequence[int]], mode: int, count: int
) -> list[int] | None:
    """Return the cut whose busiest stage, on the slowest mesh of its position, is fastest; memory holds everywhere."""
    low, high = 0.0, float(max(tables.prefix_mrl[m, mode, -1] for stage in at for m in stage))
    best = _fill(problem, tables, at, mode, (count, high)) if np.isfinite(high) else None
    if best is None:
        return None
    for _ in range(24):
        middle = (low + high) / 2
        found = _fill(problem, tables, at, mode, (count, middle))
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _fill(
    problem: Problem, tables: Tables, at: Sequence[Sequence[int]], mode: int, limit: tuple[int, float]
) -> list[int] | None:
    count, tau = limit
    limits = problem.limits
    held_before = np.concatenate([[0], np.cumsum([x.kind == "decoder" for x in problem.prices.model.chain])])
    ends: list[int] = []
    first = 0
    for s, meshes in enumerate(at):
        later = len(at) - 1 - s
        needed = held_before[-1] - later * limits.min_decoder_layers
        last = min(problem.num_layers - later, int(np.searchsorted(held_before, needed, side="right")) - 1)
        candidates = range(last, first, -1) if s < len(at) - 1 else (problem.num_layers,)
        held = min(count, len(at) - s)
        for end in candidates:
            if limits.pinned_layers is not None and held_before[end] - held_before[first] != limits.pinned_layers[s]:
                continue
            if held_before[end] - held_before[first] < limits.min_decoder_layers:
                continue
            if all(
                tables.prefix_mrl[m, mode, end] - tables.prefix_mrl[m, mode, first] <= tau
                and tables.fixed_mrll[m, mode, first, end] + held * tables.flight_mrll[m, mode, first, end] <= 1.0
                for m in meshes
            ):
                ends.append(end)
                first = end
                break
        else:
            return None
    return ends


def _fits(tables: Tables, at: Sequence[Sequence[int]], ends: Sequence[int], mode: int, count: int) -> bool:
    return all(
        tables.fixed_mrll[m, mode, first, end] + min(count, len(at) - s) * tables.flight_mrll[m, mode, first, end] <= 1
        for s, (meshes, (first, end)) in enumerate(zip(at, pairwise([0, *ends]), strict=True))
        for m in meshes
    )


def _layout(problem: Problem, tables: Tables, grid: Grid, cut: tuple[Rows, list[int], Recompute]) -> Layout:
    rows, ends, recompute = cut
    names = {mesh.group: mesh.name for mesh in problem.meshes}
    count = problem.batch // (grid.microbatch * grid.replicas)
    replicas = []
    for groups, copies in rows:
        stages = tuple(
            Stage(
                group=names[g],
                first_layer=first,
                end_layer=end,
                tp=grid.tp,
                cp=grid.cp,
                dp=grid.stage_dp,
                ep=grid.ep,
                recompute=recompute,
            )
            for g, (first, end) in zip(groups, pairwise([0, *ends]), strict=True)
        )
        replicas.append(Replica(stages=stages, microbatch=grid.microbatch, num_microbatches=count, copies=copies))
    return Layout(replicas=tuple(replicas), schedule=problem.limits.schedules[0], sharding=tables.sharding)


def grid_score_s(problem: Problem, tables: Tables, grid: Grid, rows: Rows) -> float:
    """Return the closed form sigma + (m - 1) tau of a grid with layers shared out without rounding."""
    index = {(m.group, m.tp, m.cp, m.dp, m.ep): i for i, m in enumerate(problem.meshes)}
    wanted = (grid.tp, grid.cp, grid.stage_dp, grid.ep)
    try:
        unit = [max(tables.unit_m[index[(row[s], *wanted)]] for row, _ in rows) for s in range(grid.pp)]
    except KeyError:
        return float("inf")
    work = float(tables.weight_l.sum())
    rate = sum(1 / u for u in unit) if min(unit) > 0 else float("inf")
    tau = work / rate if rate > 0 else float("inf")
    count = problem.batch // (grid.microbatch * grid.replicas)
    return float(tau * (grid.pp + count - 1))
