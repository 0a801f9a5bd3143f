"""What no assignment can beat.

For each module apart, with speeds `v` and loads `w` sorted from large to small:

- *work*: `sum(w) / sum(v)`;
- *crowding*: of the `k B + 1` largest samples some bin of the `B` holds `k + 1`, and its sum is at least that of the
  `k + 1` smallest of them; it runs at most at `max(v)` (`k = 0`: the largest sample alone).

The same holds for any weighted mean of the modules whose weights sum to 1, because the largest module is at least the
mean; where all bins run equally fast a few of these are tried as well, for they bind when samples are heavy in
different modules.
"""

from __future__ import annotations

import numpy as np

from hetplan.balance.problem import Floats, Problem

MIXES = (0.25, 0.5, 0.75)
"""Weights of the first of two modules in the means tried."""


def lower_bound(problem: Problem) -> float:
    """Return seconds that the largest load of any assignment reaches at least."""
    modules = problem.loads_sm.shape[1]
    bounds = [_scalar_bound(problem.loads_sm[:, m], problem.speeds_bm[:, m]) for m in range(modules)]
    if np.ptp(problem.speeds_bm) == 0:
        speed_b = problem.speeds_bm[:, 0]
        for first in range(modules):
            for second in range(first + 1, modules):
                pair_sm = problem.loads_sm[:, [first, second]]
                bounds += [_scalar_bound(pair_sm @ np.array([mix, 1 - mix]), speed_b) for mix in MIXES]
    return max(bounds)


def _scalar_bound(load_s: Floats, speed_b: Floats) -> float:
    work = float(load_s.sum() / speed_b.sum())
    ordered = np.sort(load_s)[::-1]
    edges = np.concatenate([[0.0], np.cumsum(ordered)])
    fastest = float(speed_b.max())
    num_bins = len(speed_b)
    crowded = 0.0
    for k in range((len(ordered) - 1) // num_bins + 1):
        end = k * num_bins + 1
        crowded = max(crowded, float(edges[end] - edges[end - k - 1]) / fastest)
    return max(work, crowded)
