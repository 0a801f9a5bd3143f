"""The gradient's norm: one number that all ranks need before any of them changes a weight.

Clipping by the global norm makes every step end in an all-reduce over the whole job. Its size is nothing, and its
latency is that of the farthest ranks: microseconds in a machine room, a good part of the step between continents.
"""

from __future__ import annotations

from hetplan.costs.prices import Prices
from hetplan.costs.records import Holders
from hetplan.plan.records import Layout


def norm_s(layout: Layout, prices: Prices) -> float:
    """Return the latency of an all-reduce of a number over all ranks of a layout, which fill nodes one by one."""
    ranks: dict[str, int] = {}
    for replica in layout.replicas:
        for stage in replica.stages[: replica.pp]:
            ranks[stage.group] = ranks.get(stage.group, 0) + replica.copies * stage.mesh_size
    holders = []
    for name, num_ranks in ranks.items():
        a_node = min(num_ranks, prices.cluster.group(name).devices_per_node)
        holders.append(Holders(group=name, num_ranks=num_ranks, ranks_per_node=a_node, tp=1))
    return prices.norm_s(holders)
