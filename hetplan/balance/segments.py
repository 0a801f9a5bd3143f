"""Per-batch segments: every rank holds a slice of every module, and the order of work is made for the batch at hand.

With a static cut, ranks that hold an encoder idle through batches of text, the others through batches of images. Here
module `m` is cut into `num_ranks * slices` segments, segment `i` on rank `i % num_ranks` (as virtual stages are), so
every rank has its share of every microbatch whatever its mix. What remains is the order: microbatch `j` runs the
segments of module 0 forward, then those of module 1 .., then all of it backward in reverse; a rank runs one segment
at a time and takes, of what is ready, what a rule puts first: the best rule feeds the rank that will idle soonest.
The rules are played through with several orders in which microbatches start; the best is the answer. At most
`in_flight` microbatches are begun and not finished, which bounds the memory of activations as 1F1B does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetplan.balance.order import order_microbatches
from hetplan.balance.problem import Floats
from hetplan.errors import UsageError


class Segment(NamedTuple):
    """One piece of work of a rank: the segment at `position` of a microbatch's chain, forward or backward."""

    microbatch: int
    position: int
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """What every rank runs, in order."""

    ranks: tuple[tuple[Segment, ...], ...]
    step_s: float
    bubble: float
    """Part of all ranks' seconds in which they idle."""
    rule: str
    slices: int
    """Segments of each module a rank holds; 0: a static cut."""
    held: float
    """Most activations a rank holds, in mean microbatches of the whole model, weighed by forward seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Segments in the order a microbatch runs them: where each is, and how long it takes."""

    rank_i: tuple[int, ...]
    forward_ji: Floats
    backward_ji: Floats


class _Look(NamedTuple):
    """What a rank knows of a piece of work that is ready."""

    work: Segment
    place: int
    """Where its microbatch stands in the starting order."""
    ahead_s: float
    """Seconds of work that already wait at the rank this microbatch goes to next."""


RULES: dict[str, Callable[[_Look], tuple[float, ...]]] = {
    "feed the idle": lambda look: (look.ahead_s, not look.work.backward, look.place, -look.work.position),
    "backward first": lambda look: (not look.work.backward, look.place, -look.work.position),
    "oldest first": lambda look: (look.place, not look.work.backward, -look.work.position),
}
"""What a rank prefers of the work that is ready: the least."""


def plan_segments(
    forward_jm: Floats, backward_jm: Floats, num_ranks: int, *, in_flight: int, slices: Sequence[int] = (1, 2)
) -> SegmentPlan:
    """Return the best order of segments for microbatches that take these seconds a module, on one rank alone.

    Raises:
        UsageError: the shapes do not agree or a count is below 1.
    """
    forward_jm, backward_jm = np.asarray(forward_jm, dtype=np.float64), np.asarray(backward_jm, dtype=np.float64)
    if forward_jm.shape != backward_jm.shape or forward_jm.ndim != 2 or min(num_ranks, in_flight, *slices) < 1:
        raise UsageError("forward and backward seconds are microbatches x modules; all counts are at least 1")
    plans = []
    for count in slices:
        chain = _sliced(forward_jm, backward_jm, num_ranks, count)
        plans.append(_best(chain, num_ranks, in_flight, _orders(forward_jm + backward_jm), count))
    return min(plans, key=lambda plan: plan.step_s)


def static_cut(
    forward_jm: Floats, backward_jm: Floats, num_ranks: int, *, in_flight: int, layers: Sequence[int]
) -> SegmentPlan:
    """Return the best plan that cuts the chain of modules (of `layers[m]` equal layers) once, for all batches alike.

    The cut balances the mean microbatch; cuts at module borders are tried beside it. Orders are chosen as above, so
    nothing but the cut differs.
    """
    layer_m = np.repeat(np.arange(len(layers)), layers)
    forward_jl = np.asarray(forward_jm)[:, layer_m] / np.asarray(layers)[layer_m]
    backward_jl = np.asarray(backward_jm)[:, layer_m] / np.asarray(layers)[layer_m]
    plans = []
    for ends in _cuts((forward_jl + backward_jl).mean(axis=0), num_ranks, layers):
        forward_ji = np.add.reduceat(forward_jl, ends[:-1], axis=1)
        backward_ji = np.add.reduceat(backward_jl, ends[:-1], axis=1)
        chain = Chain(rank_i=tuple(range(num_ranks)), forward_ji=forward_ji, backward_ji=backward_ji)
        plans.append(_best(chain, num_ranks, in_flight, _orders(np.asarray(forward_jm) + backward_jm), 0))
    return min(plans, key=lambda plan: plan.step_s)


def _cuts(mean_l: Floats, num_ranks: int, layers: Sequence[int]) -> list[list[int]]:
    """Return first layers of stages (and the end): balanced over the whole chain, and within each side of a border."""
    cuts = [balanced_cut(mean_l, num_ranks)]
    border = 0
    for width in layers[:-1]:
        border += width
        for before in range(1, num_ranks):
            if before <= border and num_ranks - before <= len(mean_l) - border:
                head = balanced_cut(mean_l[:border], before)
                tail = [border + end for end in balanced_cut(mean_l[border:], num_ranks - before)]
                cuts.append(head[:-1] + tail)
    return cuts


def balanced_cut(mean_l: Floats, parts: int) -> list[int]:
    """Return the ends (0 first) of `parts` runs of layers whose largest sum is least, by dynamic programming."""
    edges = np.concatenate([[0.0], np.cumsum(mean_l)])
    count = len(mean_l)
    best = np.full((parts + 1, count + 1), np.inf)
    back = np.zeros((parts + 1, count + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for part in range(1, parts + 1):
        for end in range(part, count + 1):
            largest = np.maximum(best[part - 1, :end], edges[end] - edges[:end])
            back[part, end] = int(largest.argmin())
            best[part, end] = largest[back[part, end]]
    ends = [count]
    for part in range(parts, 0, -1):
        ends.append(int(back[part, ends[-1]]))
    return ends[::-1]


def _sliced(forward_jm: Floats, backward_jm: Floats, num_ranks: int, slices: int) -> Chain:
    modules = forward_jm.shape[1]
    width = num_ranks * slices
    return Chain(
        rank_i=tuple(i % num_ranks for i in range(width)) * modules,
        forward_ji=np.repeat(forward_jm, width, axis=1) / width,
        backward_ji=np.repeat(backward_jm, width, axis=1) / width,
    )


def _orders(times_jm: Floats) -> dict[str, list[int]]:
    """Return starting orders: as given, by flow shop, and light and heavy microbatches in turn."""
    heavy = np.argsort(-times_jm.sum(axis=1), kind="stable").tolist()
    mix = times_jm / np.maximum(times_jm.sum(axis=1, keepdims=True), 1e-300)
    by_mix = np.argsort(mix[:, 0], kind="stable").tolist()
    half = (len(by_mix) + 1) // 2
    turns = [j for pair in zip(by_mix[:half], [*by_mix[half:][::-1], -1], strict=False) for j in pair if j >= 0]
    return {
        "as given": list(range(len(times_jm))),
        "flow shop": order_microbatches(times_jm).tolist() if times_jm.shape[1] > 1 else heavy,
        "light last": heavy,
        "light first": heavy[::-1],
        "mixes in turn": turns if len(turns) == len(by_mix) else by_mix,
    }


def _best(chain: Chain, num_ranks: int, in_flight: int, orders: dict[str, list[int]], slices: int) -> SegmentPlan:
    best: SegmentPlan | None = None
    for name, order in orders.items():
        for rule in RULES:
            ranks, step_s = play(chain, num_ranks, in_flight, order, rule)
            if best is None or step_s < best.step_s:
                work = float(chain.forward_ji.sum() + chain.backward_ji.sum())
                best = SegmentPlan(
                    ranks=ranks,
                    step_s=step_s,
                    bubble=1.0 - work / (num_ranks * step_s),
                    rule=f"{rule}, {name}",
                    slices=slices,
                    held=_held(chain, ranks),
                )
    if best is None:
        raise UsageError("there is no microbatch to order")
    return best


def play(
    chain: Chain, num_ranks: int, in_flight: int, order: Sequence[int], rule: str
) -> tuple[tuple[tuple[Segment, ...], ...], float]:
    """Return what each rank ran, and when the last of it ended, under one rule and starting order."""
    stage = _Stage(chain, num_ranks, order, rule)
    waiting = list(order)[::-1]
    for _ in range(min(in_flight, len(waiting))):
        stage.offer(Segment(waiting.pop(), 0, False))
    stage.start(chain.rank_i[0])
    while stage.events:
        rank, work = stage.finish()
        following = _next(work, len(chain.rank_i))
        if following is None and waiting:
            following = Segment(waiting.pop(), 0, False)
        if following is not None:
            stage.offer(following)
            stage.start(chain.rank_i[following.position])
        stage.start(rank)
    return tuple(tuple(work) for work in stage.ran), stage.now_s


class _Stage:
    """Ranks, what is ready on each, and the clock of one play."""

    def __init__(self, chain: Chain, num_ranks: int, order: Sequence[int], rule: str) -> None:
        self._chain = chain
        self._seconds = (chain.forward_ji.tolist(), chain.backward_ji.tolist())
        self._first = RULES[rule]
        self._place = {j: place for place, j in enumerate(order)}
        self._ready: list[list[Segment]] = [[] for _ in range(num_ranks)]
        self._queued_s = [0.0] * num_ranks
        self._until_s = [0.0] * num_ranks
        self._busy = [False] * num_ranks
        self.ran: list[list[Segment]] = [[] for _ in range(num_ranks)]
        self.events: list[tuple[float, int, Segment]] = []
        self.now_s = 0.0

    def offer(self, work: Segment) -> None:
        """Make work ready on its rank."""
        rank = self._chain.rank_i[work.position]
        self._ready[rank].append(work)
        self._queued_s[rank] += self._takes_s(work)

    def start(self, rank: int) -> None:
        """Let a free rank begin what its rule prefers."""
        ready = self._ready[rank]
        if self._busy[rank] or not ready:
            return
        work = ready[0] if len(ready) == 1 else min(ready, key=lambda one: self._first(self._look(one, rank)))
        ready.remove(work)
        seconds = self._takes_s(work)
        self._queued_s[rank] -= seconds
        self._busy[rank], self._until_s[rank] = True, self.now_s + seconds
        self.ran[rank].append(work)
        heapq.heappush(self.events, (self.now_s + seconds, rank, work))

    def finish(self) -> tuple[int, Segment]:
        """Move the clock to the next end of work and free its rank."""
        self.now_s, rank, work = heapq.heappop(self.events)
        self._busy[rank] = False
        return rank, work

    def _takes_s(self, work: Segment) -> float:
        return float(self._seconds[work.backward][work.microbatch][work.position])

    def _look(self, work: Segment, rank: int) -> _Look:
        following = _next(work, len(self._chain.rank_i))
        ahead_s = 0.0
        if following is not None:
            to = self._chain.rank_i[following.position]
            ahead_s = self._queued_s[to]
            if self._busy[to] and to != rank:
                ahead_s += max(0.0, self._until_s[to] - self.now_s)
        return _Look(work, self._place[work.microbatch], ahead_s)


def _next(work: Segment, length: int) -> Segment | None:
    """Return what the microbatch runs after `work`; None: it is finished."""
    if not work.backward:
        last = work.position + 1 == length
        return Segment(work.microbatch, work.position if last else work.position + 1, last)
    return Segment(work.microbatch, work.position - 1, True) if work.position else None


def _held(chain: Chain, ranks: tuple[tuple[Segment, ...], ...]) -> float:
    """Return the most a rank holds of the activations of whole microbatches, each weighed by its forward seconds.

    1.0 is the mean microbatch over all layers of the model.
    """
    unit = float(chain.forward_ji.sum(axis=1).mean())
    most = 0.0
    for work in ranks:
        signed = [(-1.0 if one.backward else 1.0) * chain.forward_ji[one.microbatch, one.position] for one in work]
        most = max(most, float(np.cumsum(signed).max(initial=0.0)))
    return most / unit
