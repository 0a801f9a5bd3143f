"""Strict reading of YAML documents with file:line:column in every error.

`read_document` loads a file safely and returns the `Fields` of its root mapping. A reader takes each key it knows
with a typed method and calls `finish()`, which refuses keys nobody asked for, with a near match.

A key whose value is empty or `null` counts as an error, not as absent.
"""

from __future__ import annotations

from pathlib import Path

from hetplan.errors import Location, SpecError
from hetplan.specs.fields import Fields
from hetplan.specs.nodes import MapNode, Node, nodes_from_bytes, nodes_from_text, read_bytes
from hetplan.specs.scalars import MAX_INTEGER, Plain, describe
from hetplan.units import escape, show

__all__ = ["MAX_INTEGER", "Fields", "Plain", "document_from_text", "read_document"]

_HEADER = "hetplan"


def read_document(path: Path, kind: str) -> Fields:
    """Return the root of the file at `path`, which must start with `hetplan: <kind>/v1` (any mapping if `kind` is "").

    Raises:
        SpecError: the file cannot be read, is no safe YAML, or is of another kind.
    """
    return _root(nodes_from_bytes(read_bytes(path), str(path)), escape(str(path)), kind)


def document_from_text(text: str, file_name: str, kind: str) -> Fields:
    """Return the root of `text` as `read_document` does; errors name `file_name`.

    Raises:
        SpecError: the text is no safe YAML, or is of another kind.
    """
    return _root(nodes_from_text(text, file_name), escape(file_name), kind)


def _root(node: Node, file_name: str, kind: str) -> Fields:
    """Check the header and return the root mapping."""
    location = Location(file=file_name, line=node.line, column=node.column)
    if not isinstance(node, MapNode):
        wanted = f"a mapping that starts with '{_HEADER}: {kind}/v1'" if kind else "a mapping"
        raise SpecError(f"expected {wanted}, found {describe(node)}", location=location)
    fields = Fields(node, file_name, "")
    if kind:
        _expect_kind(fields, kind)
    return fields


def _expect_kind(fields: Fields, kind: str) -> None:
    """Take the `hetplan:` key and refuse another kind or version."""
    wanted = f"{kind}/v1"
    if not fields.has(_HEADER):
        raise fields.error(f"the first key must be '{_HEADER}: {wanted}'; without it this is no {kind} file")
    found = fields.text(_HEADER)
    if found == wanted:
        return
    if found.partition("/")[0] == kind:
        raise fields.error(f"version {show(found)} is not known; this hetplan reads '{wanted}'", _HEADER)
    raise fields.error(f"this file is {show(found)}, expected '{wanted}'", _HEADER)
