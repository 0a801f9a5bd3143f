"""Several sources over each other: equal facts agree, missing ones complete each other, unlike ones are refused.

Sheets meet by node name; those that speak of one node without a name complete every group they suit. Nodes with equal
facts form groups. Which of two sources is right is never decided here: the user is told which two disagree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from hetplan.errors import UsageError
from hetplan.specs.importers.facts import Cards, Catalog, Facts, Nic, NodeSheet, distinct
from hetplan.units import show

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGroup:
    """Nodes with equal accelerators, as far as they are known; a node with unlike cards gives several."""

    name: str
    nodes: tuple[str, ...]
    """Empty: `num_nodes` nodes without names."""
    num_nodes: int
    is_counted: bool
    """False: one node was looked at, how many are like it was not said."""
    cards: Cards | None
    sheet: NodeSheet
    """What is common to all nodes."""
    domains: tuple[str | None, ...] = ()
    unusable: Mapping[str, str] | None = None
    looked_at: tuple[str, ...] = ()
    """Sources that saw one node and were taken for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A cluster as far as sources know it."""

    groups: tuple[DraftGroup, ...]
    fabrics: tuple[frozenset[str], ...]
    name: str | None
    remarks: tuple[str, ...]
    questions: tuple[str, ...]


def merge(sources: Sequence[Facts], catalog: Catalog) -> Draft:
    """Return what sources say together.

    Raises:
        UsageError: two of them contradict each other, or one suits nothing the others describe.
    """
    sheets = [sheet for facts in sources for sheet in facts.sheets]
    nodes = _by_node(sheets, catalog)
    without = [name for name, sheet in nodes.items() if sheet.cards == ()]
    groups = _groups({name: sheet for name, sheet in nodes.items() if sheet.cards != ()}, catalog)
    groups.extend(_counted_groups(sheets))
    groups = _complete(groups, _boxes(sheets, catalog), catalog)
    if not groups:
        raise UsageError("the files describe no node with accelerators")
    remarks = [remark for facts in sources for remark in facts.remarks]
    if without:
        remarks.append(f"{len(without)} nodes without accelerators were left out ({without[0]}, ...)")
    return Draft(
        groups=_named([part for group in groups for part in _by_card(group)], catalog),
        fabrics=tuple(frozenset(fabric) for facts in sources for fabric in facts.fabrics),
        name=next((facts.name for facts in sources if facts.name), None),
        remarks=distinct(remarks),
        questions=distinct(question for facts in sources for question in facts.questions),
    )


def _by_node(sheets: Iterable[NodeSheet], catalog: Catalog) -> dict[str, NodeSheet]:
    nodes: dict[str, NodeSheet] = {}
    for sheet in sheets:
        for name in sheet.nodes:
            nodes[name] = overlay(nodes[name], sheet, catalog) if name in nodes else sheet
    return nodes


def _boxes(sheets: Iterable[NodeSheet], catalog: Catalog) -> list[NodeSheet]:
    """One sheet a tag, of those that speak of a node without a name."""
    boxes: dict[str | None, NodeSheet] = {}
    for sheet in sheets:
        if not sheet.nodes and sheet.num_nodes is None:
            before = boxes.get(sheet.group)
            boxes[sheet.group] = overlay(before, sheet, catalog) if before else sheet
    return list(boxes.values())


def overlay(first: NodeSheet, second: NodeSheet, catalog: Catalog) -> NodeSheet:
    """Return two sheets as one.

    Raises:
        UsageError: they disagree.
    """
    merged: dict[str, object] = {}
    for key in (field.name for field in fields(NodeSheet)):
        one, other = getattr(first, key), getattr(second, key)
        if key in ("source", "nodes"):
            continue
        if one is None or other is None or one == other:
            merged[key] = other if one is None else one
        elif key == "cards":
            merged[key] = _same_cards(first, second, catalog)
        elif key == "nics":
            merged[key] = _same_nics(one, other)
        elif key == "wiring" and (one.family, one.is_full) == (other.family, other.is_full):
            merged[key] = one
        elif key in ("group", "unusable", "host_memory_bytes", "cores"):
            merged[key] = one  # partitions overlap; memory and cores differ by what each tool leaves to the system
        else:
            raise _disagree(first, second, key.replace("_", " "))
    sources = distinct([*first.source.split(", "), second.source])
    return replace(first, source=", ".join(sources), **merged)  # type: ignore[arg-type]


def _disagree(first: NodeSheet, second: NodeSheet, what: str) -> UsageError:
    return UsageError(f"{first.source} and {second.source} disagree about the {what} of a node")


def _same_cards(first: NodeSheet, second: NodeSheet, catalog: Catalog) -> tuple[Cards, ...]:
    one, other = first.cards or (), second.cards or ()
    for kinds, whole in ((one, other), (other, one)):
        if len(kinds) > 1 and len(whole) == 1 and whole[0].count == sum(cards.count for cards in kinds):
            names = {_kind(cards, catalog) for cards in kinds}
            if whole[0].product is None or _kind(whole[0], catalog) in names:
                return kinds  # a label or a table of links counts all devices under one name
    if len(one) != len(other):
        raise _disagree(first, second, f"accelerators ({_cards_text(one)} or {_cards_text(other)})")
    pairs = [(a, _match(a, other, catalog)) for a in one]
    if any(b is None for _, b in pairs):
        raise _disagree(first, second, f"accelerators ({_cards_text(one)} or {_cards_text(other)})")
    return tuple(_laid(a, b, catalog) for a, b in pairs if b is not None)


def _match(cards: Cards, others: Sequence[Cards], catalog: Catalog) -> Cards | None:
    """Return the entry that may speak of the same devices."""
    for other in others:
        if cards.count == other.count and _may_be_same(cards.product, other.product, catalog):
            return other
    return None


def _may_be_same(one: str | None, other: str | None, catalog: Catalog) -> bool:
    if one is None or other is None:
        return True
    known, also_known = catalog.device(one), catalog.device(other)
    if known is not None and also_known is not None:
        return known.name == also_known.name
    short, full = (one, also_known) if known is None else (other, known)
    return one.casefold() == other.casefold() or (full is not None and full.name in catalog.candidates(short, None))


def _laid(one: Cards, other: Cards, catalog: Catalog) -> Cards:
    """Return two entries of the same devices as one; a product the catalog knows is the better name."""
    products = [cards.product for cards in (one, other) if cards.product is not None]
    known = [product for product in products if catalog.device(product) is not None]
    values = {
        field.name: getattr(one, field.name) if getattr(one, field.name) is not None else getattr(other, field.name)
        for field in fields(Cards)
        if field.name not in ("count", "product")
    }
    return Cards(count=one.count, product=next(iter(known or products), None), **values)


def _kind(cards: Cards, catalog: Catalog) -> str | None:
    device = catalog.device(cards.product)
    return device.name if device is not None else cards.product


def _cards_text(cards: Sequence[Cards]) -> str:
    return " + ".join(f"{c.count} x {c.product or 'unknown'}" for c in cards) or "none"


def _same_nics(one: Sequence[Nic], other: Sequence[Nic]) -> tuple[Nic, ...]:
    """Ports of one name are one port; what either source says of it holds."""
    found = {nic.name: nic for nic in one}
    for nic in other:
        before = found.get(nic.name)
        found[nic.name] = (
            nic
            if before is None
            else Nic(
                name=nic.name,
                kind=before.kind or nic.kind,
                bandwidth_bytes_per_s=before.bandwidth_bytes_per_s or nic.bandwidth_bytes_per_s,
                is_active=before.is_active and nic.is_active,
            )
        )
    return tuple(found.values())


def _groups(nodes: Mapping[str, NodeSheet], catalog: Catalog) -> list[DraftGroup]:
    """Return named nodes with equal facts together, in the order in which they appear."""
    alike: dict[Hashable, list[str]] = {}
    for name, sheet in nodes.items():
        cards = tuple((_kind(c, catalog), c.count) for c in sheet.cards) if sheet.cards is not None else None
        rates = Counter((nic.kind, nic.bandwidth_bytes_per_s, nic.is_active) for nic in sheet.nics or ())
        key = (sheet.group, cards, sheet.wiring, frozenset(rates.items()), sheet.site)
        alike.setdefault(key, []).append(name)
    return [_group([nodes[name] for name in names], names) for names in alike.values()]


def _group(sheets: Sequence[NodeSheet], names: Sequence[str]) -> DraftGroup:
    """Return a group of nodes; of numbers that differ a little the smallest holds for all."""
    order = _domain_order([sheet.domain for sheet in sheets])
    kinds = [sheet.cards for sheet in sheets if sheet.cards is not None]
    cards = tuple(_least_cards([kind[i] for kind in kinds]) for i in range(len(kinds[0]))) if kinds else None
    common = replace(
        sheets[0],
        cards=cards,
        host_memory_bytes=_least(sheet.host_memory_bytes for sheet in sheets),
        cores=_least(sheet.cores for sheet in sheets),
        source=", ".join(distinct(word for sheet in sheets for word in sheet.source.split(", "))),
    )
    return DraftGroup(
        name=common.group or "",
        nodes=tuple(names[i] for i in order),
        num_nodes=len(names),
        is_counted=True,
        cards=None,
        sheet=common,
        domains=tuple(sheets[i].domain for i in order),
        unusable={names[i]: sheets[i].unusable or "" for i in order if sheets[i].unusable},
    )


def _domain_order(domains: Sequence[str | None]) -> list[int]:
    """Nodes of one domain side by side, domains in the order in which they appear."""
    first: dict[str | None, int] = {}
    for domain in domains:
        first.setdefault(domain, len(first))
    return sorted(range(len(domains)), key=lambda i: first[domains[i]])


def _least(values: Iterable[Number | None]) -> Number | None:
    return min((value for value in values if value is not None), default=None)


def _least_cards(cards: Sequence[Cards]) -> Cards:
    return replace(
        cards[0],
        usable_memory_bytes=_least(c.usable_memory_bytes for c in cards),
        power_limit_w=_least(c.power_limit_w for c in cards),
        link_bandwidth_bytes_per_s=_least(c.link_bandwidth_bytes_per_s for c in cards),
    )


def _counted_groups(sheets: Iterable[NodeSheet]) -> list[DraftGroup]:
    """Return the groups that sources count without naming their nodes."""
    return [
        DraftGroup(
            name=sheet.group or "", nodes=(), num_nodes=sheet.num_nodes, is_counted=True, cards=None, sheet=sheet
        )
        for sheet in sheets
        if not sheet.nodes and sheet.num_nodes is not None
    ]


def _complete(groups: list[DraftGroup], boxes: Sequence[NodeSheet], catalog: Catalog) -> list[DraftGroup]:
    """Lay what single nodes say over the groups they suit; what suits none is a group of its own."""
    done = list(groups)
    for box in boxes:
        tagged = [group for group in done if box.group is not None and group.name == box.group]
        if not groups or (box.group is not None and not tagged):
            done.append(_single(box))
            continue
        suited = [group for group in tagged or groups if _suits(box, group, catalog)]
        if not suited:
            raise UsageError(f"{box.source}: a node with {_cards_text(box.cards or ())} is none of those described")
        if box.cards is None and len(suited) > 1:
            names = ", ".join(group.name or group.nodes[0] for group in suited[:5])
            raise UsageError(f"{box.source}: nodes of which group? Write GROUP=FILE; there are {names}")
        kept = {id(group) for group in suited}
        done = [_completed(group, box, catalog) if id(group) in kept else group for group in done]
        groups = [group for group in done if group.is_counted]
    return done


def _completed(group: DraftGroup, box: NodeSheet, catalog: Catalog) -> DraftGroup:
    sheet = overlay(group.sheet, replace(box, group=None), catalog)
    seen = distinct([*group.looked_at, *box.source.split(", ")]) if group.num_nodes > 1 else ()
    return replace(group, sheet=sheet, looked_at=seen)


def _single(box: NodeSheet) -> DraftGroup:
    return DraftGroup(name=box.group or "", nodes=(), num_nodes=1, is_counted=False, cards=None, sheet=box)


def _suits(box: NodeSheet, group: DraftGroup, catalog: Catalog) -> bool:
    if box.cards is None or group.sheet.cards is None:
        return True
    try:
        _same_cards(box, group.sheet, catalog)
    except UsageError:
        return False
    return True


def _by_card(group: DraftGroup) -> list[DraftGroup]:
    """Return a group for each kind of card; they share their hosts."""
    kinds = group.sheet.cards
    if not kinds:
        return [group]
    nodes = group.nodes
    if len(kinds) > 1 and not nodes:
        stem = group.name or "node"
        nodes = tuple(f"{stem}-{number}" for number in range(1, group.num_nodes + 1))
    return [replace(group, cards=cards, nodes=nodes) for cards in kinds]


def _named(groups: Sequence[DraftGroup], catalog: Catalog) -> tuple[DraftGroup, ...]:
    """Give each group a name of its own: its partition's, else its device's."""
    taken: set[str] = set()
    named = []
    for group in groups:
        kind = _kind(group.cards, catalog) if group.cards else None
        stem = _slug(group.name if group.name and not _is_shared(group, groups) else kind or group.name or "node")
        name, number = stem, 1
        while name in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name)
        named.append(replace(group, name=name))
    return tuple(named)


def _is_shared(group: DraftGroup, groups: Sequence[DraftGroup]) -> bool:
    return sum(other.name == group.name for other in groups) > 1


def _slug(text: str) -> str:
    kept = "".join(c.lower() if c.isascii() and c.isalnum() else "-" for c in text).strip("-")
    return kept[:60] or "node"


def tagged(facts: Facts, group: str) -> Facts:
    """Return facts whose nodes are of a group the user names.

    Raises:
        UsageError: the name cannot be one.
    """
    if _slug(group) != group.lower():
        raise UsageError(f"{show(group)} is not a group name; letters, digits and '-' make one")
    return replace(facts, sheets=tuple(replace(sheet, group=group) for sheet in facts.sheets))
