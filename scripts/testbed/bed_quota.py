"""CPU control groups for `throttle: quota`.

Each rank may use `speed` of a core in every period of 10 ms (shorter ones under-deliver where the scheduler's tick is
4 ms), and has high shares, so that other work cannot eat what it is due. Groups are named after this process and
removed at the end; those of a process that is gone are removed by the next.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from bed_kernel import UnsupportedError
from bed_spec import Bed

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
PREFIX = "hetplan-testbed-"
PERIOD_US = 10_000
SHARES, WEIGHT = 200_000, 10_000


class Quotas:
    """Control groups of one bed."""

    def __init__(self, bed: Bed) -> None:
        self._version = 1 if (V1 / "cpu.shares").exists() else 2 if (V2 / "cgroup.controllers").exists() else 0
        self._root = V1 if self._version == 1 else V2
        self._groups: dict[int, Path] = {}
        self._bed = bed
        try:
            self._remove_stale()
            self._make()
        except OSError as error:
            self.close()
            if bed.throttle == "quota":
                raise UnsupportedError(
                    f"no CPU control groups: {error.strerror or error}; use throttle: pace"
                ) from None

    def _make(self) -> None:
        if not self._version:
            raise OSError("there is no cpu controller")
        for number, (_, _, group) in enumerate(self._bed.ranks()):
            place = self._root / f"{PREFIX}{os.getpid()}-{number}"
            place.mkdir()
            self._groups[number] = place
            quota_us = int(group.speed * PERIOD_US)
            if self._version == 1:
                (place / "cpu.shares").write_text(str(SHARES))
                (place / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (place / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (place / "cpu.weight").write_text(str(WEIGHT))
                (place / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")

    def join(self, rank: int) -> None:
        """Put this process into a rank's control group (called in the child, before it starts its program)."""
        if rank in self._groups:
            with suppress(OSError):
                (self._groups[rank] / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        """Remove the groups; what was in them has ended, or is about to."""
        for place in self._groups.values():
            _remove(place)
        self._groups.clear()

    def _remove_stale(self) -> None:
        for place in self._root.glob(f"{PREFIX}*"):
            owner = place.name.removeprefix(PREFIX).split("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                _remove(place)


def _remove(place: Path) -> None:
    for _ in range(50):
        with suppress(OSError):
            place.rmdir()
        if not place.exists():
            return
        time.sleep(0.02)
