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
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from hetplan.costs.prices import Prices
from hetplan.costs.records import Holders
from hetplan.plan.program import schedule_errors
from hetplan.plan.stages import tied_tables, whole_params
from hetplan.plan.timing import Durations, Finish, pipeline_finish
from hetplan.search.exhaustive_combine import Combination
from hetplan.search.exhaustive_shapes import Mesh, Shape
from hetplan.search.exhaustive_space import Space
from hetplan.search.exhaustive_table import most_degrees

Ring = tuple[tuple[str, int, int], ...]
"""(group, ranks, tp) of each row that holds a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One replica shape of a set, with its exact pipeline on the least stage times."""

    shape: Shape
    key: tuple[object, ...]
    """What rows of a layout are sorted by."""
    cut: tuple[int, ...]
    last_s: tuple[tuple[float, ...], ...]
    """For each stage, the work on its last gradients before each of its layers and after all, summed up."""
    finish: Finish

    @property
    def pp(self) -> int:
        return len(self.shape.meshes)

    def mesh(self, stage: int) -> Mesh:
        return self.shape.meshes[stage % self.pp]

    def stage_at(self, layer: int) -> int:
        return next(stage for stage, end in enumerate(self.cut[1:]) if layer < end)


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
        return max(self.latest_s, self.first_s + self.total_s if self.total_s else 0.0)


class Floors:
    """Lower bounds on the step time of sets of replicas of one space."""

    def __init__(self, prices: Prices, space: Space) -> None:
        self._prices = prices
        self._space = space
        self._rows: dict[tuple[int, int], _Row | None] = {}
        self._rings: dict[tuple[int, int, Ring], tuple[float, float]] = {}
        self._updates: dict[tuple[Mesh, int, int], float] = {}
        self._dense_l, _ = whole_params(prices)
        self._ties = tied_tables(prices)

    def step_s(self, combination: Combination) -> float:
        """Return a time no layout of the set falls below; infinite where its schedule cannot run."""
        found = [(self._row(*one), combination.count(one)) for one in dict.fromkeys(combination)]
        rows = [(row, copies) for row, copies in found if row is not None]
        if len(rows) < len(found):
            return math.inf
        rows.sort(key=lambda entry: entry[0].key)
        traffic = [[_Traffic(latest_s=end) for end in row.finish.rank_s] for row, _ in rows]
        for first, end in pairwise(sorted({layer for row, _ in rows for layer in row.cut})):
            self._add_bucket(rows, traffic, first, end)
        return max(self._row_end_s(row, buckets) for (row, _), buckets in zip(rows, traffic, strict=True))

    def _row(self, index: int, num_microbatches: int) -> _Row | None:
        if (index, num_microbatches) not in self._rows:
            self._rows[index, num_microbatches] = self._make_row(index, num_microbatches)
        return self._rows[index, num_microbatches]

    def _make_row(self, index: int, num_microbatches: int) -> _Row | None:
        columns, context = self._space.pool.columns, self._space.context
        shape = self._space.shapes[int(columns.shape[index])]
        pp, count = len(shape.meshes), shape.num_stages
        if schedule_errors(context.schedule, pp, num_microbatches, shape.vpp):
            return None
        backward_s = columns.backward_s[index, :count]
        durations = Durations(
            forward_s=tuple(columns.forward_s[index, :count].tolist()),
            backward_s=tuple(backward_s.tolist()),
            weight_s=tuple((backward_s - columns.input_s[index, :count]).tolist()),
            p2p_s=tuple(columns.hop_s[index, : count - 1].tolist()),
        )
        cut = tuple(columns.cuts[index, : count + 1].tolist())
        size = int(columns.microbatch[index])
        stages = tuple(
            (mesh.group, first, end, mesh.tp, mesh.cp, mesh.dp, mesh.ep)
            for mesh, (first, end) in zip(shape.meshes * shape.vpp, pairwise(cut), strict=True)
        )
        return _Row(
            shape=shape,
            key=(count, stages, size, num_microbatches, shape.vpp),
            cut=cut,
            last_s=tuple(self._last_s(index, stage, size) for stage in range(count)),
            finish=pipeline_finish(context.schedule, pp, num_microbatches, shape.vpp, durations),
        )

    def _last_s(self, index: int, stage: int, size: int) -> tuple[float, ...]:
        columns, context = self._space.pool.columns, self._space.context
        shape = self._space.shapes[int(columns.shape[index])]
        mode = context.recomputes[int(columns.modes[index, stage])]
        costs = self._prices.layers(shape.meshes[stage % len(shape.meshes)].option(size, mode))
        each_l = costs.weight_gradient_s if context.schedule == "zero-bubble" else costs.backward_total_s
        first, end = columns.cuts[index, stage : stage + 2]
        return tuple(accumulate(each_l[first:end].tolist(), initial=0.0))

    def _add_bucket(self, rows: list[tuple[_Row, int]], traffic: list[list[_Traffic]], first: int, end: int) -> None:
        members = [(number, row, row.stage_at(first)) for number, (row, _) in enumerate(rows)]
        ring = tuple(
            (mesh.group, copies * mesh.dp * mesh.cp, mesh.tp)
            for (row, copies), (_, _, stage) in zip(rows, members, strict=True)
            for mesh in (row.mesh(stage),)
        )
        cost_s = self._ring_s(first, end, ring)
        if not sum(cost_s):
            return
        overlap = self._prices.calibration.overlap.gradients
        earliest = ready = 0.0
        for _, row, stage in members:
            last_s, start = row.last_s[stage], row.cut[stage]
            complete = row.finish.gradients_s[stage]
            through = complete - last_s[first - start]
            ready = max(ready, through)
            own_s = last_s[end - start] - last_s[first - start]
            earliest = max(earliest, through - own_s, complete - overlap * last_s[-1])
        params = float(self._dense_l[first:end].sum())
        lowest_s = cost_s[0] * float(self._dense_l[first]) / params
        for number, row, stage in members:
            traffic[number][stage % row.pp].add(earliest, ready, lowest_s, cost_s)

    def _ring_s(self, first: int, end: int, ring: Ring) -> tuple[float, float]:
        """Return the least seconds to reduce and to gather layers, however the ranks are packed into nodes."""
        key = (first, end, ring)
        if key not in self._rings:
            params = float(self._dense_l[first:end].sum())
            alone = sum(ranks for _, ranks, _ in ring) == 1
            self._rings[key] = (0.0, 0.0) if alone or params <= 0 else self._least_sync_s(params, ring)
        return self._rings[key]

    def _least_sync_s(self, params: float, ring: Ring) -> tuple[float, float]:
        sharding = self._space.context.sharding
        choices = []
        for group, ranks, tp in ring:
            per_node = -(-self._prices.cluster.group(group).devices_per_node // tp)
            packed = range(1, min(ranks, per_node) + 1)
            choices.append([Holders(group=group, num_ranks=ranks, ranks_per_node=near, tp=tp) for near in packed])
        costs = [self._prices.sync(params, holders, sharding) for holders in product(*choices)]
        reduce_s = min(cost.reduce_s for cost in costs) if sharding in ("none", "optimizer") else 0.0
        return reduce_s, min(cost.gather_s for cost in costs) if sharding != "full" else 0.0

    def _row_end_s(self, row: _Row, buckets: list[_Traffic]) -> float:
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
            updates_s[stage % row.pp] += self._update_s(row.mesh(stage), first, end_layer)
        return max(
            end + update_s + traffic.gather_s for end, update_s, traffic in zip(ends_s, updates_s, buckets, strict=True)
        )

    def _tie_s(self, params: float, meshes: list[Mesh]) -> float:
        holders = tuple(Holders(group=mesh.group, num_ranks=1, ranks_per_node=1, tp=mesh.tp) for mesh in meshes)
        return self._prices.sync(params, holders, "none").reduce_s

    def _update_s(self, mesh: Mesh, first: int, end: int) -> float:
        key = (mesh, first, end)
        if key not in self._updates:
            context = self._space.context
            costs = self._prices.layers(mesh.option(mesh.dp, context.recomputes[0]))
            degrees = most_degrees(self._prices, mesh, context)
            shared = context.sharding != "none"
            dense, expert = (float(each[first:end].sum()) for each in (costs.params, costs.expert_params))
            params = dense / (degrees.dense if shared else 1) + expert / (degrees.expert if shared else 1)
            self._updates[key] = self._prices.optimizer_s(mesh.group, params)
        return self._updates[key]
