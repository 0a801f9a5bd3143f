"""A timeline as text: one row a rank or stage, one character a slice of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetplan.report.tables import WIDTH

IDLE = "."


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One piece of work, drawn with the character `mark`."""

    start_s: float
    end_s: float
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one rank or stage does, under the name it is shown with."""

    name: str
    bars: tuple[Bar, ...]


def gantt(rows: Sequence[Row], end_s: float, *, width: int = WIDTH) -> str:
    """Return the rows drawn over [0, `end_s`]; each column shows what fills most of it, `.` where that is idleness."""
    name_width = max((len(row.name) for row in rows), default=0)
    columns = max(1, width - name_width - 3)
    return "\n".join(f"{row.name.ljust(name_width)} |{_drawn(row, end_s, columns)}|" for row in rows)


def _drawn(row: Row, end_s: float, columns: int) -> str:
    column_s = end_s / columns
    if column_s <= 0:
        return IDLE * columns
    spent: list[dict[str, float]] = [{} for _ in range(columns)]
    for bar in row.bars:
        first = max(0, min(columns - 1, int(bar.start_s / column_s)))
        last = max(0, min(columns - 1, int(bar.end_s / column_s)))
        for column in range(first, last + 1):
            overlap_s = min(bar.end_s, (column + 1) * column_s) - max(bar.start_s, column * column_s)
            if overlap_s > 0:
                spent[column][bar.mark] = spent[column].get(bar.mark, 0.0) + overlap_s
    return "".join(_most(marks, column_s) for marks in spent)


def _most(marks: dict[str, float], column_s: float) -> str:
    idle_s = column_s - sum(marks.values())
    mark, mark_s = max(marks.items(), key=lambda item: item[1], default=(IDLE, 0.0))
    return mark if mark_s >= idle_s else IDLE
