"""Gradient synchronisation among the ranks that hold the same slice of a layer, wherever they run.

All holders form one ring. It goes through the devices of a node, then through the nodes of a group, then on to the
next group, so that it crosses between two groups once each way; which groups follow each other is the tree of links
whose slowest is fastest (groups that share hosts may meet on PCIe there). The slowest link on the way sets the pace
for the whole ring: a ring over InfiniBand and RoCE nodes runs at the rate of the Ethernet they share. A holder with
tensor parallelism `tp` takes part with `1 / tp` of the layer, and its node's NICs are divided among its `tp` slices
and those of other stages on the node; where degrees differ, the holder that takes longest for its slice decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.costs.links import Link, crossing_bytes_per_s, inside_link, link_between, pcie_link
from hetplan.costs.records import Holders
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRing:
    """A ring over all holders of a layer, per byte of the whole layer (before tp)."""

    num_ranks: int
    pass_latency_s: float
    tree_latency_s: float
    s_per_byte: float
    shared_lines: tuple[str, ...] = ()

    @property
    def half_s_per_byte(self) -> float:
        """Seconds a byte of the layer adds to a reduce-scatter or an all-gather."""
        return (self.num_ranks - 1) / self.num_ranks * self.s_per_byte

    def half_s(self, num_bytes: float) -> float:
        """Return the seconds of a reduce-scatter or an all-gather of a layer of `num_bytes`."""
        if self.num_ranks == 1:
            return 0.0
        return self.pass_latency_s + num_bytes * self.half_s_per_byte

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds of an all-reduce, by ring or tree."""
        if self.num_ranks == 1:
            return 0.0
        return min(2 * self.half_s(num_bytes), 2 * (self.tree_latency_s + num_bytes * self.s_per_byte))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The holders of one group and what they cross."""

    group: Group
    holders: tuple[Holders, ...]
    num_domains: int
    inside: Link | None
    own: Link | None
    """The group's own network, where its holders span domains."""

    @property
    def per_domain(self) -> int:
        return max(_per_domain(holder, self.group) for holder in self.holders)


def sync_ring(cluster: Cluster, holders: Sequence[Holders], calibration: Calibration, *, expert: bool) -> SyncRing:
    """Return the ring of all `holders`; those of one group and tp count together, in however many rows they stand."""
    holders = _together(holders)
    num_ranks = sum(holder.num_ranks for holder in holders)
    if num_ranks <= 1:
        return SyncRing(num_ranks=1, pass_latency_s=0.0, tree_latency_s=0.0, s_per_byte=0.0)
    names = dict.fromkeys(holder.group for holder in holders)
    parts = [_part(cluster, name, [h for h in holders if h.group == name], calibration) for name in names]
    bridges = _bridges(cluster, list(names), calibration)
    if bridges is None or any(part.num_domains > 1 and part.own is None for part in parts):
        return SyncRing(num_ranks=num_ranks, pass_latency_s=math.inf, tree_latency_s=math.inf, s_per_byte=0.0)
    crossed = {part.group.name: _crossed(part, bridges) for part in parts}
    s_per_byte = max(
        _s_per_byte(holder, part, crossed[part.group.name], expert=expert) for part in parts for holder in part.holders
    )
    links = [link for part in parts for link in crossed[part.group.name]]
    outer_s = max((link.ring_latency_s for link in links), default=0.0)
    inner_s = max((part.inside.ring_latency_s for part in parts if part.inside), default=0.0)
    per_domain = max(part.per_domain for part in parts)
    num_domains = sum(part.num_domains for part in parts)
    return SyncRing(
        num_ranks=num_ranks,
        pass_latency_s=(per_domain - 1) * inner_s + (num_domains - 1) * outer_s,
        tree_latency_s=math.log2(per_domain) * inner_s + math.log2(num_domains) * outer_s,
        s_per_byte=s_per_byte,
        shared_lines=tuple(dict.fromkeys(link.network for link in links if link.shared)),
    )


def _together(holders: Sequence[Holders]) -> list[Holders]:
    found: dict[tuple[str, int], Holders] = {}
    for holder in holders:
        key = (holder.group, holder.tp)
        before = found.get(key)
        found[key] = (
            holder
            if before is None
            else replace(
                before,
                num_ranks=before.num_ranks + holder.num_ranks,
                ranks_per_node=max(before.ranks_per_node, holder.ranks_per_node),
                rings_per_node=max(before.rings_per_node, holder.rings_per_node),
            )
        )
    return list(found.values())


def _per_domain(holder: Holders, group: Group) -> int:
    """Return how many holders of a slice sit in one node or fast-link domain."""
    return max(1, min(holder.num_ranks, holder.ranks_per_node * group.domain_nodes))


def _part(cluster: Cluster, name: str, holders: list[Holders], calibration: Calibration) -> _Part:
    group = cluster.group(name)
    most = math.ceil(len(group.nodes) / group.domain_nodes)
    spanned = sum(math.ceil(holder.num_ranks / _per_domain(holder, group)) for holder in holders)
    num_domains = min(most, spanned)
    ranks = sum(holder.num_ranks for holder in holders)
    per_domain = max(_per_domain(holder, group) for holder in holders)
    together = per_domain if num_domains > 1 else ranks
    stride = min(holder.tp for holder in holders)
    inside = inside_link(group, together, calibration, stride) if together > 1 else None
    own = link_between(cluster, name, name, calibration) if num_domains > 1 else None
    return _Part(group=group, holders=tuple(holders), num_domains=num_domains, inside=inside, own=own)


def _bridges(cluster: Cluster, names: list[str], calibration: Calibration) -> list[tuple[str, str, Link]] | None:
    """Return the links that tie groups together, fastest first chosen (Kruskal); None where some cannot be reached."""
    links = []
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            link = _bridge(cluster, first, second, calibration)
            if link is not None:
                links.append((first, second, link))
    links.sort(key=lambda entry: -entry[2].bandwidth_bytes_per_s)
    root = {name: name for name in names}
    chosen = []
    for first, second, link in links:
        old, new = root[second], root[first]
        if old != new:
            root = {name: new if top == old else top for name, top in root.items()}
            chosen.append((first, second, link))
    return chosen if len(chosen) == len(names) - 1 else None


def _bridge(cluster: Cluster, first: str, second: str, calibration: Calibration) -> Link | None:
    """Return the best link between two groups: their network, or PCIe where they share a host."""
    a, b = cluster.group(first), cluster.group(second)
    link = link_between(cluster, first, second, calibration)
    if set(a.nodes).isdisjoint(b.nodes):
        return link
    host = pcie_link(a, b, calibration)
    return host if link is None or host.bandwidth_bytes_per_s > link.bandwidth_bytes_per_s else link


def _crossed(part: _Part, bridges: list[tuple[str, str, Link]]) -> list[Link]:
    """Return the links outside nodes that the ring crosses at one group."""
    crossed = [link for first, second, link in bridges if part.group.name in (first, second)]
    return [*crossed, part.own] if part.own is not None else crossed


def _s_per_byte(holder: Holders, part: _Part, crossed: list[Link], *, expert: bool) -> float:
    """Return the seconds a byte of the whole layer takes past the slowest link one holder sees."""
    group = part.group
    ranks = _per_domain(holder, group)
    rings = max(1, min(holder.tp, group.devices_per_node), holder.rings_per_node)
    if expert:
        rings = max(rings, group.devices_per_node * group.domain_nodes // ranks)
    rates = [crossing_bytes_per_s(link, group, rings=rings, ranks=ranks) * link.ring_fraction for link in crossed]
    if part.inside is not None:
        rates.append(part.inside.ring_bytes_per_s(ranks, min(holder.tp, group.devices_per_node)))
    return 1.0 / (min(rates) * holder.tp)
