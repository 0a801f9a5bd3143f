"""What a layout costs: the one objective every other part of hetplan is held to.

Per row of the layout (one replica shape), the exact critical path of its Program over its own stages and links gives
the end of every rank (`timing`); copies whose boundaries lie differently are told apart, and the slowest counts.
Gradients then meet across rows, weights are updated and go out again (`sync`). The step ends with the last of it.

What it leaves out, `simulate` adds: contention of transfers of different copies or stages for one NIC or line, jitter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import StageOption
from hetplan.plan.memory import mesh_memory
from hetplan.plan.placement import (
    Indices,
    NodeShare,
    is_placed,
    mesh_devices,
    node_shares,
    place,
    places_of,
    same_domain,
)
from hetplan.plan.records import Estimate, Layout, Replica, StageEstimate, TimeParts
from hetplan.plan.stages import HeldRun, Sharing, StageWork, boundary_seconds, option_of, sharded_work, stage_work
from hetplan.plan.sync import Ending, Mesh, StepEnd, ending, finish_step, held_runs, shard_degrees, stages_over
from hetplan.plan.timing import Durations, Finish, pipeline_finish
from hetplan.plan.traffic import traffic_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyClass:
    """Copies of a row whose boundaries lie alike."""

    durations: Durations
    copies: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """What one row of a layout does: everything the times of its pipelines depend on."""

    replica: Replica
    options: tuple[StageOption, ...]
    work: tuple[StageWork, ...]
    classes: tuple[CopyClass, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A layout in the cost model's numbers; `estimate` and `simulate` both start from it."""

    layout: Layout
    rows: tuple[RowWork, ...]
    ending: Ending
    traffic_usd: float
    """Price of what a step moves over paid networks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A layout on its devices: all that its price depends on besides the constants of the cost model."""

    layout: Layout
    options: tuple[tuple[StageOption, ...], ...]
    domains: Mapping[Mesh, Indices]
    sharing: Sharing
    boundaries: tuple[tuple[tuple[tuple[bool, ...], tuple[int, ...]], ...], ...]
    """By row: ways in which the boundaries between stages lie, and the copies that lie so."""


def estimate(layout: Layout, prices: Prices) -> Estimate:
    """Return what a layout costs; stages without devices are placed first (see `placement.place`).

    Raises:
        UsageError: the layout names a group the cluster does not have, or more devices than there are.
    """
    work = work_of(layout, prices)
    finishes = [row_finish(row, layout) for row in work.rows]
    end = finish_step(work.ending, [f.rank_s for f in finishes], [f.gradients_s for f in finishes])
    stages = tuple(_stage_estimates(work, prices))
    replica_s = tuple(finish.pipeline_s for finish in finishes)
    parts, overlapped_s = _parts(work, replica_s, end)
    used = [(stage.group, row.replica.copies * stage.mesh_size) for row in work.rows for stage in _physical(row)]
    samples = layout.num_samples
    flop_per_s = sum(count * prices.peak_flop_per_s(group) for group, count in used)
    return Estimate(
        step_s=end.step_s,
        parts=parts,
        replica_s=replica_s,
        dp_overlapped_s=overlapped_s,
        tokens_per_s=samples * prices.workload.seq_len / end.step_s,
        mfu=prices.model_flop() * samples / (end.step_s * flop_per_s),
        usd_per_step=_usd(used, prices, end.step_s, work.traffic_usd),
        joules_per_step=_joules(stages, work, prices, end.step_s),
        stages=stages,
        relative_error=prices.calibration.relative_error,
        origins=prices.origins(),
    )


def work_of(layout: Layout, prices: Prices) -> Work:
    """Return a layout in the cost model's numbers."""
    return work_on(arrange(layout, prices), prices)


def arrange(layout: Layout, prices: Prices) -> Arrangement:
    """Return where a layout's stages are and who shares what, which no constant of the cost model changes."""
    placed = layout if is_placed(layout) else place(layout, prices.cluster)
    places = places_of(prices)
    domains: dict[Mesh, Indices] = {}
    nodes: dict[Mesh, Indices] = {}
    for row, replica in enumerate(placed.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            devices_cd = mesh_devices(stage, replica.copies)
            domains[row, q] = places[stage.group].domain_d[devices_cd]
            nodes[row, q] = places[stage.group].node_d[devices_cd]
    return Arrangement(
        layout=placed,
        options=tuple(tuple(option_of(stage, replica) for stage in replica.stages) for replica in placed.replicas),
        domains=domains,
        sharing=sharing_of(placed, node_shares(placed, nodes)),
        boundaries=tuple(
            _boundary_kinds(replica, [domains[row, q] for q in range(replica.pp)])
            for row, replica in enumerate(placed.replicas)
        ),
    )


def sharing_of(layout: Layout, shares: Mapping[Mesh, NodeShare]) -> Sharing:
    """Return who holds what of a layout together."""
    runs = held_runs(layout, shares)
    degrees = {
        (row, v): shard_degrees(layout, row, v)
        for row, replica in enumerate(layout.replicas)
        for v in range(len(replica.stages) if layout.sharding != "none" else 0)
    }
    holders = tuple(tuple(stages_over(layout, run.first_layer)) for run in runs)
    return Sharing(runs=runs, holders=holders, degrees=degrees)


def work_on(at: Arrangement, prices: Prices) -> Work:
    """Return an arranged layout in the cost model's numbers."""
    rows = []
    for row, replica in enumerate(at.layout.replicas):
        work = _stage_works(at.layout, prices, row, at.options[row], at.sharing.runs)
        classes = _classes(prices, replica, at.options[row], work, at.boundaries[row])
        rows.append(RowWork(replica=replica, options=at.options[row], work=work, classes=classes))
    after = ending(at.layout, prices, at.options, at.sharing)
    usd = traffic_usd(at.layout, prices, at.domains, after.buckets)
    return Work(layout=at.layout, rows=tuple(rows), ending=after, traffic_usd=usd)


def _stage_works(
    layout: Layout, prices: Prices, row: int, options: tuple[StageOption, ...], runs: tuple[HeldRun, ...]
) -> tuple[StageWork, ...]:
    stages = layout.replicas[row].stages
    if layout.sharding in ("none", "optimizer"):
        return tuple(
            stage_work(prices, option, stage.first_layer, stage.end_layer)
            for stage, option in zip(stages, options, strict=True)
        )
    return tuple(
        sharded_work(
            prices,
            option,
            tuple(run for run in runs if stage.first_layer <= run.first_layer < stage.end_layer),
            layout.sharding,
        )
        for stage, option in zip(stages, options, strict=True)
    )


def _boundary_kinds(replica: Replica, domains: list[Indices]) -> tuple[tuple[tuple[bool, ...], tuple[int, ...]], ...]:
    """Return the different ways in which the boundaries of copies lie (which are inside a domain), and their copies."""
    pp, num_boundaries = replica.pp, len(replica.stages) - 1
    near = [same_domain(domains[v % pp], domains[(v + 1) % pp]) for v in range(min(num_boundaries, pp))]
    if not near:
        return (((), tuple(range(replica.copies))),)
    kinds, kind_c = np.unique(np.stack(near, axis=1), axis=0, return_inverse=True)
    return tuple(
        (tuple(kind), tuple(np.flatnonzero(kind_c.ravel() == index).tolist()))
        for index, kind in enumerate(kinds.tolist())
    )


def _classes(
    prices: Prices,
    replica: Replica,
    options: tuple[StageOption, ...],
    work: tuple[StageWork, ...],
    boundaries: tuple[tuple[tuple[bool, ...], tuple[int, ...]], ...],
) -> tuple[CopyClass, ...]:
    """Return the different ways in which the boundaries of copies lie, with the copies of each."""
    pp, num_boundaries = replica.pp, len(options) - 1
    classes = []
    for kind, copies in boundaries:
        p2p_s = tuple(
            boundary_seconds(prices, options[v], options[v + 1], replica.stages[v].end_layer - 1, kind[v % pp])
            if pp > 1
            else 0.0
            for v in range(num_boundaries)
        )
        durations = Durations(
            forward_s=tuple(stage.forward_s for stage in work),
            backward_s=tuple(stage.backward_s for stage in work),
            weight_s=tuple(stage.weight_s for stage in work),
            p2p_s=p2p_s,
            sends_block=prices.calibration.overlap.sends_block,
            timing=prices.calibration.overlap.pipeline,
        )
        classes.append(CopyClass(durations=durations, copies=copies))
    return tuple(classes)


def row_finish(row: RowWork, layout: Layout) -> Finish:
    """Return when the slowest copy of each rank and stage of a row is done."""
    replica = row.replica
    finishes = [
        pipeline_finish(layout.schedule, replica.pp, replica.num_microbatches, replica.vpp, kind.durations)
        for kind in row.classes
    ]
    return slowest(finishes)


def slowest(finishes: list[Finish]) -> Finish:
    """Return, rank by rank and stage by stage, the latest end."""
    if len(finishes) == 1:
        return finishes[0]
    return Finish(
        rank_s=tuple(max(ends) for ends in zip(*(f.rank_s for f in finishes), strict=True)),
        gradients_s=tuple(max(ends) for ends in zip(*(f.gradients_s for f in finishes), strict=True)),
    )


def _physical(row: RowWork) -> tuple[StageOption, ...]:
    return row.options[: row.replica.pp]


def _busy_s(row: RowWork, q: int) -> float:
    """Return the seconds a rank works in a step."""
    works = row.work[q :: row.replica.pp]
    return row.replica.num_microbatches * sum(work.forward_s + work.backward_s for work in works)


def _stage_estimates(work: Work, prices: Prices) -> Iterator[StageEstimate]:
    for index, row in enumerate(work.rows):
        replica = row.replica
        for q in range(replica.pp):
            in_flight, memory = mesh_memory(work.layout, prices, (index, q))
            yield StageEstimate(
                replica=index,
                stage=q,
                group=row.options[q].group,
                forward_s=sum(stage.forward_s for stage in row.work[q :: replica.pp]),
                backward_s=sum(stage.backward_s for stage in row.work[q :: replica.pp]),
                busy_s=_busy_s(row, q),
                in_flight=in_flight,
                memory=memory,
                capacity_bytes=prices.capacity_bytes(row.options[q].group),
            )


def _parts(work: Work, replica_s: tuple[float, ...], end: StepEnd) -> tuple[TimeParts, float]:
    """Return where the step of the busiest rank goes, and the seconds of its synchronisation that are hidden."""
    meshes = [(index, q) for index, row in enumerate(work.rows) for q in range(row.replica.pp)]
    index, q = max(meshes, key=lambda mesh: _busy_s(work.rows[mesh[0]], mesh[1]))
    row = work.rows[index]
    replica, m = row.replica, row.replica.num_microbatches
    works = row.work[q :: replica.pp]
    travel_s = replica_s[index] - max(
        pipeline_finish(work.layout.schedule, replica.pp, m, replica.vpp, kind.durations.without_p2p()).pipeline_s
        for kind in row.classes
    )
    pipelines_s = max(replica_s)
    after_s = end.step_s - pipelines_s
    optimizer_s = min(work.ending.optimizer_s[index, q], after_s)
    sharding_s = m * sum(stage.sharding_s for stage in works)
    parts = TimeParts(
        compute_s=m * sum(stage.compute_s for stage in works),
        tp_s=m * sum(stage.tp_s for stage in works),
        cp_s=m * sum(stage.cp_s for stage in works),
        ep_s=m * sum(stage.ep_s for stage in works),
        pp_s=travel_s,
        bubble_s=max(0.0, pipelines_s - travel_s - _busy_s(row, q)),
        dp_s=after_s - optimizer_s + sharding_s,
        optimizer_s=optimizer_s,
    )
    moved_s = sum(
        bucket.cost.reduce_s
        for bucket in work.ending.buckets
        if any(member.mesh == (index, q) for member in bucket.members)
    )
    exposed_s = max(0.0, end.synced_s[index, q] - pipelines_s)
    return parts, max(0.0, moved_s - exposed_s)


def _usd(used: list[tuple[str, int]], prices: Prices, step_s: float, traffic_usd: float) -> float | None:
    total = 0.0
    for group, count in used:
        usd_per_s = prices.usd_per_s(group)
        if usd_per_s is None:
            return None
        total += count * usd_per_s
    return total * step_s + traffic_usd


def _joules(stages: tuple[StageEstimate, ...], work: Work, prices: Prices, step_s: float) -> float:
    """Return the energy of the devices in use; a device counts as computing while its rank is busy."""
    total_w = 0.0
    for stage in stages:
        row = work.rows[stage.replica]
        devices = row.replica.copies * row.options[stage.stage].mesh_size
        total_w += devices * prices.power_w(stage.group, min(1.0, stage.busy_s / step_s))
    return total_w * step_s
