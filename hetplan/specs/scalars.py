"""What a plain scalar means: the only place where text of a document becomes a number, a flag or null.

`on`, `no`, `12:30` and `010` never turn into something else on the way, as they do under YAML 1.1.
"""

from __future__ import annotations

import math
import re

from hetplan.specs.nodes import ListNode, MapNode, Node, Scalar
from hetplan.units import show

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
"""A value as JSON knows it."""

MAX_INTEGER = 10**15
_MAX_PLAIN_INTEGER = 10**18
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[+-]?\.?(nan|inf|infinity)", re.IGNORECASE)
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_FLAGS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_MAX_DIGITS = 40


def is_null(node: Node) -> bool:
    """Whether nothing, or `null`, is written."""
    return isinstance(node, Scalar) and node.plain and node.text in _NULLS


def is_integer(scalar: Scalar) -> bool:
    """Whether a whole number is written (quoted digits are a text)."""
    return scalar.plain and _INTEGER.fullmatch(scalar.text) is not None


def is_numeric(scalar: Scalar) -> bool:
    """Whether any number is written."""
    return scalar.plain and _NUMBER.fullmatch(scalar.text) is not None


def flag_of(node: Node) -> bool:
    """Return the truth value written.

    Raises:
        ValueError: there is none.
    """
    if isinstance(node, Scalar) and node.plain and node.text in _FLAGS:
        return _FLAGS[node.text]
    raise ValueError(f"expected true or false, found {describe(node)}")


def integer_of(scalar: Scalar, minimum: int, maximum: int) -> int:
    """Return the whole number written.

    Raises:
        ValueError: there is none, or it is out of bounds.
    """
    if not is_integer(scalar):
        raise ValueError(f"expected a whole number, found {describe(scalar)}")
    if len(scalar.text) > _MAX_DIGITS:
        raise ValueError(f"{show(scalar.text)} is beyond any sensible count")
    value = int(scalar.text)
    if value < minimum:
        raise ValueError(f"must be at least {minimum}, found {show(scalar.text)}")
    if value > maximum:
        raise ValueError(f"must be at most {maximum}, found {show(scalar.text)}")
    return value


def number_of(scalar: Scalar, minimum: float, maximum: float) -> float:
    """Return the finite number written.

    Raises:
        ValueError: there is none, or it is out of bounds.
    """
    shown = show(scalar.text)
    if scalar.plain and _NOT_FINITE.fullmatch(scalar.text):
        raise ValueError(f"expected a number, found {shown}, which is not finite")
    if not scalar.plain or not _NUMBER.fullmatch(scalar.text) or len(scalar.text) > _MAX_DIGITS:
        raise ValueError(f"expected a number, found {describe(scalar)}")
    value = float(scalar.text)
    if not math.isfinite(value):
        raise ValueError(f"{shown} is too large for a number")
    if value < minimum:
        raise ValueError(f"must be at least {minimum:g}, found {shown}")
    if value > maximum:
        raise ValueError(f"must be at most {maximum:g}, found {shown}")
    return value


def plain_of(scalar: Scalar) -> bool | int | float | str | None:
    """Return a scalar as JSON would read it; what is no number, flag or null is text.

    Raises:
        ValueError: it is a number that is not finite, or a senselessly large one.
    """
    if not scalar.plain:
        return scalar.text
    if scalar.text in _NULLS:
        return None
    if scalar.text in _FLAGS:
        return _FLAGS[scalar.text]
    if is_integer(scalar):
        return integer_of(scalar, -_MAX_PLAIN_INTEGER, _MAX_PLAIN_INTEGER)
    if _NOT_FINITE.fullmatch(scalar.text) or _NUMBER.fullmatch(scalar.text):
        return number_of(scalar, -math.inf, math.inf)
    return scalar.text


def is_special(scalar: Scalar) -> bool:
    """Whether a scalar reads as something else than the text it is: a number, a flag, null."""
    if not scalar.plain:
        return False
    text = scalar.text
    return text in _NULLS or text in _FLAGS or bool(_NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text))


def describe(node: Node) -> str:
    """Name what was found, for messages."""
    if isinstance(node, MapNode):
        return "a mapping"
    if isinstance(node, ListNode):
        return "a list"
    if not node.plain:
        return f"the quoted text {show(node.text)}"
    return "nothing" if node.text in _NULLS else show(node.text)
