"""Integer context-parallel degrees: each microbatch divides its ranks into groups of any size.

A sequence of `n` tokens takes, on a group of `d` ranks,

    seconds(n, d) = (linear n + quadratic n^2) / d + [d > 1] (exchange n (d - 1) / d + latency (d - 1))

and a group runs its sequences one after the other; its tokens over `d` must fit a rank's memory. The ranks of a
microbatch are all given to groups, `sum(d) = R`, and a microbatch lasts as long as its slowest group; the step is the
sum over microbatches.

For a time `T` and a set of sequences, each sequence needs at least `d(n, T)` ranks; sequences go, from long to short,
to the open group where they fit best or open one of that size, and `T` is feasible when no more than `R` ranks are
opened. Bisection finds the least such `T`; ranks left over are given, one at a time, to the slowest group.
Microbatches are made in two ways, of like lengths (long ones with long) and of like work, in several numbers; all
static degrees (equal groups, longest sequences first) are tried beside, so the answer is never worse than the best of
those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hetplan.balance.greedy import lpt
from hetplan.balance.problem import Floats, Ints, make_problem
from hetplan.errors import InfeasibleError

BISECTIONS = 12
MOST_EXTRA_MICROBATCHES = 4
"""Microbatches beyond the least number that are tried (assumed: more only add latency)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCost:
    """Seconds of a sequence on a group of ranks."""

    linear_s_per_token: float
    quadratic_s_per_token2: float
    exchange_s_per_token: float = 0.0
    """What the ring (keys and values passed on) takes a token of the sequence that arithmetic does not hide."""
    latency_s: float = 0.0
    """A hop of the ring."""

    def seconds(self, tokens: Floats | float, degree: Floats | float) -> Floats:
        """Return the seconds of sequences of `tokens` on groups of `degree` ranks."""
        n, d = np.asarray(tokens, dtype=np.float64), np.asarray(degree, dtype=np.float64)
        work = (self.linear_s_per_token * n + self.quadratic_s_per_token2 * n * n) / d
        found: Floats = work + self.exchange_s_per_token * n * (d - 1) / d + self.latency_s * (d - 1)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that work on the same sequences."""

    degree: int
    sequences: tuple[int, ...]
    seconds: float
    tokens_per_rank: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreePlan:
    """Microbatches, each a division of all ranks into groups."""

    microbatches: tuple[tuple[RankGroup, ...], ...]
    method: str

    @property
    def total_s(self) -> float:
        """Seconds of the step: microbatches one after the other."""
        return sum(max(group.seconds for group in groups) for groups in self.microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What stays the same throughout one plan."""

    lengths: Floats
    num_ranks: int
    cap: float
    cost: SequenceCost

    def group(self, degree: int, members: Iterable[int]) -> RankGroup:
        sequences = tuple(members)
        tokens = self.lengths[list(sequences)]
        seconds = float(self.cost.seconds(tokens, degree).sum()) if sequences else 0.0
        return RankGroup(
            degree=degree, sequences=sequences, seconds=seconds, tokens_per_rank=float(tokens.sum()) / degree
        )


def plan_degrees(lengths: Floats, num_ranks: int, cap: float, cost: SequenceCost) -> DegreePlan:
    """Return groups of any integer degree for sequences of `lengths` tokens; `cap`: tokens a rank holds at once.

    Raises:
        InfeasibleError: the longest sequence does not fit all ranks together.
    """
    task = _task(lengths, num_ranks, cap, cost)
    least = _least_microbatches(task)
    plans = [plan for plan in (_static(task, degree) for degree in _divisors(num_ranks)) if plan is not None]
    for count in range(least, min(least + MOST_EXTRA_MICROBATCHES, len(task.lengths)) + 1):
        for divide in (_by_length, _by_work):
            plan = _flexible(task, divide(task, count))
            if plan is not None:
                plans.append(plan)
    if not plans:
        raise InfeasibleError("no number of microbatches tried fits the memory of the ranks: raise the cap")
    return min(plans, key=lambda plan: plan.total_s)


def static_degrees(lengths: Floats, num_ranks: int, cap: float, cost: SequenceCost) -> dict[int, DegreePlan]:
    """Return, for each degree that divides the ranks and fits, the plan that uses it throughout."""
    task = _task(lengths, num_ranks, cap, cost)
    plans = {degree: _static(task, degree) for degree in _divisors(num_ranks)}
    return {degree: plan for degree, plan in plans.items() if plan is not None}


def _task(lengths: Floats, num_ranks: int, cap: float, cost: SequenceCost) -> _Task:
    task = _Task(lengths=np.asarray(lengths, dtype=np.float64), num_ranks=num_ranks, cap=cap, cost=cost)
    longest = float(task.lengths.max())
    if longest > cap * num_ranks:
        raise InfeasibleError(
            f"the longest sequence has {longest:.0f} tokens, {num_ranks} ranks hold {cap * num_ranks:.0f}:"
            " use more ranks, more memory a rank, or leave it out"
        )
    return task


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _least_microbatches(task: _Task) -> int:
    return max(1, int(np.ceil(float(task.lengths.sum()) / (task.cap * task.num_ranks))))


def _by_length(task: _Task, count: int) -> list[Ints]:
    """Return `count` runs of the sorted sequences whose tokens are about equal."""
    order = np.argsort(-task.lengths, kind="stable")
    middle = np.cumsum(task.lengths[order]) - task.lengths[order] / 2
    run = np.minimum((middle / task.lengths.sum() * count).astype(np.int64), count - 1)
    return [order[run == i] for i in range(count) if (run == i).any()]


def _by_work(task: _Task, count: int) -> list[Ints]:
    """Return `count` sets of about equal seconds and tokens."""
    loads = np.stack([task.cost.seconds(task.lengths, 1.0), task.lengths], axis=1)
    bin_s = lpt(make_problem(loads / loads.sum(axis=0), (count,)))
    return [] if bin_s is None else [np.flatnonzero(bin_s == i) for i in range(count) if (bin_s == i).any()]


def _static(task: _Task, degree: int) -> DegreePlan | None:
    """Return the plan of equal groups, with the best number of microbatches; None: a sequence is too long."""
    if task.lengths.max() > task.cap * degree:
        return None
    width = task.num_ranks // degree
    seconds = task.cost.seconds(task.lengths, float(degree))
    best: DegreePlan | None = None
    least = _least_microbatches(task)
    for count in range(least, least + MOST_EXTRA_MICROBATCHES + 1):
        for divide in (_by_length, _by_work):
            plan = _static_groups(task, degree, width, (seconds, divide(task, count)))
            if plan is not None and (best is None or plan.total_s < best.total_s):
                best = plan
    return best


def _static_groups(task: _Task, degree: int, width: int, parts: tuple[Floats, list[Ints]]) -> DegreePlan | None:
    seconds, sets = parts
    microbatches = []
    for members in sets:
        sizes = task.lengths[members]
        bin_s = lpt(make_problem(seconds[members], (width,), sizes=sizes, caps=task.cap * degree))
        if bin_s is None:
            return None
        microbatches.append(tuple(task.group(degree, members[bin_s == b].tolist()) for b in range(width)))
    return DegreePlan(microbatches=tuple(microbatches), method=f"static {degree}")


def _flexible(task: _Task, sets: list[Ints]) -> DegreePlan | None:
    microbatches = []
    for members in sets:
        groups = _divide_ranks(task, members[np.argsort(-task.lengths[members], kind="stable")])
        if groups is None:
            return None
        microbatches.append(groups)
    return DegreePlan(microbatches=tuple(microbatches), method="flexible")


def _divide_ranks(task: _Task, members: Ints) -> tuple[RankGroup, ...] | None:
    """Return the groups of one microbatch; `members` from long to short."""
    degrees = np.arange(1, task.num_ranks + 1, dtype=np.float64)
    seconds_sd = task.cost.seconds(task.lengths[members][:, None], degrees[None, :])
    fits_sd = task.lengths[members][:, None] <= task.cap * degrees[None, :]
    low = float(np.where(fits_sd, seconds_sd, np.inf).min(axis=1).max())
    high = float(seconds_sd[:, -1].sum()) + low
    low = max(low, float(task.cost.seconds(task.lengths[members], 1.0).sum()) / task.num_ranks * 0.5)
    found = _pack(task, members, seconds_sd, high)
    if found is None:
        return None
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        better = _pack(task, members, seconds_sd, middle)
        low, high, found = (low, middle, better) if better is not None else (middle, high, found)
    return _spread(task, [(degree, [int(members[i]) for i in places]) for degree, places in found])


def _pack(task: _Task, members: Ints, seconds_sd: Floats, limit: float) -> list[tuple[int, list[int]]] | None:
    """Return (degree, places in `members`) of groups that all end by `limit`, None where ranks run out."""
    fits_sd = task.lengths[members][:, None] <= task.cap * np.arange(1, task.num_ranks + 1)
    good_sd = (seconds_sd <= limit * (1 + 1e-12)) & fits_sd
    if not good_sd.any(axis=1).all():
        return None
    least_s = good_sd.argmax(axis=1) + 1
    degree_g = np.zeros(task.num_ranks, dtype=np.int64)
    time_g, room_g = np.zeros(task.num_ranks), np.zeros(task.num_ranks)
    places: list[list[int]] = []
    free = task.num_ranks
    lengths = task.lengths[members].tolist()
    for i, (tokens, least) in enumerate(zip(lengths, least_s.tolist(), strict=True)):
        used = len(places)
        ends_g = time_g[:used] + seconds_sd[i, degree_g[:used] - 1]
        ends_g = np.where((ends_g <= limit * (1 + 1e-12)) & (room_g[:used] >= tokens), ends_g, -1.0)
        g = int(ends_g.argmax()) if used else -1
        if g < 0 or ends_g[g] < 0:
            if least > free:
                return None
            g, free = used, free - least
            degree_g[g], room_g[g] = least, task.cap * least
            places.append([])
        time_g[g] += seconds_sd[i, degree_g[g] - 1]
        room_g[g] -= tokens
        places[g].append(i)
    return [(int(degree_g[g]), members_of) for g, members_of in enumerate(places)]


def _spread(task: _Task, found: list[tuple[int, list[int]]]) -> tuple[RankGroup, ...]:
    """Return the groups with all ranks in use: one more at a time to the slowest that gains by it, the rest idle."""
    groups = [task.group(degree, members) for degree, members in found]
    free = task.num_ranks - sum(group.degree for group in groups)
    while free > 0:
        slowest = max(range(len(groups)), key=lambda g: groups[g].seconds)
        wider = task.group(groups[slowest].degree + 1, groups[slowest].sequences)
        if wider.seconds >= groups[slowest].seconds:
            break
        groups[slowest], free = wider, free - 1
    return (*groups, *(task.group(1, ()) for _ in range(free)))
