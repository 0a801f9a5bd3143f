"""Transfers and all-reduces by message size, inside hosts, between hosts, and side by side (see `rank_sets`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from hetplan.profiling.rank_sets import LinkSet, Ranked
from hetplan.profiling.ranks import Ranks
from hetplan.profiling.records import LinkFigure, LinkKind, Timing
from hetplan.profiling.stopwatch import Stopwatch, summary

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
QUICK_SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
FEWEST, MOST = 5, 60
LONGEST_S = 4.0
"""Larger messages of a set are left out once one takes a quarter of this."""


def measure_links(ranks: Ranks, chosen: LinkSet, sizes: Sequence[int], watch: Stopwatch) -> tuple[LinkFigure, ...]:
    """Return the figures of one set of transfers, on every rank the same.

    Every rank must call this with the same sets; those in none of them wait.
    """
    groups = [ranks.group(one) for one in chosen.sets]
    mine = next((i for i, one in enumerate(chosen.sets) if ranks.place.rank in one), None)
    figures: list[LinkFigure] = []
    for num_bytes in sizes:
        ranks.meet()
        timing = None
        if mine is not None:
            round_s = watch.round_s if time.monotonic() < watch.hurry_from_s else 0.0
            timing = _measure(ranks, chosen.kind, chosen.sets[mine], groups[mine], (num_bytes, round_s))
        found = ranks.gather(timing)
        for one in chosen.sets:
            figures.append(
                LinkFigure(
                    kind=chosen.kind, ranks=one, num_bytes=num_bytes, timing=found[one[0]], together=len(chosen.sets)
                )
            )
        if max(found[one[0]].seconds for one in chosen.sets) > LONGEST_S / 4:
            break
    return tuple(figures)


def _measure(ranks: Ranks, kind: LinkKind, members: Ranked, group: Any, effort: tuple[int, float]) -> Timing:
    num_bytes, round_s = effort
    buffer = torch.zeros(max(1, num_bytes // 4), device=ranks.device)
    if kind == "send":
        first = ranks.place.rank == members[0]
        peer = members[1] if first else members[0]
        back = torch.empty_like(buffer)
        return _repeat(lambda: _there_and_back(buffer, back, peer, first=first), 0.5, (members, group, round_s))
    return _repeat(lambda: distributed.all_reduce(buffer, group=group), 1.0, (members, group, round_s))


def _repeat(work: Callable[[], object], share: float, setting: tuple[Ranked, Any, float]) -> Timing:
    members, group, round_s = setting
    work()
    once_s = _wall_s(work)
    count = torch.tensor([float(max(FEWEST, min(MOST, math.ceil(round_s / max(once_s, 1e-9)))))])
    distributed.broadcast(count, src=members[0], group=group)
    return summary([share * _wall_s(work) for _ in range(int(count.item()))])


def _there_and_back(buffer: torch.Tensor, back: torch.Tensor, peer: int, *, first: bool) -> None:
    if first:
        distributed.send(buffer, peer)
        distributed.recv(back, peer)
    else:
        distributed.recv(back, peer)
        distributed.send(buffer, peer)


def _wall_s(work: Callable[[], object]) -> float:
    import time

    start_s = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s
