"""How far predictions are from measurements, in percent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import rankdata

from hetplan.costs.records import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of some rows; `mape`, `median`, `p90` and `max` are of |predicted / observed - 1|, all in percent."""

    n: int
    mape: float | None
    median: float | None
    p90: float | None
    max: float | None
    bias: float | None
    """Mean of predicted / observed - 1."""
    spearman: float | None
    """Rank correlation, in percent; None below three rows or without any spread."""

    def document(self) -> dict[str, float | int | None]:
        """Return the fields, rounded for print."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


def score(predicted: Sequence[float], observed: Sequence[float]) -> Score:
    """Return the errors of predictions."""
    if not observed:
        return Score(n=0, mape=None, median=None, p90=None, max=None, bias=None, spearman=None)
    ratio = np.asarray(predicted) / np.asarray(observed) - 1.0
    size = np.abs(ratio) * 100
    return Score(
        n=len(observed),
        mape=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.percentile(size, 90)),
        max=float(size.max()),
        bias=float(ratio.mean() * 100),
        spearman=spearman(np.asarray(predicted), np.asarray(observed)),
    )


def spearman(first: Floats, second: Floats) -> float | None:
    """Return the rank correlation in percent."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1] * 100)
