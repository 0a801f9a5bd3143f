"""How long a piece of work takes: warm-up, repetitions, their median and spread, another round where they disagree.

What counts as a second depends on the device:

* CUDA and ROCm: time between two events on the stream;
* a CPU that computes with one thread: that thread's processor time, which other programs on the machine disturb least;
  a rank slowed to a share `speed` of its core (see `scripts/testbed`) takes `processor time / speed`;
* a CPU with several threads, and anything that waits for other ranks: the wall clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetplan.profiling.records import Timing

WARM_UP = 2
FEWEST, MOST = 5, 200
"""Repetitions of a round."""
ROUNDS = 3
"""Rounds a figure whose repetitions disagree is given."""

Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times work on one device."""

    device: str
    """As torch names it: `cpu`, `cuda:0`."""
    round_s: float
    """What one round may take."""
    speed: float = 1.0
    rounds: int = ROUNDS
    hurry_from_s: float = math.inf
    """On the monotonic clock: from then on each figure gets one round of the fewest repetitions (a busy machine)."""

    def time(self, work: Work) -> Timing:
        """Return what `work` takes on this device alone."""
        return self._time(work, self._one)

    def time_waiting(self, work: Work) -> Timing:
        """Return what `work` takes by the wall clock, waiting included."""
        return self._time(work, self._one_wall)

    def passes(self, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]) -> PassTimings:
        """Return the timings of a forward pass and of the backward pass that follows each."""
        both: list[tuple[Timing, Timing]] = []
        for _ in range(self._num_rounds()):
            pairs = [self._one_pair(forward, backward) for _ in range(WARM_UP)][-1:]
            for _ in range(self._count(sum(pairs[0]))):
                pairs.append(self._one_pair(forward, backward))
            both.append((summary([a for a, _ in pairs[1:]]), summary([b for _, b in pairs[1:]])))
            if both[-1][0].is_steady and both[-1][1].is_steady:
                break
        best = min(both, key=lambda pair: max(pair[0].spread, pair[1].spread))
        return PassTimings(forward=best[0], backward=best[1])

    def _one_pair(
        self, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]
    ) -> tuple[float, float]:
        kept: list[torch.Tensor] = []
        first_s = self._one(lambda: kept.append(forward()))
        return first_s, self._one(lambda: backward(kept[0]))

    def _time(self, work: Work, one: Callable[[Work], float]) -> Timing:
        timings: list[Timing] = []
        for _ in range(self._num_rounds()):
            first_s = min(one(work) for _ in range(WARM_UP))
            timings.append(summary([one(work) for _ in range(self._count(first_s))]))
            if timings[-1].is_steady:
                break
        return min(timings, key=lambda timing: timing.spread)

    def _num_rounds(self) -> int:
        return 1 if time.monotonic() > self.hurry_from_s else self.rounds

    def _count(self, once_s: float) -> int:
        if time.monotonic() > self.hurry_from_s:
            return FEWEST
        return max(FEWEST, min(MOST, math.ceil(self.round_s / max(once_s, 1e-9))))

    def _one(self, work: Work) -> float:
        if self.device != "cpu":
            return _event_s(work)
        if torch.get_num_threads() > 1:
            return self._one_wall(work)
        start_s = time.thread_time()
        work()
        taken_s = time.thread_time() - start_s
        if self.speed < 1.0:
            time.sleep(taken_s * (1.0 / self.speed - 1.0))
        return taken_s / self.speed

    def _one_wall(self, work: Work) -> float:
        start_s = time.perf_counter()
        work()
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimings:
    """A forward pass and its backward pass."""

    forward: Timing
    backward: Timing


def summary(seconds: list[float]) -> Timing:
    """Return median and spread of repetitions."""
    middle = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (middle, middle, middle)
    return Timing(seconds=middle, spread=(high - low) / middle if middle > 0 else 0.0, repeats=len(seconds))


def _event_s(work: Work) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3
