"""The cluster map: sites, groups and nodes, each device coloured by its group where it works, with who holds what.

Nodes that do the same are one tile with their number and names, so a map of ten thousand devices stays a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Stage
from hetplan.report.html import Markup, joined, tag
from hetplan.report.html_rows import group_class, held_words, num_decoders, physical, swatch
from hetplan.report.layouts import Setting, count_text, replica_text, shape_name
from hetplan.report.tables import cut
from hetplan.specs.cluster import Cluster, Group, Network
from hetplan.specs.hostlist import hostlist_text
from hetplan.specs.model import Model
from hetplan.units import format_bits, format_seconds

MOST_TILES = 24
"""Kinds of node shown of a group."""
MOST_SHAPES = 24
MOST_WIDE_SITES = 2
"""Above this many sites, they stand side by side."""
MOST_SLOTS = 32
MOST_LABELLED = 20
"""Stages of a shape whose segments are wide enough for a number."""
MOST_CAPTIONS = 8
WIDEST_NAME = 56

_Slot = tuple[int, int] | str
"""(replica shape, stage) of a device, or why it has none."""
_IDLE, _OUT = "idle", "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    slots: tuple[_Slot, ...]
    nodes: tuple[str, ...]


def layer_strips(layout: Layout, setting: Setting) -> Markup:
    """Return one strip a replica shape: the model from first to last layer, cut into stages."""
    shown = layout.replicas[:MOST_SHAPES]
    strips = []
    for row, replica in enumerate(shown):
        many = len(replica.stages) > MOST_LABELLED
        segments = [
            _segment(f"{shape_name(row)}{v % replica.pp}", stage, setting, labelled=not many)
            for v, stage in enumerate(replica.stages)
        ]
        words = f"{shape_name(row)}: {replica_text(replica)}"
        strips.append(tag("div", tag("p", words), tag("div", *segments, class_="strip"), class_="shape"))
    more = len(layout.replicas) - len(shown)
    rest = [tag("p", f"{more} more replica shapes are not drawn.", class_="note")] if more else []
    return joined([*strips, *rest])


def _segment(name: str, stage: Stage, setting: Setting, *, labelled: bool) -> Markup:
    count = num_decoders(setting.model, (stage,))
    words = f"stage {name} on group {stage.group}: {held_words(setting.model, (stage,))}"
    return tag(
        "span",
        str(count) if labelled else "",
        class_=group_class(setting.cluster, stage.group),
        style=f"flex-grow:{stage.num_layers}",
        title=words,
    )


def cluster_map(layout: Layout, setting: Setting) -> Markup:
    """Return every site with its groups, and what joins them."""
    cluster = setting.cluster
    work = _work_of_devices(place(layout, cluster), cluster)
    sites = dict.fromkeys(group.site for group in cluster.groups)
    held = {(row, q): parts for row, replica in enumerate(layout.replicas) for q, parts in enumerate(physical(replica))}
    drawn = [
        tag(
            "div",
            tag("h3", f"site {site}") if len(sites) > 1 else "",
            *(_group(group, work[group.name], held, setting) for group in cluster.groups if group.site == site),
            class_="site",
        )
        for site in sites
    ]
    networks = tag("div", *(_network(net, cluster) for net in cluster.networks), class_="nets")
    return joined([tag("div", *drawn, class_="sites many" if len(sites) > MOST_WIDE_SITES else "sites"), networks])


def _work_of_devices(layout: Layout, cluster: Cluster) -> dict[str, list[_Slot]]:
    """Return, for each usable device of each group, who it works for."""
    work: dict[str, list[_Slot]] = {group.name: [_IDLE] * group.num_devices for group in cluster.groups}
    for row, replica in enumerate(layout.replicas):
        for q, stage in enumerate(replica.stages[: replica.pp]):
            for first, end in stage.devices:
                work[stage.group][first:end] = [(row, q)] * (end - first)
    return work


def _tiles(group: Group, work: Sequence[_Slot]) -> list[_Tile]:
    """Return the kinds of node of a group, in the order of their first node."""
    found: dict[tuple[_Slot, ...], list[str]] = {}
    device = iter(work)
    for index, name in enumerate(group.nodes):
        slots = tuple(
            _OUT if (index, slot) in group.left_out else next(device) for slot in range(group.devices_per_node)
        )
        found.setdefault(slots, []).append(name)
    return [_Tile(slots=slots, nodes=tuple(nodes)) for slots, nodes in found.items()]


def _group(
    group: Group, work: Sequence[_Slot], held: Mapping[tuple[int, int], tuple[Stage, ...]], setting: Setting
) -> Markup:
    colour = group_class(setting.cluster, group.name)
    used = sum(who != _IDLE for who in work)
    tiles = _tiles(group, work)
    shown = tiles[:MOST_TILES]
    nodes = count_text(len(group.nodes), "node")
    title = tag(
        "h4",
        swatch(colour),
        group.name,
        tag("small", f"{group.device.name}, {nodes} of {group.devices_per_node}; {used:,} of {len(work):,} in use"),
    )
    left = len(tiles) - len(shown)
    more = tag("p", f"Nodes of {left} more kinds are not drawn.", class_="note") if left else ""
    tiles_shown = [_tile(tile, colour, held, setting.model) for tile in shown]
    return tag("div", title, tag("div", *tiles_shown, class_="tiles"), more, class_="group")


def _tile(tile: _Tile, colour: str, held: Mapping[tuple[int, int], tuple[Stage, ...]], model: Model) -> Markup:
    names = hostlist_text(tile.nodes)
    stages = list(dict.fromkeys(slot for slot in tile.slots if not isinstance(slot, str)))
    squares = list(_squares(tile.slots, stages, colour))
    captions = [
        tag("li", f"{shape_name(row)}{q}: {held_words(model, held[row, q])}") for row, q in stages[:MOST_CAPTIONS]
    ]
    if len(stages) > MOST_CAPTIONS:
        captions.append(tag("li", f"and {len(stages) - MOST_CAPTIONS} more stages"))
    if not stages:
        captions.append(tag("li", "idle"))
    count = tag("b", f"{len(tile.nodes):,} x ") if len(tile.nodes) > 1 else ""
    head = tag("p", count, cut(names, WIDEST_NAME), title=cut(names, 400))
    return tag("div", head, tag("div", *squares, class_="devices"), tag("ul", *captions), class_="tile")


def _squares(slots: Sequence[_Slot], stages: Sequence[_Slot], colour: str) -> Iterator[Markup]:
    for slot in slots[:MOST_SLOTS]:
        if isinstance(slot, str):
            yield tag("i", class_=slot, title="left out" if slot == _OUT else "idle")
        else:
            shade = " odd" if stages.index(slot) % 2 else ""
            yield tag("i", class_=f"{colour}{shade}", title=f"stage {shape_name(slot[0])}{slot[1]}")
    if len(slots) > MOST_SLOTS:
        yield tag("span", f"+{len(slots) - MOST_SLOTS}")


def _network(network: Network, cluster: Cluster) -> Markup:
    each = f"{network.nics_per_node} x " if network.nics_per_node > 1 else ""
    rate = f"{each}{format_bits(network.bandwidth_bytes_per_s)}, {format_seconds(network.latency_s)}"
    shared = ", one line for all" if network.shared else ""
    narrow = f", core {network.oversubscription:g}:1" if network.oversubscription > 1 else ""
    pairs = ", by pairs of places" if network.pairs else ""
    joins = [tag("span", swatch(group_class(cluster, name)), name) for name in network.joins[:MOST_TILES]]
    words = tag("span", f"{network.kind}, {rate}{shared}{narrow}{pairs}")
    return tag("p", tag("b", network.name), words, tag("span", *joins, class_="joins"))
