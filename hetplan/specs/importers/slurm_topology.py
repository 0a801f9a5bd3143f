"""Slurm's network topology: `topology.conf` (switch trees or blocks) and `topology.yaml`.

Switches say which nodes hang together, not how fast; blocks are nodes that share more than the rest, often one
fast-link domain, which only an annotation makes certain. Besides Slurm's own YAML the form of topology simulators is
read (`switches:` by name, `blocks:` with labels of regions and zones).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hetplan.errors import HetplanError, SpecError
from hetplan.specs.decode import document_from_text
from hetplan.specs.fields import Fields
from hetplan.specs.hostlist import expand_hostlist
from hetplan.specs.importers.facts import Facts, NodeSheet, SourceText
from hetplan.units import hint, show

ZONE_KEYS = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
REGION_KEYS = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
_CONF_KEYS = ("SwitchName", "Switches", "Nodes", "LinkSpeed", "BlockName", "BlockSizes")
_WORD = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch:
    """One switch: what hangs under it, and what labels say of it."""

    line: int
    children: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Nodes of one block."""

    name: str
    line: int
    nodes: tuple[str, ...]
    switch: str | None = None
    domain: str | None = None


def read_topology_conf(source: SourceText) -> Facts:
    """Return the nodes of a `topology.conf`.

    Raises:
        SpecError: a line is not understood, or names a switch that is not there.
    """
    switches: dict[str, _Switch] = {}
    blocks: list[_Block] = []
    for line, text in enumerate(source.lines, 1):
        words = text.partition("#")[0].split()
        values: dict[str, str] = {}
        for word in words:
            match = _WORD.fullmatch(word)
            if match is None or match[1] not in _CONF_KEYS:
                near = hint(word.partition("=")[0], _CONF_KEYS)
                raise source.error(f"{show(word)} is not understood{near}", line, text.find(word) + 1)
            values[match[1]] = match[2]
        if "SwitchName" in values:
            _add_switch(source, line, values, switches)
        elif "BlockName" in values:
            nodes = _names(source, line, values.get("Nodes", ""))
            blocks.append(_Block(name=values["BlockName"], line=line, nodes=nodes))
        elif values and set(values) != {"BlockSizes"}:
            raise source.error("expected SwitchName=, BlockName= or BlockSizes= on this line", line)
    return _facts(source, switches, blocks)


def _add_switch(source: SourceText, line: int, values: Mapping[str, str], switches: dict[str, _Switch]) -> None:
    name = values["SwitchName"]
    if name in switches:
        raise source.error(f"switch {show(name)} is already given at line {switches[name].line}", line)
    if ("Switches" in values) == ("Nodes" in values):
        raise source.error(f"switch {show(name)} needs either Switches= or Nodes=", line)
    switches[name] = _Switch(
        line=line,
        children=_names(source, line, values["Switches"]) if "Switches" in values else (),
        nodes=_names(source, line, values["Nodes"]) if "Nodes" in values else (),
    )


def _names(source: SourceText, line: int, text: str) -> tuple[str, ...]:
    try:
        return expand_hostlist(text)
    except HetplanError as error:
        raise source.error(str(error), line) from None


def read_topology_yaml(source: SourceText) -> Facts:
    """Return the nodes of a `topology.yaml`, of Slurm or of a topology simulator.

    Raises:
        SpecError: the file is neither, or names a switch that is not there.
    """
    if re.search(r"(?m)^- *topology:", source.text):
        padded = "topologies:\n" + re.sub(r"(?m)^---[ \t]*$", "", source.text, count=1)
        try:
            return _slurm_yaml(source, document_from_text(padded, source.name, ""))
        except SpecError as error:
            raise _one_line_up(source, error) from None
    root = document_from_text(source.text, source.name, "")
    switches = {
        name: _Switch(
            line=row.location().line,
            children=row.texts("switches", default=()),
            nodes=tuple(n for text in row.texts("nodes", default=()) for n in _listed(row, "nodes", text)),
            labels=_labels(row, "labels"),
        )
        for name, row in root.table("switches").items()
    }
    blocks = [_simulated_block(row, number) for number, row in enumerate(root.rows("blocks", required=False), 1)]
    return _facts(source, switches, blocks, leaves_listed=False)


def _one_line_up(source: SourceText, error: SpecError) -> SpecError:
    """The same error where a line was put in front of the text that was read."""
    where = error.location
    message = str(error).partition(f"{where}: ")[2] if where else str(error)
    return source.error(message, max(1, where.line - 1) if where else 1, where.column if where else 1)


def _slurm_yaml(source: SourceText, root: Fields) -> Facts:
    switches: dict[str, _Switch] = {}
    blocks: list[_Block] = []
    for row in root.rows("topologies"):
        row.text("topology")
        if row.has("tree"):
            for switch in row.fields("tree").rows("switches"):
                children = switch.text("children", default=None)
                nodes = switch.text("nodes", default=None)
                switches[switch.text("switch")] = _Switch(
                    line=switch.location().line,
                    children=_listed(switch, "children", children) if children else (),
                    nodes=_listed(switch, "nodes", nodes) if nodes else (),
                )
        elif row.has("block"):
            for block in row.fields("block").rows("blocks"):
                names = _listed(block, "nodes", block.text("nodes"))
                blocks.append(_Block(name=block.text("block"), line=block.location().line, nodes=names))
        elif not row.has("flat"):
            raise row.error("expected 'tree:', 'block:' or 'flat:'")
    return _facts(source, switches, blocks)


def _listed(row: Fields, key: str, text: str) -> tuple[str, ...]:
    try:
        return expand_hostlist(text)
    except HetplanError as error:
        raise row.error(str(error), key) from None


def _labels(row: Fields, key: str) -> dict[str, str]:
    return {name: str(value) for name, value in row.fields(key, required=False).raw_mapping().items()}


def _simulated_block(row: Fields, number: int) -> _Block:
    nodes = tuple(name for text in row.texts("nodes") for name in _listed(row, "nodes", text))
    notes = _labels(row, "annotations")
    return _Block(
        name=f"block {number}",
        line=row.location().line,
        nodes=nodes,
        switch=row.text("switch", default=None),
        domain=next((v for k, v in notes.items() if k.startswith("accelerator.") and k.endswith("/domain")), None),
    )


def _facts(
    source: SourceText, switches: Mapping[str, _Switch], blocks: list[_Block], *, leaves_listed: bool = True
) -> Facts:
    """Return one sheet a leaf switch or block; without `leaves_listed` a switch may be named by its parent alone."""
    above = _parents(source, switches, leaves_listed=leaves_listed)
    for block in blocks:
        if block.switch is not None and block.switch not in switches and block.switch not in above:
            near = hint(block.switch, [*switches, *above])
            raise source.error(f"unknown switch {show(block.switch)}{near}", block.line)
    leaves = [(name, switch.nodes) for name, switch in switches.items() if switch.nodes]
    sheets = [NodeSheet(source=source.name, nodes=nodes, site=_site(switches, above, name)) for name, nodes in leaves]
    sheets.extend(
        NodeSheet(
            source=source.name,
            nodes=block.nodes,
            domain=block.domain,
            site=_site(switches, above, block.switch) if block.switch else None,
        )
        for block in blocks
    )
    if not sheets:
        raise source.error("the topology names no node")
    groups = [nodes for _, nodes in leaves] + [block.nodes for block in blocks if block.switch]
    parts = [(name, nodes) for name, nodes in leaves] + [(b.switch, b.nodes) for b in blocks if b.switch]
    return Facts(
        sheets=tuple(sheets),
        fabrics=_fabrics(above, parts),
        remarks=_remarks(switches, groups),
        questions=_questions(blocks),
    )


def _parents(source: SourceText, switches: Mapping[str, _Switch], *, leaves_listed: bool) -> dict[str, str]:
    """Return the switch above each switch.

    Raises:
        SpecError: a switch is unknown, hangs under two others or under itself.
    """
    above: dict[str, str] = {}
    for name, switch in switches.items():
        for child in switch.children:
            if child not in switches and leaves_listed:
                raise source.error(f"unknown switch {show(child)}{hint(child, switches)}", switch.line)
            if child in above:
                raise source.error(f"switch {show(child)} hangs under both {above[child]} and {name}", switch.line)
            above[child] = name
    for name in switches:
        if len(set(path := _path(above, name))) != len(path):
            raise source.error(f"switch {show(name)} hangs under itself", switches[name].line)
    return above


def _path(above: Mapping[str, str], name: str) -> list[str]:
    """A switch and those above it, up to the root, or to the first that comes again."""
    path = [name]
    while path[-1] in above and path.count(path[-1]) == 1:
        path.append(above[path[-1]])
    return path


def _site(switches: Mapping[str, _Switch], above: Mapping[str, str], name: str) -> str | None:
    """The zone, else the region, that the nearest labelled switch is in."""
    labels: dict[str, str] = {}
    for place in reversed(_path(above, name)):
        labels.update(switches[place].labels if place in switches else {})
    return next((labels[key] for key in (*ZONE_KEYS, *REGION_KEYS) if key in labels), None)


def _fabrics(above: Mapping[str, str], parts: Iterable[tuple[str, tuple[str, ...]]]) -> tuple[tuple[str, ...], ...]:
    roots: dict[str, list[str]] = {}
    for name, nodes in parts:
        roots.setdefault(_path(above, name)[-1], []).extend(nodes)
    return tuple(tuple(nodes) for nodes in roots.values())


def _remarks(switches: Mapping[str, _Switch], groups: list[tuple[str, ...]]) -> tuple[str, ...]:
    if not groups:
        return ()
    sizes = sorted({len(nodes) for nodes in groups})
    each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    over = sum(1 for switch in switches.values() if switch.children)
    return (f"{len(groups)} leaf switches of {each} nodes, other switches: {over}; nodes are listed switch by switch",)


def _questions(blocks: list[_Block]) -> tuple[str, ...]:
    unmarked = [block for block in blocks if block.domain is None]
    if not unmarked:
        return ()
    sizes = sorted({len(block.nodes) for block in unmarked})
    each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return (
        f"is each of the {len(unmarked)} blocks of {each} nodes one fast-link (NVLink) domain? "
        f"If so, write domain_nodes: {sizes[0]}",
    )
