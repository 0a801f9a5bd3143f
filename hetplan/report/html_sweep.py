"""A sweep as one page of HTML that needs no network: curves, and the table they are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hetplan
from hetplan.report.html import Markup, bullets, section, table, tag
from hetplan.report.html_page import POLICY
from hetplan.report.html_rows import legend
from hetplan.report.html_style import STYLE
from hetplan.report.layouts import Setting
from hetplan.report.svg_curves import CURVE_STYLE, Chart, Line, colour_names, curve_figure
from hetplan.report.sweeps import axis_value, axis_words, notes, plan_words
from hetplan.search.sweep import Point, Sweep, last_paying
from hetplan.units import format_count, format_seconds, format_usd

MOST_LINES = 8
_CURVES: tuple[tuple[str, str, Callable[[Point], float | None], Callable[[float], str]], ...] = (
    ("throughput, tokens/s", "tokens_per_s", lambda point: point.tokens_per_s, format_count),
    ("money, $ a million tokens", "usd_per_million_tokens", lambda point: point.usd_per_million_tokens, format_usd),
    ("energy, J a token", "joules_per_token", lambda point: point.joules_per_token, lambda value: f"{value:.3g}"),
    (
        "gain of each added device, tokens/s",
        "marginal_tokens_per_s_per_device",
        lambda point: point.marginal_tokens_per_s,
        format_count,
    ),
)
"""Title, column of the CSV, value of a point, its words."""


def sweep_html(found: Sweep, setting: Setting) -> str:
    """Return the page."""
    title = f"{setting.model.name} on {setting.cluster.name}: {' x '.join(axis_words(axis) for axis in found.axes)}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(STYLE + CURVE_STYLE)),
    )
    workload = setting.workload
    asked = f"{workload.precision}, {workload.global_batch:,} samples of {workload.seq_len:,} tokens a step"
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", setting.model.name, tag("small", f" on {setting.cluster.name}")),
            tag("p", f"{asked} where nothing else is said; {axis_words(found.axes[0])} across", class_="note"),
        ),
        tag("main", *_sections(found)),
        tag("footer", f"hetplan {hetplan.__version__}; values are those of `hetplan sweep --json`"),
    )
    return f'<!doctype html>\n<html lang="en">{head}\n{body}</html>\n'


def across(found: Sweep) -> int:
    """Return the axis that runs across: that of nodes, else the first."""
    return found.along or 0


def _sections(found: Sweep) -> Iterator[Markup]:
    index = across(found)
    runs = list(found.series(index))
    lines = runs[:MOST_LINES]
    names = colour_names([Line(name=_name(found, index, rest), points=()) for rest, _ in lines])
    left = f"The first {MOST_LINES} of {len(runs)} settings are drawn." if len(runs) > MOST_LINES else ""
    figures = [curve_figure(_chart(found, index, curve)) for curve in _CURVES]
    yield section(
        "Curves",
        tag("div", *figures, class_="curves"),
        legend(names) if names else "",
        name="curves",
        note=f"Each point is a plan of its own. {left}".strip(),
    )
    yield section("Where it stops paying", bullets(notes(found)), name="stops")
    yield section("Points", _table(found), name="points")


def _name(found: Sweep, index: int, rest: tuple[float, ...]) -> str:
    others = (*found.axes[:index], *found.axes[index + 1 :])
    return ", ".join(f"{axis_words(a)} {axis_value(a, v)}" for a, v in zip(others, rest, strict=True))


def _chart(
    found: Sweep,
    index: int,
    curve: tuple[str, str, Callable[[Point], float | None], Callable[[float], str]],
) -> Chart:
    title, key, value, words = curve
    lines = []
    for rest, points in list(found.series(index))[:MOST_LINES]:
        known = tuple((p.values[index], y) for p in points if (y := value(p)) is not None)
        last = last_paying(points) if found.along is not None else None
        stop = last.values[index] if last is not None else None
        lines.append(Line(name=_name(found, index, rest), points=known, stop=stop))
    axis = found.axes[index]
    return Chart(title=title, lines=tuple(lines), across=lambda x: axis_value(axis, x), words=words, key=key)


def _table(found: Sweep) -> Markup:
    headers = (
        *(axis_words(axis) for axis in found.axes), "devices", "step time", "tokens/s", "$/M tokens", "J/token",
        "gain a device", "plan",
    )  # fmt: skip
    return table(headers, (_row(found, point) for point in found.points), class_="cards")


def _row(found: Sweep, point: Point) -> tuple[str, ...]:
    values = tuple(axis_value(axis, value) for axis, value in zip(found.axes, point.values, strict=True))
    if point.candidate is None:
        return (*values, f"{point.num_devices:,}", "nothing fits", "", "", "", "", "")
    usd, joules, gain = point.usd_per_million_tokens, point.joules_per_token, point.marginal_tokens_per_s
    return (
        *values,
        f"{point.num_devices:,}",
        format_seconds(point.candidate.estimate.step_s),
        format_count(point.candidate.estimate.tokens_per_s),
        format_usd(usd) if usd is not None else "",
        f"{joules:.3g}" if joules is not None else "",
        tag("span", format_count(max(0.0, gain)), class_=None if point.pays else "bad") if gain is not None else "",
        tag("small", plan_words(point)),
    )
