"""How a step ends: gradients meet, weights are updated, weights go out again.

Replicas may cut the chain in different places, so gradients meet by *bucket*: a run of layers that the same stages
hold, one stage a row of the layout. The rules, each in the function named:

- a holder has a bucket's gradients when its last backward pass has gone through the bucket's lowest layer; layers of a
  stage finish from the top down (`_ready`);
- traffic may start once the bucket's first gradients exist, but no earlier than the last `overlap.gradients` of the
  stage's last backward pass; the lowest layer's share travels only after it exists (`_ready`, `_reduce`);
- buckets that share a mesh, or a line that all traffic shares, go one after the other in the order they are ready;
  others side by side (`_Lines`);
- a tied embedding and head on different stages add up their tables after both buckets are through (`_tie`);
- no weight changes before the gradients' norm has gone around all ranks (see `norm`); that a mesh that is early waits
  for the last gradients is left out;
- each stage then updates its weights, and where these are shared out every bucket gathers them (`finish_step`);
- with sharded gradients all but the lowest layer's gradients went out during the backward pass (see `stages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetplan.costs.prices import Prices
from hetplan.costs.records import Holders, ShardDegrees, StageOption, SyncCost
from hetplan.plan.norm import norm_s
from hetplan.plan.placement import NodeShare
from hetplan.plan.records import Layout
from hetplan.plan.stages import (
    BACKWARD,
    EXPERT_PARAMS,
    PARAMS,
    WEIGHT,
    HeldRun,
    Sharing,
    span_sums,
    tied_tables,
    whole_params,
)

Mesh = tuple[int, int]
"""(row of the layout, physical stage)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One stage that holds a bucket."""

    row: int
    stage: int
    """Virtual stage."""
    mesh: Mesh
    backward_s: float
    """Last backward pass through the whole stage."""
    own_s: float
    """Its part through the bucket."""
    below_s: float
    """Its part through the stage's layers below the bucket."""
    tail_s: float
    """What is left to send when the lowest layer of the stage is through (sharded gradients), else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that meet at once."""

    first_layer: int
    end_layer: int
    expert: bool
    params: float
    """Of the whole run of layers, before any split."""
    members: tuple[Member, ...]
    cost: SyncCost
    lowest_share: float
    """Part of the bucket's parameters that its lowest layer holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A table two stages of a row hold."""

    meshes: tuple[Mesh, Mesh]
    cost: SyncCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """All that happens after the backward passes."""

    buckets: tuple[Bucket, ...]
    ties: tuple[Tie, ...]
    optimizer_s: Mapping[Mesh, float]
    overlap: float
    """Part of the last backward pass that may hide traffic."""
    norm_s: float = 0.0
    """To sum up the gradient's norm over all ranks, before each update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something with a name that keeps some meshes' links, or one mesh, busy."""

    name: str
    start_s: float
    end_s: float
    meshes: tuple[Mesh, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """When a step is over, and how it got there."""

    step_s: float
    synced_s: Mapping[Mesh, float]
    """When each mesh has all its gradients."""
    events: tuple[Event, ...]


def held_runs(layout: Layout, shares: Mapping[Mesh, NodeShare]) -> tuple[HeldRun, ...]:
    """Return the chain cut wherever some row's stages change, each run with its holders."""
    cuts = sorted({layer for row in layout.replicas for s in row.stages for layer in (s.first_layer, s.end_layer)})
    runs: list[HeldRun] = []
    for first, end in pairwise(cuts):
        holders = []
        together = _ranks_together(layout, shares, first)
        for row, v in stages_over(layout, first):
            replica = layout.replicas[row]
            stage, share = replica.stages[v], shares[row, v % replica.pp]
            holders.append(
                Holders(
                    group=stage.group,
                    num_ranks=replica.copies * stage.dp * stage.cp,
                    ranks_per_node=together[stage.group, stage.tp],
                    tp=stage.tp,
                    rings_per_node=share.rings_per_node,
                )
            )
        runs.append(HeldRun(first_layer=first, end_layer=end, holders=tuple(holders)))
    return tuple(runs)


def _ranks_together(layout: Layout, shares: Mapping[Mesh, NodeShare], layer: int) -> dict[tuple[str, int], int]:
    """Return, for each group and tp that hold a layer, the most ranks of one slice on a node, of all rows together."""
    counts: dict[tuple[str, int], dict[int, int]] = {}
    for row, v in stages_over(layout, layer):
        stage = layout.replicas[row].stages[v]
        ranks_n = counts.setdefault((stage.group, stage.tp), {})
        for node, ranks in shares[row, v % layout.replicas[row].pp].ranks_n:
            ranks_n[node] = ranks_n.get(node, 0) + ranks
    return {key: max(ranks_n.values()) for key, ranks_n in counts.items()}


def stages_over(layout: Layout, layer: int) -> list[tuple[int, int]]:
    """Return (row, virtual stage) of every stage that holds a layer."""
    return [
        (row, v)
        for row, replica in enumerate(layout.replicas)
        for v, stage in enumerate(replica.stages)
        if stage.first_layer <= layer < stage.end_layer
    ]


def shard_degrees(layout: Layout, row: int, stage: int) -> ShardDegrees:
    """Return over how many ranks a (virtual) stage's states are shared out.

    Ranks that hold the same slice share it: all holders of a layer with this stage's tp (and, for experts, ep), in
    whatever row. Where the layers of the stage have unequal numbers of such holders, the fewest count.
    """
    own = layout.replicas[row].stages[stage]
    dense: list[int] = []
    expert: list[int] = []
    cuts = {own.first_layer}
    for replica in layout.replicas:
        cuts.update(s.first_layer for s in replica.stages if own.first_layer < s.first_layer < own.end_layer)
    for layer in cuts:
        holders = [(layout.replicas[r], layout.replicas[r].stages[v]) for r, v in stages_over(layout, layer)]
        equal = [(replica.copies * s.dp * s.cp, s.ep) for replica, s in holders if s.tp == own.tp]
        dense.append(sum(ranks for ranks, _ in equal))
        expert.append(sum(ranks // ep for ranks, ep in equal if ep == own.ep))
    return ShardDegrees(dense=max(1, min(dense)), expert=max(1, min(expert)))


def ending(layout: Layout, prices: Prices, options: Sequence[Sequence[StageOption]], sharing: Sharing) -> Ending:
    """Return what has to happen after the backward passes of a layout."""
    buckets: list[Bucket] = []
    for run, holders in zip(sharing.runs, sharing.holders, strict=True):
        members = tuple(_member(layout, prices, options, run, at) for at in holders)
        for expert in (False, True):
            bucket = _bucket(layout, prices, run, members, expert=expert)
            if bucket is not None:
                buckets.append(bucket)
    return Ending(
        buckets=tuple(buckets),
        ties=tuple(_ties(layout, prices)),
        optimizer_s=_optimizers(layout, prices, options, sharing.degrees),
        overlap=prices.calibration.overlap.gradients,
        norm_s=norm_s(layout, prices),
    )


def _member(
    layout: Layout, prices: Prices, options: Sequence[Sequence[StageOption]], run: HeldRun, at: tuple[int, int]
) -> Member:
    row, v = at
    replica = layout.replicas[row]
    stage, option = replica.stages[v], options[row][v]
    part = WEIGHT if layout.schedule == "zero-bubble" else BACKWARD
    tail_s = 0.0
    if layout.sharding in ("gradients", "full") and run.first_layer == stage.first_layer:
        tail_s = float(prices.gathers_s(option, run.holders)[1][run.first_layer])
    return Member(
        row=row,
        stage=v,
        mesh=(row, v % replica.pp),
        backward_s=span_sums(prices, option, stage.first_layer, stage.end_layer)[part],
        own_s=span_sums(prices, option, run.first_layer, run.end_layer)[part],
        below_s=span_sums(prices, option, stage.first_layer, run.first_layer)[part],
        tail_s=tail_s,
    )


def _bucket(
    layout: Layout, prices: Prices, run: HeldRun, members: tuple[Member, ...], *, expert: bool
) -> Bucket | None:
    params_l = whole_params(prices)[1 if expert else 0][run.first_layer : run.end_layer]
    params = float(params_l.sum())
    if params <= 0:
        return None
    holders = run.holders
    if expert:
        eps = [layout.replicas[member.row].stages[member.stage].ep for member in members]
        params /= min(eps)
        holders = tuple(_expert_holders(h, ep) for h, ep in zip(holders, eps, strict=True))
    if sum(h.num_ranks for h in holders) == 1:
        return None
    cost = prices.sync(params, holders, layout.sharding, expert=expert)
    if layout.sharding in ("gradients", "full"):
        cost = replace(cost, reduce_s=0.0, gather_s=0.0 if layout.sharding == "full" else cost.gather_s)
    return Bucket(
        first_layer=run.first_layer,
        end_layer=run.end_layer,
        expert=expert,
        params=float(params_l.sum()),
        members=members,
        cost=cost,
        lowest_share=float(params_l[0] / params_l.sum()),
    )


def _expert_holders(holders: Holders, ep: int) -> Holders:
    """Return the ranks that hold the same routed experts: every `ep`-th."""
    return Holders(
        group=holders.group,
        num_ranks=max(1, holders.num_ranks // ep),
        ranks_per_node=max(1, holders.ranks_per_node // ep),
        tp=holders.tp,
        rings_per_node=holders.rings_per_node,
    )


def _ties(layout: Layout, prices: Prices) -> Iterable[Tie]:
    for table, head, params in tied_tables(prices):
        for row, replica in enumerate(layout.replicas):
            first, last = (_stage_of(layout, row, layer) for layer in (table, head))
            meshes = (row, first % replica.pp), (row, last % replica.pp)
            if meshes[0] == meshes[1]:
                continue
            pair = [replica.stages[first], replica.stages[last]]
            cost = prices.sync(
                float(params),
                tuple(Holders(group=s.group, num_ranks=1, ranks_per_node=1, tp=s.tp) for s in pair),
                "none",
            )
            yield Tie(meshes=meshes, cost=cost)


def _stage_of(layout: Layout, row: int, layer: int) -> int:
    for v, stage in enumerate(layout.replicas[row].stages):
        if stage.first_layer <= layer < stage.end_layer:
            return v
    return 0


def _optimizers(
    layout: Layout,
    prices: Prices,
    options: Sequence[Sequence[StageOption]],
    degrees_v: Mapping[tuple[int, int], ShardDegrees],
) -> dict[Mesh, float]:
    """Return the seconds each mesh takes to update the weights it is in charge of."""
    seconds: dict[Mesh, float] = {}
    for row, replica in enumerate(layout.replicas):
        for q in range(replica.pp):
            params = measured_s = 0.0
            for v in range(q, len(replica.stages), replica.pp):
                stage = replica.stages[v]
                sums = span_sums(prices, options[row][v], stage.first_layer, stage.end_layer)
                degrees = degrees_v.get((row, v), ShardDegrees())
                update_s = prices.update_s(options[row][v], stage.first_layer, stage.end_layer)
                if update_s is None:
                    params += sums[PARAMS] / degrees.dense + sums[EXPERT_PARAMS] / degrees.expert
                else:
                    measured_s += update_s / degrees.dense
            seconds[row, q] = measured_s or prices.optimizer_s(replica.stages[q].group, params)
    return seconds


class _Lines:
    """When meshes and shared lines are free for the next bucket."""

    def __init__(self) -> None:
        self._free_s: dict[Mesh | str, float] = {}

    def run(
        self, users: Sequence[Mesh | str], earliest_s: float, seconds: float, least_s: float
    ) -> tuple[float, float]:
        """Return start and end of traffic that needs all `users` and cannot end before `least_s`."""
        start = max(earliest_s, *(self._free_s.get(user, 0.0) for user in users))
        end = max(start + seconds, least_s)
        for user in users:
            self._free_s[user] = end
        return start, end


def finish_step(parts: Ending, rank_s: Sequence[Sequence[float]], gradients_s: Sequence[Sequence[float]]) -> StepEnd:
    """Return when the step is over.

    `rank_s[row][q]` is the end of a mesh's last action, `gradients_s[row][v]` the end of the last action that adds to
    a virtual stage's gradients; of the slowest copy each.
    """
    events: list[Event] = []
    synced_s: dict[Mesh, float] = {(row, q): end for row, ends in enumerate(rank_s) for q, end in enumerate(ends)}
    _reduce(parts, gradients_s, synced_s, events)
    for tie in parts.ties:
        _tie(tie, synced_s, events)
    updated_s: dict[Mesh, float] = {}
    for mesh, ready_s in synced_s.items():
        start = ready_s + parts.norm_s
        updated_s[mesh] = start + parts.optimizer_s[mesh]
        events.append(Event(name="optimizer", start_s=start, end_s=updated_s[mesh], meshes=(mesh,)))
    step_s = max(updated_s.values())
    lines = _Lines()
    gathered = [bucket for bucket in parts.buckets if bucket.cost.gather_s > 0]
    ready = [max(updated_s[member.mesh] for member in bucket.members) for bucket in gathered]
    for index in sorted(range(len(gathered)), key=lambda i: (ready[i], i)):
        bucket = gathered[index]
        start, end = lines.run(_users(bucket), ready[index], bucket.cost.gather_s, 0.0)
        events.append(_event("gather", bucket, start, end))
        step_s = max(step_s, end)
    return StepEnd(step_s=step_s, synced_s=synced_s, events=tuple(events))


def _reduce(
    parts: Ending, gradients_s: Sequence[Sequence[float]], synced_s: dict[Mesh, float], events: list[Event]
) -> None:
    lines = _Lines()
    times = [_ready(bucket, gradients_s, parts.overlap) for bucket in parts.buckets]
    for index in sorted(range(len(times)), key=lambda i: (times[i][1], i)):
        bucket = parts.buckets[index]
        earliest, ready = times[index]
        least = ready + bucket.lowest_share * bucket.cost.reduce_s
        start, end = lines.run(_users(bucket), earliest, bucket.cost.reduce_s, least)
        events.append(_event("reduce", bucket, start, end))
        for member in bucket.members:
            synced_s[member.mesh] = max(synced_s[member.mesh], end)


def _ready(bucket: Bucket, gradients_s: Sequence[Sequence[float]], overlap: float) -> tuple[float, float]:
    """Return when traffic of a bucket may start, and when the last of its gradients exists."""
    earliest = ready = 0.0
    for member in bucket.members:
        end = gradients_s[member.row][member.stage]
        through = end - member.below_s
        ready = max(ready, through + member.tail_s)
        earliest = max(earliest, through - member.own_s, end - overlap * member.backward_s)
    return earliest, ready


def _tie(tie: Tie, synced_s: dict[Mesh, float], events: list[Event]) -> None:
    start = max(synced_s[mesh] for mesh in tie.meshes)
    end = start + tie.cost.reduce_s
    for mesh in tie.meshes:
        synced_s[mesh] = end
    events.append(Event(name="tied table", start_s=start, end_s=end, meshes=tie.meshes))


def _users(bucket: Bucket) -> list[Mesh | str]:
    return [*(member.mesh for member in bucket.members), *bucket.cost.shared_lines]


def _event(what: str, bucket: Bucket, start_s: float, end_s: float) -> Event:
    of = "experts" if bucket.expert else "layers"
    return Event(
        name=f"{what} {of} {bucket.first_layer}-{bucket.end_layer - 1}",
        start_s=start_s,
        end_s=end_s,
        meshes=tuple(member.mesh for member in bucket.members),
    )
