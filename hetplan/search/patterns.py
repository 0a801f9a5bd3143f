"""Replica shapes in bulk: a pattern is up to `MAX_BLOCKS` blocks of equal stages, each block on a mesh of its own.

Stages of one block run on the same kind of mesh; a replica passes its blocks in order, and no group feeds two blocks of
one replica. For a pattern with p stages, unit time t_i and n_i stages in block i, and m microbatches under 1F1B, with
tau the busiest stage's forward + backward seconds, W the sum over stages, C the seconds of all transfers both ways and
A what must follow the first stage's last backward pass (gradients that nothing hides, optimizer, gathers; at least
`after` seconds for each unit of layers on that stage):

    T >= m tau_s + A_s  for every stage s,
    T >= W + C + (m - 1) beta tau + A,    T >= 2 W + C + (m - 1 - p) tau + A  (m > p)

where beta is the smallest backward share. A pipeline's last action is the first stage's last backward pass, hence A.
The first bound holds for any schedule; the second because the busiest stage still has m - 1 backward passes to do once
the first microbatch is through all stages; the third because under 1F1B stage s starts microbatch j + (p - s) after it
has finished microbatch j, so between the first and the last journey through the stages behind it lie m - 1 - (p - s)
of its own periods; with s the busiest stage, sum_{i<s} tau_i <= s tau gives the form above. With layers divisible at
will the first bound asks that sum_i n_i T / (m t_i + after_i) is at least all layers.

With layers divisible at will each right side is, for given tau, least when the cheapest blocks are filled first (the
first stage is a block of its own for its A), and convex and piecewise linear in tau: its minimum over all cuts lies
where the e cheapest blocks, and no others, are full, for some e. So the most microbatches within T is the largest of a
few lines in T, kept as `Lines`. `cuts` puts the whole layers back.

Legend: N patterns, K blocks (`MAX_BLOCKS`), G groups; mesh -1 and count 0 where a pattern has fewer blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import permutations, product

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.search.after import Units
from hetplan.search.problem import Problem, Tables

Ints = npt.NDArray[np.int64]
MAX_BLOCKS = 3
NEWTON_STEPS = 5
WHOLE_LAYER_STEPS = 12
MOST_HELD = 128
NEVER_S = 1e150
"""Longer than any step: a transfer between places that nothing joins, a stage on a mesh that cannot run it."""
MOST_PATTERNS = 20_000
"""Patterns enumerated for one microbatch size and sharding; stage counts thin out to stay below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """Arrays, one row a pattern."""

    mesh: Ints
    count: Ints
    used: Ints
    """Devices of each group, (N, G)."""
    stages: Ints
    comm_s: Floats
    """C: transfers both ways, the least they can take."""
    unit_s: Floats
    """t_i, (N, K); infinite where there is no block."""

    def __len__(self) -> int:
        return len(self.stages)

    def take(self, rows: Ints) -> Patterns:
        """Return the patterns at `rows`."""
        return Patterns(**{field.name: getattr(self, field.name)[rows] for field in fields(Patterns)})


def stage_counts(most: int, choices: int) -> tuple[int, ...]:
    """Return at most `choices` stage counts up to `most`: all of 1, 2, 3, 4, 6, 8, 12 ..., or fewer, wider apart."""
    dense = [n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128) if n <= most]
    powers = [n for n in dense if n & (n - 1) == 0]
    halves = [n for n in dense if n in (3, 6, 12, 24, 48, 96)]
    if choices >= len(dense):
        return tuple(dense)
    if choices >= len(powers):
        return tuple(sorted([*powers, *halves[: choices - len(powers)]]))
    return tuple(powers[:choices])


def enumerate_patterns(problem: Problem, tables: Tables) -> Patterns:
    """Return all patterns of the space for one microbatch size."""
    usable = [m for m in range(len(problem.meshes)) if tables.usable_m[m]]
    by_group: dict[int, list[int]] = {}
    for m in usable:
        by_group.setdefault(problem.meshes[m].group, []).append(m)
    parts = [_singles(problem, usable)]
    budget = MOST_PATTERNS
    for size in range(2, min(MAX_BLOCKS, len(by_group)) + 1):
        sequences = list(_mesh_sequences(problem, by_group, size))
        if not sequences:
            continue
        choices = int((budget / len(sequences)) ** (1 / size))
        if choices < 1:
            sequences, choices = sequences[:budget], 1
        parts.append(_multiples(problem, np.array(sequences), max(1, choices)))
    mesh = np.concatenate([part[0] for part in parts])
    count = np.concatenate([part[1] for part in parts])
    keep = _inside(problem, mesh, count)
    return make_patterns(problem, tables, mesh[keep], count[keep])


def _singles(problem: Problem, usable: list[int]) -> tuple[Ints, Ints]:
    rows = [
        (m, n)
        for m in usable
        for n in range(
            1, min(problem.num_layers, problem.devices_g[problem.meshes[m].group] // problem.meshes[m].size) + 1
        )
    ]
    mesh = np.full((len(rows), MAX_BLOCKS), -1, dtype=np.int64)
    count = np.zeros((len(rows), MAX_BLOCKS), dtype=np.int64)
    if rows:
        mesh[:, 0], count[:, 0] = np.array(rows).T
    return mesh, count


def _mesh_sequences(problem: Problem, by_group: dict[int, list[int]], size: int) -> Iterator[tuple[int, ...]]:
    for groups in permutations(sorted(by_group), size):
        for meshes in product(*(by_group[g] for g in groups)):
            kinds = {(problem.meshes[m].cp, problem.meshes[m].dp, problem.meshes[m].ep) for m in meshes}
            if len(kinds) == 1:
                yield meshes


def _multiples(problem: Problem, sequences: Ints, choices: int) -> tuple[Ints, Ints]:
    size = sequences.shape[1]
    counts = np.array(list(product(stage_counts(problem.num_layers, choices), repeat=size)), dtype=np.int64)
    mesh = np.full((len(sequences) * len(counts), MAX_BLOCKS), -1, dtype=np.int64)
    count = np.zeros_like(mesh)
    mesh[:, :size] = np.repeat(sequences, len(counts), axis=0)
    count[:, :size] = np.tile(counts, (len(sequences), 1))
    return mesh, count


def _inside(problem: Problem, mesh: Ints, count: Ints) -> npt.NDArray[np.bool_]:
    used = devices_used(problem, mesh, count)
    stages = count.sum(axis=1)
    keep = np.all(used <= np.array(problem.devices_g), axis=1) & (stages <= problem.num_layers)
    limits = problem.limits
    if limits.pp is not None:
        keep &= np.isin(stages, np.array(limits.pp))
    if limits.pinned_layers is not None:
        keep &= stages == len(limits.pinned_layers)
    if limits.uniform_degrees:
        tp = np.array([m.tp for m in problem.meshes] + [0])[mesh]
        keep &= np.all((tp == tp[:, :1]) | (mesh < 0), axis=1)
    return np.asarray(keep)


def devices_used(problem: Problem, mesh: Ints, count: Ints) -> Ints:
    """Return the devices of each group that patterns use, (N, G)."""
    sizes = np.array([m.size for m in problem.meshes] + [0])
    groups = np.array([m.group for m in problem.meshes] + [-1])
    used = np.zeros((len(mesh), len(problem.devices_g)), dtype=np.int64)
    for block in range(mesh.shape[1]):
        for g in range(used.shape[1]):
            used[:, g] += np.where(groups[mesh[:, block]] == g, sizes[mesh[:, block]] * count[:, block], 0)
    return used


def make_patterns(problem: Problem, tables: Tables, mesh: Ints, count: Ints) -> Patterns:
    """Return pattern arrays with their transfers and unit times."""
    unit = np.append(tables.unit_m, np.inf)
    return Patterns(
        mesh=mesh,
        count=count,
        used=devices_used(problem, mesh, count),
        stages=count.sum(axis=1),
        comm_s=_transfers_s(problem, tables, mesh, count),
        unit_s=unit[mesh],
    )


def _transfers_s(problem: Problem, tables: Tables, mesh: Ints, count: Ints) -> Floats:
    """Return C: inside a block, as many neighbours as a domain holds are near; block ends may always be near."""
    sizes = np.array([m.size for m in problem.meshes])
    domains = np.array([problem.domain_g[m.group] for m in problem.meshes])
    together = np.maximum(1, domains // sizes)
    total = np.zeros(len(mesh))
    for block in range(mesh.shape[1]):
        there = mesh[:, block] >= 0
        m = np.where(there, mesh[:, block], 0)
        inner = np.maximum(count[:, block] - 1, 0)
        across = np.minimum(inner, np.maximum(0, -(-count[:, block] // together[m]) - 1))
        near = np.where(inner > across, inner - across, 0) * np.minimum(tables.near_mm[m, m], NEVER_S)
        total += np.where(there, near + across * np.minimum(tables.far_mm[m, m], NEVER_S), 0.0)
        if block:
            before = np.where(there, mesh[:, block - 1], 0)
            total += np.where(there, tables.near_mm[before, m], 0.0)
    return 2.0 * total


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Most microbatches as the least of maxima of lines `at + T * slope` (breakpoints, N) and of the first bound."""

    work: float
    floor_tau_s: Floats
    """No cut's busiest stage is faster, (N,)."""
    pace: tuple[Floats, Floats, Floats]
    """Stages, unit seconds and A of each block, (N, K), for the first bound."""
    first_at: Floats
    first_slope: Floats
    flow_at: Floats
    flow_slope: Floats
    stages: Ints

    def most_microbatches(self, step_s: float) -> Ints:
        """Return the most microbatches each pattern can run within `step_s` (0: none)."""
        most = np.minimum(self._paced(step_s), np.max(self.first_at + step_s * self.first_slope, axis=0))
        flow = np.max(self.flow_at + step_s * self.flow_slope, axis=0)
        most = np.where(flow > self.stages, np.minimum(most, flow), np.minimum(most, self.stages))
        rounded = np.floor(most * (1 + 1e-12) + 1e-9)
        return np.where(np.isfinite(rounded), np.maximum(rounded, 0), 0).astype(np.int64)

    def _paced(self, step_s: float) -> Floats:
        """Return the root m of sum_i n_i T / (m t_i + after_i) = work, by Newton's method from the left."""
        count, unit, after = self.pace
        most = step_s / self.floor_tau_s
        if not after.any():
            return np.asarray(most)
        slowest = np.where(count > 0, after / unit, 0.0).max(axis=1)
        low = np.maximum(1e-9, most - slowest)
        for _ in range(NEWTON_STEPS):
            each = low[:, None] * unit + after
            share = np.where(count > 0, count * step_s / each, 0.0)
            value = share.sum(axis=1) - self.work
            slope = np.where(count > 0, share * unit / each, 0.0).sum(axis=1)
            low = np.maximum(low, low + value / slope)
        return np.asarray(np.minimum(most, low * (1 + 1e-6)))


def bound_lines(
    patterns: Patterns,
    tables: Tables,
    after: tuple[Units, float] | None = None,
    floor_tau_s: Floats | None = None,
) -> Lines:
    """Return the bounds above as lines in the step time.

    `after`: A of a unit of layers, and the weight of layers without parameters (None: nothing follows pipelines).
    `floor_tau_s`: seconds below which no cut brings the busiest stage.
    """
    beta = backward_share(tables)
    nothing = np.zeros(len(tables.unit_m))
    units, bare = after or (Units(first_m=nothing, each_m=nothing), 0.0)
    after_s = np.append(units.each_m, 0.0)[patterns.mesh]
    unit, count = with_first_stage(patterns)
    extra = np.zeros_like(unit)
    extra[:, 0] = units.first_m[patterns.mesh[:, 0]]
    p = patterns.stages
    first = breakpoints(unit, count, extra, (tables, floor_tau_s), work_factor=1.0)
    flow = breakpoints(unit, count, extra, (tables, floor_tau_s), work_factor=2.0)
    comm = patterns.comm_s
    finite = np.where(np.isfinite(patterns.unit_s), patterns.unit_s, 1.0)
    return Lines(
        work=float(tables.weight_l.sum()) - (bare if after_s.any() else 0.0),
        floor_tau_s=flow[0][-1],
        pace=(np.where(np.isfinite(patterns.unit_s), patterns.count, 0).astype(float), finite, after_s),
        first_at=1 - (comm + first[1]) / (beta * first[0]) if beta > 0 else np.full_like(first[0], np.inf),
        first_slope=1 / (beta * first[0]) if beta > 0 else np.zeros_like(first[0]),
        flow_at=1 + p - (comm + flow[1]) / flow[0],
        flow_slope=1 / flow[0],
        stages=p,
    )


def whole_layers_tau_s(patterns: Patterns, tables: Tables, num_microbatches: Ints | None = None) -> Floats:
    """Return seconds below which no stage time lets whole layers of unit weight find room, (N,).

    A stage holds no more layers than fit beside the microbatches in flight at its block's last stage; infinite where
    that leaves no room at all. `num_microbatches`: how many each pattern runs (None: at least one).
    """
    repeats = int(np.sum(tables.weight_l >= 1 - 1e-9))
    unit = np.where(np.isfinite(patterns.unit_s), patterns.unit_s, 1.0)
    count = np.where(np.isfinite(patterns.unit_s), patterns.count, 0)
    last = np.cumsum(patterns.count, axis=1)
    held = np.maximum(patterns.stages[:, None] - last + 1, 1)
    held = np.minimum(held, 1 if num_microbatches is None else num_microbatches[:, None])
    most = most_layers(tables)[np.minimum(held, MOST_HELD), patterns.mesh]
    low = repeats / np.maximum((count / unit).sum(axis=1), 1e-300) * (1 - 1e-9)
    high = np.maximum(low, (np.where(count > 0, most, 0) * unit).max(axis=1)) * 1.001
    fits = (count * most).sum(axis=1) >= repeats
    count_k, unit_k, most_k = (np.ascontiguousarray(values.T, dtype=float) for values in (count, unit, most))
    for _ in range(WHOLE_LAYER_STEPS):
        middle = (low + high) / 2
        room = (count_k * np.minimum(np.floor(middle / unit_k * (1 + 1e-9)), most_k)).sum(axis=0)
        enough = room >= repeats
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(fits, low, np.inf)


def most_layers(tables: Tables) -> Ints:
    """Return how many layers of unit weight a stage holds at most, by microbatches held and mesh, (held + 1, m + 1)."""
    if "unit layers" in tables.block_memo:
        return np.asarray(tables.block_memo["unit layers"][0])
    layers = np.cumsum(np.concatenate([[0], tables.weight_l >= 1 - 1e-9]))
    num = len(tables.unit_m)
    result = np.zeros((MOST_HELD + 1, num + 1), dtype=np.int64)
    kept = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, MOST_HELD]
    for k, after in zip(kept, [*kept[1:], MOST_HELD + 1], strict=True):
        ends = tables.furthest_fit(k)
        spans = layers[ends] - layers[np.minimum(np.arange(len(layers)), ends)]
        result[k:after, :num] = spans.max(axis=(1, 2))
    tables.block_memo["unit layers"] = (result,)
    return result


def backward_share(tables: Tables) -> float:
    """Return beta, the smallest part of a layer's seconds that is its backward pass."""
    total = tables.forward_mrl + tables.backward_mrl
    finite = np.isfinite(total) & (total > 0)
    return float(np.min(tables.backward_mrl[finite] / total[finite])) if finite.any() else 0.5


def with_first_stage(patterns: Patterns) -> tuple[Floats, Floats]:
    """Return unit seconds and stage counts of blocks with the first stage as a block of its own, (N, K + 1) each."""
    unit = np.concatenate([patterns.unit_s[:, :1], patterns.unit_s], axis=1)
    count = np.concatenate([np.ones_like(patterns.count[:, :1]), patterns.count], axis=1).astype(float)
    count[:, 1] -= 1
    return unit, count


def least_held(tables: Tables, count: Floats) -> Floats:
    """Return the layers (in units) every block holds at least: none of its stages is empty. The first is stage 0."""
    weight = tables.weight_l
    inner = float(weight[1:].min()) if len(weight) > 1 else 0.0
    held = count * inner
    held[:, 0] = count[:, 0] * float(weight[0])
    return held


def breakpoints(
    unit: Floats, count: Floats, extra: Floats, at: tuple[Tables, Floats | None], *, work_factor: float
) -> tuple[Floats, Floats]:
    """Return (tau, work_factor W + A) at every breakpoint, (blocks, N) each."""
    tables, floor_tau_s = at
    work = float(tables.weight_l.sum())
    there = np.isfinite(unit) & (count > 0)
    seconds = np.where(there, unit, 1.0)
    cost = np.where(there, work_factor * seconds + extra, np.inf)
    order = np.argsort(cost, axis=1, kind="stable")
    base = np.take_along_axis(np.where(there, least_held(tables, count), 0.0), order, axis=1)
    cost = np.where(np.isfinite(cost), cost, 0.0)
    cost = np.take_along_axis(cost, order, axis=1)
    held = np.cumsum(np.take_along_axis(np.where(there, count / seconds, 0.0), order, axis=1), axis=1)
    based = np.cumsum(base, axis=1)
    left = np.maximum(work - based[:, -1], 0.0)
    with np.errstate(divide="ignore"):
        taus = ((left[:, None] + based) / held).T
    least = np.minimum(taus[-1] if floor_tau_s is None else np.maximum(taus[-1], floor_tau_s), NEVER_S)
    finite = np.isfinite(taus)
    taus = np.maximum(np.where(finite, taus, 0.0), least)
    loads, room, filled = np.zeros_like(taus), np.zeros_like(taus), np.zeros_like(taus)
    for k in range(len(taus)):
        room = np.maximum(room, held[:, k] * taus - based[:, k])
        before, filled = filled, np.minimum(left, room)
        loads += (filled - before + base[:, k]) * cost[:, k]
    return np.where(finite, taus, 1e150), np.where(finite, loads, 1e150)


def fill_work_s(unit: Floats, count: Floats, tables: Tables, tau: Floats) -> Floats:
    """Return the least W when no stage exceeds `tau`: fastest blocks first. The first column is stage 0 alone."""
    there = np.isfinite(unit) & (count > 0)
    seconds = np.where(there, unit, 1.0)
    base = np.where(there, least_held(tables, count), 0.0)
    room = np.where(there, np.maximum(count * tau[:, None] / seconds - base, 0.0), 0.0)
    order = np.argsort(np.where(there, unit, np.inf), axis=1, kind="stable")
    left = np.maximum(float(tables.weight_l.sum()) - base.sum(axis=1), 0.0)
    filled = np.minimum(np.cumsum(np.take_along_axis(room, order, axis=1), axis=1), left[:, None])
    shares = np.diff(filled, axis=1, prepend=0.0)
    return np.asarray((base * seconds).sum(axis=1) + (shares * np.take_along_axis(seconds, order, axis=1)).sum(axis=1))
