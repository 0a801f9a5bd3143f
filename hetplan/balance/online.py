"""A cost model of samples that corrects itself from measured step times.

A bin that holds the features `f` (counts, tokens, squared tokens, as sums over its samples) on module `m` takes
`theta[m] @ f` seconds. `theta` starts from a prediction and follows the measurements by recursive least squares with
forgetting (Ljung 1999, chapter 11): with gain `k = P f / (lambda + f' P f)`,

    theta += k (measured - theta @ f),   P = (P - k f' P) / lambda

Features are scaled by the first predictions, so one forgetting factor fits all; negative coefficients are cut to zero
when costs are asked for, since no sample makes a step shorter. A measurement that is more than `outlier` times the
prediction, or that times less, changes nothing (a checkpoint, a page fault, another job); so many of these in a row
are believed, for then the machine has changed, and the model is free to follow at once.
"""

from __future__ import annotations

import numpy as np

from hetplan.balance.problem import Floats
from hetplan.errors import UsageError

BELIEVED_AFTER = 8
"""Outliers in a row that are no longer outliers (assumed)."""


class CostModel:
    """Seconds of samples, learned from seconds of bins; one instance a training run."""

    def __init__(self, theta: Floats, *, forgetting: float = 0.98, trust: float = 1.0, outlier: float = 3.0) -> None:
        """Start from `theta`, shape (modules, features); `trust` is the variance granted to it (0: never corrected)."""
        self._theta_mf = np.array(theta, dtype=np.float64)
        if self._theta_mf.ndim != 2 or not 0 < forgetting <= 1 or trust < 0 or outlier <= 1:
            raise UsageError("a cost model needs modules x features, forgetting in (0, 1], trust >= 0 and outlier > 1")
        modules, features = self._theta_mf.shape
        self._scale_f: Floats | None = None
        self._covariance_mff = np.repeat(np.eye(features)[None] * trust, modules, axis=0)
        self._forgetting = forgetting
        self._outlier = outlier
        self._trust = trust
        self._strange_m = np.zeros(modules, dtype=np.int64)
        self.num_observed = 0

    @property
    def theta_mf(self) -> Floats:
        """Seconds a unit of each feature, shape (modules, features); never negative."""
        return np.maximum(self._theta_mf, 0.0)

    def loads(self, features_sf: Floats) -> Floats:
        """Return the seconds of samples on every module, shape (samples, modules)."""
        loads_sm: Floats = np.asarray(features_sf, dtype=np.float64) @ self.theta_mf.T
        return loads_sm

    def observe(self, features_f: Floats, measured_s: Floats) -> None:
        """Correct the model by one bin: the sums of its samples' features, and its seconds on every module.

        A module whose seconds are not known is `nan`.
        """
        sums_f = np.asarray(features_f, dtype=np.float64)
        if self._scale_f is None:
            self._scale_f = np.where(sums_f > 0, sums_f, 1.0)
        for m, seconds in enumerate(np.asarray(measured_s, dtype=np.float64).tolist()):
            if np.isfinite(seconds) and seconds > 0:
                self._correct(m, sums_f, seconds)
        self.num_observed += 1

    def _correct(self, m: int, sums_f: Floats, seconds: float) -> None:
        scale_f = self._scale_f
        if scale_f is None:
            return
        predicted = float(self._theta_mf[m] @ sums_f)
        strange = predicted > 0 and not 1 / self._outlier < seconds / predicted < self._outlier
        self._strange_m[m] = self._strange_m[m] + 1 if strange else 0
        if strange and self._strange_m[m] < BELIEVED_AFTER:
            return
        if strange:
            self._covariance_mff[m] = np.eye(len(sums_f)) * self._trust
        unit_s = seconds if predicted <= 0 else predicted
        x_f = sums_f / scale_f
        covariance_ff = self._covariance_mff[m]
        gain_f = covariance_ff @ x_f / (self._forgetting + x_f @ covariance_ff @ x_f)
        error = (seconds - predicted) / unit_s
        self._theta_mf[m] = self._theta_mf[m] + gain_f * error * unit_s / scale_f
        smaller = (covariance_ff - np.outer(gain_f, x_f @ covariance_ff)) / self._forgetting
        self._covariance_mff[m] = np.minimum(smaller, 1e6) if np.trace(smaller) < 1e6 else covariance_ff
