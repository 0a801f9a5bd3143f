"""`Fields`: one mapping of a document, read key by key with typed methods and located errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal, TypeVar, overload

from hetplan.errors import HetplanError, Location, SpecError
from hetplan.specs.nodes import ListNode, MapNode, Node, Scalar
from hetplan.specs.scalars import (
    MAX_INTEGER,
    Plain,
    describe,
    flag_of,
    integer_of,
    is_null,
    is_numeric,
    number_of,
    plain_of,
)
from hetplan.units import UnitKind, escape, hint, parse_quantity, show


class _Absent(Enum):
    """The default of a key that must be there."""

    REQUIRED = "required"


_REQUIRED: Literal[_Absent.REQUIRED] = _Absent.REQUIRED
_Required = Literal[_Absent.REQUIRED]
D = TypeVar("D")
W = TypeVar("W", bound=str)


class Fields:
    """One mapping of a document; each method takes one key, checks it and returns it typed."""

    __slots__ = ("_file", "_node", "_taken", "path")

    def __init__(self, node: MapNode, file_name: str, path: str) -> None:
        self._node = node
        self._file = file_name
        self._taken: set[str] = set()
        self.path = path
        """Where this mapping stands in the document (`groups.a100`)."""

    def has(self, key: str) -> bool:
        """Whether the key is written."""
        return key in self._node.entries

    def names(self) -> tuple[str, ...]:
        """The keys in the order they are written."""
        return tuple(self._node.entries)

    def location(self, key: str | None = None, index: int | None = None) -> Location:
        """Where the value of `key` (or one item of its list), or this mapping, stands."""
        entry = self._node.entries.get(key) if key is not None else None
        node = entry[1] if entry else self._node
        if index is not None and isinstance(node, ListNode):
            node = node.items[index]
        return Location(file=self._file, line=node.line, column=node.column)

    def error(self, message: str, key: str | None = None, *, index: int | None = None) -> SpecError:
        """Return a located error about `key` (or one item of its list), or about this mapping."""
        item = "" if index is None else f"[{index}]"
        path = self.path if key is None else _join(self.path, key) + item
        return SpecError(escape(message), location=self.location(key, index), path=path)

    def finish(self, known: Iterable[str] = ()) -> None:
        """Refuse keys that are neither `known` nor asked for by a method.

        Raises:
            SpecError: there is one.
        """
        taken = self._taken.union(known)
        for key, (where, _) in self._node.entries.items():
            if key not in taken:
                unused = sorted(name for name in taken if not self.has(name))
                near = hint(key, unused) or hint(key, sorted(taken))
                location = Location(file=self._file, line=where.line, column=where.column)
                raise SpecError(f"unknown key {show(key)}{near}", location=location, path=self.path)

    @overload
    def text(self, key: str, *, choices: Iterable[str] | None = None) -> str: ...

    @overload
    def text(self, key: str, *, default: D, choices: Iterable[str] | None = None) -> str | D: ...

    def text(self, key: str, *, default: D | _Required = _REQUIRED, choices: Iterable[str] | None = None) -> str | D:
        """Return a non-empty text, one of `choices` if given."""
        node = self._take(key, required=default is _REQUIRED)
        if node is None:
            return _given(default)
        text = self._scalar(node, key, "a text").text
        if not text:
            raise self.error("expected a text, found an empty one", key)
        if choices is not None and text not in (known := tuple(choices)):
            raise self.error(f"{show(text)} is not one of {', '.join(known)}{hint(text, known)}", key)
        return text

    @overload
    def choice(self, key: str, choices: Sequence[W]) -> W: ...

    @overload
    def choice(self, key: str, choices: Sequence[W], *, default: D) -> W | D: ...

    def choice(self, key: str, choices: Sequence[W], *, default: D | _Required = _REQUIRED) -> W | D:
        """Return the one of `choices` that is written, typed as they are."""
        if not self.has(key) and default is not _REQUIRED:
            self._taken.add(key)
            return _given(default)
        text = self.text(key, choices=choices)
        return next(choice for choice in choices if choice == text)

    @overload
    def integer(self, key: str, *, minimum: int = ..., maximum: int = ...) -> int: ...

    @overload
    def integer(self, key: str, *, default: D, minimum: int = ..., maximum: int = ...) -> int | D: ...

    def integer(
        self,
        key: str,
        *,
        default: D | _Required = _REQUIRED,
        minimum: int = -MAX_INTEGER,
        maximum: int = MAX_INTEGER,
    ) -> int | D:
        """Return a whole number within bounds."""
        node = self._take(key, required=default is _REQUIRED)
        if node is None:
            return _given(default)
        return self._integer(node, key, (minimum, maximum))

    @overload
    def number(self, key: str, *, minimum: float = ..., maximum: float = ...) -> float: ...

    @overload
    def number(self, key: str, *, default: D, minimum: float = ..., maximum: float = ...) -> float | D: ...

    def number(
        self,
        key: str,
        *,
        default: D | _Required = _REQUIRED,
        minimum: float = -math.inf,
        maximum: float = math.inf,
    ) -> float | D:
        """Return a finite number within bounds."""
        node = self._take(key, required=default is _REQUIRED)
        if node is None:
            return _given(default)
        scalar = self._scalar(node, key, "a number")
        try:
            return number_of(scalar, minimum, maximum)
        except ValueError as error:
            raise self.error(str(error), key) from None

    @overload
    def flag(self, key: str) -> bool: ...

    @overload
    def flag(self, key: str, *, default: D) -> bool | D: ...

    def flag(self, key: str, *, default: D | _Required = _REQUIRED) -> bool | D:
        """Return true or false; no other spelling is one."""
        node = self._take(key, required=default is _REQUIRED)
        if node is None:
            return _given(default)
        try:
            return flag_of(node)
        except ValueError as error:
            raise self.error(str(error), key) from None

    @overload
    def quantity(self, key: str, kind: UnitKind, *, positive: bool = ...) -> float: ...

    @overload
    def quantity(self, key: str, kind: UnitKind, *, default: D, positive: bool = ...) -> float | D: ...

    def quantity(
        self, key: str, kind: UnitKind, *, default: D | _Required = _REQUIRED, positive: bool = False
    ) -> float | D:
        """Return a quantity with a unit, in the base unit of `kind`; `positive` refuses 0."""
        node = self._take(key, required=default is _REQUIRED)
        if node is None:
            return _given(default)
        text = self._scalar(node, key, "a quantity with a unit").text
        try:
            value = parse_quantity(text, kind)
        except HetplanError as error:
            raise self.error(str(error), key) from None
        if positive and value == 0:
            raise self.error(f"must be above zero, found {show(text)}", key)
        return value

    @overload
    def texts(self, key: str) -> tuple[str, ...]: ...

    @overload
    def texts(self, key: str, *, default: D) -> tuple[str, ...] | D: ...

    def texts(self, key: str, *, default: D | _Required = _REQUIRED) -> tuple[str, ...] | D:
        """Return a list of non-empty texts."""
        node = self._take(key, required=default is _REQUIRED)
        if node is None:
            return _given(default)
        texts = []
        for index, item in enumerate(self._list(node, key).items):
            name = f"{key}[{index}]"
            scalar = self._scalar(item, name, "a text")
            if not scalar.text:
                raise self._error_at(item, "expected a text, found an empty one", name)
            texts.append(scalar.text)
        return tuple(texts)

    @overload
    def integers(self, key: str, *, minimum: int = ..., maximum: int = ...) -> tuple[int, ...]: ...

    @overload
    def integers(self, key: str, *, default: D, minimum: int = ..., maximum: int = ...) -> tuple[int, ...] | D: ...

    def integers(
        self,
        key: str,
        *,
        default: D | _Required = _REQUIRED,
        minimum: int = -MAX_INTEGER,
        maximum: int = MAX_INTEGER,
    ) -> tuple[int, ...] | D:
        """Return a list of whole numbers within bounds."""
        node = self._take(key, required=default is _REQUIRED)
        if node is None:
            return _given(default)
        items = self._list(node, key).items
        return tuple(self._integer(item, f"{key}[{i}]", (minimum, maximum)) for i, item in enumerate(items))

    def fields(self, key: str, *, required: bool = True) -> Fields:
        """Return a mapping; an empty one if the key is absent and not required."""
        node = self._take(key, required=required)
        if node is None:
            empty = MapNode(self._node.line, self._node.column, {})
            return Fields(empty, self._file, _join(self.path, key))
        return self._sub_fields(node, key)

    def table(self, key: str, *, required: bool = True) -> dict[str, Fields]:
        """Return a mapping of names to mappings, in the order written."""
        outer = self.fields(key, required=required)
        return {name: outer.fields(name) for name in outer.names()}

    def rows(self, key: str, *, required: bool = True) -> tuple[Fields, ...]:
        """Return a list of mappings."""
        node = self._take(key, required=required)
        if node is None:
            return ()
        items = self._list(node, key).items
        return tuple(self._sub_fields(item, f"{key}[{index}]") for index, item in enumerate(items))

    def is_text(self, key: str) -> bool:
        """Whether the value is a single scalar that is no number (quoted digits are a text)."""
        entry = self._node.entries.get(key)
        return entry is not None and isinstance(entry[1], Scalar) and not is_numeric(entry[1])

    def is_mapping(self, key: str) -> bool:
        """Whether the value is a mapping."""
        entry = self._node.entries.get(key)
        return entry is not None and isinstance(entry[1], MapNode)

    def raw(self, key: str) -> Plain:
        """Return the value with plain scalars read as JSON does (`null`, `true`, numbers), everything else as text.

        Raises:
            SpecError: the key is absent or a number in it is not finite or senseless.
        """
        node = self._take(key, required=True)
        return None if node is None else self._plain(node, key)

    def raw_mapping(self) -> dict[str, Plain]:
        """Return this whole mapping as `raw` does."""
        return {key: self.raw(key) for key in self.names()}

    def _take(self, key: str, *, required: bool) -> Node | None:
        """Mark the key as known and return its node, None if it is absent."""
        self._taken.add(key)
        entry = self._node.entries.get(key)
        if entry is not None:
            return entry[1]
        if required:
            near = hint(key, [name for name in self._node.entries if name not in self._taken], nearness=0.78)
            raise self.error(f"key {show(key)} is missing{near.replace('did you mean', 'is it')}")
        return None

    def _error_at(self, node: Node, message: str, name: str) -> SpecError:
        """A located error about a node inside the value of a key."""
        location = Location(file=self._file, line=node.line, column=node.column)
        return SpecError(message, location=location, path=_join(self.path, name))

    def _scalar(self, node: Node, name: str, wanted: str) -> Scalar:
        """Return `node` if it is a scalar with a value."""
        if isinstance(node, Scalar) and not is_null(node):
            return node
        raise self._error_at(node, f"expected {wanted}, found {describe(node)}", name)

    def _list(self, node: Node, name: str) -> ListNode:
        """Return `node` if it is a list."""
        if isinstance(node, ListNode):
            return node
        raise self._error_at(node, f"expected a list, found {describe(node)}", name)

    def _sub_fields(self, node: Node, name: str) -> Fields:
        """Return the `Fields` of `node` if it is a mapping."""
        if isinstance(node, MapNode):
            return Fields(node, self._file, _join(self.path, name))
        raise self._error_at(node, f"expected a mapping, found {describe(node)}", name)

    def _integer(self, node: Node, name: str, bounds: tuple[int, int]) -> int:
        """Return the whole number `node` holds."""
        scalar = self._scalar(node, name, "a whole number")
        try:
            return integer_of(scalar, *bounds)
        except ValueError as error:
            raise self._error_at(node, str(error), name) from None

    def _plain(self, node: Node, name: str) -> Plain:
        """Return a node as plain Python values; nesting is bounded by the reader."""
        if isinstance(node, ListNode):
            return [self._plain(item, f"{name}[{index}]") for index, item in enumerate(node.items)]
        if isinstance(node, MapNode):
            return {key: self._plain(value, f"{name}.{key}") for key, (_, value) in node.entries.items()}
        try:
            return plain_of(node)
        except ValueError as error:
            raise self._error_at(node, str(error), name) from None


def _given(default: D | _Required) -> D:
    """Return a default that is known to be there."""
    if isinstance(default, _Absent):
        raise TypeError("a required key has no default")
    return default


def _join(path: str, name: str) -> str:
    """Extend a path by a key, which may hold anything."""
    safe = show(name)[1:-1]
    return f"{path}.{safe}" if path else safe
