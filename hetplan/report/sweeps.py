"""Points of a sweep beside each other: as text, as CSV and as a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hetplan.report.layouts import Setting, count_text, replica_text
from hetplan.report.sizes import SHORT_SEARCH
from hetplan.report.tables import bullets, join_sections, percent, section, table
from hetplan.search.sweep import Axis, Point, Sweep, last_paying
from hetplan.units import format_bits, format_count, format_seconds, format_usd

_HEADERS = {"nodes": "nodes", "global_batch": "batch", "seq_len": "seq len", "bandwidth": "speed"}
COLUMNS = (
    "devices",
    "step_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "usd_per_million_tokens",
    "joules_per_token",
    "marginal_tokens_per_s_per_device",
    "pays",
    "plan",
)
"""Of a CSV row, after the axes."""


def axis_value(axis: Axis, value: float) -> str:
    """Return a value of an axis in words."""
    return format_bits(value) if axis.kind == "bandwidth" else f"{int(value):,}"


def axis_words(axis: Axis) -> str:
    """Return what an axis is, in words."""
    words = {"nodes": "nodes of group", "global_batch": "samples a step", "seq_len": "tokens a sample"}
    return f"{words.get(axis.kind, 'bandwidth of network')} {axis.of}".strip()


def plan_words(point: Point) -> str:
    """Return a point's plan in a line."""
    if point.candidate is None:
        return ""
    rows = point.candidate.layout.replicas
    return "; ".join(f"{replica_text(row)}: {' -> '.join(f'{s.group} tp{s.tp}' for s in row.stages)}" for row in rows)


def sweep_text(found: Sweep, setting: Setting) -> str:
    """Return the table and where adding hardware stops paying."""
    head = (
        f"{setting.model.name} on {setting.cluster.name}, {setting.workload.precision}:"
        f" {' x '.join(axis_words(axis) for axis in found.axes)}"
    )
    axes = [f"{_HEADERS[axis.kind]} {axis.of}".strip() for axis in found.axes]
    headers = (*axes, "devices", "step time", "tokens/s", "$/M tokens", "J/token", "gain a device")
    rows = [_cells(found, point) for point in found.points]
    return join_sections([head, table(headers, rows), section("Notes", bullets(list(notes(found))))])


def _cells(found: Sweep, point: Point) -> tuple[str, ...]:
    values = tuple(axis_value(axis, value) for axis, value in zip(found.axes, point.values, strict=True))
    if point.candidate is None:
        return (*values, f"{point.num_devices:,}", "nothing fits", "", "", "", "")
    usd, joules = point.usd_per_million_tokens, point.joules_per_token
    return (
        *values,
        f"{point.num_devices:,}",
        format_seconds(point.candidate.estimate.step_s),
        format_count(point.candidate.estimate.tokens_per_s),
        format_usd(usd) if usd is not None else "",
        f"{joules:.3g}" if joules is not None else "",
        _gain_words(point),
    )


def _gain_words(point: Point) -> str:
    if point.marginal_tokens_per_s is None:
        return ""
    return f"{format_count(max(0.0, point.marginal_tokens_per_s))}{'' if point.pays else ' *'}"


def notes(found: Sweep) -> Iterator[str]:
    """Yield where adding stops paying, and what the numbers rest on."""
    index = found.along
    if index is not None and len(found.axes[index].values) > 1:
        yield from _stops(found, index)
        yield (
            "gain a device: throughput each added device brings, against the row with the next fewer nodes; * is under "
            f"{percent(found.worth)} of what a device brought on average before (--worth)"
        )
    yield f"{SHORT_SEARCH}; `hetplan search` may find a faster plan"
    yield "$ and J are of the devices in use; devices counts all of the cluster"


def _stops(found: Sweep, index: int) -> Iterator[str]:
    axis = found.axes[index]
    others = (*found.axes[:index], *found.axes[index + 1 :])
    for rest, points in found.series(index):
        last = last_paying(points)
        at = ", ".join(f"{axis_words(a)} {axis_value(a, v)}" for a, v in zip(others, rest, strict=True))
        where = f" ({at})" if at else ""
        if all(point.candidate is None for point in points):
            yield f"nothing fits{where}"
        elif last is None:
            most = count_text(int(axis.values[-1]), "node")
            yield f"adding nodes of group {axis.of} pays as far as was looked, {most}{where}"
        else:
            nodes = count_text(int(last.values[index]), "node")
            yield f"adding hardware stops paying after {nodes} of group {axis.of}{where}"


def sweep_document(found: Sweep) -> dict[str, Any]:
    """Return the sweep as a document; what is not known is null."""
    index = found.along
    return {
        "axes": [
            {"name": axis.name, "kind": axis.kind, "of": axis.of or None, "values": list(axis.values)}
            for axis in found.axes
        ],
        "worth": found.worth,
        "points": [dict(zip(csv_header(found), _values(point), strict=True)) for point in found.points],
        "stops_paying": None if index is None else [_stop_document(found, index, run) for run in found.series(index)],
    }


def _stop_document(found: Sweep, index: int, run: tuple[tuple[float, ...], Sequence[Point]]) -> dict[str, Any]:
    rest, points = run
    others = (*found.axes[:index], *found.axes[index + 1 :])
    last = last_paying(points)
    at = {axis.name: value for axis, value in zip(others, rest, strict=True)}
    return {**at, "axis": found.axes[index].name, "after_nodes": int(last.values[index]) if last else None}


def csv_header(found: Sweep) -> tuple[str, ...]:
    """Return the columns: bandwidth in bytes a second."""
    return (*(f"{a.name}_bytes_per_s" if a.kind == "bandwidth" else a.name for a in found.axes), *COLUMNS)


def _values(point: Point) -> tuple[Any, ...]:
    found = point.candidate.estimate if point.candidate else None
    return (
        *(int(value) if value == int(value) else value for value in point.values),
        point.num_devices,
        found.step_s if found else None,
        point.tokens_per_s,
        found.tokens_per_s / point.num_devices if found else None,
        found.mfu if found else None,
        point.usd_per_million_tokens,
        point.joules_per_token,
        point.marginal_tokens_per_s,
        point.pays,
        plan_words(point) or None,
    )


def sweep_csv(found: Sweep) -> str:
    """Return a header and a row a point; unknown cells are empty."""
    lines = [",".join(csv_header(found))]
    lines += [",".join(_cell(value) for value in _values(point)) for point in found.points]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n') else text
