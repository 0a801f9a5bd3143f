"""A simulated step as text: a Gantt chart of one copy of each replica shape, and what waited for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetplan.plan.records import Layout
from hetplan.report.gantt import IDLE, Bar, Row, gantt
from hetplan.report.layouts import Setting, headline, shape_name
from hetplan.report.tables import bullets, join_sections, pairs, percent, section, table
from hetplan.simulate.records import Timeline
from hetplan.units import format_seconds

MOST_ROWS = 24
MARKS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "S": "synchronisation",
    "O": "optimizer",
    IDLE: "idle",
}
LEAST_SHOWN = 1e-6
"""Waits below this share of the step are rounding."""


def timeline_text(timeline: Timeline, layout: Layout, setting: Setting) -> str:
    """Return everything a simulation says."""
    slower = timeline.step_s / timeline.estimated_s - 1.0
    facts = pairs(
        [
            ("step time", f"{format_seconds(timeline.step_s)} as simulated"),
            ("estimate", f"{format_seconds(timeline.estimated_s)} without contention or jitter"),
            ("difference", percent(slower) if slower > 0 else "none"),
        ]
    )
    waits = sorted(timeline.waited_s.items(), key=lambda item: (-item[1], item[0]))
    rows = [(name, format_seconds(seconds)) for name, seconds in waits[:8] if seconds > LEAST_SHOWN * timeline.step_s]
    return join_sections(
        [
            headline(layout, setting),
            facts,
            timeline_gantt(timeline),
            section("Transfers waited for", table(("shared", "all together"), rows)) if rows else "",
            section("Notes", bullets(timeline.notes)),
        ]
    )


def timeline_gantt(timeline: Timeline) -> str:
    """Return the ranks of the first copy of each replica shape over the step, at most `MOST_ROWS` of them."""
    rows = list(_rows(timeline))
    shown = rows if len(rows) <= MOST_ROWS else _spread(rows)
    left_out = f" ({len(rows)} stages, {len(shown)} of them shown)" if len(shown) < len(rows) else ""
    chart = gantt(shown, timeline.step_s)
    legend = "  ".join(f"{mark} {word}" for mark, word in MARKS.items() if mark in chart)
    return f"One copy of each replica shape, 0 to {format_seconds(timeline.step_s)}{left_out}\n{chart}\n{legend}"


def _spread(rows: Sequence[Row]) -> list[Row]:
    """Return `MOST_ROWS` rows from first to last, evenly spread."""
    return [rows[round(i * (len(rows) - 1) / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]


def _rows(timeline: Timeline) -> Iterator[Row]:
    first_copy: dict[int, int] = {}
    for lane in timeline.lanes:
        if lane.receiver is not None or lane.copy != first_copy.setdefault(lane.row, lane.copy):
            continue
        work = [Bar(start_s=part.start_s, end_s=part.end_s, mark=part.kind) for part in lane.intervals]
        ending = [
            Bar(start_s=event.start_s, end_s=event.end_s, mark="O" if event.name.startswith("optimizer") else "S")
            for event in timeline.events
            if (lane.row, lane.rank) in event.meshes
        ]
        yield Row(name=f"{shape_name(lane.row)}{lane.rank}", bars=(*work, *ending))
