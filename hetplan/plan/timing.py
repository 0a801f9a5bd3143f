"""When the work of a pipeline ends: the exact critical path of a schedule over unequal stages and links.

An action starts when its rank is free and its input has arrived. What a rank sends to another rank leaves in the order
it was made, one transfer after the other, each direction a line of its own, beside all computation:

    start(a)   = max(end(previous action of the rank), arrival(input of a))
    end(a)     = start(a) + seconds(a)
    arrival(a) = max(end(a), arrival(previous transfer from that rank to that rank)) + p2p

A rank whose sends block does nothing else for a part `sends_block` of the time from `end(a)` to `arrival(a)`. Only
additions, products and maxima, in one fixed order, so an event loop that follows the same rules meets the same last
digit.
Where a calibration says so, a pipeline is timed in *lock step* instead, as planners do that know no schedule: with
`t_s` both passes of a stage and `c_s` the two transfers it sends a microbatch (an end stage's one counts twice; in
pipelines of at most three stages the first's counts once, as in the simulator of Strati 2025, Sailor, SOSP),

    T = sum_s (t_s + c_s) + (m - 1) max_s (t_s + c_s)

*blocking* is the same where both ends of a transfer wait for it, `c_s = 2 (d_(s-1) + d_s)`: activations and gradients,
coming and going, as in engines whose sends and receives are calls that return when they are done.

Or in *columns*: with `c_s = 2 d_s`, what stage s and the next exchange, all stages that are busy at once wait for the
slowest of them (GPipe's picture; Yan 2024, FlashFlex, arXiv:2409.01143),

    T = sum over j = 0 .. m + p - 2 of max over s with s <= j < s + m of (t_s + c_s)

A schedule is turned once into flat index lists in an order that respects every dependency; pricing a pipeline is then
one pass over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hetplan.errors import UsageError
from hetplan.plan.program import Action, Program, in_flight_1f1b, program
from hetplan.plan.records import ScheduleName
from hetplan.specs.calibration import PipelineTiming

Ints = npt.NDArray[np.int32]
SHORT_PIPELINE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of one microbatch; one entry a virtual stage, one a boundary between virtual stages `i` and `i + 1`."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """The whole backward pass."""
    weight_s: tuple[float, ...]
    """The part of `backward_s` a split schedule does in ``W``."""
    p2p_s: tuple[float, ...]
    """One way; the gradient takes as long on its way back."""
    timing: PipelineTiming = "exact"
    sends_block: float = 0.0
    """Part of a transfer for which the sender does nothing else."""

    def without_p2p(self) -> Durations:
        """Return the same work on stages between which nothing takes time."""
        return Durations(
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            weight_s=self.weight_s,
            p2p_s=(0.0,) * len(self.p2p_s),
            timing=self.timing,
            sends_block=self.sends_block,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """When a pipeline is done."""

    rank_s: tuple[float, ...]
    """End of each rank's last action."""
    gradients_s: tuple[float, ...]
    """End of the last action that adds to a virtual stage's weight gradients."""

    @property
    def pipeline_s(self) -> float:
        """End of the last action of all."""
        return max(self.rank_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A schedule as flat lists, one entry an action, in an order in which every input comes before its use."""

    num_ranks: int
    num_stages: int
    num_links: int
    rank: Ints
    work: Ints
    """Index into (forward | backward | input gradient | weight gradient) x virtual stages."""
    source: Ints
    """Action whose transfer must have arrived; -1: none."""
    link: Ints
    """Link the result leaves on; -1: it stays."""
    boundary: Ints
    """Boundary whose seconds the transfer takes; 0 where it stays."""


def finish_times(order: Program, durations: Durations) -> Finish:
    """Return when the ranks and stages of any valid program are done.

    Raises:
        UsageError: the program cannot run to its end (an action waits for one that never comes).
    """
    return _run(compile_program(order), durations)


@lru_cache(maxsize=8192)
def pipeline_finish(schedule: ScheduleName, pp: int, num_microbatches: int, vpp: int, durations: Durations) -> Finish:
    """Return `finish_times` of a named schedule; equal pipelines are priced once.

    Raises:
        UsageError: the schedule cannot run these counts.
    """
    if durations.timing != "exact":
        return _closed_form(pp, num_microbatches, durations)
    return _run(_compiled(schedule, pp, num_microbatches, vpp), durations)


def lock_step_s(num_microbatches: int, stage_s: Sequence[float], p2p_s: Sequence[float]) -> float:
    """Return the seconds of a pipeline in lock step, from both passes of each stage and one transfer a boundary."""
    num = len(stage_s)
    paces = list(stage_s)
    for s in range(num if num > 1 else 0):
        if s == 0:
            paces[s] += p2p_s[0] * (1 if num <= SHORT_PIPELINE else 2)
        else:
            paces[s] += p2p_s[s - 1] + p2p_s[s] if s < num - 1 else 2 * p2p_s[s - 1]
    return sum(paces) + (num_microbatches - 1) * max(paces)


def blocking_s(num_microbatches: int, stage_s: Sequence[float], p2p_s: Sequence[float]) -> float:
    """Return the seconds of a pipeline whose stages wait for all they send and receive."""
    around = [0.0, *p2p_s[: len(stage_s) - 1], 0.0]
    paces = [seconds + 2 * (around[s] + around[s + 1]) for s, seconds in enumerate(stage_s)]
    return sum(paces) + (num_microbatches - 1) * max(paces)


def columns_s(num_microbatches: int, stage_s: Sequence[float], p2p_s: Sequence[float]) -> float:
    """Return the seconds of a pipeline in columns, from both passes of each stage and one transfer a boundary."""
    num, m = len(stage_s), num_microbatches
    paces = [seconds + 2 * sent for seconds, sent in zip(stage_s, [*p2p_s[: num - 1], 0.0], strict=True)]
    return sum(max(paces[max(0, j - m + 1) : j + 1]) for j in range(m + num - 1))


def _closed_form(pp: int, num_microbatches: int, durations: Durations) -> Finish:
    """Return one end for all; a rank's virtual stages work one after the other."""
    totals = [f + b for f, b in zip(durations.forward_s, durations.backward_s, strict=True)]
    forms = {"lock-step": lock_step_s, "blocking": blocking_s, "columns": columns_s}
    end_s = forms[durations.timing](
        num_microbatches, [sum(totals[q::pp]) for q in range(pp)], durations.p2p_s[: pp - 1]
    )
    return Finish(rank_s=(end_s,) * pp, gradients_s=(end_s,) * len(totals))


@lru_cache(maxsize=256)
def _compiled(schedule: ScheduleName, pp: int, num_microbatches: int, vpp: int) -> Flow:
    if schedule == "1f1b" and vpp == 1:
        return _one_f_one_b_flow(pp, num_microbatches)
    return compile_program(program(schedule, pp, num_microbatches, vpp))


def _run(flow: Flow, durations: Durations) -> Finish:
    seconds = _work_seconds(durations)
    p2p_s = [*durations.p2p_s, 0.0]
    free_s = [0.0] * flow.num_ranks
    line_s = [0.0] * (flow.num_links + 1)
    block = durations.sends_block
    arrival_s: list[float] = []
    arrive = arrival_s.append
    ends_s: list[float] = [0.0] * len(seconds)
    for rank, work, source, link, boundary in zip(
        flow.rank.tolist(),
        flow.work.tolist(),
        flow.source.tolist(),
        flow.link.tolist(),
        flow.boundary.tolist(),
        strict=True,
    ):
        end = free_s[rank]
        if source >= 0 and arrival_s[source] > end:
            end = arrival_s[source]
        end += seconds[work]
        free_s[rank] = ends_s[work] = end
        if link >= 0:
            if line_s[link] > end:
                end = line_s[link]
            end += p2p_s[boundary]
            line_s[link] = end
            if block:
                free_s[rank] += block * (end - free_s[rank])
        arrive(end)
    n = flow.num_stages
    return Finish(
        rank_s=tuple(free_s),
        gradients_s=tuple(max(ends_s[n + v], ends_s[3 * n + v]) for v in range(n)),
    )


def _work_seconds(durations: Durations) -> list[float]:
    input_s = [backward - weight for backward, weight in zip(durations.backward_s, durations.weight_s, strict=True)]
    return [*durations.forward_s, *durations.backward_s, *input_s, *durations.weight_s]


def action_seconds(action: Action, durations: Durations) -> float:
    """Return how long one action keeps its rank."""
    match action.kind:
        case "F":
            return durations.forward_s[action.stage]
        case "B":
            return durations.backward_s[action.stage]
        case "I":
            return durations.backward_s[action.stage] - durations.weight_s[action.stage]
        case "W":
            return durations.weight_s[action.stage]


def source_of(action: Action, num_stages: int, *, split: bool) -> Action | None:
    """Return the action another rank must have done first (None: nothing from elsewhere)."""
    kind, stage, microbatch = action
    if kind == "F":
        return Action("F", stage - 1, microbatch) if stage else None
    if kind == "W" or stage == num_stages - 1:
        return None
    return Action("I" if split else "B", stage + 1, microbatch)


def local_source_of(action: Action) -> Action | None:
    """Return the action of the same stage that must have come before (None: none)."""
    kind, stage, microbatch = action
    if kind == "F":
        return None
    return Action("I" if kind == "W" else "F", stage, microbatch)


def compile_program(order: Program) -> Flow:
    """Return a program as flat lists.

    Raises:
        UsageError: an action waits for one that never comes.
    """
    num_stages = order.pp * order.vpp
    split = any(action.kind == "I" for rank in order.ranks for action in rank)
    place: dict[Action, int] = {}
    sequence: list[tuple[int, Action, int]] = []
    position = [0] * order.pp
    waiting = list(range(order.pp))
    while waiting:
        moved = False
        for rank in waiting:
            done = _advance(order.ranks[rank], position[rank], place, num_stages, split=split)
            for action, source in done:
                place[action] = len(sequence)
                sequence.append((rank, action, source))
            position[rank] += len(done)
            moved = moved or bool(done)
        waiting = [rank for rank in waiting if position[rank] < len(order.ranks[rank])]
        if waiting and not moved:
            stuck = order.ranks[waiting[0]][position[waiting[0]]]
            raise UsageError(f"the program stops: rank {waiting[0]} waits for the input of {stuck}")
    return _flow(order.pp, num_stages, sequence)


def _advance(
    actions: tuple[Action, ...], first: int, place: dict[Action, int], num_stages: int, *, split: bool
) -> list[tuple[Action, int]]:
    """Return the actions from `first` on whose inputs exist, each with the place of what it waits for (-1: nothing)."""
    done: list[tuple[Action, int]] = []
    fresh: set[Action] = set()
    for index in range(first, len(actions)):
        action = actions[index]
        local = local_source_of(action)
        if local is not None and local not in place and local not in fresh:
            break
        source = source_of(action, num_stages, split=split)
        if source is None:
            done.append((action, -1))
        elif source in place:
            done.append((action, place[source]))
        else:
            break
        fresh.add(action)
    return done


def _flow(pp: int, num_stages: int, sequence: Sequence[tuple[int, Action, int]]) -> Flow:
    offset = {"F": 0, "B": num_stages, "I": 2 * num_stages, "W": 3 * num_stages}
    rank = np.array([item[0] for item in sequence], dtype=np.int32)
    stage = np.array([item[1].stage for item in sequence], dtype=np.int32)
    kind = np.array([offset[item[1].kind] for item in sequence], dtype=np.int32)
    source = np.array([item[2] for item in sequence], dtype=np.int32)
    return _link_up(pp, num_stages, rank, (kind, stage, source))


def _link_up(pp: int, num_stages: int, rank: Ints, entries: tuple[Ints, Ints, Ints]) -> Flow:
    """Number the links: rank to rank + 1 is link `2 r`, rank to rank - 1 link `2 r + 1` (indices modulo pp)."""
    kind, stage, source = entries
    forward = kind == 0
    leaves = np.where(forward, stage < num_stages - 1, (kind < 3 * num_stages) & (stage > 0)) & (pp > 1)
    up = forward if pp > 2 else rank == 0
    link = np.where(leaves, 2 * rank + np.where(up, 0, 1), -1).astype(np.int32)
    boundary = np.where(leaves, np.where(forward, stage, stage - 1), 0).astype(np.int32)
    return Flow(
        num_ranks=pp,
        num_stages=num_stages,
        num_links=2 * pp,
        rank=rank,
        work=(kind + stage).astype(np.int32),
        source=source,
        link=link,
        boundary=boundary,
    )


def _one_f_one_b_flow(pp: int, num_microbatches: int) -> Flow:
    """Return the flow of 1f1b without building the program.

    The start times on equal stages (one unit forward, one backward) respect every dependency: ``F(s, j)`` starts at
    ``s + j`` while rank ``s`` runs ahead and at ``s + 2 j`` after, ``B(s, j)`` at ``2 p - 1 - s + 2 j``.
    """
    stage, j = (grid.ravel() for grid in np.mgrid[0:pp, 0:num_microbatches].astype(np.int32))
    ahead = np.array([in_flight_1f1b(pp, s, num_microbatches) for s in range(pp)], dtype=np.int32)[stage]
    key = np.concatenate([np.where(j < ahead, stage + j, stage + 2 * j), 2 * pp - 1 - stage + 2 * j])
    order = np.argsort(key, kind="stable")
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    half = pp * num_microbatches
    forward_source = np.where(stage > 0, place[:half].reshape(pp, -1)[stage - 1, j], -1)
    backward_source = np.where(stage < pp - 1, place[half:].reshape(pp, -1)[(stage + 1) % pp, j], -1)
    both = np.concatenate([stage, stage])[order]
    kind = np.repeat(np.array([0, pp], dtype=np.int32), half)[order]
    source = np.concatenate([forward_source, backward_source])[order].astype(np.int32)
    return _link_up(pp, pp, both, (kind, both, source))
