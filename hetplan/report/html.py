"""HTML as text: elements with everything escaped, and numbers that say which key of the JSON document they are.

A `Markup` is HTML already; any other string is text and is escaped where it enters an element. Attribute names are
Python words: `class_` is `class`, `data_key` is `data-key`. An attribute that is None or False is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from hetplan.units import escape as printable

Attribute = str | int | float | bool | None

_VOID = frozenset({"meta", "link", "br", "hr"})
_URL = re.compile(r"https?://[^\s<>\"']*[^\s<>\"'.,;:)]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(words: str) -> Markup:
    """Return words as HTML, with what a page cannot show escaped."""
    return words if isinstance(words, Markup) else Markup(escape(printable(words), quote=True))


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """Return an element."""
    opening = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    if name in _VOID:
        return Markup(opening)
    return Markup(f"{opening}{joined(children)}</{name}>")


def joined(children: Iterable[str], between: str = "") -> Markup:
    """Return children one after the other."""
    return Markup(text(between).join(text(child) for child in children))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{text(value if isinstance(value, str) else str(value))}"'


def number(key: str, value: float, words: str) -> Markup:
    """Return a number in words that carries its exact value and its key in the JSON document of `estimate`."""
    return tag("span", words, class_="n", data_key=key, data_value=repr(float(value)))


def linked(words: str) -> Markup:
    """Return words with their web addresses as links."""
    parts: list[str] = []
    end = 0
    for match in _URL.finditer(words):
        parts += [words[end : match.start()], tag("a", match[0], href=match[0], rel="noreferrer")]
        end = match.end()
    return joined([*parts, words[end:]])


def table(headers: Iterable[str], rows: Iterable[Iterable[str]], *, class_: str = "") -> Markup:
    """Return a table; on narrow screens its rows become cards, each cell named by its column."""
    names = list(headers)
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names)))
    body = tag("tbody", *(_row(names, list(cells)) for cells in rows))
    return tag("table", head, body, class_=class_ or None)


def _row(names: list[str], cells: list[str]) -> Markup:
    shown = zip(names, cells, strict=True)
    return tag(
        "tr", *(tag("td", cell, data_name=name or None, class_=None if cell else "none") for name, cell in shown)
    )


def bullets(sentences: Iterable[str]) -> Markup:
    """Return sentences as a list."""
    return tag("ul", *(tag("li", sentence) for sentence in sentences))


def section(title: str, *body: str, note: str = "", name: str) -> Markup:
    """Return a section with its title; nothing where the body is empty."""
    if not any(body):
        return Markup("")
    remark = tag("p", note, class_="note") if note else Markup("")
    return tag("section", tag("h2", title), remark, *body, id=name)
