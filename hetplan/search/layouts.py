"""Columns with counts and copies as a layout; devices are chosen later."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.plan.records import Layout
from hetplan.search.columns import Column


def layout_of(rows: Sequence[tuple[Column, int, int]]) -> Layout:
    """Return the layout of (column, microbatches, copies) rows, largest share of the devices first."""
    ordered = sorted(rows, key=lambda row: (-row[2] * sum(row[0].used_g), -row[1], repr(row[0].stages)))
    return Layout(
        replicas=tuple(column.replica(count, copies) for column, count, copies in ordered),
        schedule=rows[0][0].schedule,
        sharding=rows[0][0].sharding,
    )
