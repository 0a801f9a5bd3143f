"""The layout that comes nearest to fitting: what memory a request takes at the very least, stage by stage.

Candidates are pipelines of one shape with everything that saves memory: the smallest microbatch, the strongest
recomputation, every sharding the limits allow, deep pipelines and few copies or shallow ones and many. For each, the
cut of the chain that minimises the largest overflow is found exactly,

    f_s(j) = min over i < j of max(f_(s-1)(i), fixed_s[i, j] + held_s flight_s[i, j] - capacity_s),

with `held_s` the microbatches stage `s` holds under its schedule. The best few are priced by `plan.estimate`, whose
memory is the one that counts. Devices may be left unused, so more devices never make the answer worse by much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from hetplan.costs.records import Floats, ShardDegrees
from hetplan.errors import UsageError
from hetplan.plan.check import check
from hetplan.plan.cuts import pinned_cut
from hetplan.plan.estimate import estimate
from hetplan.plan.placement import places_of
from hetplan.plan.program import held_counts, schedule_errors
from hetplan.plan.records import Estimate, Layout, Replica, Stage, StageEstimate
from hetplan.plan.rules import Violation
from hetplan.search.problem import Mesh, Problem
from hetplan.specs.workload import RECOMPUTES, Recompute, Sharding

MOST_COPIES = 5
"""Numbers of copies tried for each choice of meshes: one, the largest, and steps in between."""
MOST_KINDS = 6
PRICED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A layout that is as light as can be, priced and held to the rules."""

    layout: Layout
    estimate: Estimate
    violations: tuple[Violation, ...]

    @property
    def worst(self) -> StageEstimate:
        """The stage that overflows most (or has least room)."""
        return max(self.estimate.stages, key=overflow_bytes)

    @property
    def overflow_bytes(self) -> float:
        """Bytes the worst stage lacks; 0 or less: memory fits."""
        return overflow_bytes(self.worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Meshes of one replica in pipeline order, and what it is fed."""

    meshes: tuple[Mesh, ...]
    copies: int
    microbatch: int
    num_microbatches: int
    sharding: Sharding
    recompute: Recompute


def overflow_bytes(stage: StageEstimate) -> float:
    """Return the bytes a stage needs beyond what its device offers; negative where there is room."""
    return stage.memory.total_bytes - stage.capacity_bytes


def fits(problem: Problem) -> Near | None:
    """Return some layout that is valid, memory included, or None where none of the lightest is."""
    return lightest(problem, enough=True)


def lightest(problem: Problem, *, enough: bool = False) -> Near | None:
    """Return the layout whose fullest stage overflows least, or None where no layout of the limits has a shape.

    `enough`: the first valid layout will do, and none will where there is no valid one.
    """
    found: list[tuple[float, int, _Shape, tuple[int, ...]]] = []
    scores: list[float] = []
    for shape in _shapes(problem):
        worth = 0.0 if enough else (sorted(scores)[PRICED - 1] if len(scores) >= PRICED else math.inf)
        if _mean_overflow(problem, shape) > worth:
            continue
        scored = _best_cut(problem, shape)
        if scored is None:
            continue
        scores.append(scored[0])
        found.append((scored[0], len(found), shape, scored[1]))
        if enough and scored[0] <= 0:
            near = _priced(problem, shape, scored[1])
            if near is not None and not near.violations:
                return near
    if enough:
        return None
    found.sort(key=lambda entry: entry[:2])
    priced = [near for _, _, shape, cut in found[:PRICED] if (near := _priced(problem, shape, cut)) is not None]
    return min(
        priced, key=lambda near: (near.overflow_bytes > 0, len(near.violations), near.overflow_bytes), default=None
    )


def strongest_recompute(problem: Problem) -> Recompute:
    """Return the allowed recomputation that keeps least."""
    return max(problem.limits.recompute, key=RECOMPUTES.index)


def _shapes(problem: Problem) -> Iterator[_Shape]:
    """Yield the shapes worth cutting."""
    sizes = [size for size in problem.microbatches if problem.batch % size == 0]
    recompute = strongest_recompute(problem)
    for own in _mesh_choices(problem):
        widest = max(mesh.dp for mesh in own)
        size = next((size for size in sizes if size % widest == 0), None)
        if size is None:
            continue
        parts = problem.batch // size
        rooms = [room_for(problem, mesh) for mesh in own]
        for copies in _copies(parts, sum(rooms), min(_depths(problem, own))):
            for meshes in _pipelines(problem, own, [room // copies for room in rooms]):
                for sharding in _shardings(problem, copies, meshes):
                    yield _Shape(
                        meshes=meshes,
                        copies=copies,
                        microbatch=size,
                        num_microbatches=parts // copies,
                        sharding=sharding,
                        recompute=recompute,
                    )


def _mesh_choices(problem: Problem) -> Iterator[tuple[Mesh, ...]]:
    """Yield one mesh for each of some groups: all groups together, and each group alone."""
    kinds = sorted({(mesh.tp, mesh.cp, mesh.dp, mesh.ep) for mesh in problem.meshes}, key=_lightest_first)
    seen: set[tuple[Mesh, ...]] = set()
    groups = sorted({mesh.group for mesh in problem.meshes})
    for kind in kinds[:MOST_KINDS]:
        own = [mesh for g in groups if (mesh := _nearest_mesh(problem, g, kind)) is not None]
        if problem.limits.uniform_degrees:
            own = [mesh for mesh in own if (mesh.tp, mesh.cp, mesh.dp, mesh.ep) == kind]
        for chosen in (*_reachable(problem, own), *((mesh,) for mesh in own)):
            if chosen and chosen not in seen:
                seen.add(chosen)
                yield chosen


def _reachable(problem: Problem, own: Sequence[Mesh]) -> Iterator[tuple[Mesh, ...]]:
    """Yield all meshes where links join them all, else each pair that a link joins."""
    joined = [pair for pair in combinations(own, 2) if problem.prices.link(pair[0].name, pair[1].name) is not None]
    if len(joined) == len(own) * (len(own) - 1) // 2:
        yield tuple(own)
    else:
        yield from joined


def _lightest_first(kind: tuple[int, int, int, int]) -> tuple[int, ...]:
    tp, cp, dp, ep = kind
    return (-tp * cp, -tp, -ep, dp)


def _nearest_mesh(problem: Problem, group: int, kind: tuple[int, int, int, int]) -> Mesh | None:
    """Return the group's mesh with at most the tp and ep wanted, as near to them as it has."""
    tp, cp, _, ep = kind
    own = [m for m in problem.meshes if m.group == group and m.tp <= tp and m.cp <= cp and m.ep <= ep]
    return max(own, key=lambda mesh: (mesh.tp, mesh.cp, mesh.ep, -mesh.dp), default=None)


def room_for(problem: Problem, mesh: Mesh) -> int:
    """Return how many meshes a group's devices have room for, tp groups inside fast-link domains.

    Nodes that no network joins cannot work together: only the largest counts.
    """
    _, sizes = np.unique(places_of(problem.prices)[mesh.name].domain_d, return_counts=True)
    if len(sizes) > 1 and problem.prices.link(mesh.name, mesh.name) is None:
        sizes = sizes[np.argmax(sizes) :][:1]
    if mesh.tp <= int(sizes.max(initial=0)):
        return int((sizes // mesh.tp).sum()) // (mesh.cp * mesh.dp)
    return int(sizes.sum()) // mesh.size


def _depths(problem: Problem, own: Sequence[Mesh]) -> tuple[int, ...]:
    """Return the pipeline depths the limits allow."""
    limits = problem.limits
    if limits.pinned_layers is not None:
        return (len(limits.pinned_layers),)
    decoders = sum(layer.kind == "decoder" for layer in problem.prices.model.chain)
    most = decoders // limits.min_decoder_layers if limits.min_decoder_layers > 0 else problem.num_layers
    depths = limits.pp if limits.pp is not None else tuple(range(1, problem.num_layers + 1))
    return tuple(p for p in depths if p <= most and (decoders % p == 0 or not limits.equal_cuts)) or (1,)


def _copies(parts: int, room: int, depth: int) -> list[int]:
    """Return some numbers of equal replicas the batch can be divided over, from 1 to as many as there is room for."""
    most = max(1, min(parts, room // max(1, depth)))
    able = [c for c in range(1, most + 1) if parts % c == 0] if most <= 1 << 16 else [1, most]
    if len(able) <= MOST_COPIES:
        return able
    places = np.unique(np.linspace(0, len(able) - 1, MOST_COPIES).round().astype(int))
    return [able[place] for place in places.tolist()]


def _pipelines(problem: Problem, own: Sequence[Mesh], rooms: Sequence[int]) -> Iterator[tuple[Mesh, ...]]:
    """Yield the deepest and the shallowest allowed pipeline there is room for, memory-rich devices first and last."""
    richest = sorted(range(len(own)), key=lambda i: -problem.prices.capacity_bytes(own[i].name) * own[i].tp)
    total = min(sum(rooms), problem.num_layers)
    depths = [p for p in _depths(problem, own) if p <= total]
    for depth in dict.fromkeys((max(depths), min(depths)) if depths else ()):
        taken: list[Mesh] = []
        for i in richest:
            taken += [own[i]] * min(rooms[i], depth - len(taken))
        yield tuple(taken)
        if len(set(taken)) > 1:
            yield tuple(reversed(taken))


def _shardings(problem: Problem, copies: int, meshes: Sequence[Mesh]) -> tuple[Sharding, ...]:
    allowed = problem.limits.sharding
    alone = copies * min(mesh.dp * mesh.cp for mesh in meshes) == 1
    return tuple(s for s in allowed if s == "none") or allowed[:1] if alone else allowed


def _mean_overflow(problem: Problem, shape: _Shape) -> float:
    """Return bytes a stage lacks on average at the very least: what no cut can share out better.

    Every layer's states lie on some stage, and its activations of one microbatch at least; a chain's fixed bytes less
    those of its largest layer are no more than the sum of the layers' states.
    """
    needs = []
    for mesh in dict.fromkeys(shape.meshes):
        fixed, flight = _matrices(problem, shape, mesh)
        needs.append(float(fixed[0, -1] - np.diagonal(fixed, 1).max() + flight[0, -1]))
    room = sum(problem.prices.capacity_bytes(mesh.name) for mesh in shape.meshes)
    return (min(needs) - room) / len(shape.meshes)


def _best_cut(problem: Problem, shape: _Shape) -> tuple[float, tuple[int, ...]] | None:
    """Return the least largest overflow of a shape in bytes, and the stage starts (and end) that reach it."""
    schedule, depth = problem.limits.schedules[0], len(shape.meshes)
    if schedule_errors(schedule, depth, shape.num_microbatches):
        return None
    moments = held_counts(schedule, depth, shape.num_microbatches)
    held = [max(sum(counts) for counts in rank) for rank in moments]
    memo: dict[tuple[Mesh, int], Floats] = {}
    over: list[Floats] = []
    for mesh, count in zip(shape.meshes, held, strict=True):
        if (mesh, count) not in memo:
            memo[mesh, count] = _overflows(problem, shape, mesh, count)
        over.append(memo[mesh, count])
    given = _given_cut(problem, depth)
    if given is not None:
        return max(float(matrix[i, j]) for matrix, (i, j) in zip(over, pairwise(given), strict=True)), given
    if problem.limits.pinned_layers is not None or problem.limits.equal_cuts:
        return None
    return _walk(over)


def _given_cut(problem: Problem, depth: int) -> tuple[int, ...] | None:
    """Return the cut the limits prescribe, None where they leave it open or prescribe what cannot be."""
    pinned = problem.limits.pinned_layers
    if pinned is None and problem.limits.equal_cuts:
        decoders = sum(layer.kind == "decoder" for layer in problem.prices.model.chain)
        pinned = (decoders // depth,) * depth if decoders % depth == 0 else None
    if pinned is None:
        return None
    try:
        return pinned_cut(problem.prices.model, pinned)
    except UsageError:
        return None


def _overflows(problem: Problem, shape: _Shape, mesh: Mesh, held: int) -> Floats:
    """Return the bytes each span lacks on a mesh, shape (layers + 1, layers + 1); infinite where it is no span."""
    prices = problem.prices
    fixed, flight = _matrices(problem, shape, mesh)
    over = fixed + held * flight - prices.capacity_bytes(mesh.name)
    is_span = np.triu(np.ones(over.shape, dtype=bool), k=1)
    if problem.limits.min_decoder_layers > 0:
        is_decoder = [layer.kind == "decoder" for layer in prices.model.chain]
        before = np.concatenate([[0], np.cumsum(is_decoder)])
        is_span &= before[None, :] - before[:, None] >= problem.limits.min_decoder_layers
    return np.asarray(np.where(is_span, over, np.inf), dtype=np.float64)


def _matrices(problem: Problem, shape: _Shape, mesh: Mesh) -> tuple[Floats, Floats]:
    """Return fixed bytes and bytes a microbatch of every span on a mesh."""
    ranks = shape.copies * mesh.dp * mesh.cp if shape.sharding != "none" else 1
    degrees = ShardDegrees(dense=ranks, expert=max(1, ranks // mesh.ep))
    option = mesh.option(shape.microbatch, shape.recompute)
    return problem.prices.memory_matrices(option, shape.sharding, degrees)


def _walk(over: Sequence[Floats]) -> tuple[float, tuple[int, ...]] | None:
    """Return the least largest value of a path through the spans, by the module's recurrence, and its cut."""
    least = [over[0][0]]
    for matrix in over[1:]:
        least.append(np.min(np.maximum(least[-1][:, None], matrix), axis=0))
    end = over[0].shape[0] - 1
    value = float(least[-1][end])
    if not np.isfinite(value):
        return None
    cut = [end]
    for s in range(len(over) - 1, 0, -1):
        end = int(np.argmin(np.maximum(least[s - 1], over[s][:, end])))
        cut.append(end)
    return value, (0, *reversed(cut))


def _priced(problem: Problem, shape: _Shape, cut: Sequence[int]) -> Near | None:
    stages = tuple(
        Stage(
            group=mesh.name,
            first_layer=first,
            end_layer=end,
            tp=mesh.tp,
            cp=mesh.cp,
            dp=mesh.dp,
            ep=mesh.ep,
            recompute=shape.recompute,
        )
        for mesh, (first, end) in zip(shape.meshes, pairwise(cut), strict=True)
    )
    replica = Replica(
        stages=stages, microbatch=shape.microbatch, num_microbatches=shape.num_microbatches, copies=shape.copies
    )
    layout = Layout(replicas=(replica,), schedule=problem.limits.schedules[0], sharding=shape.sharding)
    return near_of(problem, layout)


def near_of(problem: Problem, layout: Layout) -> Near | None:
    """Return a layout with its price and the rules it breaks, None where it has no price."""
    violations = check(layout, problem.prices, problem.limits)
    if any(violation.unpriceable for violation in violations):
        return None
    return Near(layout=layout, estimate=estimate(layout, problem.prices), violations=violations)


def without(near: Near, *components: str) -> float:
    """Return the overflow in bytes if some components of memory (field names) lay elsewhere."""
    return max(
        overflow_bytes(stage) - sum(float(getattr(stage.memory, name)) for name in components)
        for stage in near.estimate.stages
    )
