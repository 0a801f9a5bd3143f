"""Figures -> the constants of the cost model, by least squares on the logarithm of seconds.

* products: `(flop + half) / (peak fraction (1 - penalty steps))`, at least the time their bytes take
  (`hetplan.costs.compute`); three unknowns, `fraction`, `half` and `penalty`;
* attention: `(flop + half) / (peak fraction)`, its backward pass 2.5 times that;
* elementwise work: bytes over bandwidth times a fraction, the geometric mean of all kinds; the optimizer's likewise;
* a link: `latency + bytes / rate` for a transfer; an all-reduce of `n` ranks makes `2 (n - 1)` steps of `bytes / n`.

A logarithm weighs a microsecond as much as a second, which is what a model that sums over both wants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from hetplan.costs.compute import FLASH_BACKWARD_FACTOR, misalignment_o
from hetplan.profiling.records import (
    STEADY_SPREAD,
    AttentionFigure,
    GemmFigure,
    LinkFigure,
    Timing,
    TrafficFigure,
)
from hetplan.specs.workload import BYTES_PER_ELEMENT

Floats = npt.NDArray[np.float64]

SMALLEST, LARGEST = 1e-4, 1.5
"""Bounds of fractions in a calibration file."""
MOST_PENALTY = 0.49
LARGEST_HALF_FLOP = 1e12
LONGEST_LATENCY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFit:
    """Constants of products and how far they miss the figures."""

    fraction: float
    half_flop: float
    penalty: float
    error: float
    """Median relative error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds of a message: `latency_s + bytes * s_per_byte`."""

    latency_s: float
    s_per_byte: float
    error: float
    """Median relative error."""


def fit_gemms(figures: Sequence[GemmFigure], peaks: Mapping[str, float], memory_bytes_per_s: float) -> GemmFit:
    """Return the constants of products; `peaks` are nominal, by precision."""
    measured_s = np.array([figure.timing.seconds for figure in figures])
    flop = np.array([figure.flop for figure in figures])
    peak = np.array([peaks[figure.precision] for figure in figures])
    steps = np.array([float(misalignment_o((f.rows, f.inputs, f.outputs))) for f in figures])
    moved = np.array([_moved(figure) for figure in figures])
    weights = np.array([_trust(figure.timing) for figure in figures])
    best = float(np.max(flop / (peak * measured_s)))

    def predicted(unknowns: Floats) -> Floats:
        fraction, half, penalty = math.exp(unknowns[0]), math.exp(unknowns[1]), unknowns[2]
        arithmetic = (flop + half) / (peak * fraction * (1.0 - penalty * steps))
        return np.maximum(arithmetic, moved / memory_bytes_per_s)

    def misses(unknowns: Floats) -> Floats:
        return np.asarray(weights * np.log(predicted(unknowns) / measured_s))

    found = least_squares(
        misses,
        x0=np.array([math.log(_clipped(best)), math.log(max(1e5, float(flop.min()) / 10)), 0.05]),
        bounds=(
            [math.log(SMALLEST), 0.0, 0.0],
            [math.log(LARGEST), math.log(LARGEST_HALF_FLOP), MOST_PENALTY],
        ),
        loss="soft_l1",
        f_scale=0.1,
    )
    return GemmFit(
        fraction=math.exp(found.x[0]),
        half_flop=math.exp(found.x[1]),
        penalty=float(found.x[2]) if steps.any() else 0.0,
        error=float(np.median(np.abs(predicted(found.x) / measured_s - 1.0))),
    )


def _trust(timing: Timing) -> float:
    """Weigh a figure by how well its repetitions agree."""
    return min(1.0, STEADY_SPREAD / max(timing.spread, 1e-9))


def _moved(figure: GemmFigure) -> float:
    element = BYTES_PER_ELEMENT[figure.precision]
    return float(element) * (
        figure.rows * figure.inputs + figure.rows * figure.outputs + figure.inputs * figure.outputs
    )


def attention_fraction(figures: Sequence[AttentionFigure], peaks: Mapping[str, float], half_flop: float) -> float:
    """Return the fraction of the nominal peak that attention reaches, forward and backward together."""
    shares = []
    for figure in figures:
        work = figure.forward_flop + half_flop
        work *= FLASH_BACKWARD_FACTOR if figure.way == "backward" else 1.0
        shares.append(work / (peaks[figure.precision] * figure.timing.seconds))
    return _clipped(geometric_mean(shares))


def traffic_rate(figures: Iterable[TrafficFigure]) -> float:
    """Return the bytes a second of several kinds of elementwise work."""
    return geometric_mean([figure.num_bytes / figure.timing.seconds for figure in figures])


def fit_sends(figures: Sequence[LinkFigure]) -> Line:
    """Return the line of transfers."""
    return _line([(float(f.num_bytes), 1.0, f.timing) for f in figures])


def fit_all_reduces(figures: Sequence[LinkFigure]) -> Line:
    """Return latency and rate of one step of a ring; sets of ranks of several sizes may be mixed."""
    rows = []
    for figure in figures:
        n = len(figure.ranks)
        rows.append((2.0 * (n - 1) / n * figure.num_bytes, 2.0 * (n - 1), figure.timing))
    return _line(rows)


def _line(rows: Sequence[tuple[float, float, Timing]]) -> Line:
    """Fit seconds to `steps * latency + bytes * s_per_byte` from rows of (bytes, steps, timing)."""
    moved, steps = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    measured_s = np.array([row[2].seconds for row in rows])
    weights = np.array([_trust(row[2]) for row in rows])
    fastest = float(np.min(measured_s / moved))

    def predicted(unknowns: Floats) -> Floats:
        return np.asarray(np.exp(unknowns[0]) * steps + np.exp(unknowns[1]) * moved)

    def misses(unknowns: Floats) -> Floats:
        return np.asarray(weights * np.log(predicted(unknowns) / measured_s))

    found = least_squares(
        misses,
        x0=np.array([math.log(float(np.min(measured_s / steps))), math.log(fastest)]),
        bounds=([math.log(1e-9), math.log(1e-15)], [math.log(LONGEST_LATENCY_S), math.log(1.0)]),
        loss="soft_l1",
        f_scale=0.1,
    )
    return Line(
        latency_s=float(np.exp(found.x[0])),
        s_per_byte=float(np.exp(found.x[1])),
        error=float(np.median(np.abs(predicted(found.x) / measured_s - 1.0))),
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Return the mean of positive numbers that treats halves and doubles alike."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _clipped(fraction: float) -> float:
    return min(LARGEST, max(SMALLEST, fraction))
