"""Constants for every device and software stack of a set of runs, from general to particular.

First one vector for all runs, then one for each kind of device and one for each software stack that ran on several,
both starting from it; then one for each stack on each device, starting from the device's, and for each of its releases.
A run of an unknown stack is priced with its device's constants, a known stack on an unknown device with the stack's,
anything else with those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.calibrate.express import Setup
from hetplan.calibrate.fit import Effort, Fitted, Observation, Predictions, fit
from hetplan.calibrate.parameters import PARAMETERS, blocks
from hetplan.costs.records import Floats
from hetplan.specs.calibration import Calibration

Devices = tuple[str, ...]
ANY: Devices = ("any",)
ROUGH = Effort(descents=1, most_steps=6)
"""For the general levels, which later ones refine."""
ROWS_OF_A_STACK = 8
"""Rows of one stack that general levels look at: enough to say how it differs, and no stack drowns the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Fitted constants, level by level."""

    everywhere: Fitted
    by_device: dict[Devices, Fitted]
    by_software: dict[str, Fitted]
    """Stacks that ran on several kinds of device, these together."""
    by_stack: dict[tuple[str, Devices], Fitted]
    by_release: dict[tuple[str, str, Devices], Fitted]
    """Where runs of one stack name several releases."""

    def find(self, setup: Setup) -> tuple[str, Fitted]:
        """Return the most particular constants there are for a configuration, and their level."""
        release = self.by_release.get((setup.run.stack, setup.run.release, setup.devices))
        if release is not None:
            return "release", release
        own = self.by_stack.get((setup.run.stack, setup.devices))
        if own is not None:
            return "stack", own
        software = self.by_software.get(setup.run.stack)
        if software is not None:
            return "software", software
        device = self.by_device.get(setup.devices)
        return ("device", device) if device is not None else ("all", self.everywhere)

    def calibration(self, setup: Setup) -> Calibration:
        """Return the calibration of a configuration."""
        return self.find(setup)[1].calibration(setup)


def fit_stacks(
    observations: Sequence[Observation], predictions: Predictions | None = None, *, particular: bool = True
) -> Stacks:
    """Return constants fitted on `observations`; not `particular`: for devices only, not for each stack."""
    known = predictions or Predictions()
    everywhere = fit(few_of_each(observations), ANY, np.zeros(len(blocks(ANY))), known, ROUGH)
    by_software = _software(observations, everywhere.offsets, known) if particular else {}
    by_device: dict[Devices, Fitted] = {}
    by_stack: dict[tuple[str, Devices], Fitted] = {}
    by_release: dict[tuple[str, str, Devices], Fitted] = {}
    for devices in sorted({row.setup.devices for row in observations}):
        of_device = [row for row in observations if row.setup.devices == devices]
        start = spread_out(everywhere.offsets, len(devices))
        by_device[devices] = fit(few_of_each(of_device), devices, start, known, ROUGH)
        for name in sorted({row.setup.run.stack for row in of_device}) if particular else ():
            rows = [row for row in of_device if row.setup.run.stack == name]
            own = by_stack[name, devices] = fit(rows, devices, by_device[devices].offsets, known)
            releases = sorted({row.setup.run.release for row in rows})
            for release in releases if len(releases) > 1 else ():
                of_release = [row for row in rows if row.setup.run.release == release]
                by_release[name, release, devices] = fit(of_release, devices, own.offsets, known)
    return Stacks(
        everywhere=everywhere, by_device=by_device, by_software=by_software, by_stack=by_stack, by_release=by_release
    )


def _software(observations: Sequence[Observation], start: Floats, known: Predictions) -> dict[str, Fitted]:
    """Return constants of each stack that ran on several kinds of device."""
    found: dict[str, Fitted] = {}
    for name in sorted({row.setup.run.stack for row in observations}):
        rows = [row for row in observations if row.setup.run.stack == name]
        if len({row.setup.devices for row in rows}) > 1:
            found[name] = fit(few_of_each(rows, 3 * ROWS_OF_A_STACK), ANY, start, known)
    return found


def few_of_each(observations: Sequence[Observation], most: int = ROWS_OF_A_STACK) -> list[Observation]:
    """Return at most so many rows of each stack and device, spread evenly over the order in which they came."""
    stacks: dict[tuple[str, Devices], list[Observation]] = {}
    for row in observations:
        stacks.setdefault((row.setup.run.stack, row.setup.devices), []).append(row)
    chosen: list[Observation] = []
    for rows in stacks.values():
        step = max(1.0, len(rows) / most)
        chosen.extend(rows[int(place * step)] for place in range(min(len(rows), most)))
    return chosen


def spread_out(offsets: Floats, num_devices: int) -> Floats:
    """Return one device's vector repeated for several devices, shared entries once."""
    own = sum(entry.record == "device" for entry in PARAMETERS)
    return np.concatenate([np.tile(offsets[:own], num_devices), offsets[own:]])
