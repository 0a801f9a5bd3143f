"""The best plan of one segmentation of a path in one case, or the proof that there is none below the best known.

Variables: `x[i][c]` devices of class c in each stage of segment i (`a_i` stages long), `z[i][c][d]` pipelines that go
from class c to class d between segments (and inside one, where staying in a class is not the cheapest), `g[i][k]` hop i
is above level k, `D` the slowest exchange.

    sum_c x[i][c] = R,   sum_i a_i x[i][c] <= count_c (= where all devices are used)         _fill
    (x[i], cost) among the listed stages,  or  D >= sum_d w[c, d] x[i][d] - w[c, c] if x[i][c] > 0   _price_stage
    sum_d z[i][c][d] = x[i][c],  sum_c z[i][c][d] = x[i + 1][d],  z[i][c][d] = 0 unless g allows p[c, d]   _hop
    components of level k hold equal counts on both sides unless g[i][k + 1]                   _hop
    some hop is at or above the case's lowest level                                           _case
    minimise D + 2 sum of hops, below the best known
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.sat.python import cp_model

from hetplan.search.geo_cases import Case, Flow, Space, components, hops_least, share_of

Linear = cp_model.LinearExpr | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan in counts."""

    value: int
    """Microseconds."""
    stages: tuple[tuple[int, ...], ...]
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a solve told."""

    best: Found | None
    proved: bool
    """No plan of the space solved is below `best` (or below the limit that was given)."""
    effort: float
    bound: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmentation:
    """Lengths of segments, the case of the slowest hop, and the value to beat."""

    lengths: tuple[int, ...]
    case: Case
    below: int | None


@dataclass(slots=True, kw_only=True)
class _Work:
    """A model under construction."""

    space: Space
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    x: list[list[cp_model.IntVar]] = field(default_factory=list)
    z: list[list[list[cp_model.IntVar]]] = field(default_factory=list)
    above: list[list[cp_model.IntVar]] = field(default_factory=list)
    hops: list[Linear] = field(default_factory=list)


def best_of(space: Space, one: Segmentation, effort: float) -> Outcome:
    """Return the best plan of a segmentation below the value to beat."""
    allowed, cap = _stages_left(space, one)
    if allowed is not None and not allowed.any():
        return Outcome(best=None, proved=True, effort=0.0)
    work = _Work(space=space)
    if not _fill(work, one, allowed):
        return Outcome(best=None, proved=True, effort=0.0)
    slowest = work.model.new_int_var(0, cap, "D")
    for stage in work.x:
        _price_stage(work, stage, slowest, allowed)
    owners = _hops(work, one)
    _case(work, one)
    total = cp_model.LinearExpr.sum([slowest, *(2 * hop for hop in work.hops)])
    if one.below is not None:
        work.model.add(total <= one.below - 1)
    work.model.minimize(total)
    return _solve(work, one, owners, effort)


def _stages_left(space: Space, one: Segmentation) -> tuple[np.ndarray | None, int]:
    """Return which listed stages can stand in a better plan, and the largest exchange there can be."""
    num = len(one.lengths)
    ceiling = int(space.exchange.max()) * space.num_replicas
    cap = ceiling if one.below is None else one.below - 1 - 2 * hops_least(space, one.case, num)
    if space.stages is None or space.costs is None or one.case.allowed is None:
        return None, max(0, min(cap, ceiling))
    allowed = one.case.allowed & (space.costs <= cap) if num > 1 else space.costs <= cap
    return allowed, max(0, min(cap, ceiling))


def _fill(work: _Work, one: Segmentation, allowed: np.ndarray | None) -> bool:
    """Add the counts of each segment; False where some segment has no stage left."""
    space = work.space
    counts = np.array(space.counts, dtype=np.int64)
    for length in one.lengths:
        if allowed is not None and space.stages is not None:
            fits = allowed & (length * space.stages <= counts).all(axis=1)
            if not fits.any():
                return False
        work.x.append([work.model.new_int_var(0, min(space.num_replicas, n // length), "") for n in space.counts])
        work.model.add(sum(work.x[-1]) == space.num_replicas)
    for c, count in enumerate(space.counts):
        used = sum(length * stage[c] for length, stage in zip(one.lengths, work.x, strict=True))
        if space.uses_all:
            work.model.add(used == count)
        else:
            work.model.add(used <= count)
    return True


def _price_stage(
    work: _Work, stage: Sequence[cp_model.IntVar], slowest: cp_model.IntVar, allowed: np.ndarray | None
) -> None:
    space = work.space
    if allowed is not None and space.stages is not None and space.costs is not None:
        own = work.model.new_int_var(0, int(space.costs[allowed].max()), "")
        rows = np.column_stack([space.stages[allowed], space.costs[allowed]])
        work.model.add_allowed_assignments([*stage, own], rows.tolist())
        work.model.add(slowest >= own)
        return
    for c in range(space.num_classes):
        held = work.model.new_bool_var("")
        work.model.add(stage[c] >= 1).only_enforce_if(held)
        work.model.add(stage[c] == 0).only_enforce_if(~held)
        spent = sum(int(space.exchange[c, d]) * stage[d] for d in range(space.num_classes))
        work.model.add(slowest >= spent - int(space.exchange[c, c])).only_enforce_if(held)


def _hops(work: _Work, one: Segmentation) -> list[int | None]:
    """Add all hops; return for each hop of the path which flow it follows, None where every pipeline stays."""
    space = work.space
    owners: list[int | None] = []
    inside = np.diag(space.transfer)
    stays = bool((inside == space.transfer.min()).all())
    for i, length in enumerate(one.lengths):
        if length > 1 and stays:
            work.hops.append((length - 1) * int(inside[0]))
            owners += [None] * (length - 1)
        elif length > 1:
            _hop(work, work.x[i], work.x[i], times=length - 1, highest=space.levels[-1])
            owners += [len(work.z) - 1] * (length - 1)
        if i + 1 < len(one.lengths):
            _hop(work, work.x[i], work.x[i + 1], times=1, highest=max(one.case.highest, space.least_crossing))
            owners.append(len(work.z) - 1)
    return owners


def _hop(
    work: _Work, first: Sequence[cp_model.IntVar], second: Sequence[cp_model.IntVar], *, times: int, highest: int
) -> None:
    space, model, levels = work.space, work.model, work.space.levels
    num = space.num_classes
    z = [[model.new_int_var(0, space.num_replicas, "") for _ in range(num)] for _ in range(num)]
    above = [model.new_bool_var("") for _ in levels]
    model.add(above[0] == 1)
    for k in range(1, len(levels)):
        model.add_implication(above[k], above[k - 1])
        if levels[k] > highest:
            model.add(above[k] == 0)
    for c in range(num):
        model.add(sum(z[c]) == first[c])
        model.add(sum(row[c] for row in z) == second[c])
        for d in range(num):
            cost = int(space.transfer[c, d])
            if cost not in levels:
                model.add(z[c][d] == 0)
            elif levels.index(cost) > 0:
                model.add(z[c][d] == 0).only_enforce_if(~above[levels.index(cost)])
    for k in range(len(levels) - 1):
        joined = components(space, levels[k])
        if len(set(joined)) == 1:
            break
        for component in set(joined):
            members = [c for c in range(num) if joined[c] == component]
            before, after = sum(first[c] for c in members), sum(second[c] for c in members)
            model.add(before == after).only_enforce_if(~above[k + 1])
    work.z.append(z)
    work.above.append(above)
    cost_of_hop = levels[0] + sum((levels[k] - levels[k - 1]) * above[k] for k in range(1, len(levels)))
    work.hops.append(times * cost_of_hop)


def _case(work: _Work, one: Segmentation) -> None:
    """Hold the model to its case."""
    space, levels = work.space, work.space.levels
    if len(one.lengths) == 1:
        return
    if one.case.lowest > levels[0] and work.above:
        at = levels.index(one.case.lowest)
        work.model.add_bool_or([above[at] for above in work.above])
    for component in set(one.case.components):
        share = share_of(space, one.case.components, component)
        members = [c for c in range(space.num_classes) if one.case.components[c] == component]
        for stage in work.x if share is not None else ():
            work.model.add(sum(stage[c] for c in members) == share)


def _solve(work: _Work, one: Segmentation, owners: Sequence[int | None], effort: float) -> Outcome:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = max(0.01, effort)
    status = solver.solve(work.model)
    spent = float(solver.response_proto.deterministic_time)
    if status == cp_model.INFEASIBLE:
        return Outcome(best=None, proved=True, effort=spent)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome(best=None, proved=False, effort=spent, bound=solver.best_objective_bound)
    stages = tuple(
        tuple(int(solver.value(variable)) for variable in stage)
        for stage, length in zip(work.x, one.lengths, strict=True)
        for _ in range(length)
    )
    flows = tuple(
        _staying(stages[hop]) if owner is None else _flow(solver, work.z[owner]) for hop, owner in enumerate(owners)
    )
    best = Found(value=round(solver.objective_value), stages=stages, flows=flows)
    return Outcome(best=best, proved=status == cp_model.OPTIMAL, effort=spent, bound=solver.best_objective_bound)


def _flow(solver: cp_model.CpSolver, z: Sequence[Sequence[cp_model.IntVar]]) -> Flow:
    return tuple(tuple(int(solver.value(variable)) for variable in row) for row in z)


def _staying(stage: Sequence[int]) -> Flow:
    return tuple(tuple(count if c == d else 0 for d in range(len(stage))) for c, count in enumerate(stage))
