"""A draft of a cluster as YAML: what sources said, and a `# QUESTION:` line wherever they said nothing.

A field the reader can do without is left out under its question; one it needs is written as `'?'`, or as the tool
printed it, which the reader refuses at that line until it is answered. Latencies, which no inventory tool prints, are
the catalog's assumption of the network's generation and say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetplan.specs.cluster import Device, NetworkKind
from hetplan.specs.encode import scalar_text
from hetplan.specs.hostlist import hostlist_text
from hetplan.specs.importers.facts import Catalog, Nic, distinct
from hetplan.specs.importers.merge import Draft, DraftGroup
from hetplan.specs.importers.wired_devices import Override, override_of
from hetplan.units import format_bytes, quantity_text

UNKNOWN = "'?'"
_SHORT: dict[NetworkKind, str] = {
    "infiniband": "ib",
    "ethernet": "eth",
    "roce": "roce",
    "efa": "efa",
    "slingshot": "slingshot",
}


Ports = tuple[NetworkKind, float, int]
"""Kind, bytes a second of one port, ports a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedText:
    """A file to write, and what is still open in it."""

    text: str
    questions: tuple[str, ...]


def cluster_text(draft: Draft, catalog: Catalog, name: str) -> ImportedText:
    """Return the cluster file of a draft."""
    lines = list(_lines(draft, catalog, name))
    asked = tuple(line.partition("# QUESTION: ")[2] for line in lines if "# QUESTION: " in line)
    return ImportedText(text="\n".join(lines) + "\n", questions=asked)


def _lines(draft: Draft, catalog: Catalog, name: str) -> Iterator[str]:
    sources = distinct(word for group in draft.groups for word in group.sheet.source.split(", "))
    yield f"# Imported from {', '.join(_comment(source) for source in sources)}."
    yield from (f"# Note: {_comment(remark)}" for remark in draft.remarks)
    yield from (_question(question, "") for question in draft.questions)
    yield "hetplan: cluster/v1"
    yield f"name: {scalar_text(name)}"
    overrides = [override_of(group, catalog) for group in draft.groups]
    names = _device_names(draft.groups, overrides, catalog)
    written = {names[i]: override for i, override in enumerate(overrides) if override.values}
    if written:
        yield "devices:"
    for device_name, override in written.items():
        yield f"  # {override.reason}"
        yield f"  {scalar_text(device_name)}: {{{', '.join(override.values)}}}"
    yield "groups:"
    for group, override, device_name in zip(draft.groups, overrides, names, strict=True):
        yield f"  {scalar_text(group.name)}:"
        yield from (f"    {line}" for line in _group(group, override, device_name, catalog))
    yield from _networks(draft, catalog)


def _comment(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _question(text: str, indent: str) -> str:
    return f"{indent}# QUESTION: {_comment(text)}"


def _device_names(groups: Sequence[DraftGroup], overrides: Sequence[Override], catalog: Catalog) -> list[str]:
    """Name of each group's device; a datasheet is replaced only where all groups with the device are wired alike."""
    names = []
    for group, override in zip(groups, overrides, strict=True):
        device = _device(group, catalog)
        if device is None:
            names.append("")
            continue
        others = {o.values for g, o in zip(groups, overrides, strict=True) if _device(g, catalog) == device}
        names.append(device.name if len(others) == 1 or not override.values else f"{device.name}-{group.name}")
    return names


def _device(group: DraftGroup, catalog: Catalog) -> Device | None:
    return catalog.device(group.cards.product) if group.cards else None


def _group(group: DraftGroup, override: Override, device_name: str, catalog: Catalog) -> Iterator[str]:
    if group.looked_at:
        seen = ", ".join(group.looked_at)
        yield _question(f"{seen} speaks of one node and was taken for all {group.num_nodes}; are they alike?", "")
    yield from (_question(text, "") for text in override.questions)
    if device_name:
        yield f"device: {scalar_text(device_name)}"
    else:
        yield from _open_device(group, catalog)
    yield from _nodes(group)
    if group.cards is None:
        yield _question("how many accelerators does a node have?", "")
        yield f"devices_per_node: {UNKNOWN}"
    else:
        yield f"devices_per_node: {group.cards.count}"
    if group.sheet.site:
        yield f"site: {scalar_text(group.sheet.site[:64])}"
    yield from _card_numbers(group, catalog)
    yield from _domains(group)
    yield from _host(group)
    if group.unusable:
        reasons = ", ".join(distinct(group.unusable.values()))
        yield f"# state when read: {_comment(reasons)}"
        if len(group.unusable) == len(group.nodes):
            yield _question("every node was unusable when this was read; are they back?", "")
        else:
            yield f"leave_out: [{', '.join(scalar_text(node) for node in group.unusable)}]"


def _open_device(group: DraftGroup, catalog: Catalog) -> Iterator[str]:
    """The line of a device that is not known, under its question."""
    cards = group.cards
    if cards is None or cards.product is None:
        yield _question("which accelerator is it? (nvidia-smi --query-gpu=name,memory.total --format=csv)", "")
        yield f"device: {UNKNOWN}"
        return
    usable, stated = cards.usable_memory_bytes, cards.stated_memory_bytes
    memory = usable or stated
    near = catalog.candidates(cards.product, memory) or catalog.candidates(cards.product.split("-")[0], memory)
    of = f" of {format_bytes(usable)}" if usable else f" of {stated / 1e9:g} GB" if stated else ""
    choices = f"one of {', '.join(near)}, or another" if near else "the catalog has none of that name"
    yield _question(f"which device is {_comment(cards.product)!r}{of}: {choices}?", "")
    yield f"device: {scalar_text(cards.product)}"


def _nodes(group: DraftGroup) -> Iterator[str]:
    if group.nodes:
        yield f"nodes: {scalar_text(hostlist_text(group.nodes))}"
        return
    if not group.is_counted:
        yield _question("one node was looked at; how many are like it, and what are their names?", "")
    yield f"nodes: {group.num_nodes}"


def _card_numbers(group: DraftGroup, catalog: Catalog) -> Iterator[str]:
    device, cards = _device(group, catalog), group.cards
    if cards is None:
        return
    stated = cards.stated_memory_bytes
    if device is not None and stated is not None and abs(stated / device.memory_bytes - 1) > 0.08:
        has = format_bytes(device.memory_bytes)
        yield _question(f"{stated / 1e9:g} GB are stated, the datasheet of {device.name} says {has}; which?", "")
    usable = cards.usable_memory_bytes
    if usable is not None and device is not None and usable > device.memory_bytes:
        has = format_bytes(device.memory_bytes)
        yield _question(f"{format_bytes(usable)} are reported, {device.name} has {has}; is it that device?", "")
    elif usable is not None:
        yield f"usable_memory: {quantity_text(usable, 'bytes')}"
    if cards.power_limit_w is not None:
        yield f"power_limit: {quantity_text(cards.power_limit_w, 'W')}"


def _domains(group: DraftGroup) -> Iterator[str]:
    sizes = Counter(domain for domain in group.domains if domain is not None)
    if not sizes:
        return
    if len(set(sizes.values())) == 1 and None not in group.domains:
        size = next(iter(sizes.values()))
        if size > 1:
            yield f"domain_nodes: {size}"
        return
    text = ", ".join(f"{name}: {count}" for name, count in list(sizes.items())[:6])
    yield _question(f"fast-link domains are of unlike sizes ({_comment(text)}); split the group by domain_nodes?", "")


def _host(group: DraftGroup) -> Iterator[str]:
    sheet = group.sheet
    parts = []
    if sheet.host_memory_bytes is not None:
        parts.append(f"memory: {quantity_text(sheet.host_memory_bytes, 'bytes')}")
    if sheet.cores is not None:
        parts.append(f"cores: {sheet.cores}")
    if parts:
        yield f"host: {{{', '.join(parts)}}}"


def _networks(draft: Draft, catalog: Catalog) -> Iterator[str]:
    """The `networks:` section; a comment where nothing was read of any network."""
    ports = [(group, *key, count) for group in _one_a_host(draft.groups) for key, count in _rated(group).items()]
    lines: list[str] = []
    joined: dict[Ports, list[list[DraftGroup]]] = {}
    for group, kind, rate, count in ports:
        for cluster in joined.setdefault((kind, rate, count), []):
            if _one_fabric(draft, [*cluster, group]):
                cluster.append(group)
                break
        else:
            joined[kind, rate, count].append([group])
    names = _network_names(joined)
    for kind_rate_count, clusters in joined.items():
        for number, cluster in enumerate(clusters):
            name = names[kind_rate_count, number]
            lines.extend(_network(name, kind_rate_count, _all_on(cluster, draft), catalog))
    yield from (_question(text, "") for text in _open_ports(draft))
    if lines:
        yield _question("is a fabric's core narrower than its edge? Then write its oversubscription", "")
        yield "networks:"
        yield from (f"  {line}" for line in lines)
    yield from _open_joins(draft, [cluster for clusters in joined.values() for cluster in clusters])


def _one_a_host(groups: Sequence[DraftGroup]) -> list[DraftGroup]:
    """Groups whose hosts were not met before; unlike cards of one host have its ports in common."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for group in groups:
        if not group.nodes or group.nodes not in seen:
            kept.append(group)
        seen.add(group.nodes)
    return kept


def _all_on(cluster: Sequence[DraftGroup], draft: Draft) -> list[str]:
    """Names of groups of a network, with those on the same hosts."""
    hosts = {group.nodes for group in cluster if group.nodes}
    own = {group.name for group in cluster}
    return [group.name for group in draft.groups if group.name in own or (group.nodes and group.nodes in hosts)]


def _rated(group: DraftGroup) -> dict[tuple[NetworkKind, float], int]:
    rated: Counter[tuple[NetworkKind, float]] = Counter()
    for nic in group.sheet.nics or ():
        if nic.is_active and nic.kind is not None and nic.bandwidth_bytes_per_s:
            rated[nic.kind, nic.bandwidth_bytes_per_s] += 1
    return dict(rated)


def _one_fabric(draft: Draft, groups: Sequence[DraftGroup]) -> bool:
    nodes = {node for group in groups for node in group.nodes}
    return all(group.nodes for group in groups) and any(nodes <= fabric for fabric in draft.fabrics)


def _network_names(joined: Mapping[Ports, Sequence[Sequence[DraftGroup]]]) -> dict[tuple[Ports, int], str]:
    """Name networks by kind, by rate where one place has several of a kind, by group where fabrics may be apart."""
    names: dict[tuple[Ports, int], str] = {}
    for ports, clusters in joined.items():
        kind, rate, count = ports
        rates = [other for other in joined if other[0] == kind]
        for number, cluster in enumerate(clusters):
            words = [_SHORT[kind]]
            words += [f"{8 * rate / 1e9:g}g"] if len({other[1] for other in rates}) > 1 else []
            words += [cluster[0].name] if len(clusters) > 1 else []
            words += [f"x{count}"] if sum(other[1] == rate for other in rates) > 1 else []
            names[ports, number] = "-".join(words)[:60]
    return names


def _network(name: str, ports: Ports, joins: Sequence[str], catalog: Catalog) -> Iterator[str]:
    kind, rate, count = ports
    yield f"{scalar_text(name)}:"
    yield f"  joins: [{', '.join(scalar_text(group) for group in joins)}]"
    if kind == "ethernet":
        yield _question("do these Ethernet ports run RoCE? If so, write kind: roce", "  ")
    yield f"  kind: {kind}"
    yield f"  bandwidth: {8 * rate / 1e9:.10g} Gbit/s"
    yield f"  nics_per_node: {count}"
    assumed = catalog.latency_of(kind, rate)
    if assumed is None:
        yield _question("what is the latency of a small message?", "  ")
        yield f"  latency: {UNKNOWN}"
    else:
        yield _question(f"latency was not read; this is what the catalog assumes of {assumed[1]}", "  ")
        yield f"  latency: {quantity_text(assumed[0], 's')}"


def _open_ports(draft: Draft) -> Iterator[str]:
    for group in _one_a_host(draft.groups):
        half = [nic for nic in group.sheet.nics or () if nic.is_active and not (nic.kind and nic.bandwidth_bytes_per_s)]
        if half:
            yield (
                f"{group.name}: {len(half)} network ports ({_port_names(half)}) of which kind and rate, and which of "
                "them serve the accelerators? (ibstat; grep . /sys/class/infiniband/*/ports/*/{rate,state,link_layer})"
            )


def _port_names(nics: Sequence[Nic]) -> str:
    names = [nic.name for nic in nics]
    return ", ".join(names if len(names) <= 4 else [*names[:3], "...", names[-1]])


def _open_joins(draft: Draft, clusters: Sequence[Sequence[DraftGroup]]) -> Iterator[str]:
    """Ask for a network where devices could not talk otherwise."""
    hosts = {group.nodes or (group.name,) for group in draft.groups}
    joined = [{name for group in cluster for name in _all_on([group], draft)} for cluster in clusters]
    everyone = {group.name for group in draft.groups}
    if any(names == everyone for names in joined) or (len(hosts) == 1 and draft.groups[0].num_nodes == 1):
        return
    names = ", ".join(scalar_text(group.name) for group in draft.groups)
    line = f"joins: [{names}], kind: ethernet, bandwidth: ? Gbit/s, latency: ? us"
    yield _question("which network joins all nodes? Nothing read says so; fill in such a line:", "")
    if not clusters:
        yield "# networks:"
    yield f"#   all: {{{line}}}"
