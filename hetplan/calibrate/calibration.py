"""A calibration file from the runs someone has seen: constants, how sure they are, and which rows disagree.

Runs of each set of devices are fitted by themselves (`fit`), starting from the assumptions; what hides behind what and
the network, which several sets share, come from the set with most runs. The stated error is the mean of errors on
runs that were left out, one fifth at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.calibrate.dataset import Dataset, dataset_of
from hetplan.calibrate.fit import Effort, Fitted, Observation, Predictions, fit
from hetplan.calibrate.memory import GIB, fit_memory
from hetplan.calibrate.parameters import Parameter, blocks
from hetplan.calibrate.predict import step_s
from hetplan.calibrate.runs import Run
from hetplan.errors import CalibrationError
from hetplan.specs.calibration import Calibration

LEFT_OUT_PARTS = 5
DISAGREES = 3.0
"""A row disagrees when its error is this many times the typical one (and above 5 %)."""
LEAST_DISAGREEMENT = 0.05
CAREFUL = Effort(descents=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantReport:
    """One fitted constant."""

    owner: str
    """Device; `network` or `overlap` for what devices share."""
    name: str
    value: float
    low: float
    high: float
    """One standard deviation to either side."""
    known: float
    """Part of the assumption's width that the runs removed: 0 not at all, 1 fully."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """One run and what the fitted calibration says about it."""

    id: str
    observed_s: float
    predicted_s: float
    disagrees: bool

    @property
    def error(self) -> float:
        """Predicted over observed, less one."""
        return self.predicted_s / self.observed_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCalibration:
    """What `hetplan calibrate` makes."""

    calibration: Calibration
    constants: tuple[ConstantReport, ...]
    rows: tuple[RowReport, ...]
    left_out: tuple[tuple[str, str], ...]
    """(row, reason) for rows that could not be used."""
    held_out_error: float | None
    """Mean error of runs the constants were not fitted on; None for fewer than three runs."""


def stacks_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the systems a table holds runs of."""
    return tuple(sorted({run.stack for run in runs}))


def calibrate(runs: Sequence[Run], *, network: str, source: str) -> FittedCalibration:
    """Return the calibration that explains runs of one system.

    `network`: the name its clusters give the network between nodes; `source`: where the runs come from.

    Raises:
        CalibrationError: no row can be used.
    """
    data = dataset_of(runs)
    if not data.times:
        reasons = "; ".join(sorted({f"{entry.run.id}: {entry.reason}" for entry in data.left})[:3])
        raise CalibrationError(f"none of {len(runs)} rows holds a step time that can be used ({reasons or 'none'})")
    predictions = Predictions()
    parts = _parts(data.times, predictions, CAREFUL)
    error = held_out_error(data.times, predictions)
    calibration = _merged(parts, data, network)
    calibration = replace(
        calibration,
        relative_error=None if error is None else round(error, 4),
        provenance={"fitted on": f"{len(data.times)} observed step times", "source": source},
    )
    return FittedCalibration(
        calibration=calibration,
        constants=tuple(report for rows, fitted in parts for report in _constants(rows, fitted)),
        rows=tuple(row for rows, fitted in parts for row in _rows(rows, fitted)),
        left_out=tuple((entry.run.id, entry.reason) for entry in data.left),
        held_out_error=error,
    )


_Part = tuple[list[Observation], Fitted]


def _parts(times: Sequence[Observation], predictions: Predictions, effort: Effort) -> list[_Part]:
    """Return the fit of every set of devices, the one with most runs first."""
    groups: dict[tuple[str, ...], list[Observation]] = {}
    for row in times:
        groups.setdefault(row.setup.devices, []).append(row)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        (rows, fit(rows, devices, np.zeros(len(blocks(devices))), predictions, effort)) for devices, rows in ordered
    ]


def held_out_error(times: Sequence[Observation], predictions: Predictions) -> float | None:
    """Return the mean error of runs that were left out, a fifth of the configurations at a time."""
    names = sorted({row.setup.run.configuration for row in times})
    if len(names) < 3:
        return None
    errors: list[float] = []
    for part in range(min(LEFT_OUT_PARTS, len(names))):
        held = set(names[part::LEFT_OUT_PARTS])
        rest = [row for row in times if row.setup.run.configuration not in held]
        fits = {rows[0].setup.devices: fitted for rows, fitted in _parts(rest, predictions, Effort())}
        for row in times:
            fitted = fits.get(row.setup.devices)
            if row.setup.run.configuration in held and fitted is not None:
                errors.append(abs(step_s(row.setup, fitted.calibration(row.setup)) / row.step_s - 1.0))
    return float(np.mean(errors)) if errors else None


def _merged(parts: Sequence[_Part], data: Dataset, network: str) -> Calibration:
    made = [fitted.calibration(rows[0].setup) for rows, fitted in parts]
    devices = {name: constants for calibration in reversed(made) for name, constants in calibration.devices.items()}
    if data.peaks:
        overhead, reserve = (float(value) for value in fit_memory(data.peaks, data.outcomes))
        devices = {
            name: replace(constants, memory_overhead_fraction=overhead, reserve_bytes=reserve * GIB)
            for name, constants in devices.items()
        }
    first = made[0]
    return Calibration(devices=devices, networks={network: next(iter(first.networks.values()))}, overlap=first.overlap)


def _constants(rows: Sequence[Observation], fitted: Fitted) -> list[ConstantReport]:
    calibration = fitted.calibration(rows[0].setup)
    reports = []
    for (device, entry), spread in zip(fitted.entries, fitted.spread, strict=True):
        value = _value(calibration, device, entry)
        width = float(spread)
        low, high = (
            (value - width, value + width) if entry.adds else (value * math.exp(-width), value * math.exp(width))
        )
        reports.append(
            ConstantReport(
                owner=device or entry.record,
                name=entry.name,
                value=value,
                low=max(low, entry.lowest),
                high=min(high, entry.highest),
                known=max(0.0, 1.0 - width / entry.width),
            )
        )
    return reports


def _value(calibration: Calibration, device: str, entry: Parameter) -> float:
    if entry.record == "device":
        return float(getattr(calibration.devices[device], entry.name))
    record = next(iter(calibration.networks.values())) if entry.record == "network" else calibration.overlap
    return float(getattr(record, entry.name))


def _rows(rows: Sequence[Observation], fitted: Fitted) -> list[RowReport]:
    typical = float(np.median(np.abs(fitted.errors)))
    bar = max(DISAGREES * typical, LEAST_DISAGREEMENT)
    return [
        RowReport(
            id=row.setup.run.id,
            observed_s=row.step_s,
            predicted_s=row.step_s * math.exp(error),
            disagrees=abs(error) > bar,
        )
        for row, error in zip(rows, fitted.errors.tolist(), strict=True)
    ]
