"""Calibrations of several hosts -> one.

Devices and networks that only one file has are taken as they are. Where several have the same, each constant is their
geometric mean (a zero among them: the plain mean), since two hosts of one kind are two samples of it. Measured layers
of the same model lie side by side, rows of the same device, degree and microbatch averaged; provenance of every file
is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from hetplan.errors import UsageError
from hetplan.profiling.fit import geometric_mean
from hetplan.specs.calibration import Calibration, DeviceConstants, NetworkConstants
from hetplan.specs.layer_table import LayerRow, LayerTable

Record = TypeVar("Record", DeviceConstants, NetworkConstants, LayerRow)


def merged(calibrations: Sequence[tuple[str, Calibration]]) -> Calibration:
    """Return one calibration of several, each with the name it is told by.

    Raises:
        UsageError: they disagree about what overlaps, or hold measured layers of different models.
    """
    first = calibrations[0][1]
    for name, other in calibrations[1:]:
        if other.overlap != first.overlap:
            raise UsageError(f"{name} and {calibrations[0][0]} disagree about what overlaps")
    provenance = {
        f"{name}: {key}" if len(calibrations) > 1 else key: text
        for name, calibration in calibrations
        for key, text in calibration.provenance.items()
    }
    errors = [c.relative_error for _, c in calibrations if c.relative_error is not None]
    return replace(
        first,
        devices=_together([c.devices for _, c in calibrations]),
        networks=_together([c.networks for _, c in calibrations]),
        relative_error=max(errors, default=None),
        provenance=provenance,
        layers=_layers(calibrations),
    )


def _together(tables: Sequence[Mapping[str, Record]]) -> dict[str, Record]:
    found: dict[str, list[Record]] = {}
    for table in tables:
        for name, record in table.items():
            found.setdefault(name, []).append(record)
    return {name: mean(records) for name, records in found.items()}


def mean(records: Sequence[Record]) -> Record:
    """Return the record whose numbers are the means of all."""
    changes: dict[str, Any] = {}
    for field in fields(records[0]):
        values = [getattr(record, field.name) for record in records]
        numbers = [v for v in values if isinstance(v, float)]
        if len(numbers) < len(values) or len(set(numbers)) == 1:
            continue
        positive = all(number > 0 for number in numbers)
        changes[field.name] = geometric_mean(numbers) if positive else sum(numbers) / len(numbers)
    return replace(records[0], **changes)


def _layers(calibrations: Sequence[tuple[str, Calibration]]) -> LayerTable | None:
    held = [(name, c.layers) for name, c in calibrations if c.layers is not None]
    if not held:
        return None
    first = held[0][1]
    for name, table in held[1:]:
        if (table.model, table.num_layers) != (first.model, first.num_layers):
            raise UsageError(
                f"{name} holds layers of {table.model}, {held[0][0]} of {first.model}; merge one model at a time"
            )
    rows: dict[tuple[str, int, int, int], list[LayerRow]] = {}
    for _, table in held:
        for row in table.rows:
            rows.setdefault((row.device, row.tp, row.microbatch, row.first_layer), []).append(row)
    return replace(first, rows=tuple(mean(same) for same in rows.values()))
