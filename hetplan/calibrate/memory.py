"""Allocator overhead and reserve from observed peaks.

The peak of a stage is `fixed + grown x (1 + overhead) + reserve`: weights, states and logits do not grow, activations
and buffers do. What a figure means differs by stack (allocated, reserved, or all the device shows as used), and the
two constants take it up. Least squares of log ratios, robust, drawn to where they start. A configuration that ran tells
that its peak is below what its devices have, one that did not that it is above: such rows pull only where the constants
say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from hetplan.calibrate.express import Setup
from hetplan.calibrate.predict import StageMemory
from hetplan.costs.records import Floats

NOISE = 0.03
WIDTHS = np.array([0.15, 2.0])
"""Prior widths: overhead as a fraction, reserve in GiB."""
BOUNDS = (np.array([-0.5, 0.0]), np.array([1.0, 16.0]))
START = np.array([0.06, 1.4])
"""The assumed constants."""
MARGIN = 0.99
"""What ran is taken to have used at most this part of a device."""
SURELY = 1.02
"""What ran out of memory is taken to have needed at least this much of a device."""
OUT_OF_MEMORY_WEIGHT = 4.0
"""Such rows are few, and missing one costs a user more than a plan that is refused."""
GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One configuration, what its stages hold, and the peak that was seen."""

    setup: Setup
    stages: tuple[StageMemory, ...]
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Whether a configuration ran."""

    setup: Setup
    stages: tuple[StageMemory, ...]
    ran: bool


def peak_bytes(stages: Sequence[StageMemory], constants: Floats) -> float:
    """Return the peak of the fullest stage under (overhead, reserve in GiB)."""
    return max(stage.total_bytes(float(constants[0]), float(constants[1]) * GIB) for stage in stages)


def fits(stages: Sequence[StageMemory], constants: Floats) -> bool:
    """Return whether every stage fits its device."""
    return all(stage.total_bytes(float(constants[0]), float(constants[1]) * GIB) <= stage.capacity for stage in stages)


def _excess(outcome: Outcome, constants: Floats) -> float:
    """Return by how much (log) the fullest stage is on the wrong side of its capacity; 0 on the right side."""
    fill = max(
        stage.total_bytes(float(constants[0]), float(constants[1]) * GIB) / stage.capacity for stage in outcome.stages
    )
    if outcome.ran:
        return max(0.0, math.log(fill / MARGIN))
    return OUT_OF_MEMORY_WEIGHT * max(0.0, math.log(SURELY / fill))


def fit_memory(peaks: Sequence[Peak], outcomes: Sequence[Outcome] = (), start: Floats = START) -> Floats:
    """Return (overhead, reserve in GiB)."""
    if not peaks and not outcomes:
        return start

    def residuals(constants: Floats) -> Floats:
        errors = [np.log(peak_bytes(peak.stages, constants) / peak.peak_bytes) for peak in peaks]
        errors += [_excess(outcome, constants) for outcome in outcomes]
        return np.concatenate([np.array(errors) / NOISE, (constants - start) / WIDTHS])

    found = least_squares(residuals, np.clip(start, *BOUNDS), bounds=BOUNDS, loss="soft_l1", x_scale=WIDTHS)
    return np.asarray(found.x, dtype=np.float64)
