"""Constants from observed step times: regularised robust least squares.

Minimised over offsets `x` (see `parameters`):

    sum_i rho((log T_i(x) - log observed_i) / noise)  +  sum_k ((x_k - start_k) / width_k) ** 2

with `rho` soft L1, so that single rows that disagree do not bend everything, and noise 4 % (published runs repeat
within about 5 %). The second sum is the prior: few rows move few constants.

A prediction costs much more than linear algebra, so each step solves the problem with `log T` linear around the point
at hand (scipy, within the bounds and a trust region), asks for the true times there once, and keeps the better point;
the slopes then take up what the step has shown (Broyden 1965), and may be taken anew where a descent has ended.
The first slopes are those at no offset at all, which every fit that holds a row shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from hetplan.calibrate.express import Setup
from hetplan.calibrate.parameters import Parameter, blocks, calibration_of, limits, matters, widths
from hetplan.calibrate.predict import Predictor
from hetplan.costs.records import Floats
from hetplan.specs.calibration import Calibration

NOISE = 0.04
"""Relative scatter of a measured step time at which a row is taken at its word."""
LEAST_GAIN = 0.01
"""Part of the cost a step must take off for the descent to go on."""
FIRST_REGION, SMALLEST_REGION = 4.0, 0.1
"""Largest move of a constant in one step, in prior widths: at first, and where a descent gives up."""
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

    descents: int = 1
    """The slopes are taken anew before each but the first."""
    most_steps: int = 8
    """Of one descent."""
    freedom: float = 1.0
    """Factor on the prior's widths: how far constants may go from where they start."""


class Predictions:
    """Logarithms of step times and their slopes; remembers pricers, and slopes at no offset (fits share them)."""

    def __init__(self) -> None:
        self._pricers: dict[int, Predictor] = {}
        self._slopes: dict[tuple[int, int], tuple[float, Floats]] = {}
        self._held: list[Observation] = []

    def log_s(self, observation: Observation, entries: Entries, offsets: Floats) -> float:
        """Return the logarithm of the predicted seconds."""
        return self._logs(observation, entries, [offsets])[0]

    def slopes(self, observation: Observation, entries: Entries, offsets: Floats) -> Floats:
        """Return the derivative of `log_s`, by forward differences over the constants that can matter to the row."""
        key = (id(observation), len(entries))
        at_zero = not offsets.any()
        if at_zero and key in self._slopes:
            return self._slopes[key][1]
        asked = [k for k, (_, entry) in enumerate(entries) if matters(entry, observation.setup)]
        points = [offsets]
        for k in asked:
            beside = offsets.copy()
            beside[k] += entries[k][1].step
            points.append(beside)
        logs = self._logs(observation, entries, points)
        slopes = np.zeros(len(entries))
        slopes[asked] = [(value - logs[0]) / entries[k][1].step for k, value in zip(asked, logs[1:], strict=True)]
        if at_zero:
            self._slopes[key] = (logs[0], slopes)
        return slopes

    def _logs(self, observation: Observation, entries: Entries, points: Sequence[Floats]) -> list[float]:
        pricer = self._pricers.get(id(observation))
        if pricer is None:
            pricer = self._pricers[id(observation)] = Predictor(observation.setup)
            self._held.append(observation)
        cluster = observation.setup.cluster
        return [math.log(seconds) for seconds in pricer.steps_s([calibration_of(cluster, entries, p) for p in points])]


def fit(
    observations: Sequence[Observation],
    devices: Sequence[str],
    start: Floats,
    predictions: Predictions,
    effort: Effort = Effort(),
) -> Fitted:
    """Return the constants that explain `observations`, starting from (and drawn to) `start`."""
    entries = blocks(devices)
    problem = _Problem(tuple(observations), entries, start, predictions, effort.freedom)
    slopes = problem.slopes(np.zeros(len(entries)))
    x, errors = problem.start, problem.errors(problem.start)
    told = np.any(slopes != 0.0, axis=0)
    for descent in range(effort.descents):
        if descent:
            slopes = problem.slopes(x)
            told |= np.any(slopes != 0.0, axis=0)
        x, errors, slopes = problem.descend(x, errors, slopes, effort.most_steps)
    if not told.all():
        x = np.where(told, x, problem.start)
        errors = problem.errors(x)
    curvature = np.concatenate([slopes / NOISE, np.diag(1.0 / (effort.freedom * widths(entries)))])
    spread = np.sqrt(np.diag(np.linalg.pinv(curvature.T @ curvature)))
    return Fitted(entries=entries, offsets=x, spread=spread, errors=errors)


class _Problem:
    """Residuals, slopes and steps of one fit."""

    def __init__(
        self,
        observations: tuple[Observation, ...],
        entries: Entries,
        start: Floats,
        predictions: Predictions,
        freedom: float = 1.0,
    ) -> None:
        self._observations = observations
        self._entries = entries
        self._widths = freedom * widths(entries)
        self._low, self._high = limits(observations[0].setup.cluster, entries)
        self.start = np.clip(start, self._low, self._high)
        self._predictions = predictions
        self._observed = np.log([observation.step_s for observation in observations])

    def slopes(self, offsets: Floats) -> Floats:
        """Return the derivative of `errors`, shape (rows, constants)."""
        rows = [self._predictions.slopes(row, self._entries, offsets) for row in self._observations]
        return np.array(rows).reshape(len(self._observations), len(self._entries))

    def errors(self, offsets: Floats) -> Floats:
        """Return log(predicted / observed) of every row."""
        logs = [self._predictions.log_s(row, self._entries, offsets) for row in self._observations]
        return np.array(logs) - self._observed

    def cost(self, offsets: Floats, errors: Floats) -> float:
        """Return what is minimised."""
        squares = (errors / NOISE) ** 2
        prior = ((offsets - self.start) / self._widths) ** 2
        return float(np.sum(2 * (np.sqrt(1 + squares) - 1)) + np.sum(prior))

    def descend(self, x: Floats, errors: Floats, slopes: Floats, most_steps: int) -> tuple[Floats, Floats, Floats]:
        """Return the best point found, its errors, and the slopes as the steps have corrected them."""
        cost, region = self.cost(x, errors), FIRST_REGION
        for _ in range(most_steps):
            tried = self._solved(x, errors, slopes, region)
            move = tried - x
            if not move.any():
                break
            found = self.errors(tried)
            scaled = move / self._widths
            missed = found - errors - slopes @ move
            slopes = slopes + np.outer(missed, scaled / self._widths) * (slopes != 0.0) / float(scaled @ scaled)
            new = self.cost(tried, found)
            if new >= cost:
                region *= 0.3
                if region < SMALLEST_REGION:
                    break
                continue
            gained = 1.0 - new / cost if cost else 0.0
            x, errors, cost = tried, found, new
            if gained < LEAST_GAIN:
                break
        return x, errors, slopes

    def _solved(self, x: Floats, errors: Floats, slopes: Floats, region: float) -> Floats:
        """Return the optimum with errors linear around `x`, no constant moving more than `region` widths."""
        low = np.maximum(self._low, x - region * self._widths)
        high = np.minimum(self._high, x + region * self._widths)
        free = high - low > 1e-12
        rows = np.concatenate([slopes[:, free] / NOISE, np.diag(1.0 / self._widths)[free][:, free]])
        here = np.concatenate([errors / NOISE, ((x - self.start) / self._widths)[free]])

        def residuals(move: Floats) -> Floats:
            return np.asarray(here + rows @ move)

        def jacobian(move: Floats) -> Floats:
            return rows

        found = least_squares(
            residuals,
            np.clip(np.zeros(int(free.sum())), (low - x)[free], (high - x)[free]),
            bounds=((low - x)[free] - 1e-12, (high - x)[free] + 1e-12),
            jac=jacobian,
            x_scale=self._widths[free],
            loss=self._loss,  # type: ignore[arg-type]  # scipy's stubs ask for another array type
            method="trf",
            max_nfev=60,
        )
        tried = x.copy()
        tried[free] = np.clip(x[free] + found.x, low[free], high[free])
        return tried

    def _loss(self, squares: Floats) -> npt.NDArray[np.float64]:
        """Return soft L1 for rows and plain squares for the prior, with first and second derivatives."""
        count = len(self._observations)
        rho = np.empty((3, len(squares)))
        rho[0], rho[1], rho[2] = squares, 1.0, 0.0
        t = 1.0 + squares[:count]
        rho[0, :count], rho[1, :count], rho[2, :count] = 2 * (np.sqrt(t) - 1), t**-0.5, -0.5 * t**-1.5
        return rho
