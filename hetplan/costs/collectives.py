"""Seconds of collective operations over a ring of ranks.

A ring of `n` ranks moves `(n - 1) / n` of a buffer past its slowest link in `n - 1` steps, for a reduce-scatter or an
all-gather alike; an all-reduce does both. Steps inside a node and steps between nodes have their own latency: `r`
ranks on each of `m` nodes take `(r - 1)` of the former and `(m - 1)` of the latter, the rest overlaps. An all-reduce
may take a double binary tree instead, whose latency grows with the logarithm and which moves the whole buffer twice;
the faster of the two counts (Sanders, Speck, Traeff 2009; the choice NCCL makes).

Every function takes floats or arrays (one entry an option); a ring of one rank costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hetplan.costs.links import Link, crossing_bytes_per_s, inside_link, link_between
from hetplan.costs.records import Floats
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster, Group

Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Ranks that reduce or gather together."""

    num_ranks: int
    pass_latency_s: float
    """Latency of going around once; infinite where some rank cannot be reached."""
    tree_latency_s: float
    """Latency of going up a tree once."""
    s_per_byte: float
    """Of the slowest link."""
    shared_lines: tuple[str, ...] = ()
    inner_s_per_byte: float = 0.0
    outer_s_per_byte: float = 0.0
    """All-to-alls only: seconds a byte of the buffer adds inside a domain and between domains, side by side."""
    num_domains: int = 1

    @property
    def moved(self) -> float:
        """Part of the buffer that passes each link."""
        return (self.num_ranks - 1) / self.num_ranks


ALONE = Ring(num_ranks=1, pass_latency_s=0.0, tree_latency_s=0.0, s_per_byte=0.0)


def unreachable(num_ranks: int) -> Ring:
    """Return a ring whose ranks no network joins: everything on it takes for ever."""
    return Ring(num_ranks=num_ranks, pass_latency_s=math.inf, tree_latency_s=math.inf, s_per_byte=0.0)


def reduce_scatter_s(num_bytes: Amount, ring: Ring) -> Amount:
    """Return the seconds of a reduce-scatter of `num_bytes` a rank (an all-gather to `num_bytes` takes as long)."""
    return ring.pass_latency_s + num_bytes * (ring.moved * ring.s_per_byte)


def all_reduce_s(num_bytes: float, ring: Ring) -> float:
    """Return the seconds of an all-reduce of `num_bytes` a rank, by ring or tree."""
    around = 2 * reduce_scatter_s(num_bytes, ring)
    if ring.num_ranks == 1:
        return around
    return min(around, 2 * (ring.tree_latency_s + num_bytes * ring.s_per_byte))


def ring_inside(cluster: Cluster, group: Group, calibration: Calibration, *, num_ranks: int, stride: int) -> Ring:
    """Return the ring of one mesh axis: `num_ranks` devices of a group, `stride` places apart.

    Axes that fit in a node or fast-link domain stay there; others cross the group's own network, where the `stride`
    rings that lie side by side share each node's NICs.
    """
    if num_ranks == 1:
        return ALONE
    domain = group.devices_per_node * group.domain_nodes
    per_domain = max(1, min(num_ranks, domain // stride))
    num_domains = math.ceil(num_ranks / per_domain)
    inside = inside_link(group, per_domain, calibration, stride)
    inner_rate = inside.ring_bytes_per_s(per_domain, min(stride, domain))
    if num_domains == 1:
        return _ring(num_ranks, (per_domain, inside), None, rate=inner_rate)
    link = link_between(cluster, group.name, group.name, calibration)
    if link is None:
        return unreachable(num_ranks)
    rate = crossing_bytes_per_s(link, group, rings=min(stride, domain), ranks=per_domain) * link.ring_fraction
    if per_domain > 1:
        rate = min(rate, inner_rate)
    return _ring(num_ranks, (per_domain, inside), (num_domains, link), rate=rate)


def _ring(num_ranks: int, inside: tuple[int, Link], between: tuple[int, Link] | None, *, rate: float) -> Ring:
    """Return a ring of given rate with the latencies of its inner and outer steps."""
    per_domain, link = inside
    passing = (per_domain - 1) * link.ring_latency_s
    climbing = math.log2(per_domain) * link.ring_latency_s
    shared: tuple[str, ...] = ()
    if between is not None:
        num_domains, outer = between
        passing += (num_domains - 1) * outer.ring_latency_s
        climbing += math.log2(num_domains) * outer.ring_latency_s
        shared = (outer.network,) if outer.shared else ()
    return Ring(
        num_ranks=num_ranks,
        pass_latency_s=passing,
        tree_latency_s=climbing,
        s_per_byte=1.0 / rate,
        shared_lines=shared,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """One ring an option, shape (options,)."""

    num_ranks_o: Floats
    pass_latency_s_o: Floats
    tree_latency_s_o: Floats
    s_per_byte_o: Floats
    moved_o: Floats
    inner_s_per_byte_o: Floats
    outer_s_per_byte_o: Floats
    num_domains_o: Floats

    def exchange_s(self, num_bytes_o: Floats, outer_share_o: Floats) -> Floats:
        """Return the seconds of an all-to-all of which only a share of what leaves a domain has to travel."""
        slower_o = np.maximum(self.inner_s_per_byte_o, self.outer_s_per_byte_o * outer_share_o)
        return self.pass_latency_s_o + num_bytes_o * slower_o

    def reduce_scatter_s(self, num_bytes_o: Floats) -> Floats:
        """Return the seconds of a reduce-scatter or an all-gather."""
        return self.pass_latency_s_o + num_bytes_o * (self.moved_o * self.s_per_byte_o)

    def all_reduce_s(self, num_bytes_o: Floats) -> Floats:
        """Return the seconds of an all-reduce, by ring or tree."""
        around = 2 * self.reduce_scatter_s(num_bytes_o)
        tree = 2 * (self.tree_latency_s_o + num_bytes_o * self.s_per_byte_o)
        return np.minimum(around, tree)


def stack(rings: list[Ring]) -> Rings:
    """Return rings side by side."""
    return Rings(
        num_ranks_o=np.array([float(ring.num_ranks) for ring in rings]),
        pass_latency_s_o=np.array([ring.pass_latency_s for ring in rings]),
        tree_latency_s_o=np.array([ring.tree_latency_s for ring in rings]),
        s_per_byte_o=np.array([ring.s_per_byte for ring in rings]),
        moved_o=np.array([ring.moved for ring in rings]),
        inner_s_per_byte_o=np.array([ring.inner_s_per_byte for ring in rings]),
        outer_s_per_byte_o=np.array([ring.outer_s_per_byte for ring in rings]),
        num_domains_o=np.array([float(ring.num_domains) for ring in rings]),
    )


def exchange_inside(cluster: Cluster, group: Group, calibration: Calibration, *, num_ranks: int, stride: int) -> Ring:
    """Return the cost of an all-to-all among `num_ranks` devices `stride` apart, in the form of a ring.

    Each rank keeps 1/n of its buffer; what goes to peers of its domain and what leaves the domain travel side by side
    and the slower part counts. All devices of a node exchange at once, so each has its share of the NICs.
    """
    if num_ranks == 1:
        return ALONE
    domain = group.devices_per_node * group.domain_nodes
    per_domain = max(1, min(num_ranks, domain // stride))
    inside = inside_link(group, per_domain * min(stride, domain), calibration)
    moved = (num_ranks - 1) / num_ranks
    inner = (per_domain - 1) / num_ranks / inside.bandwidth_bytes_per_s
    outer = 0.0
    latency_s = inside.latency_s
    shared: tuple[str, ...] = ()
    if per_domain < num_ranks:
        link = link_between(cluster, group.name, group.name, calibration)
        if link is None:
            return unreachable(num_ranks)
        rate = crossing_bytes_per_s(link, group, rings=domain, ranks=1)
        outer = (num_ranks - per_domain) / num_ranks / rate
        latency_s += link.latency_s
        shared = (link.network,) if link.shared else ()
    return Ring(
        num_ranks=num_ranks,
        pass_latency_s=latency_s,
        tree_latency_s=latency_s,
        s_per_byte=max(inner, outer) / moved,
        shared_lines=shared,
        inner_s_per_byte=inner,
        outer_s_per_byte=outer,
        num_domains=math.ceil(num_ranks / per_domain),
    )
