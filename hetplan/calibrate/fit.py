"""Constants from observed step times: regularised robust least squares.

Minimised over offsets `x` (see `parameters`):

    sum_i rho((log T_i(x) - log observed_i) / noise)  +  sum_k ((x_k - start_k) / width_k) ** 2

with `rho` Huber-like (soft L1), so that single rows that disagree do not bend everything, and noise 4 % (published
runs repeat within about 5 %). The second sum is the prior: few rows move few constants. scipy's trust-region
methods solve it within bounds, in turns; the Jacobian is by forward differences, taken anew for every turn but the
first, which uses the one at no offset at all, and kept while `x` stays near.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from hetplan.calibrate.express import Setup
from hetplan.calibrate.parameters import Parameter, blocks, calibration_of, limits, widths
from hetplan.calibrate.predict import step_s
from hetplan.costs.records import Floats
from hetplan.specs.calibration import Calibration

NOISE = 0.04
"""Relative scatter of a measured step time at which a row is taken at its word."""
METHODS: tuple[tuple[Literal["dogbox", "trf"], float], ...] = (("trf", 0.02), ("dogbox", 0.0))
"""Solvers in turn, and how far from its bounds each starts: an interior method, then one that sits at bounds."""
LEAST_GAIN = 0.02
"""Part of the cost a turn must take off for another to follow."""
FAR = 3.0
"""Offset, in prior widths, by which a constant is tried to see whether it matters to a row at all."""
Entries = tuple[tuple[str, Parameter], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One configuration and how long its step took."""

    setup: Setup
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Constants of one device and software stack."""

    entries: Entries
    offsets: Floats
    spread: Floats
    """Standard deviation of each offset, from the curvature at the optimum."""
    errors: Floats
    """log(predicted / observed) of the rows it was fitted on."""

    def calibration(self, setup: Setup) -> Calibration:
        """Return the calibration for a configuration's cluster."""
        return calibration_of(setup.cluster, self.entries, self.offsets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How carefully a fit looks."""

    most_turns: int = 4
    most_steps: int = 15
    keep_jacobian: float = 1.0
    """Largest move, in prior widths, at which a Jacobian is still used."""


class Predictions:
    """Step times of observations at offsets; remembers what was asked (folds share their first steps)."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], float] = {}
        self._matters: dict[tuple[int, int], tuple[int, ...]] = {}
        self._held: list[Observation] = []

    def slopes(self, observation: Observation, entries: Entries, offsets: Floats) -> Floats:
        """Return the derivative of `log_s`, by forward differences over the constants that matter."""
        base = self.log_s(observation, entries, offsets)
        slopes = np.zeros(len(entries))
        for k in self._mattering(observation, entries):
            beside = offsets.copy()
            beside[k] += entries[k][1].step
            slopes[k] = (self.log_s(observation, entries, beside) - base) / entries[k][1].step
        return slopes

    def _mattering(self, observation: Observation, entries: Entries) -> tuple[int, ...]:
        key = (id(observation), len(entries))
        if key not in self._matters:
            zero = np.zeros(len(entries))
            base = self.log_s(observation, entries, zero)
            found = []
            for k, (_, entry) in enumerate(entries):
                far = zero.copy()
                for side in (-FAR, FAR):
                    far[k] = side * entry.width
                    if self.log_s(observation, entries, far) != base:
                        found.append(k)
                        break
            self._matters[key] = tuple(found)
            self._held.append(observation)
        return self._matters[key]

    def log_s(self, observation: Observation, entries: Entries, offsets: Floats) -> float:
        """Return the logarithm of the predicted seconds."""
        key = (id(observation), offsets.tobytes())
        if key not in self._known:
            calibration = calibration_of(observation.setup.cluster, entries, offsets)
            self._known[key] = math.log(step_s(observation.setup, calibration))
        return self._known[key]


def fit(
    observations: Sequence[Observation],
    devices: Sequence[str],
    start: Floats,
    predictions: Predictions,
    effort: Effort = Effort(),
) -> Fitted:
    """Return the constants that explain `observations`, starting from (and drawn to) `start`."""
    entries = blocks(devices)
    problem = _Problem(tuple(observations), entries, start, predictions, effort.keep_jacobian)
    low, high = limits(observations[0].setup.cluster, entries)
    best = np.clip(start, low, high)
    cost = np.inf
    for turn in range(effort.most_turns):
        method, inside = METHODS[turn % len(METHODS)]
        if turn:
            problem.take(best)
        found = least_squares(
            problem.residuals,
            np.clip(best, low + inside * (high - low), high - inside * (high - low)),
            bounds=(low, high),
            jac=problem.jacobian,
            x_scale=widths(entries),
            loss=problem.loss,  # type: ignore[arg-type]  # scipy's stubs ask for another array type
            method=method,
            max_nfev=effort.most_steps,
            xtol=1e-3,
            ftol=1e-4,
        )
        gained = found.cost < cost * (1.0 - LEAST_GAIN)
        if found.cost < cost:
            best, cost = np.asarray(found.x, dtype=np.float64), float(found.cost)
        if turn and not gained:
            break
    best = np.where(problem.told(), best, np.clip(start, low, high))
    jacobian = problem.jacobian(best)
    spread = np.sqrt(np.diag(np.linalg.pinv(jacobian.T @ jacobian)))
    return Fitted(entries=entries, offsets=best, spread=spread, errors=problem.errors(best))


class _Problem:
    """Residuals and Jacobian of one fit."""

    def __init__(
        self,
        observations: tuple[Observation, ...],
        entries: Entries,
        start: Floats,
        predictions: Predictions,
        keep: float,
    ) -> None:
        self._observations = observations
        self._entries = entries
        self._start = start
        self._widths = widths(entries)
        self._predictions = predictions
        self._observed = np.log([observation.step_s for observation in observations])
        self._keep = keep
        self.take(np.zeros(len(entries)))

    def told(self) -> npt.NDArray[np.bool_]:
        """Return which constants some row says something about."""
        return np.asarray(np.any(self._slopes != 0.0, axis=0))

    def take(self, offsets: Floats) -> None:
        """Take the Jacobian anew."""
        self._taken_at = offsets.copy()
        rows = [self._predictions.slopes(row, self._entries, offsets) for row in self._observations]
        self._slopes = np.array(rows).reshape(len(self._observations), len(self._entries))

    def errors(self, offsets: Floats) -> Floats:
        """Return log(predicted / observed) of every row."""
        logs = [self._predictions.log_s(row, self._entries, offsets) for row in self._observations]
        return np.array(logs) - self._observed

    def residuals(self, offsets: Floats) -> Floats:
        """Return scaled errors, then scaled distances from the start."""
        return np.concatenate([self.errors(offsets) / NOISE, (offsets - self._start) / self._widths])

    def jacobian(self, offsets: Floats) -> Floats:
        """Return the derivative of `residuals`."""
        if np.max(np.abs(offsets - self._taken_at) / self._widths) > self._keep:
            self.take(offsets)
        return np.concatenate([self._slopes / NOISE, np.diag(1.0 / self._widths)])

    def loss(self, squares: Floats) -> npt.NDArray[np.float64]:
        """Return soft L1 for rows and plain squares for the prior, with first and second derivatives."""
        count = len(self._observations)
        rho = np.empty((3, len(squares)))
        rho[0], rho[1], rho[2] = squares, 1.0, 0.0
        t = 1.0 + squares[:count]
        rho[0, :count], rho[1, :count], rho[2, :count] = 2 * (np.sqrt(t) - 1), t**-0.5, -0.5 * t**-1.5
        return rho
