"""Which networks a layout's traffic crosses, and which of them is the slowest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from hetplan.costs.links import Link
from hetplan.costs.prices import Prices
from hetplan.plan.placement import mesh_devices, place, places_of
from hetplan.plan.records import Layout
from hetplan.plan.sync import stages_over
from hetplan.units import format_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A network that some traffic crosses, between nodes of two groups (or of one)."""

    network: str
    first: str
    second: str
    bandwidth_bytes_per_s: float
    """Usable, of one node."""

    @property
    def words(self) -> str:
        """The crossing in words."""
        between = f"inside {self.first}" if self.first == self.second else f"between {self.first} and {self.second}"
        return f"network {self.network} {between} ({format_rate(self.bandwidth_bytes_per_s)} a node)"


def slowest(crossings: Iterable[Crossing]) -> Crossing | None:
    """Return the crossing with least bandwidth, None where traffic stays inside nodes."""
    return min(crossings, key=lambda crossing: crossing.bandwidth_bytes_per_s, default=None)


def stage_crossings(layout: Layout, prices: Prices) -> tuple[Crossing, ...]:
    """Return the networks that activations cross between neighbouring stages."""
    return tuple(dict.fromkeys(_stage_crossings(place(layout, prices.cluster), prices)))


def _stage_crossings(layout: Layout, prices: Prices) -> Iterator[Crossing]:
    places = places_of(prices)
    for replica in layout.replicas:
        for sender, receiver in pairwise(replica.stages):
            nodes = [places[s.group].node_d[mesh_devices(s, replica.copies)] for s in (sender, receiver)]
            if np.all(nodes[0].min(axis=1) == nodes[1].max(axis=1)) and np.all(
                nodes[0].max(axis=1) == nodes[1].min(axis=1)
            ):
                continue
            yield from _crossing(prices.link(sender.group, receiver.group), sender.group, receiver.group)


def gradient_crossings(layout: Layout, prices: Prices) -> tuple[Crossing, ...]:
    """Return the networks that gradients cross between devices that hold the same layers."""
    return tuple(dict.fromkeys(_gradient_crossings(place(layout, prices.cluster), prices)))


def _gradient_crossings(layout: Layout, prices: Prices) -> Iterator[Crossing]:
    places = places_of(prices)
    for layer in sorted({stage.first_layer for replica in layout.replicas for stage in replica.stages}):
        held: dict[str, set[int]] = {}
        for row, v in stages_over(layout, layer):
            replica = layout.replicas[row]
            stage = replica.stages[v]
            nodes = places[stage.group].node_d[mesh_devices(stage, replica.copies)]
            if replica.copies * stage.dp * stage.cp > 1 or len(layout.replicas) > 1:
                held.setdefault(stage.group, set()).update(np.unique(nodes).tolist())
        for group, own in held.items():
            if len(own) > 1:
                yield from _crossing(prices.link(group, group), group, group)
        for first, second in combinations(held, 2):
            if held[first] != held[second] or len(held[first]) > 1:
                yield from _crossing(prices.link(first, second), first, second)


def _crossing(link: Link | None, first: str, second: str) -> Iterator[Crossing]:
    if link is not None and link.network:
        yield Crossing(
            network=link.network, first=first, second=second, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s
        )
