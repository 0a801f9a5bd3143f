"""A line between two sites in user space: delay, rate and a queue, for kernels without netem.

    python relay.py PID PID RATE DELAY

makes a tap device `line` in the network spaces of two processes and carries frames between them. Each direction is a
line of its own: a frame leaves when the one before it is through, `bytes / rate` after it began, and arrives `delay`
later; frames that would wait more than a quarter of a second are dropped.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from contextlib import suppress

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
LARGEST_FRAME = 65536
LONGEST_QUEUE_S = 0.25
FRAMES_AT_ONCE = 64


class Direction:
    """Frames on their way from one tap to the other."""

    def __init__(self, source: int, target: int, rate_bytes_per_s: float, delay_s: float) -> None:
        self.source, self._target = source, target
        self._rate, self._delay = rate_bytes_per_s, delay_s
        self._free_s = 0.0
        self._flying: list[tuple[float, int, bytes]] = []
        self._count = 0

    def take(self, now_s: float) -> None:
        """Read the frames that have come."""
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(self.source, LARGEST_FRAME)
            except BlockingIOError:
                return
            start_s = max(now_s, self._free_s)
            if start_s - now_s > LONGEST_QUEUE_S:
                continue
            self._free_s = start_s + len(frame) / self._rate
            self._count += 1
            heapq.heappush(self._flying, (self._free_s + self._delay, self._count, frame))

    def deliver(self, now_s: float) -> None:
        """Write the frames that are due."""
        while self._flying and self._flying[0][0] <= now_s:
            _, _, frame = heapq.heappop(self._flying)
            try:
                os.write(self._target, frame)
            except OSError:
                continue

    def due_s(self) -> float | None:
        """When the next frame arrives."""
        return self._flying[0][0] if self._flying else None


def open_tap(pid: int) -> int:
    """Return a tap device called `line` in the network space of a process."""
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if _LIBC.setns(space, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(space)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"line", _IFF_TAP | _IFF_NO_PI))
    return tap


def main(words: list[str]) -> None:
    first, second = (open_tap(int(pid)) for pid in words[:2])
    rate, delay_s = float(words[2]), float(words[3])
    directions = {first: Direction(first, second, rate, delay_s), second: Direction(second, first, rate, delay_s)}
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    print("ready", flush=True)
    while True:
        due = [at for direction in directions.values() if (at := direction.due_s()) is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select(list(directions), [], [], wait_s)
        now_s = time.monotonic()
        for tap in ready:
            directions[tap].take(now_s)
        for direction in directions.values():
            direction.deliver(time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1:])
