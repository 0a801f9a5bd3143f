"""What sets two plans apart, as text and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hetplan.plan.difference import Change, CostChange, Difference, MovedDevices, MovedLayers
from hetplan.plan.document import ranges_text
from hetplan.report.estimates import PART_WORDS
from hetplan.report.layouts import shape_name
from hetplan.report.tables import join_sections, percent, section, table
from hetplan.units import format_bytes, format_count, format_energy, format_seconds, format_usd

MOST_ROWS = 40
"""Stages and runs of layers listed before the rest is only counted."""

_TOTALS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_s": ("step time", format_seconds),
    "tokens_per_s": ("tokens/s", format_count),
    "mfu": ("MFU", percent),
    "usd_per_step": ("cost a step", format_usd),
    "joules_per_step": ("energy a step", format_energy),
    "dp_overlapped_s": ("gradients, hidden", format_seconds),
}
_HEADERS = ("", "before", "after", "change", "")


def difference_text(found: Difference, names: tuple[str, str]) -> str:
    """Return the differences of two plans called `names`."""
    title = f"before: {names[0]}\nafter:  {names[1]}"
    if found.is_empty:
        return f"{title}\n\nThe plans are the same: layout and job do not differ."
    notes = "These differ too, so the costs below are not the layout's doing alone"
    return join_sections(
        [
            title,
            section(notes, _changes_table(found.inputs)) if found.inputs else "",
            section("Settings", _changes_table(found.settings)) if found.settings else "",
            section("Layers that moved (of the chain, embedding and head counted)", _layers_table(found.layers)),
            section("Devices only one plan uses (indices within their group)", _devices_table(found.devices)),
            section("Costs", _costs_table([_total_row(total) for total in found.totals if _is_known(total)])),
            section("Time by part", _costs_table([_part_row(part) for part in found.parts if _matters(part)])),
            section("Peak memory of a device", _memory_table(found.memory)),
        ]
    )


def _changes_table(changes: Sequence[Change]) -> str:
    return table(("", "before", "after"), [(one.what, one.before or "-", one.after or "-") for one in changes])


def _layers_table(moved: Sequence[MovedLayers]) -> str:
    if not moved:
        return ""
    rows = [
        (
            shape_name(run.row),
            ranges_text([(run.first_layer, run.end_layer)]),
            run.before or "no such replica",
            run.after or "no such replica",
        )
        for run in moved
    ]
    return table(("replica", "layers", "before", "after"), [*rows[:MOST_ROWS], *_more(rows)])


def _more(rows: Sequence[object]) -> list[str]:
    return [f"(and {len(rows) - MOST_ROWS} more)"] if len(rows) > MOST_ROWS else []


def _devices_table(moved: Sequence[MovedDevices]) -> str:
    if not moved:
        return ""
    rows = [(one.group, ranges_text(one.only_before) or "-", ranges_text(one.only_after) or "-") for one in moved]
    return table(("group", "only before", "only after"), rows)


def _is_known(cost: CostChange) -> bool:
    return cost.before is not None or cost.after is not None


def _matters(cost: CostChange) -> bool:
    return bool(cost.before or cost.after)


def _costs_table(rows: Sequence[tuple[str, ...]]) -> str:
    return table(_HEADERS, rows) if rows else ""


def _total_row(cost: CostChange) -> tuple[str, ...]:
    words, form = _TOTALS[cost.name]
    return _cost_row(words, cost, form)


def _part_row(cost: CostChange) -> tuple[str, ...]:
    return _cost_row(PART_WORDS[cost.name], cost, format_seconds)


def _memory_table(changes: Sequence[CostChange]) -> str:
    moved = [cost for cost in changes if cost.before != cost.after]
    rows: list[tuple[str, ...] | str] = [_cost_row(cost.name, cost, format_bytes) for cost in moved[:MOST_ROWS]]
    if len(moved) < len(changes):
        rows.append(f"({len(changes) - len(moved)} stages as before)")
    return table(_HEADERS, [*rows, *_more(moved)]) if moved else ""


def _cost_row(words: str, cost: CostChange, form: Callable[[float], str]) -> tuple[str, ...]:
    before, after = cost.before, cost.after
    shown = ("-" if before is None else form(before), "-" if after is None else form(after))
    if before is None or after is None:
        return (words, *shown, "", "")
    change = after - before
    signed = f"{'-' if change < 0 else '+'}{form(abs(change))}" if change else "0"
    return (words, *shown, signed, f"{100 * change / before:+.1f} %" if before else "")


def difference_document(found: Difference) -> dict[str, Any]:
    """Return the differences for JSON; layers and devices are half-open ranges."""
    return {
        "same": found.is_empty,
        "inputs": [asdict(change) for change in found.inputs],
        "settings": [asdict(change) for change in found.settings],
        "layers": [asdict(run) for run in found.layers],
        "devices": [asdict(one) for one in found.devices],
        "totals": {cost.name: _pair(cost) for cost in found.totals},
        "time_parts_s": {cost.name.removesuffix("_s"): _pair(cost) for cost in found.parts},
        "peak_bytes": {cost.name: _pair(cost) for cost in found.memory},
    }


def _pair(cost: CostChange) -> dict[str, float | None]:
    change = cost.after - cost.before if cost.after is not None and cost.before is not None else None
    return {"before": cost.before, "after": cost.after, "change": change}
