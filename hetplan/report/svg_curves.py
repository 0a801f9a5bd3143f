"""Curves as SVG: one value of a sweep over its first axis, a line a setting of the others.

The axis runs from zero upwards; across it is logarithmic where the values span a factor of eight. Text in the drawing
is small and short, so that the drawing can shrink to a phone; a point says its exact value when pointed at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10

from hetplan.report.html import Markup, tag

WIDTH, HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 24
NUM_COLOURS = 8
LOG_SPAN = 8.0

CURVE_STYLE = """
.curves{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:22px 28px}
.curves h3{margin:0 0 6px}
.curve svg{overflow:visible}
.curve path,.curve .grid{fill:none}
.curve path{stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.curve circle{fill:var(--c);stroke:var(--bg);stroke-width:1.5}
.curve circle:hover{stroke:var(--fg)}
.curve .grid{stroke:var(--line);stroke-width:1}
.curve .stop{stroke:var(--warn);stroke-width:1.5;stroke-dasharray:4 3;fill:none}
.curve text{fill:var(--soft);font-size:11px}
.curve .stop-word{fill:var(--warn)}
@media (min-width:700px){#points th,#points td:not(:last-child){white-space:nowrap;overflow-wrap:normal}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    name: str
    points: tuple[tuple[float, float], ...]
    """(across, value), across rising."""
    stop: float | None = None
    """Where adding stops paying, across."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a drawing shows and how it says it."""

    title: str
    lines: tuple[Line, ...]
    across: Callable[[float], str]
    words: Callable[[float], str]
    key: str
    """Column of the CSV the values are of."""


def curve_figure(chart: Chart) -> Markup:
    """Return one drawing; nothing where no line has a point."""
    if not any(line.points for line in chart.lines):
        return Markup("")
    xs = sorted({x for line in chart.lines for x, _ in line.points})
    top = _nice(max(value for line in chart.lines for _, value in line.points) or 1.0)
    is_log = xs[0] > 0 and xs[-1] / xs[0] >= LOG_SPAN
    spot = _Spot(xs=tuple(xs), top=top, is_log=is_log)
    drawing = tag(
        "svg",
        *_grid(spot, chart),
        *(part for i, line in enumerate(chart.lines) for part in _line(spot, chart, line, i)),
        *_stops(spot, chart),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=chart.title,
    )
    return tag("figure", tag("h3", chart.title), drawing, class_="curve")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """From values to places in the drawing."""

    xs: tuple[float, ...]
    top: float
    is_log: bool

    def x(self, value: float) -> float:
        first, last = self.xs[0], self.xs[-1]
        if first == last:
            return (_LEFT + WIDTH - _RIGHT) / 2
        share = log2(value / first) / log2(last / first) if self.is_log else (value - first) / (last - first)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - max(0.0, value) / self.top * (HEIGHT - _TOP - _BOTTOM)


def _nice(value: float) -> float:
    """Return the next number that four steps divide into round ones, at or above a value."""
    scale = 10.0 ** floor(log10(value))
    return next(
        scale * step for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if scale * step >= value * (1 - 1e-9)
    )


def _grid(spot: _Spot, chart: Chart) -> list[Markup]:
    parts = []
    for step in range(5):
        value = spot.top * step / 4
        y = f"{spot.y(value):.1f}"
        parts.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", chart.words(value), x=_LEFT - 6, y=f"{spot.y(value) + 4:.1f}", text_anchor="end"))
    return parts + _ticks(spot, chart)


def _ticks(spot: _Spot, chart: Chart) -> list[Markup]:
    every = ceil(len(spot.xs) / 7)
    shown = spot.xs[::-1][::every]
    return [
        tag("text", chart.across(x), x=f"{spot.x(x):.1f}", y=HEIGHT - 6, text_anchor=_anchor(x, spot)) for x in shown
    ]


def _anchor(x: float, spot: _Spot) -> str:
    if len(spot.xs) > 1 and x == spot.xs[-1]:
        return "end"
    return "middle"


def _line(spot: _Spot, chart: Chart, line: Line, index: int) -> list[Markup]:
    colour = f"g{index % NUM_COLOURS}"
    places = [(f"{spot.x(x):.1f}", f"{spot.y(value):.1f}") for x, value in line.points]
    parts = [tag("path", d="M" + " L".join(f"{x} {y}" for x, y in places), class_=colour)] if len(places) > 1 else []
    for (x, y), (across, value) in zip(places, line.points, strict=True):
        name = f"{line.name}, " if line.name else ""
        title = tag("title", f"{name}{chart.across(across)}: {chart.words(value)}")
        parts.append(
            tag("circle", title, cx=x, cy=y, r=4, class_=colour, data_key=chart.key, data_value=repr(float(value)))
        )
    return parts


def _stops(spot: _Spot, chart: Chart) -> list[Markup]:
    """Mark where adding stops paying, where it is the same for all lines."""
    stops = {line.stop for line in chart.lines if line.points}
    if len(stops) != 1 or None in stops:
        return []
    x = spot.x(next(stop for stop in stops if stop is not None))
    near_end = x > WIDTH * 0.7
    word = tag(
        "text",
        "stops paying",
        x=f"{x + (-5 if near_end else 5):.1f}",
        y=_TOP + 8,
        text_anchor="end" if near_end else "start",
        class_="stop-word",
    )
    return [tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=_TOP, y2=HEIGHT - _BOTTOM, class_="stop"), word]


def colour_names(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return (class, name) of each line, for a legend; nothing where there is one line."""
    return [(f"g{i % NUM_COLOURS}", line.name) for i, line in enumerate(lines)] if len(lines) > 1 else []
