"""The pipeline timeline: one lane a stage, drawn as SVG that the page's script zooms by its viewBox.

A lane is `SPAN` units wide for the whole step, whatever the screen's width; it holds no text, so that stretching does
no harm. Where a step has few actions each is a rectangle with its own words; where it has many, neighbours of one
kind closer than a sliver are drawn as one, the sliver doubled until at most `MOST_BARS` are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetplan.report.html import Markup, joined, tag
from hetplan.report.html_rows import StageRow, group_class, legend, swatch
from hetplan.simulate.records import Lane, Timeline
from hetplan.specs.cluster import Cluster
from hetplan.units import format_seconds

SPAN = 100_000
"""Units of a step."""
MOST_NAMED = 1_500
"""Up to this many actions, each has its words."""
MOST_BARS = 20_000
MOST_LANES = 48
NUM_TICKS = 4

_CLASSES = {"F": "fw", "B": "bw", "I": "ig", "W": "wg"}
_WORDS = {
    "fw": "forward",
    "bw": "backward",
    "ig": "input gradient",
    "wg": "weight gradient",
    "pp": "sending to the next stage",
    "dp": "gradients and weights between replicas",
    "op": "optimizer",
}
_TALL = (0, 10)
_LOW = (10.6, 1.8)
"""(top, height) of a lane's work and of what it sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    start_s: float
    end_s: float
    class_: str
    words: str


def timeline_figure(timeline: Timeline, rows: Sequence[StageRow], cluster: Cluster) -> Markup:
    """Return the lanes of one copy of each replica shape, with an axis and a legend."""
    shown = rows if len(rows) <= MOST_LANES else _spread(rows)
    bars = [list(_bars(timeline, row)) for row in shown]
    drawn = _merged(bars, timeline.step_s)
    scale = SPAN / timeline.step_s
    named = sum(map(len, drawn)) <= MOST_NAMED
    lanes = [
        _lane(row, group_class(cluster, row.use.group), _shapes(lane, scale, named=named))
        for row, lane in zip(shown, drawn, strict=True)
    ]
    kinds = {bar.class_ for lane in drawn for bar in lane}
    return tag(
        "figure",
        _tools(),
        tag("div", tag("div", class_="lane-name"), tag("div", *_ticks(timeline.step_s), class_="axis"), class_="lane"),
        *lanes,
        legend((class_, words) for class_, words in _WORDS.items() if class_ in kinds),
        class_="timeline",
        data_seconds=repr(float(timeline.step_s)),
        data_span=SPAN,
        tabindex=0,
    )


def left_out_note(rows: Sequence[StageRow], num_stages: int) -> str:
    """Return what the figure leaves out, in words; empty: nothing."""
    shown = min(len(rows), MOST_LANES)
    return f"{shown} of {num_stages} stages are drawn." if shown < num_stages else ""


def _spread(rows: Sequence[StageRow]) -> list[StageRow]:
    return [rows[round(i * (len(rows) - 1) / (MOST_LANES - 1))] for i in range(MOST_LANES)]


def _bars(timeline: Timeline, row: StageRow) -> Iterator[_Bar]:
    """Yield what the row's stage does in the first copy that was simulated, what it sends, and what ends the step."""
    replica, stage = row.use.replica, row.use.stage
    copy = min(lane.copy for lane in timeline.lanes if lane.row == replica)
    for lane in timeline.lanes:
        if (lane.row, lane.copy, lane.rank) == (replica, copy, stage):
            yield from _lane_bars(lane)
    for event in timeline.events:
        if (replica, stage) in event.meshes and event.end_s > event.start_s:
            class_ = "op" if event.name.startswith("optimizer") else "dp"
            yield _Bar(start_s=event.start_s, end_s=event.end_s, class_=class_, words=event.name)


def _lane_bars(lane: Lane) -> Iterator[_Bar]:
    for part in lane.intervals:
        if part.end_s <= part.start_s:
            continue
        class_ = _CLASSES[part.kind] if lane.receiver is None else "pp"
        words = f"{_WORDS[_CLASSES[part.kind]]} of microbatch {part.microbatch}"
        if lane.receiver is not None:
            words = f"{words}, sent to stage {lane.receiver}"
        yield _Bar(start_s=part.start_s, end_s=part.end_s, class_=class_, words=words)


def _merged(lanes: list[list[_Bar]], step_s: float) -> list[list[_Bar]]:
    """Return the lanes with neighbours of one kind drawn as one, until few enough bars are left."""
    sliver_s = step_s / 50_000
    while sum(map(len, lanes)) > MOST_BARS:
        lanes = [list(_joined(lane, sliver_s)) for lane in lanes]
        sliver_s *= 2
    return lanes


def _joined(lane: Iterable[_Bar], sliver_s: float) -> Iterator[_Bar]:
    by_kind: dict[str, list[_Bar]] = {}
    for bar in lane:
        by_kind.setdefault(bar.class_, []).append(bar)
    for class_, bars in by_kind.items():
        start_s, end_s = bars[0].start_s, bars[0].end_s
        for bar in sorted(bars, key=lambda bar: bar.start_s):
            if bar.start_s - end_s > sliver_s:
                yield _Bar(start_s=start_s, end_s=end_s, class_=class_, words="")
                start_s = bar.start_s
            end_s = max(end_s, bar.end_s)
        yield _Bar(start_s=start_s, end_s=end_s, class_=class_, words="")


def _shapes(bars: Sequence[_Bar], scale: float, *, named: bool) -> Iterator[Markup]:
    by_kind: dict[str, list[_Bar]] = {}
    for bar in bars:
        by_kind.setdefault(bar.class_, []).append(bar)
    for class_, alike in by_kind.items():
        if named:
            yield tag("g", *(_rectangle(bar, scale) for bar in alike), class_=class_)
        else:
            yield tag("path", class_=class_, d="".join(_outline(bar, scale) for bar in alike))


def _rectangle(bar: _Bar, scale: float) -> Markup:
    top, height = _LOW if bar.class_ == "pp" else _TALL
    words = f"{bar.words}: {format_seconds(bar.end_s - bar.start_s)} from {format_seconds(bar.start_s)}"
    x, width = round(bar.start_s * scale), max(1, round((bar.end_s - bar.start_s) * scale))
    return tag("rect", tag("title", words), x=x, y=top, width=width, height=height)


def _outline(bar: _Bar, scale: float) -> str:
    top, height = _LOW if bar.class_ == "pp" else _TALL
    x, width = round(bar.start_s * scale), max(1, round((bar.end_s - bar.start_s) * scale))
    return f"M{x} {top}h{width}v{height}h-{width}z"


def _lane(row: StageRow, class_: str, shapes: Iterator[Markup]) -> Markup:
    drawing = tag(
        "svg",
        joined(shapes),
        viewBox=f"0 0 {SPAN} 12.4",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"stage {row.name} over the step",
    )
    name = tag("div", swatch(class_), row.name, class_="lane-name", title=f"group {row.use.group}")
    return tag("div", name, drawing, class_="lane")


def _tools() -> Markup:
    words = (("out", "-", "zoom out"), ("in", "+", "zoom in"), ("all", "whole step", "show the whole step"))
    buttons = (tag("button", sign, type="button", data_do=do, aria_label=label) for do, sign, label in words)
    ends = (tag("button", word, type="button", data_do=do) for do, word in (("start", "start"), ("end", "end")))
    return tag("div", *buttons, *ends, tag("span", "drag to move, Ctrl + wheel to zoom"), class_="tools")


def _ticks(step_s: float) -> Iterator[Markup]:
    for i in range(NUM_TICKS + 1):
        at = "left:0" if i == 0 else f"left:{100 * i / NUM_TICKS:g}%"
        yield tag("span", format_seconds(step_s * i / NUM_TICKS), style=at)
