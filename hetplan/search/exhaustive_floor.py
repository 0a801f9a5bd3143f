"""A lower bound for a set of replicas as a whole: exact pipelines, and gradients that meet where the cuts say.

Everything about a step but its devices and recomputation is known once the replicas are chosen. Pipelines are timed
exactly on the least stage times. Where replicas cut the chain, gradients meet in buckets (`plan.sync`); a bucket costs
at least what its holders would pay if their ranks were packed into nodes in the best way. A mesh whose gradients are
complete at `end`, with buckets `r` that are ready at `ready[r]`, may start at `earliest[r]` and take `reduce[r]`, is
not done with them before

    max over r of  ready[r] + lowest share of r * reduce[r]
    max over r of  earliest[r] + reduce[r]
    min over r of  earliest[r]  +  sum over r of  reduce[r]        (one after the other on the mesh)

then come a tied table, its update, and the gathers of its buckets one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, Holders, ShardDegrees, StageOption
from hetplan.plan.program import held_counts, schedule_errors
from hetplan.plan.stages import tied_tables, whole_params
from hetplan.plan.timing import Durations, Finish, pipeline_finish
from hetplan.search.exhaustive_combine import Combination
from hetplan.search.exhaustive_shapes import Mesh, Shape
from hetplan.search.exhaustive_space import Space
from hetplan.search.exhaustive_table import LENIENT

Ring = tuple[tuple[str, int, int, int], ...]
"""(group, ranks, tp, ep) of each row that holds a layer."""
Piece = tuple[int, int, Ring]
"""(first layer, end layer, ring) of layers that the same stages hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One replica shape of a set."""

    shape: Shape
    key: tuple[object, ...]
    """What rows of a layout are sorted by."""
    cut: tuple[int, ...]
    size: int
    num_microbatches: int
    copies: int
    hop_s: tuple[float, ...]
    modes: tuple[int, ...]
    held: tuple[int, ...]
    """Microbatches each stage holds; empty where virtual stages share a rank."""

    @property
    def pp(self) -> int:
        return len(self.shape.meshes)

    def mesh(self, stage: int) -> Mesh:
        return self.shape.meshes[stage % self.pp]

    def stage_at(self, layer: int) -> int:
        return next(stage for stage, end in enumerate(self.cut[1:]) if layer < end)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageWork:
    """What one stage of a row does in a microbatch, at least."""

    forward_s: float
    backward_s: float
    weight_s: float
    tail_s: float
    """What is left to send of its lowest layer when the stage is through (sharded gradients)."""
    last_s: tuple[float, ...]
    """The work on the last gradients before each of its layers and after all, summed up."""


@dataclass(slots=True)
class _Traffic:
    """Buckets of one mesh so far."""

    latest_s: float
    first_s: float = math.inf
    total_s: float = 0.0
    gather_s: float = 0.0

    def add(self, earliest_s: float, ready_s: float, lowest_s: float, cost_s: tuple[float, float]) -> None:
        """Count one bucket."""
        reduce_s, gather_s = cost_s
        self.first_s = min(self.first_s, earliest_s)
        self.total_s += reduce_s
        self.gather_s += gather_s
        self.latest_s = max(self.latest_s, ready_s + lowest_s, earliest_s + reduce_s)

    def end_s(self) -> float:
        """Return when the mesh has all its gradients at the earliest."""
        return max(self.latest_s, self.first_s + self.total_s) if self.total_s else self.latest_s


class Floors:
    """Lower bounds on the step time of sets of replicas of one space."""

    def __init__(self, prices: Prices, space: Space) -> None:
        self._prices = prices
        self._space = space
        self._rows: dict[tuple[int, int, int], _Row | None] = {}
        self._replicas: dict[tuple[int, int], float] = {}
        self._syncs: dict[Piece, tuple[float, float]] = {}
        self._works: dict[tuple[Mesh, int, int, tuple[Piece, ...]], _StageWork] = {}
        self._modes: dict[tuple[Mesh, int, int, tuple[int, int], ShardDegrees], int | None] = {}
        self._updates: dict[tuple[Mesh, int, int, ShardDegrees], float] = {}
        self._dense_l, _ = whole_params(prices)
        self._ties = tied_tables(prices)

    def slowest_s(self, combination: Combination) -> float:
        """Return when the slowest replica of a set is done at the earliest, whatever the others are."""
        return max(self._replica_s(*one) for one in combination)

    def _replica_s(self, index: int, num_microbatches: int) -> float:
        key = (index, num_microbatches)
        if key not in self._replicas:
            row = self._row(index, num_microbatches, 1)
            self._replicas[key] = math.inf if row is None else self._column_s(row, index)
        return self._replicas[key]

    def _column_s(self, row: _Row, index: int) -> float:
        columns, count = self._space.pool.columns, len(row.cut) - 1
        backward_s = columns.backward_s[index, :count]
        durations = Durations(
            forward_s=tuple(columns.forward_s[index, :count].tolist()),
            backward_s=tuple(backward_s.tolist()),
            weight_s=tuple((backward_s - columns.input_s[index, :count]).tolist()),
            p2p_s=row.hop_s,
        )
        schedule = self._space.context.schedule
        finish = pipeline_finish(schedule, row.pp, row.num_microbatches, row.shape.vpp, durations)
        after_s: list[float] = columns.after_s[index, :count].tolist()
        ends_s = [end + after for end, after in zip(finish.gradients_s, after_s, strict=True)]
        return max(*ends_s, *finish.rank_s)

    def step_s(self, combination: Combination) -> float:
        """Return a time no layout of the set falls below; infinite where it does not fit or cannot run."""
        found = [self._row(*one, combination.count(one)) for one in dict.fromkeys(combination)]
        rows = sorted((row for row in found if row is not None), key=lambda row: row.key)
        if len(rows) < len(found):
            return math.inf
        pieces = _pieces(rows)
        works: list[list[_StageWork]] = []
        finishes: list[Finish] = []
        for row in rows:
            own = [self._work(row, stage, pieces) for stage in range(len(row.cut) - 1)]
            fitting = [work for work in own if work is not None]
            if len(fitting) < len(own):
                return math.inf
            works.append(fitting)
            finishes.append(self._finish(row, fitting))
        traffic = [[_Traffic(latest_s=end) for end in finish.rank_s] for finish in finishes]
        for piece in pieces:
            self._add_bucket(piece, list(zip(rows, works, finishes, traffic, strict=True)))
        return max(self._row_end_s(row, pieces, buckets) for row, buckets in zip(rows, traffic, strict=True))

    def _row(self, index: int, num_microbatches: int, copies: int) -> _Row | None:
        key = (index, num_microbatches, copies)
        if key not in self._rows:
            self._rows[key] = self._make_row(index, num_microbatches, copies)
        return self._rows[key]

    def _make_row(self, index: int, num_microbatches: int, copies: int) -> _Row | None:
        columns, schedule = self._space.pool.columns, self._space.context.schedule
        shape = self._space.shapes[int(columns.shape[index])]
        pp, count = len(shape.meshes), shape.num_stages
        if schedule_errors(schedule, pp, num_microbatches, shape.vpp):
            return None
        cut = tuple(columns.cuts[index, : count + 1].tolist())
        size = int(columns.microbatch[index])
        stages = tuple(
            (mesh.group, first, end, mesh.tp, mesh.cp, mesh.dp, mesh.ep)
            for mesh, (first, end) in zip(shape.meshes * shape.vpp, pairwise(cut), strict=True)
        )
        held = tuple(m[0][0] for m in held_counts(schedule, pp, num_microbatches)) if shape.vpp == 1 else ()
        return _Row(
            shape=shape,
            key=(count, stages, size, num_microbatches, shape.vpp),
            cut=cut,
            size=size,
            num_microbatches=num_microbatches,
            copies=copies,
            hop_s=tuple(columns.hop_s[index, : count - 1].tolist()),
            modes=tuple(columns.modes[index, :count].tolist()),
            held=held,
        )

    def _finish(self, row: _Row, works: list[_StageWork]) -> Finish:
        durations = Durations(
            forward_s=tuple(work.forward_s for work in works),
            backward_s=tuple(work.backward_s for work in works),
            weight_s=tuple(work.weight_s for work in works),
            p2p_s=row.hop_s,
        )
        schedule = self._space.context.schedule
        return pipeline_finish(schedule, row.pp, row.num_microbatches, row.shape.vpp, durations)

    def _work(self, row: _Row, stage: int, pieces: list[Piece]) -> _StageWork | None:
        """Return what a stage does with the first recomputation that fits; None where none does."""
        mesh, first, end = row.mesh(stage), row.cut[stage], row.cut[stage + 1]
        own = tuple(piece for piece in pieces if first <= piece[0] < end)
        mode: int | None = row.modes[stage]
        if row.held and self._space.context.sharding != "none":
            mode = self._mode(mesh, row.size, row.held[stage], own)
        if mode is None:
            return None
        sharded = self._space.context.sharding in ("gradients", "full")
        key = (mesh, row.size, mode, own if sharded else ((first, end, ()),))
        if key not in self._works:
            self._works[key] = self._make_work(*key)
        return self._works[key]

    def _mode(self, mesh: Mesh, size: int, held: int, own: tuple[Piece, ...]) -> int | None:
        span, degrees = (own[0][0], own[-1][1]), _degrees(mesh, own)
        key = (mesh, size, held, span, degrees)
        if key not in self._modes:
            context = self._space.context
            room = self._prices.capacity_bytes(mesh.group) * LENIENT
            options = (mesh.option(size, recompute) for recompute in context.recomputes)
            uses = (self._prices.memory(option, span, held, context.sharding, degrees) for option in options)
            self._modes[key] = next((mode for mode, use in enumerate(uses) if use.total_bytes <= room), None)
        return self._modes[key]

    def _make_work(self, mesh: Mesh, size: int, mode: int, own: tuple[Piece, ...]) -> _StageWork:
        context = self._space.context
        option = mesh.option(size, context.recomputes[mode])
        costs = self._prices.layers(option)
        forward_s = backward_s = tail_s = 0.0
        for number, (first, end, ring) in enumerate(own):
            forward_l, backward_l = costs.forward_total_s[first:end], costs.backward_total_s[first:end]
            if ring:
                gather_l, reduce_l = (each[first:end] for each in self._gathers(option, ring))
                beside = np.maximum if self._prices.calibration.overlap.gathers else np.add
                forward_l = beside(forward_l, gather_l)
                backward_l = beside(backward_l, gather_l + reduce_l)
                tail_s = float(reduce_l[0]) if number == 0 else tail_s
            forward_s += float(forward_l.sum())
            backward_s += float(backward_l.sum())
        span = slice(own[0][0], own[-1][1])
        last_l = costs.weight_gradient_s if context.schedule == "zero-bubble" else costs.backward_total_s
        return _StageWork(
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=float(costs.weight_gradient_s[span].sum()),
            tail_s=tail_s,
            last_s=tuple(accumulate(last_l[span].tolist(), initial=0.0)),
        )

    def _gathers(self, option: StageOption, ring: Ring) -> tuple[Floats, Floats]:
        """Return the least seconds to gather each layer's weights and to scatter its gradients."""
        found = [self._prices.gathers_s(option, holders) for holders in self._packings(ring)]
        gather_l = np.minimum.reduce([gather for gather, _ in found])
        reduce_l = np.minimum.reduce([reduce for _, reduce in found])
        return gather_l if self._space.context.sharding == "full" else np.zeros_like(gather_l), reduce_l

    def _packings(self, ring: Ring) -> list[tuple[Holders, ...]]:
        """Return the holders of a ring, for every number of them a node could take.

        Rows of equal group and tp are counted both one by one and as one: on one node they may be neighbours.
        """
        apart = [(group, ranks, tp) for group, ranks, tp, _ in ring]
        merged: dict[tuple[str, int], int] = {}
        for group, ranks, tp in apart:
            merged[group, tp] = merged.get((group, tp), 0) + ranks
        together = [(group, ranks, tp) for (group, tp), ranks in merged.items()]
        found: list[tuple[Holders, ...]] = []
        for rows in (apart, together) if together != apart else (apart,):
            found.extend(product(*[list(self._packed(*row)) for row in rows]))
        return found

    def _packed(self, group: str, ranks: int, tp: int) -> Iterator[Holders]:
        per_node = -(-self._prices.cluster.group(group).devices_per_node // tp)
        for near in range(1, min(ranks, per_node) + 1):
            yield Holders(group=group, num_ranks=ranks, ranks_per_node=near, tp=tp)

    def _add_bucket(self, piece: Piece, parts: list[tuple[_Row, list[_StageWork], Finish, list[_Traffic]]]) -> None:
        first, end, _ = piece
        cost_s = self._sync_s(piece)
        overlap = self._prices.calibration.overlap.gradients
        earliest = ready = 0.0
        for row, works, finish, _ in parts:
            stage = row.stage_at(first)
            work, start = works[stage], row.cut[stage]
            complete = finish.gradients_s[stage]
            through = complete - work.last_s[first - start]
            ready = max(ready, through + (work.tail_s if first == start else 0.0))
            own_s = work.last_s[end - start] - work.last_s[first - start]
            earliest = max(earliest, through - own_s, complete - overlap * work.last_s[-1])
        params = float(self._dense_l[first:end].sum())
        lowest_s = cost_s[0] * float(self._dense_l[first]) / params if params else 0.0
        for row, _, _, traffic in parts:
            traffic[row.stage_at(first) % row.pp].add(earliest, ready, lowest_s, cost_s)

    def _sync_s(self, piece: Piece) -> tuple[float, float]:
        """Return the least seconds to reduce and to gather layers, however the ranks are packed into nodes."""
        if piece not in self._syncs:
            first, end, ring = piece
            params = float(self._dense_l[first:end].sum())
            sharding = self._space.context.sharding
            alone = sum(ranks for _, ranks, _, _ in ring) == 1
            packings = [] if alone or params <= 0 else self._packings(ring)
            costs = [self._prices.sync(params, holders, sharding) for holders in packings]
            reduce_s = min((cost.reduce_s for cost in costs), default=0.0)
            gather_s = min((cost.gather_s for cost in costs), default=0.0)
            self._syncs[piece] = (
                reduce_s if sharding in ("none", "optimizer") else 0.0,
                gather_s if sharding != "full" else 0.0,
            )
        return self._syncs[piece]

    def _row_end_s(self, row: _Row, pieces: list[Piece], buckets: list[_Traffic]) -> float:
        ends_s = [traffic.end_s() for traffic in buckets]
        for table, head, params in self._ties:
            stages = [row.stage_at(layer) for layer in (table, head)]
            pair = [stage % row.pp for stage in stages]
            if pair[0] != pair[1]:
                end = max(ends_s[q] for q in pair) + self._tie_s(float(params), [row.mesh(stage) for stage in stages])
                for q in pair:
                    ends_s[q] = end
        updates_s = [0.0] * row.pp
        for stage, (first, end_layer) in enumerate(pairwise(row.cut)):
            own = tuple(piece for piece in pieces if first <= piece[0] < end_layer)
            updates_s[stage % row.pp] += self._update_s(row.mesh(stage), own)
        return max(
            end + update_s + traffic.gather_s for end, update_s, traffic in zip(ends_s, updates_s, buckets, strict=True)
        )

    def _tie_s(self, params: float, meshes: list[Mesh]) -> float:
        holders = tuple(Holders(group=mesh.group, num_ranks=1, ranks_per_node=1, tp=mesh.tp) for mesh in meshes)
        return self._prices.sync(params, holders, "none").reduce_s

    def _update_s(self, mesh: Mesh, own: tuple[Piece, ...]) -> float:
        context, first, end = self._space.context, own[0][0], own[-1][1]
        degrees = ShardDegrees() if context.sharding == "none" else _degrees(mesh, own)
        key = (mesh, first, end, degrees)
        if key not in self._updates:
            costs = self._prices.layers(mesh.option(mesh.dp, context.recomputes[0]))
            dense, expert = (float(each[first:end].sum()) for each in (costs.params, costs.expert_params))
            self._updates[key] = self._prices.optimizer_s(mesh.group, dense / degrees.dense + expert / degrees.expert)
        return self._updates[key]


def _pieces(rows: list[_Row]) -> list[Piece]:
    """Return the chain cut wherever some row cuts it, each piece with the ranks that hold it."""
    found = []
    for first, end in pairwise(sorted({layer for row in rows for layer in row.cut})):
        meshes = [(row.mesh(row.stage_at(first)), row.copies) for row in rows]
        ring = tuple((mesh.group, copies * mesh.dp * mesh.cp, mesh.tp, mesh.ep) for mesh, copies in meshes)
        found.append((first, end, ring))
    return found


def _degrees(mesh: Mesh, own: tuple[Piece, ...]) -> ShardDegrees:
    """Return over how many ranks a stage's states are shared out, as `plan.sync.shard_degrees` counts."""
    equal = [[(ranks, ep) for _, ranks, tp, ep in ring if tp == mesh.tp] for _, _, ring in own]
    dense = min(sum(ranks for ranks, _ in holders) for holders in equal)
    expert = min(sum(ranks // ep for ranks, ep in holders if ep == mesh.ep) for holders in equal)
    return ShardDegrees(dense=max(1, dense), expert=max(1, expert))
