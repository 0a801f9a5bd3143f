"""Measurements in order, with how long each should take, so that progress can say what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One measurement."""

    name: str
    expected_s: float
    measure: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run of measurements stands."""

    name: str
    done: float
    """Part of the work done, 0 to 1."""
    elapsed_s: float

    @property
    def left_s(self) -> float | None:
        """Seconds left at the pace so far; None before anything is done."""
        return self.elapsed_s * (1.0 / self.done - 1.0) if self.done > 0 else None


def work_through(items: Iterable[Item], tell: Callable[[Progress], None]) -> float:
    """Make all measurements and return the seconds they took."""
    listed = list(items)
    total_s = sum(item.expected_s for item in listed) or 1.0
    start_s, done_s = time.perf_counter(), 0.0
    for item in listed:
        tell(Progress(name=item.name, done=done_s / total_s, elapsed_s=time.perf_counter() - start_s))
        item.measure()
        done_s += item.expected_s
    elapsed_s = time.perf_counter() - start_s
    tell(Progress(name="done", done=1.0, elapsed_s=elapsed_s))
    return elapsed_s
