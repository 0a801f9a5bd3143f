"""Signs of life: what every rank last said of itself, and which one is to blame when nothing moves.

A rank notes when it last went over from waiting to working or back, and a thread of it notes that the process runs at
all. When a job stands still, a process whose thread has stopped is to blame (stopped, swapped out, stuck in the
kernel); else one that works and has not come to an end of it; else nobody in particular.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EVERY_S = 0.5
STALE_S = 5.0
"""A process that has shown no life for this long while others have is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank last said, in seconds of one clock."""

    alive_s: float
    changed_s: float
    waits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Who keeps a job from moving, and how."""

    ranks: tuple[int, ...]
    words: str


def blame(signs: Sequence[Sign], now_s: float) -> Blame:
    """Return who keeps a job from moving."""
    newest_s = max(sign.alive_s for sign in signs)
    stale = tuple(rank for rank, sign in enumerate(signs) if newest_s - sign.alive_s > STALE_S)
    if stale:
        oldest_s = min(signs[rank].alive_s for rank in stale)
        return Blame(ranks=stale, words=f"no sign of life for {now_s - oldest_s:.0f} s")
    busy = [rank for rank, sign in enumerate(signs) if not sign.waits]
    if busy:
        slowest = min(busy, key=lambda rank: signs[rank].changed_s)
        words = f"its work has come to no end for {now_s - signs[slowest].changed_s:.0f} s while others wait"
        return Blame(ranks=(slowest,), words=words)
    last_s = max(sign.changed_s for sign in signs)
    everyone = tuple(range(len(signs)))
    return Blame(ranks=everyone, words=f"all wait for each other for {now_s - last_s:.0f} s")


class SharedBeats:
    """Signs of ranks on one machine, in memory they share with the process that started them."""

    def __init__(self, cells: Any, rank: int) -> None:
        self._cells, self._base = cells, 3 * rank

    def report(self, waits: bool) -> None:  # noqa: FBT001 - the one thing it says
        """Note that the rank begins to wait or to work."""
        self._cells[self._base + 1] = time.monotonic()
        self._cells[self._base + 2] = float(waits)

    def start(self, parent: int) -> None:
        """Keep noting that the process runs, in a thread; end it when its parent is gone."""

        def beat() -> None:
            while True:
                self._cells[self._base] = time.monotonic()
                if os.getppid() != parent:
                    os._exit(1)
                time.sleep(EVERY_S)

        self.report(False)
        threading.Thread(target=beat, daemon=True).start()


def shared_signs(cells: Any) -> list[Sign]:
    """Return the signs of all ranks of one machine."""
    return [Sign(alive_s=cells[i], changed_s=cells[i + 1], waits=bool(cells[i + 2])) for i in range(0, len(cells), 3)]


class StoreBeats:
    """Signs of ranks on many machines, in the store they met at; ages are counted by whoever reads them."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._count = self._changes = 0
        self._waits = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def report(self, waits: bool) -> None:  # noqa: FBT001 - the one thing it says
        """Note that the rank begins to wait or to work."""
        self._changes += 1
        self._waits = waits

    def start(self, lost: Callable[[], None]) -> None:
        """Keep telling the store, in a thread, until `stop`; `lost` is called when the store is gone."""

        def beat() -> None:
            while not self._over.is_set():
                self._count += 1
                try:
                    self._store.set(f"hetplan/beat/{self._rank}", json.dumps([self._count, self._changes, self._waits]))
                except RuntimeError:
                    lost()
                    return
                self._over.wait(4 * EVERY_S)

        self._thread = threading.Thread(target=beat, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell no more: a process must not end while a thread of it still uses the store."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(STALE_S)


def stored_signs(store: Any, world_size: int) -> list[Sign]:
    """Return the signs of all ranks, looked at twice: what has not moved in between is old.

    Raises:
        RuntimeError: the store is gone.
    """

    def look() -> list[list[int]]:
        keys = [f"hetplan/beat/{rank}" for rank in range(world_size)]
        return [json.loads(store.get(key)) if store.check([key]) else [0, 0, 0] for key in keys]

    first = look()
    time.sleep(STALE_S + 1.0)
    then, now_s = look(), time.monotonic()
    return [
        Sign(
            alive_s=now_s if after[0] != before[0] else now_s - STALE_S - 1.0,
            changed_s=now_s if after[1] != before[1] else now_s - STALE_S - 1.0,
            waits=bool(after[2]),
        )
        for before, after in zip(first, then, strict=True)
    ]
