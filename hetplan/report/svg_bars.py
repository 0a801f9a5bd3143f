"""Bars of memory and time as SVG: widths are percentages, so they follow the page without a script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hetplan.plan.records import Estimate, StageEstimate
from hetplan.report.estimates import LEAST_SHOWN, PART_WORDS, fill, memory_parts, time_parts
from hetplan.report.html import Markup, joined, number, tag
from hetplan.report.html_rows import MOST_ROWS, StageRow, group_class, legend, swatch
from hetplan.report.tables import percent
from hetplan.specs.cluster import Cluster
from hetplan.units import format_bytes, format_seconds

MOST_SPELLED = 24
"""Up to this many bars, each says its parts in words too."""

MEMORY_CLASSES: Mapping[str, str] = {
    "weights_bytes": "m0",
    "gradients_bytes": "m1",
    "optimizer_bytes": "m2",
    "activations_bytes": "m3",
    "logits_bytes": "m4",
    "buffers_bytes": "m5",
    "reserve_bytes": "m6",
    "scores_bytes": "m7",
}
PART_CLASSES: Mapping[str, str] = {
    "compute_s": "bw",
    "tp_s": "tp",
    "cp_s": "cp",
    "ep_s": "ep",
    "pp_s": "pp",
    "bubble_s": "bu",
    "dp_s": "dp",
    "optimizer_s": "op",
}


def memory_figure(rows: Sequence[StageRow], cluster: Cluster) -> Markup:
    """Return a bar a stage: what fills a device's memory at the peak, against what it has."""
    shown = rows[:MOST_ROWS]
    widest = max(max(row.use.capacity_bytes, row.use.memory.total_bytes) for row in shown)
    spelled = len(shown) <= MOST_SPELLED
    bars = [_memory_row(row, cluster, widest, spelled=spelled) for row in shown]
    entries = ((class_, _word(name)) for name, class_ in MEMORY_CLASSES.items())
    left = len(rows) - len(shown)
    more = tag("p", f"{left} more rows are not drawn.", class_="note") if left else ""
    return tag("figure", *bars, legend([*entries, ("free", "free")]), more, class_="memory")


def _word(name: str) -> str:
    return name.removesuffix("_bytes")


def _memory_row(row: StageRow, cluster: Cluster, widest: float, *, spelled: bool) -> Markup:
    use, key = row.use, f"stages.{row.index}"
    total = number(f"{key}.peak_bytes", use.memory.total_bytes, format_bytes(use.memory.total_bytes))
    has = number(f"{key}.capacity_bytes", use.capacity_bytes, format_bytes(use.capacity_bytes))
    over = fill(use) > 1
    share = tag("b", percent(fill(use)), class_="bad" if over else None)
    head = tag(
        "p", tag("span", swatch(group_class(cluster, use.group)), f"{row.name} {use.group}"), _of(share, total, has)
    )
    drawing = tag(
        "svg",
        tag("rect", class_="free", width=_share(use.capacity_bytes, widest), height="100%"),
        *_memory_parts(use, key, widest),
        tag("rect", class_="limit", x=_share(use.capacity_bytes, widest), width="2", height="100%") if over else "",
        role="img",
        aria_label=f"memory of stage {row.name}",
    )
    words = tag("p", _spelled(use), class_="parts") if spelled else ""
    return tag("div", head, drawing, words, class_="bar")


def _of(share: Markup, total: Markup, has: Markup) -> Markup:
    return tag("span", share, " ", total, " of ", has)


def _memory_parts(use: StageEstimate, key: str, widest: float) -> Iterator[Markup]:
    before = 0.0
    for name, size in memory_parts(use.memory):
        yield tag(
            "rect",
            tag("title", f"{_word(name)}: {format_bytes(size)}"),
            class_=MEMORY_CLASSES[name],
            x=_share(before, widest),
            width=_share(size, widest),
            height="100%",
            data_key=f"{key}.memory_bytes.{_word(name)}",
            data_value=repr(float(size)),
        )
        before += size


def _share(size: float, whole: float) -> str:
    return f"{100 * size / whole:.4g}%"


def _spelled(use: StageEstimate) -> str:
    parts = [(name, size) for name, size in memory_parts(use.memory) if size > 0]
    return ", ".join(f"{_word(name)} {format_bytes(size)}" for name, size in parts)


def time_figure(estimate: Estimate) -> Markup:
    """Return where the step goes: one bar, and a line a part."""
    parts = [(name, seconds) for name, seconds in time_parts(estimate.parts)]
    lines = [_time_line(name, seconds, estimate.step_s) for name, seconds in parts]
    hidden = tag(
        "li",
        swatch("hollow dp"),
        tag("span", "gradients, hidden behind backward passes"),
        number("dp_overlapped_s", estimate.dp_overlapped_s, format_seconds(estimate.dp_overlapped_s)),
        tag("span"),
    )
    return tag("figure", parts_bar(estimate, estimate.step_s), tag("ul", *lines, hidden, class_="lines"))


def _time_line(name: str, seconds: float, step_s: float) -> Markup:
    key = f"time_parts_s.{name.removesuffix('_s')}"
    shown = format_seconds(seconds) if seconds >= LEAST_SHOWN * step_s else "0 s"
    class_ = None if seconds >= LEAST_SHOWN * step_s else "nil"
    return tag(
        "li",
        swatch(PART_CLASSES[name]),
        tag("span", PART_WORDS[name]),
        number(key, seconds, shown),
        tag("span", percent(max(0.0, seconds) / step_s)),
        class_=class_,
    )


def parts_bar(estimate: Estimate, whole_s: float) -> Markup:
    """Return the parts of a step side by side; the bar is as wide as `whole_s`."""
    return tag("svg", joined(_part_rectangles(estimate, whole_s)), class_="split", role="img", aria_label="parts")


def _part_rectangles(estimate: Estimate, whole_s: float) -> Iterable[Markup]:
    before_s = 0.0
    for name, seconds in time_parts(estimate.parts):
        if seconds < LEAST_SHOWN * estimate.step_s:
            continue
        yield tag(
            "rect",
            tag("title", f"{PART_WORDS[name]}: {format_seconds(seconds)} ({percent(seconds / estimate.step_s)})"),
            class_=PART_CLASSES[name],
            x=_share(before_s, whole_s),
            width=_share(seconds, whole_s),
            height="100%",
        )
        before_s += seconds
