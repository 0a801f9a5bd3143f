"""Constants for every device and software stack of a set of runs, from general to particular.

First one vector for all runs, then one for each kind of device and one for each software stack that ran on several,
both starting from it; then one for each stack on each device, starting from the device's, and for each of its releases.
A release changes the same code on every device: where a stack's runs name several releases and ran on several devices,
its constants on each start from those it has on all, and what a release changes is fitted on all devices together
before it is refined on each; a device that has not run a release is expected to change as the others did.
A run of an unknown stack is priced with its device's constants, a known stack on an unknown device with the stack's,
anything else with those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
NEAR = Effort(freedom=0.5)
"""For constants that start from those of the same stack: half the width (chosen on runs left out)."""
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
    changes = _changes(observations, by_software, known)
    by_device: dict[Devices, Fitted] = {}
    by_stack: dict[tuple[str, Devices], Fitted] = {}
    by_release: dict[tuple[str, str, Devices], Fitted] = {}
    for devices in sorted({row.setup.devices for row in observations}):
        of_device = [row for row in observations if row.setup.devices == devices]
        start = spread_out(everywhere.offsets, len(devices))
        by_device[devices] = fit(few_of_each(of_device), devices, start, known, ROUGH)
        for name in sorted({row.setup.run.stack for row in of_device}) if particular else ():
            rows = [row for row in of_device if row.setup.run.stack == name]
            released = changes.get(name, {})
            if released:
                own = fit(rows, devices, spread_out(by_software[name].offsets, len(devices)), known, NEAR)
            else:
                own = fit(rows, devices, by_device[devices].offsets, known)
            by_stack[name, devices] = own
            for release, start in _moved(own, rows, released).items():
                of_release = [row for row in rows if row.setup.run.release == release]
                by_release[name, release, devices] = (
                    fit(of_release, devices, start, known, NEAR) if of_release else replace(own, offsets=start)
                )
    return Stacks(
        everywhere=everywhere, by_device=by_device, by_software=by_software, by_stack=by_stack, by_release=by_release
    )


def releases(rows: Sequence[Observation]) -> dict[str, list[Observation]]:
    """Return rows by the release they name, where they name several."""
    found: dict[str, list[Observation]] = {}
    for row in sorted(rows, key=lambda row: row.setup.run.release):
        found.setdefault(row.setup.run.release, []).append(row)
    return found if len(found) > 1 else {}


def _moved(own: Fitted, rows: Sequence[Observation], changes: dict[str, Floats]) -> dict[str, Floats]:
    """Return where each release starts on a device whose `own` constants are those of its `rows` on average."""
    if not changes:
        return dict.fromkeys(releases(rows), own.offsets)
    usual = np.mean([changes[row.setup.run.release] for row in rows], axis=0)
    num_devices = len({device for device, _ in own.entries if device})
    return {release: own.offsets + spread_out(change - usual, num_devices) for release, change in changes.items()}


def _changes(
    observations: Sequence[Observation], by_software: dict[str, Fitted], known: Predictions
) -> dict[str, dict[str, Floats]]:
    """Return by how much each release's offsets differ from its stack's, fitted on all devices together."""
    found: dict[str, dict[str, Floats]] = {}
    for name, whole in by_software.items():
        of_stack = releases([row for row in observations if row.setup.run.stack == name])
        found[name] = {
            release: fit(rows, ANY, whole.offsets, known).offsets - whole.offsets for release, rows in of_stack.items()
        }
    return found


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
