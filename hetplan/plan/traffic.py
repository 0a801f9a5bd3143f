"""What a step's traffic over paid networks costs, in US dollars.

- A boundary between stages carries each microbatch's activations forth and their gradient back.
- Gradients of a bucket go around one ring (see `costs.sync`): from node to node of a group and, over the tree of best
  links, from group to group once each way. A ring of ``n`` ranks moves ``(n - 1) / n`` of the buffer over every hop for
  a reduce-scatter or an all-gather; an all-reduce does both. Slices of tp and ep go around rings of their own and
  together move the whole bucket.

Traffic inside a node, and over networks without a price, is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from hetplan.costs.links import Link, link_between
from hetplan.costs.prices import Prices
from hetplan.plan.placement import Indices, same_domain
from hetplan.plan.records import Layout
from hetplan.plan.sync import Bucket, Mesh
from hetplan.specs.workload import Sharding, Workload


@lru_cache(maxsize=8)
def has_paid_networks(prices: Prices) -> bool:
    """Return whether moving bytes costs anything anywhere."""
    return any(network.usd_per_byte > 0 for network in prices.cluster.networks)


@lru_cache(maxsize=4096)
def _link(prices: Prices, first: str, second: str) -> Link | None:
    return link_between(prices.cluster, first, second, prices.calibration)


def traffic_usd(layout: Layout, prices: Prices, domains: Mapping[Mesh, Indices], buckets: Sequence[Bucket]) -> float:
    """Return the price of one step's traffic; `domains` holds the domain of each device of a mesh's copies."""
    if not has_paid_networks(prices):
        return 0.0
    total = sum(_boundaries(layout, prices, domains))
    return total + sum(_ring_usd(layout, prices, domains, bucket) for bucket in buckets)


def _boundaries(layout: Layout, prices: Prices, domains: Mapping[Mesh, Indices]) -> Iterator[float]:
    for row, replica in enumerate(layout.replicas):
        samples = replica.num_microbatches * replica.microbatch
        for v in range(len(replica.stages) - 1 if replica.pp > 1 else 0):
            sender, receiver = replica.stages[v], replica.stages[v + 1]
            link = _link(prices, sender.group, receiver.group)
            if link is None or link.usd_per_byte == 0:
                continue
            near_c = same_domain(domains[row, v % replica.pp], domains[row, (v + 1) % replica.pp])
            apart = int(np.count_nonzero(~near_c))
            yield 2 * apart * samples * prices.boundary_bytes(sender.end_layer - 1) * link.usd_per_byte


def _ring_usd(layout: Layout, prices: Prices, domains: Mapping[Mesh, Indices], bucket: Bucket) -> float:
    places: dict[str, set[int]] = {}
    num_ranks = 0
    for member in bucket.members:
        stage = layout.replicas[member.row].stages[member.stage]
        ranks = layout.replicas[member.row].copies * stage.dp * stage.cp
        num_ranks += ranks // stage.ep if bucket.expert else ranks
        places.setdefault(stage.group, set()).update(np.unique(domains[member.mesh]).tolist())
    if num_ranks < 2:
        return 0.0
    moved = (num_ranks - 1) / num_ranks * bucket.params
    microbatches = max(layout.replicas[member.row].num_microbatches for member in bucket.members)
    moved_bytes = moved * bytes_a_param(prices.workload, layout.sharding, microbatches)
    return moved_bytes * sum(_hops_usd(prices, places))


def _hops_usd(prices: Prices, places: Mapping[str, set[int]]) -> Iterator[float]:
    """Yield the price of a byte over each hop of a ring."""
    names = list(places)
    for name in names:
        own = _link(prices, name, name)
        hops = len(places[name]) - 1 if len(names) > 1 or len(places[name]) == 1 else len(places[name])
        yield hops * own.usd_per_byte if own is not None else 0.0
    joined, waiting = names[:1], names[1:]
    while waiting:
        links = [(link, b) for a in joined for b in waiting if (link := _link(prices, a, b)) is not None]
        if not links:
            return
        best, reached = max(links, key=lambda entry: entry[0].bandwidth_bytes_per_s)
        yield 2 * best.usd_per_byte
        joined.append(reached)
        waiting.remove(reached)


def bytes_a_param(workload: Workload, sharding: Sharding, num_microbatches: int) -> int:
    """Return the bytes that go around for each parameter in a step, reductions and gathers together."""
    gradient, weight = workload.gradient_bytes, workload.weight_bytes
    match sharding:
        case "none":
            return 2 * gradient
        case "optimizer":
            return gradient + weight
        case "gradients":
            return num_microbatches * gradient + weight
        case "full":
            return num_microbatches * (gradient + 2 * weight)
