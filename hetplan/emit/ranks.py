"""Which device is which rank, engine by engine, and which `torchrun` starts it.

Orders of ranks, fastest axis first:

- ``stages``: tp, cp, dp (stage's own and copies), pp: Megatron-LM's default ``tp-cp-ep-dp-pp``, torchtitan's mesh;
- ``pipelines``: tp, cp, pp, dp: Megatron-LM with ``--use-tp-pp-dp-mapping`` (``tp-cp-ep-pp-dp``);
- ``replicas``: mesh, pp, copy, row: one pipeline after the other, as HexiScale counts;
- ``nodes``: node by node, within a node as ``replicas``: hetplan's own executor, which reads the plan.

A launcher numbers ranks agent by agent, so a rank order that comes back to a node needs a second agent there. Unequal
numbers of processes an agent are fine: torch gives agent ``k`` the ranks after those of agents ``0 .. k - 1``
(torch.distributed.elastic, ``_assign_worker_ranks``; static rendezvous keeps agents in the order of --node-rank).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

from hetplan.emit.records import Agent, Component, Job, Rank
from hetplan.plan.placement import mesh_devices
from hetplan.plan.visible_devices import physical_indices

RankOrder = Literal["stages", "pipelines", "replicas", "nodes"]


def ranks_of(job: Job, order: RankOrder) -> tuple[Rank, ...]:
    """Return the ranks of a placed plan in an order."""
    found = list(_replica_major(job))
    if order == "replicas":
        return tuple(found)
    if order == "nodes":
        first = {node: i for i, node in enumerate(dict.fromkeys(rank.node for rank in found))}
        return tuple(sorted(found, key=lambda rank: first[rank.node]))
    inner = [rank_mesh(job, rank) for rank in found]
    split = [(rank.row, rank.copy, rank.place // size) for rank, size in zip(found, inner, strict=True)]
    if order == "stages":
        keys = [(rank.stage, *copy, rank.place) for rank, copy in zip(found, split, strict=True)]
    else:
        keys = [(*copy, rank.stage, rank.place) for rank, copy in zip(found, split, strict=True)]
    return tuple(rank for _, rank in sorted(zip(keys, found, strict=True), key=lambda pair: pair[0]))


def rank_mesh(job: Job, rank: Rank) -> int:
    """Return tp x cp of a rank's stage."""
    stage = job.layout.replicas[rank.row].stages[rank.stage]
    return stage.tp * stage.cp


def _replica_major(job: Job) -> Iterator[Rank]:
    physical = physical_indices(job.cluster)
    for row, replica in enumerate(job.layout.replicas):
        stages = replica.stages[: replica.pp]
        devices = [mesh_devices(stage, replica.copies).tolist() for stage in stages]
        for copy in range(replica.copies):
            for number, stage in enumerate(stages):
                for place, device in enumerate(devices[number][copy]):
                    node, index = physical[stage.group][device]
                    yield Rank(node=node, index=index, group=stage.group, row=row, copy=copy, stage=number, place=place)


def agents_of(ranks: Sequence[Rank]) -> tuple[Agent, ...]:
    """Return one agent for each run of ranks on one node."""
    agents: list[Agent] = []
    first = 0
    for node, run in groupby(ranks, key=lambda rank: rank.node):
        devices = tuple(rank.index for rank in run)
        agents.append(Agent(number=len(agents), node=node, first_rank=first, devices=devices))
        first += len(devices)
    return tuple(agents)


def fewest_agents(job: Job, orders: Sequence[RankOrder]) -> tuple[RankOrder, tuple[Rank, ...]]:
    """Return the order that needs fewest agents, the earlier one where they tie."""
    choices = [(order, ranks_of(job, order)) for order in orders]
    return min(choices, key=lambda choice: len(agents_of(choice[1])))


def components_of(job: Job, ranks: Sequence[Rank]) -> tuple[Component, ...]:
    """Return runs of nodes with ranks of the same groups and as many of them, in the order of their ranks."""
    held: dict[str, list[str]] = {}
    for rank in ranks:
        held.setdefault(rank.node, []).append(rank.group)
    whole: Counter[str] = Counter()
    for group in job.cluster.groups:
        whole.update(dict.fromkeys(group.nodes, group.devices_per_node))
    looks = {node: (tuple(sorted(set(own))), len(own), whole[node]) for node, own in held.items()}
    found: list[Component] = []
    seen: Counter[str] = Counter()
    for (groups, count, num_devices), run in groupby(looks, key=looks.__getitem__):
        name = "-".join(groups)
        seen[name] += 1
        name = f"{name}-{seen[name]}" if seen[name] > 1 else name
        found.append(Component(name=name, groups=groups, nodes=tuple(run), num_ranks=count, num_devices=num_devices))
    return tuple(found)
