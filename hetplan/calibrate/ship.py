"""Calibrations to hand on: one file a device and software stack, with what it was fitted on and how far off it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetplan.calibrate.evaluate import Constants
from hetplan.calibrate.fit import Fitted, Observation
from hetplan.calibrate.memory import GIB
from hetplan.calibrate.parameters import widths
from hetplan.specs.calibration import ANY_NETWORK, Calibration

ALL_BUT = 0.999
"""Part of the prior's width above which a spread says that nothing was learnt."""
FEWEST_RUNS = 4
"""Constants from fewer runs are not handed on."""


def calibrations(
    times: Sequence[Observation], constants: Constants, errors: Mapping[str, float], words: Mapping[str, str]
) -> dict[str, Calibration]:
    """Return calibrations by name; `errors`, `words`: by stack, mean relative error on runs left out, readable name."""
    made: dict[str, Calibration] = {}
    for (stack, devices), fitted in sorted(constants.stacks.by_stack.items()):
        rows = [row for row in times if row.setup.devices == devices and row.setup.run.stack == stack]
        if len(rows) >= FEWEST_RUNS:
            made[name_of(words.get(stack, stack), devices)] = _calibration(rows, fitted, constants, errors.get(stack))
    return made


def name_of(stack: str, devices: Sequence[str]) -> str:
    """Return a file name without its ending."""
    return re.sub(r"[^a-z0-9.]+", "-", "-".join([*devices, stack]).lower()).strip("-")


def told(fitted: Fitted) -> Fitted:
    """Return a fit whose constants are as assumed where its rows say nothing about them."""
    knows = fitted.spread < ALL_BUT * widths(fitted.entries)
    return replace(fitted, offsets=np.where(knows, fitted.offsets, 0.0))


def _calibration(rows: Sequence[Observation], fitted: Fitted, constants: Constants, error: float | None) -> Calibration:
    setup = rows[0].setup
    found = told(fitted).calibration(setup)
    devices = found.devices
    memory = constants.memory.get(setup.run.stack) if setup.run.stack in constants.peaked else None
    if memory is not None:
        devices = {
            name: replace(entry, memory_overhead_fraction=float(memory[0]), reserve_bytes=float(memory[1]) * GIB)
            for name, entry in devices.items()
        }
    sources = sorted({re.sub(r"\s*\[.*?\]", "", row.setup.run.source) for row in rows})
    provenance = {
        "fitted on": f"{len(rows)} published step times",
        "source": "; ".join(sources[:2]) + (f"; and {len(sources) - 2} more" if len(sources) > 2 else ""),
    }
    if error is not None:
        provenance["error on runs left out"] = f"{error:.1%} mean, five folds by configuration"
    return Calibration(
        devices=devices,
        networks={ANY_NETWORK: next(iter(found.networks.values()))},
        overlap=found.overlap,
        relative_error=None if error is None else round(error, 4),
        provenance=provenance,
    )
