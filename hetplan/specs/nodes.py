"""YAML text -> a tree of nodes that know their line and column, safely and in linear time.

The parser's events are taken one by one with a stack of our own, so that depth cannot exhaust Python's. Aliases are
shared, never copied; what they would expand to is counted, so a small file cannot stand for a huge one. Tags, several
documents, duplicate keys and keys that are no scalars are refused.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from hetplan.errors import Location, SpecError
from hetplan.units import escape, show

MAX_FILE_BYTES = 16 * 10**6
MAX_DEPTH = 100
MAX_NODES = 2_000_000
"""Nodes of one document after aliases are expanded."""

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Scalar:
    """A single value; `plain` when it was written without quotes."""

    __slots__ = ("column", "line", "plain", "text")

    def __init__(self, line: int, column: int, text: str, *, plain: bool) -> None:
        self.line = line
        self.column = column
        self.text = text
        self.plain = plain


class ListNode:
    """A list."""

    __slots__ = ("column", "items", "line")

    def __init__(self, line: int, column: int) -> None:
        self.line = line
        self.column = column
        self.items: list[Node] = []


class MapNode:
    """A mapping: key -> (the key's scalar, value)."""

    __slots__ = ("column", "entries", "line")

    def __init__(self, line: int, column: int, entries: dict[str, tuple[Scalar, Node]]) -> None:
        self.line = line
        self.column = column
        self.entries = entries


Node = Scalar | ListNode | MapNode


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not been seen."""

    node: ListNode | MapNode
    anchor: str | None
    size: int = 1
    key: Scalar | None = None


class _Builder:
    """Builds the tree from events; `size` counts nodes with aliases expanded."""

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        self.root: Node | None = None
        self.stack: list[_Open] = []
        self.anchors: dict[str, tuple[Node, int] | None] = {}
        """None: the anchored node is not complete yet."""

    def error(self, message: str, node: Node) -> SpecError:
        """A located error."""
        return SpecError(message, location=Location(file=self.file_name, line=node.line, column=node.column))

    def take(self, event: yaml.Event) -> None:
        """Take the next event, the most frequent kinds first."""
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = self.stack.pop()
            self._remember(done.anchor, done.node, done.size)
            self._add(done.node, done.size)
        elif isinstance(event, yaml.MappingStartEvent):
            self._open(event, MapNode(*_position(event), {}))
        elif isinstance(event, yaml.SequenceStartEvent):
            self._open(event, ListNode(*_position(event)))
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise self.error("a second document; a file holds one", Scalar(*_position(event), "", plain=True))

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        """Put a single value."""
        line, column = _position(event)
        scalar = Scalar(line, column, event.value, plain=not event.style)
        if event.tag is not None:
            self._refuse_tag(event, scalar)
        if event.anchor is not None:
            self._remember(event.anchor, scalar, 1)
        self._add(scalar, 1)

    def _open(self, event: yaml.CollectionStartEvent, node: ListNode | MapNode) -> None:
        """Start a list or mapping."""
        self._refuse_tag(event, node)
        if len(self.stack) >= MAX_DEPTH:
            raise self.error(f"nested more than {MAX_DEPTH} levels deep", node)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.stack.append(_Open(node, event.anchor))

    def _alias(self, event: yaml.AliasEvent) -> None:
        """Put an anchored node a second time."""
        here = Scalar(*_position(event), "", plain=True)
        name = event.anchor or ""
        if name not in self.anchors:
            raise self.error(f"alias {show('*' + name)} has no anchor before it", here)
        known = self.anchors[name]
        if known is None:
            raise self.error(f"alias {show('*' + name)} stands inside the value it names", here)
        node, size = known
        if size > MAX_NODES or (self.stack and self.stack[-1].size + size > MAX_NODES):
            raise self.error(f"alias {show('*' + name)} expands the file to more than {MAX_NODES:,} values", here)
        self._add(node, size)

    def _remember(self, anchor: str | None, node: Node, size: int) -> None:
        """Keep a complete node for its aliases."""
        if anchor is not None:
            self.anchors[anchor] = (node, size)

    def _add(self, node: Node, size: int) -> None:
        """Put a complete node where it belongs."""
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        parent.size += size
        if parent.size > MAX_NODES:
            raise self.error(f"more than {MAX_NODES:,} values in one file", node)
        if isinstance(parent.node, ListNode):
            parent.node.items.append(node)
        elif parent.key is None:
            parent.key = self._key(node, parent.node)
        else:
            parent.node.entries[parent.key.text] = (parent.key, node)
            parent.key = None

    def _key(self, node: Node, mapping: MapNode) -> Scalar:
        """Return `node` if it can be a key of `mapping`."""
        if not isinstance(node, Scalar):
            raise self.error("a key must be a single word, found a list or mapping", node)
        if node.text in mapping.entries:
            first = mapping.entries[node.text][0]
            raise self.error(f"key {show(node.text)} is already given at line {first.line}", node)
        return node

    def _refuse_tag(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, node: Node) -> None:
        """Refuse YAML tags: types come from the reader, not from the file."""
        if event.tag is not None:
            raise self.error(f"tag {show(event.tag)} is not allowed", node)


def nodes_from_text(text: str, file_name: str) -> Node:
    """Return the root node of the one document in `text`.

    Raises:
        SpecError: the text is empty, not YAML, or uses what is refused here.
    """
    text = text.removeprefix("\ufeff")
    file_name = escape(file_name)
    bad = _UNPRINTABLE.search(text)
    if bad is not None:
        raise SpecError(
            f"character U+{ord(bad.group()):04X} is not allowed in a YAML file",
            location=_location_of(text, bad.start(), file_name),
        )
    builder = _Builder(file_name)
    try:
        with _without_collection():
            for event in yaml.parse(text, Loader=_LOADER):
                builder.take(event)
    except yaml.YAMLError as error:
        raise _syntax_error(error, file_name) from None
    root = builder.root
    if root is None or (isinstance(root, Scalar) and root.plain and not root.text):
        raise SpecError("the file is empty", location=Location(file=file_name, line=1, column=1))
    return root


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the cycle collector: a tree has no cycles, and looking for them doubles the time (0.5 s for 1 MB)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def nodes_from_bytes(data: bytes, file_name: str) -> Node:
    """Return the root node of a UTF-8 file's bytes.

    Raises:
        SpecError: as `nodes_from_text`, or the bytes are not UTF-8.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        location = _location_of(before, len(before), escape(file_name))
        raise SpecError(f"byte 0x{data[error.start]:02x} is not UTF-8 text", location=location) from None
    return nodes_from_text(text, file_name)


def read_bytes(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return a file's bytes; one that is larger than `limit` is refused before it is read.

    Raises:
        SpecError: the file is missing, unreadable or too large.
    """
    start = Location(file=escape(str(path)), line=1, column=1)
    try:
        if path.stat().st_size > limit:
            size = path.stat().st_size
            raise SpecError(f"the file is {size / 1e6:.0f} MB large; at most {limit / 1e6:.0f} MB", location=start)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecError(f"cannot read the file: {escape(reason).lower()}", location=start) from None
    if len(data) > limit:
        raise SpecError(f"the file is larger than {limit / 1e6:.0f} MB", location=start)
    return data


def _position(event: yaml.Event) -> tuple[int, int]:
    """Line and column of an event, from 1."""
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def _location_of(text: str, index: int, file_name: str) -> Location:
    """Location of the character at `index`."""
    line_start = text.rfind("\n", 0, index) + 1
    return Location(file=file_name, line=text.count("\n", 0, index) + 1, column=index - line_start + 1)


def _syntax_error(error: yaml.YAMLError, file_name: str) -> SpecError:
    """Turn the parser's own error into a located one."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    location = Location(file=file_name, line=mark.line + 1 if mark else 1, column=mark.column + 1 if mark else 1)
    parts = [getattr(error, "context", None), getattr(error, "problem", None) or getattr(error, "reason", None)]
    problem = " ".join(part for part in parts if part) or str(error)
    return SpecError(f"not valid YAML: {show(problem, 200)[1:-1]}", location=location)
