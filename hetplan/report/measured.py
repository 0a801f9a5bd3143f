"""Measured beside predicted, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetplan.report.tables import join_sections, table
from hetplan.units import format_seconds


def measured_text(document: Mapping[str, Any], saved: str) -> str:
    """Return what a run measured beside what its plan predicted."""
    step = document["step_s"]
    rows = [_row("step", step, step["measured_s"])]
    rows += [_row(name, pair, step["measured_s"]) for name, pair in document["parts"].items() if _matters(pair)]
    parts = table(["part", "predicted", "measured", "ratio", "share"], rows)
    stages = table(
        ["stage", "group", "pass", "predicted", "measured", "ratio"],
        [
            [f"{stage['replica']}.{stage['stage']}", stage["group"], name, *_cells(stage[name])]
            for stage in document["stages"]
            for name in ("forward", "backward")
        ],
    )
    count = document["steps"]
    spread = 100 * document["step_spread"]
    notes = f"median of {count} step{'s' if count != 1 else ''}, middle half within {spread:.1f} %; saved in {saved}"
    return join_sections([parts, stages, notes])


def _row(name: str, pair: Mapping[str, float | None], step_s: float) -> list[str]:
    measured = pair["measured_s"]
    share = "-" if measured is None else f"{100 * measured / step_s:.1f} %"
    return [name, *_cells(pair), share]


def _cells(pair: Mapping[str, float | None]) -> list[str]:
    predicted, measured, ratio = pair["predicted_s"], pair["measured_s"], pair["measured_over_predicted"]
    return [
        "-" if predicted is None else format_seconds(predicted),
        "-" if measured is None else format_seconds(measured),
        "-" if ratio is None else f"{ratio:.2f}",
    ]


def _matters(pair: Mapping[str, float | None]) -> bool:
    return bool(pair["predicted_s"]) or bool(pair["measured_s"])
