"""Process groups by the ranks they join, each made once and by all ranks in the same order."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Channel = tuple[str, int, int, int]
"""(F or B, boundary, sender, receiver)."""


class Groups:
    """Process groups of a job. `make` must be called by every rank with the same sets in the same order."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._made: dict[tuple[int, ...], Any] = {}
        self.channels: dict[Channel, Any] = {}
        """Groups of two for messages; empty where tags tell messages apart (gloo)."""

    def make(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Make the groups that do not exist yet; a set of one rank needs none."""
        for ranks in sets:
            if len(ranks) > 1 and ranks not in self._made:
                self._made[ranks] = dist.new_group(list(ranks), timeout=self._timeout)

    def make_channels(self, keys: Iterable[Channel]) -> None:
        """Make a group for each edge that does not have one yet, in the same order on every rank.

        NCCL has no tags and runs the messages of one communicator one after the other: with a communicator for each
        direction of each boundary, receives posted ahead never stand in the way of sends.
        """
        for key in keys:
            if key not in self.channels:
                self.channels[key] = dist.new_group([key[2], key[3]], timeout=self._timeout)

    def of(self, ranks: tuple[int, ...]) -> Any:
        """Return the group of some ranks; None for one alone."""
        return self._made[ranks] if len(ranks) > 1 else None
