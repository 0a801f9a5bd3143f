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
    """The passes of one unit, forward ones first, as rows of the arrays of `ends_s`.

    Forward passes and what they send lie in rows 0 to P - 1, backward passes in rows P to 2 P - 1.
    """

    stage: Ints
    line: Ints
    """Row of each pass."""
    came: Ints
    """Row and microbatch of what each pass waits for."""
    sends: Ints
    """Which of the passes send something on,"""
    sent_line: Ints
    """on which line,"""
    sent: Ints
    """and row and microbatch of what waits for it."""


@lru_cache(maxsize=64)
def waves(num_stages: int, num_microbatches: int) -> tuple[Wave, ...]:
    """Return the waves of a 1F1B pipeline, in order."""
    stage, j = (grid.ravel() for grid in np.mgrid[0:num_stages, 0:num_microbatches])
    ahead = np.array([in_flight_1f1b(num_stages, s, num_microbatches) for s in range(num_stages)])[stage]
    forward_at = np.where(j < ahead, stage + j, stage + 2 * j)
    backward_at = 2 * num_stages - 1 - stage + 2 * j
    unit = np.concatenate([forward_at, backward_at])
    line = np.concatenate([stage, num_stages + stage])
    came = line * num_microbatches + np.concatenate([j, j])
    sends = np.concatenate([stage < num_stages - 1, stage > 0])
    sent = came + np.repeat([num_microbatches, -num_microbatches], len(stage))
    order = np.argsort(unit, kind="stable")
    found = []
    for rows in np.split(order, np.flatnonzero(np.diff(unit[order])) + 1):
        on = rows[sends[rows]]
        found.append(
            Wave(
                stage=line[rows] % num_stages,
                line=line[rows],
                came=came[rows],
                sends=np.flatnonzero(sends[rows]),
                sent_line=line[on],
                sent=sent[on],
            )
        )
    return tuple(found)


def ends_s(forward_s: Floats, backward_s: Floats, p2p_s: Floats, num_microbatches: int) -> Floats:
    """Return when each rank's last backward pass ends, (N, P).

    `forward_s`, `backward_s`: seconds of one microbatch, (N, P). `p2p_s`: one way, (N, P - 1).
    """
    num, p = forward_s.shape
    nothing = np.zeros((1, num))
    duration = np.concatenate([forward_s.T, backward_s.T])
    p2p = np.concatenate([p2p_s.T, nothing, nothing, p2p_s.T])
    free, lines = np.zeros((p, num)), np.zeros((2 * p, num))
    came = np.zeros((2 * p * num_microbatches, num))
    for wave in waves(p, num_microbatches):
        end = np.maximum(free[wave.stage], came[wave.came]) + duration[wave.line]
        free[wave.stage] = end
        if len(wave.sends):
            arrival = np.maximum(lines[wave.sent_line], end[wave.sends]) + p2p[wave.sent_line]
            lines[wave.sent_line] = arrival
            came[wave.sent] = arrival
    return np.asarray(free.T)
