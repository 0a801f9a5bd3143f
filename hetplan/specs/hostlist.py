"""Slurm hostlists: `a100-[01-04,07],b-[1-2]` <-> the names they stand for, in order.

Counting comes before building, so that a list that stands for too many names is refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from hetplan.errors import UsageError
from hetplan.units import show

MAX_NAMES = 1_000_000
_ABSURD = 10**15
"""Counts are not told apart beyond this."""

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_ITEM = re.compile(r"(?:\[[^\[\]]*\]|[^\[\],])+")
_RANGE = re.compile(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})\s*)?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,12})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """Whole numbers, written with at least `width` digits."""

    first: int
    last: int
    width: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[str]:
        return (str(number).zfill(self.width) for number in range(self.first, self.last + 1))


def is_node_name(text: str) -> bool:
    """Whether `text` can name a node or a group."""
    return _NAME.fullmatch(text) is not None


def expand_hostlist(text: str, maximum: int = MAX_NAMES) -> tuple[str, ...]:
    """Return the names a hostlist stands for, in the order written.

    Raises:
        UsageError: it is malformed, names a node twice, or stands for more than `maximum` names.
    """
    items = [_parts(item) for item in _items(text)]
    count = sum(_count(parts) for parts in items)
    if count > maximum:
        raise UsageError(f"hostlist {show(text)} stands for {_large(count)} names; at most {maximum:,}")
    names = tuple("".join(pieces) for parts in items for pieces in product(*map(_alternatives, parts)))
    if len(set(names)) != len(names):
        raise UsageError(f"hostlist {show(text)} names {show(_first_repeated(names))} twice")
    for name in names:
        if not is_node_name(name):
            raise UsageError(f"{show(name)} is not a node name; letters, digits, '.', '_' and '-' make one")
    return names


def hostlist_text(names: Iterable[str]) -> str:
    """Return a compact hostlist that `expand_hostlist` turns back into `names`, in order."""
    texts: list[str] = []
    stem, ranges = "", list[list[str]]()
    for name in names:
        match = _NUMBERED.fullmatch(name)
        new_stem, digits = (match[1], match[2]) if match else (name, "")
        if ranges and digits and new_stem == stem:
            if _follows(ranges[-1], digits):
                ranges[-1][1:] = [digits]
            else:
                ranges.append([digits])
            continue
        texts.extend(_stem_text(stem, ranges))
        stem, ranges = new_stem, [[digits]] if digits else []
        if not digits:
            texts.append(name)
    texts.extend(_stem_text(stem, ranges))
    return ",".join(texts)


def _stem_text(stem: str, ranges: list[list[str]]) -> list[str]:
    """The text of consecutive names with one stem, none if there are none."""
    if not ranges:
        return []
    if len(ranges) == 1 and len(ranges[0]) == 1:
        return [stem + ranges[0][0]]
    return [f"{stem}[{','.join('-'.join(bounds) for bounds in ranges)}]"]


def _follows(bounds: list[str], digits: str) -> bool:
    """Whether `digits` is the next name of a range that starts with `bounds[0]`, padding included."""
    return digits == str(int(bounds[-1]) + 1).zfill(len(bounds[0]))


def _items(text: str) -> list[str]:
    """Split at commas outside brackets."""
    items: list[str] = []
    position = 0
    text = text.strip()
    while True:
        match = _ITEM.match(text, position)
        if match is None:
            raise UsageError(f"hostlist {show(text)} is malformed at character {position + 1}")
        items.append(match.group().strip())
        position = match.end()
        if position == len(text):
            return items
        if text[position] != ",":
            raise UsageError(f"hostlist {show(text)} is malformed at character {position + 1}")
        position += 1


def _parts(item: str) -> list[str | list[_Range]]:
    """Split an item into fixed text and bracketed ranges."""
    return [match[2] if match[2] is not None else _ranges(match[1], item) for match in _PART.finditer(item)]


def _ranges(inside: str, item: str) -> list[_Range]:
    """The ranges of one pair of brackets."""
    ranges = []
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise UsageError(f"{show(piece)} in hostlist {show(item)} is not a range such as '01-04'")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise UsageError(f"range {show(piece)} in hostlist {show(item)} runs backwards")
        ranges.append(_Range(first=int(first), last=int(last), width=len(first)))
    return ranges


def _count(parts: list[str | list[_Range]]) -> int:
    """Names an item stands for."""
    count = 1
    for part in parts:
        if not isinstance(part, str):
            count = min(count * sum(len(numbers) for numbers in part), _ABSURD)
    return count


def _alternatives(part: str | list[_Range]) -> tuple[str, ...]:
    """All texts one part stands for."""
    return (part,) if isinstance(part, str) else tuple(text for numbers in part for text in numbers)


def _first_repeated(names: tuple[str, ...]) -> str:
    """The first name that occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


def _large(count: int) -> str:
    """A count, in words once it is absurd."""
    return f"{count:,}" if count < _ABSURD else "10^15 or more"
