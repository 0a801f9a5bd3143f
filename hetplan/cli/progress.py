"""One line on stderr, on a terminal only, that says where a running search stands."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from hetplan.search.records import Progress

EVERY_S = 0.1


class ProgressLine:
    """Redraws itself on each call, at most ten times a second, and wipes itself at the end."""

    def __init__(self, objective: str, *, quiet: bool) -> None:
        self._objective = objective
        self._drawn = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._next_s = 0.0
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()

    def __call__(self, progress: Progress) -> None:
        """Draw where the search stands."""
        now_s = time.monotonic()
        if not self._drawn or now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        text = progress_text(progress, self._objective)[:79]
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = max(self._width, len(text))


def progress_text(progress: Progress, objective: str) -> str:
    """Return phase, best, bound, gap and elapsed time in one line."""
    from hetplan.report.estimates import objective_value
    from hetplan.report.tables import percent

    elapsed = f"{progress.elapsed_s:.1f} s"
    if progress.best is None:
        return f"{progress.phase}: no plan yet, {elapsed}"
    best, bound = (objective_value(value, objective) for value in (progress.best, progress.bound))
    gap = percent(max(0.0, 1.0 - progress.bound / progress.best)) if progress.best > 0 else "-"
    return f"{progress.phase}: best {best}, bound {bound}, gap {gap}, {elapsed}"
