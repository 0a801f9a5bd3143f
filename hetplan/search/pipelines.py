"""When many 1F1B pipelines of equal length end: the exact critical path of `plan.timing`, side by side.

On equal stages (one unit forward, one backward) action F(s, j) starts at unit s + j while rank s runs ahead and at
s + 2 j after, B(s, j) at 2 p - 1 - s + 2 j. These times respect every dependency whatever the real durations are, and
actions of one unit belong to different ranks: so units are waves, and each wave is a handful of array operations over
all its ranks and all pipelines.

Legend: N pipelines, P stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetplan.costs.records import Floats
from hetplan.plan.program import in_flight_1f1b
from hetplan.search.patterns import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """The forward and backward passes of one unit: stages and microbatches."""

    forward: tuple[Ints, Ints]
    backward: tuple[Ints, Ints]


@lru_cache(maxsize=64)
def waves(num_stages: int, num_microbatches: int) -> tuple[Wave, ...]:
    """Return the waves of a 1F1B pipeline, in order."""
    stage, j = (grid.ravel() for grid in np.mgrid[0:num_stages, 0:num_microbatches])
    ahead = np.array([in_flight_1f1b(num_stages, s, num_microbatches) for s in range(num_stages)])[stage]
    forward_at = np.where(j < ahead, stage + j, stage + 2 * j)
    backward_at = 2 * num_stages - 1 - stage + 2 * j
    found = []
    for unit in range(int(backward_at.max()) + 1):
        f, b = forward_at == unit, backward_at == unit
        found.append(Wave(forward=(stage[f], j[f]), backward=(stage[b], j[b])))
    return tuple(found)


def ends_s(forward_s: Floats, backward_s: Floats, p2p_s: Floats, num_microbatches: int) -> Floats:
    """Return when each rank's last backward pass ends, (N, P).

    `forward_s`, `backward_s`: seconds of one microbatch, (N, P). `p2p_s`: one way, (N, P - 1).
    """
    num, p = forward_s.shape
    forward, backward, p2p = forward_s.T, backward_s.T, p2p_s.T
    free = np.zeros((p, num))
    line_up, line_down = np.zeros((p, num)), np.zeros((p, num))
    came_up = np.zeros((p, num_microbatches, num))
    came_down = np.zeros((p, num_microbatches, num))
    for wave in waves(p, num_microbatches):
        s, j = wave.forward
        if len(s):
            end = np.maximum(free[s], came_up[s, j]) + forward[s]
            free[s] = end
            on = s < p - 1
            out, sent = s[on], end[on]
            arrival = np.maximum(line_up[out], sent) + p2p[out]
            line_up[out] = arrival
            came_up[out + 1, j[on]] = arrival
        s, j = wave.backward
        if len(s):
            end = np.maximum(free[s], came_down[s, j]) + backward[s]
            free[s] = end
            on = s > 0
            out, sent = s[on], end[on]
            arrival = np.maximum(line_down[out], sent) + p2p[out - 1]
            line_down[out] = arrival
            came_down[out - 1, j[on]] = arrival
    return np.asarray(free.T)
