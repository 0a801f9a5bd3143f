"""Nodes as Slurm writes them: `scontrol show node --json` and `sinfo --json` (data parsers of 21.08 to 24.11)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hetplan.specs.importers.facts import Facts, NodeSheet, SourceText
from hetplan.specs.importers.slurm_nodes import MIB, UNUSABLE, expand_nodes, gres_cards
from hetplan.units import show


def read_slurm_json(source: SourceText) -> Facts:
    """Return the nodes of a document.

    Raises:
        SpecError: it is no JSON, names no node, or a node has no GRES or memory of the right type.
    """
    try:
        document = json.loads(source.text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise source.error(f"not valid JSON: {error}", line) from None
    rows = list(_rows(source, document))
    sheets: dict[str, NodeSheet] = {}
    for row in rows:
        for name in row["names"]:
            sheets.setdefault(name, _sheet(source, name, row))
    if not sheets:
        raise source.error("the document lists no node")
    return Facts(sheets=tuple(sheets.values()))


def _rows(source: SourceText, document: Any) -> Iterator[dict[str, Any]]:
    """Yield nodes in one form, whichever command wrote them."""
    nodes = document.get("nodes") if isinstance(document, Mapping) else None
    if isinstance(nodes, list):
        for node in nodes:
            fields = _mapping(source, node, "a node")
            partitions = fields.get("partitions") or [None]
            yield {
                "names": expand_nodes(source, 1, _text(source, fields, "name")),
                "gres": fields.get("gres"),
                "memory": fields.get("real_memory"),
                "state": fields.get("state"),
                "partition": partitions[0] if isinstance(partitions, list) else partitions,
                "cores": _product(fields.get("sockets"), fields.get("cores")),
            }
    for entry in _mapping(source, document, "the document").get("sinfo") or ():
        fields = _mapping(source, entry, "an entry of sinfo")
        held = _mapping(source, fields.get("nodes"), "nodes of an entry").get("nodes")
        if not isinstance(held, list) or not all(isinstance(name, str) for name in held):
            raise source.error("an entry of sinfo has no list of nodes")
        yield {
            "names": tuple(name for word in held for name in expand_nodes(source, 1, word)),
            "gres": _inside(fields, "gres", "total"),
            "memory": _inside(fields, "memory", "minimum"),
            "state": _inside(fields, "node", "state"),
            "partition": _inside(fields, "partition", "name"),
            "cores": None,
        }


def _sheet(source: SourceText, name: str, row: Mapping[str, Any]) -> NodeSheet:
    gres, memory, state = row["gres"], _whole(row["memory"]), row["state"]
    if gres is not None and not isinstance(gres, str):
        raise source.error(f"node {show(name)}: gres is no text")
    words = " ".join(map(str, state)) if isinstance(state, list) else str(state or "")
    return NodeSheet(
        source=source.name,
        nodes=(name,),
        group=row["partition"] if isinstance(row["partition"], str) and row["partition"] else None,
        cards=gres_cards(source, 1, gres) if gres is not None else None,
        cores=row["cores"],
        host_memory_bytes=memory * MIB if memory else None,
        unusable=words if UNUSABLE.search(words) else None,
    )


def _mapping(source: SourceText, value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise source.error(f"{what} is no mapping")
    return value


def _text(source: SourceText, fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value:
        raise source.error(f"a node has no {key}")
    return value


def _inside(fields: Mapping[str, Any], key: str, inner: str) -> Any:
    value = fields.get(key)
    return value.get(inner) if isinstance(value, Mapping) else value


def _whole(value: Any) -> int | None:
    """Return a number, which newer versions wrap as `{"set": true, "number": 515000}`."""
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set", True) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _product(sockets: Any, cores: Any) -> int | None:
    one, other = _whole(sockets), _whole(cores)
    return one * other if one and other else None
