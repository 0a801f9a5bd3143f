"""Plain-text tables and bars that read well at 80 columns without colour: text in, text out, ASCII only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap

WIDTH = 80
"""Columns every report is made to fit."""

_NUMBER = re.compile(r"<?[-+$]?[\d,]*\.?\d+(e[-+]?\d+)?( ?[%A-Za-z/]+)?")
_GAP = "  "


def table(headers: Sequence[str], rows: Sequence[Sequence[str] | str], *, shrink: str = "", indent: int = 0) -> str:
    """Return an aligned table; columns that hold only numbers stand right, a row that is one string spans all columns.

    Columns with nothing in them are left out. Where the table is wider than a report, the cells of the column whose
    header is `shrink` are cut (never below 8 characters).
    """
    cells = [tuple(row) for row in rows if not isinstance(row, str)]
    kept = [i for i in range(len(headers)) if any(row[i] for row in cells)]
    widths = {i: max(len(headers[i]), *(len(row[i]) for row in cells)) for i in kept}
    right = {i for i in kept if all(_is_number(row[i]) for row in cells)}
    too_wide = indent + sum(widths.values()) + len(_GAP) * (len(kept) - 1) - WIDTH
    if too_wide > 0 and shrink in headers and (i := headers.index(shrink)) in kept:
        widths[i] = max(widths[i] - too_wide, len(shrink), min(widths[i], 8))

    def line(row: Sequence[str]) -> str:
        texts = {i: cut(row[i], widths[i]) for i in kept}
        shown = (texts[i].rjust(widths[i]) if i in right else texts[i].ljust(widths[i]) for i in kept)
        return (" " * indent + _GAP.join(shown)).rstrip()

    lines = [line(headers)] if kept else []
    lines += [" " * indent + row if isinstance(row, str) else line(row) for row in rows]
    return "\n".join(lines)


def cut(text: str, width: int) -> str:
    """Return `text` in at most `width` characters, the end replaced by `..` where it does not fit."""
    return text if len(text) <= width else text[: max(width - 2, 0)] + ".."


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or _NUMBER.fullmatch(cell) is not None


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Return `name  value` lines with the values aligned and wrapped to the report's width."""
    width = max((len(name) for name, _ in rows), default=0)
    room = WIDTH - width - len(_GAP)
    lines: list[str] = []
    for name, value in rows:
        first, *more = wrap(value, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"{name.ljust(width)}{_GAP}{first}".rstrip())
        lines += [" " * (width + len(_GAP)) + text for text in more]
    return "\n".join(lines)


def bar(fraction: float, width: int = 10) -> str:
    """Return `fraction` of `width` columns as `#`, the rest as `.`; a fraction above 1 ends in `!`."""
    filled = round(min(max(fraction, 0.0), 1.0) * width)
    if fraction > 1.0:
        return "#" * (width - 1) + "!"
    return "#" * filled + "." * (width - filled)


def percent(fraction: float) -> str:
    """Return a fraction as a percentage, with a decimal below 10 %."""
    value = 100.0 * fraction
    if 0 < abs(value) < 0.05:
        return "<0.1 %"
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def section(title: str, body: str) -> str:
    """Return `body` under its title; an empty body gives nothing at all."""
    return f"{title}\n{body}" if body else ""


def join_sections(sections: Sequence[str]) -> str:
    """Return the sections that are not empty, one blank line apart."""
    return "\n\n".join(text for text in sections if text)


def bullets(notes: Sequence[str]) -> str:
    """Return one `- note` a line, wrapped to the report's width."""
    lines: list[str] = []
    for note in notes:
        lines += wrap(note, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines)
