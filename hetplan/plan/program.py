"""The order in which every rank of a pipeline works: schedules as data, with a text form.

An action is a forward pass ``F``, a whole backward pass ``B``, or, where a schedule splits the backward pass, the
gradient of the input ``I`` and the gradient of the weights ``W``, of one microbatch on one virtual stage. Virtual stage
``v`` runs on rank ``v % pp``. In text, ``2F0`` is stage 2, forward, microbatch 0; a rank is a line of such words.

``F(v, j)`` needs ``F(v - 1, j)``; ``B(v, j)`` (or ``I``) needs ``F(v, j)`` and ``B(v + 1, j)``; ``W(v, j)`` needs
``I(v, j)``. Each schedule lists the actions of a rank; a rank runs them in that order and waits for what each needs.

- *gpipe*: all forward passes, then all backward passes (Huang 2019, arXiv:1811.06965).
- *1f1b*: rank ``s`` runs ``min(m, p - s)`` forward passes ahead, then alternates (Narayanan 2021, arXiv:2104.04473).
- *interleaved*: the same over ``vpp`` virtual stages a rank, microbatches in runs of ``p`` (the same paper, 2.2).
- *zero-bubble*: 1f1b with the backward pass split; rank ``s`` makes weight gradients ``s`` microbatches late, which
  fills the bubble and holds at most what rank 0 of 1f1b holds (ZB-H1 of Qi 2023, arXiv:2401.10241).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import numpy as np

from hetplan.errors import UsageError
from hetplan.plan.records import ScheduleName

MOST_PASSES = 2**21
"""Forward passes a pipeline may have; more would take longer than a second to time."""
Kind = Literal["F", "B", "I", "W"]
_HEAD = re.compile(r"(gpipe|1f1b|interleaved|zero-bubble) pp=([0-9]{1,9}) vpp=([0-9]{1,9}) microbatches=([0-9]{1,9})")
_WORD = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")


class Action(NamedTuple):
    """One unit of work: `stage` is a virtual stage's index in the replica."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What each rank of a pipeline does, in order."""

    schedule: ScheduleName
    vpp: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def pp(self) -> int:
        """Pipeline degree."""
        return len(self.ranks)


def program(schedule: ScheduleName, pp: int, num_microbatches: int, vpp: int = 1) -> Program:
    """Return the order of work of a pipeline.

    Raises:
        UsageError: a count is below 1, or the schedule cannot run these counts.
    """
    for message in schedule_errors(schedule, pp, num_microbatches, vpp):
        raise UsageError(message)
    ranks = (_RANKS[schedule](pp, rank, num_microbatches, vpp) for rank in range(pp))
    return Program(
        schedule=schedule, vpp=vpp, num_microbatches=num_microbatches, ranks=tuple(tuple(rank) for rank in ranks)
    )


def schedule_errors(schedule: ScheduleName, pp: int, num_microbatches: int, vpp: int = 1) -> tuple[str, ...]:
    """Return why a schedule cannot run these counts (empty: it can)."""
    if pp < 1 or num_microbatches < 1 or vpp < 1:
        return (f"pp {pp}, vpp {vpp} and {num_microbatches} microbatches must all be at least 1",)
    if pp * vpp * num_microbatches > MOST_PASSES:
        return (f"{num_microbatches} microbatches on {pp * vpp} stages are more than can be ordered ({MOST_PASSES})",)
    if schedule == "interleaved":
        if vpp > 1 and pp > 1 and num_microbatches % pp:
            return (
                f"schedule interleaved needs a multiple of pp {pp} microbatches, not {num_microbatches} "
                f"(nearest: {_nearest_multiples(num_microbatches, pp)})",
            )
    elif vpp > 1:
        return (f"vpp {vpp} needs schedule interleaved, not {schedule}",)
    return ()


def _nearest_multiples(value: int, factor: int) -> str:
    below = value // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def _gpipe(pp: int, rank: int, num_microbatches: int, vpp: int) -> Iterator[Action]:
    for j in range(num_microbatches):
        yield Action("F", rank, j)
    for j in range(num_microbatches):
        yield Action("B", rank, j)


def _one_f_one_b(pp: int, rank: int, num_microbatches: int, vpp: int) -> Iterator[Action]:
    ahead = in_flight_1f1b(pp, rank, num_microbatches)
    for j in range(ahead):
        yield Action("F", rank, j)
    for j in range(num_microbatches):
        yield Action("B", rank, j)
        if j + ahead < num_microbatches:
            yield Action("F", rank, j + ahead)


def _interleaved(pp: int, rank: int, num_microbatches: int, vpp: int) -> Iterator[Action]:
    """Yield Megatron-LM's order: unit `k` of a rank is chunk ``k // p % v`` of microbatch ``k // (p v) p + k % p``."""
    if vpp == 1:
        yield from _one_f_one_b(pp, rank, num_microbatches, vpp)
        return
    total = num_microbatches * vpp
    ahead = min(total, 2 * (pp - rank - 1) + (vpp - 1) * pp + 1)

    def unit(kind: Kind, k: int) -> Action:
        chunk = k // pp % vpp
        chunk = chunk if kind == "F" else vpp - 1 - chunk
        return Action(kind, chunk * pp + rank, k // (pp * vpp) * pp + k % pp)

    for k in range(ahead):
        yield unit("F", k)
    for k in range(total):
        yield unit("B", k)
        if k + ahead < total:
            yield unit("F", k + ahead)


def _zero_bubble(pp: int, rank: int, num_microbatches: int, vpp: int) -> Iterator[Action]:
    ahead = in_flight_1f1b(pp, rank, num_microbatches)
    for j in range(ahead):
        yield Action("F", rank, j)
    for j in range(num_microbatches):
        yield Action("I", rank, j)
        if j >= rank:
            yield Action("W", rank, j - rank)
        if j + ahead < num_microbatches:
            yield Action("F", rank, j + ahead)
    for j in range(max(0, num_microbatches - rank), num_microbatches):
        yield Action("W", rank, j)


_RANKS = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "interleaved": _interleaved, "zero-bubble": _zero_bubble}


def in_flight_1f1b(pp: int, stage: int, num_microbatches: int) -> int:
    """Return the microbatches whose activations stage `stage` holds at once under 1f1b."""
    return min(num_microbatches, pp - stage)


def in_flight(order: Program) -> tuple[int, ...]:
    """Return, for each rank, the most (virtual stage, microbatch) pairs whose activations it holds at once."""
    return tuple(max(sum(counts) for counts in rank) for rank in held(order))


def held(order: Program) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, for each rank, the counts of held microbatches a virtual stage, at every moment that may be its peak.

    Activations are held from the start of a forward pass to the end of the backward pass (of ``W`` where it is split).
    A moment is left out when another holds at least as many of every virtual stage.
    """
    return tuple(_held_by_rank(actions, order.pp, order.vpp) for actions in order.ranks)


def _held_by_rank(actions: tuple[Action, ...], pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    change = np.zeros((len(actions), vpp), dtype=np.int64)
    effect = {"F": 1, "B": -1, "I": 0, "W": -1}
    rows = np.arange(len(actions))
    change[rows, [action.stage // pp for action in actions]] = [effect[action.kind] for action in actions]
    moments = np.unique(change.cumsum(axis=0), axis=0)
    at_most = np.all(moments[:, None, :] <= moments[None, :, :], axis=2)
    peaks = moments[np.sum(at_most, axis=1) == 1]
    return tuple(tuple(int(count) for count in row) for row in peaks)


@lru_cache(maxsize=512)
def held_counts(
    schedule: ScheduleName, pp: int, num_microbatches: int, vpp: int = 1
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return `held` of a schedule without building a program where a formula is known."""
    if vpp > 1:
        return held(program(schedule, pp, num_microbatches, vpp))
    if schedule == "gpipe":
        return (((num_microbatches,),),) * pp
    if schedule == "zero-bubble":
        return (((min(num_microbatches, pp),),),) * pp
    return tuple(((in_flight_1f1b(pp, rank, num_microbatches),),) for rank in range(pp))


def program_text(order: Program) -> str:
    """Return a header line and one line of words a rank."""
    head = f"{order.schedule} pp={order.pp} vpp={order.vpp} microbatches={order.num_microbatches}"
    return "\n".join([head, *(" ".join(map(str, rank)) for rank in order.ranks)]) + "\n"


def parse_program(text: str) -> Program:
    """Return the program that `program_text` printed.

    Raises:
        UsageError: the text is no program.
    """
    head, _, body = text.partition("\n")
    match = re.fullmatch(
        r"(gpipe|1f1b|interleaved|zero-bubble) pp=(\d{1,9}) vpp=(\d{1,9}) microbatches=(\d{1,9})", head
    )
    if match is None:
        raise UsageError("a program starts with `<schedule> pp=<n> vpp=<n> microbatches=<n>`")
    lines = body.split("\n")[:-1]
    if len(lines) != int(match[2]):
        raise UsageError(f"a program of pp {match[2]} has as many lines of actions, not {len(lines)}")
    return Program(
        schedule=cast(ScheduleName, match[1]),
        vpp=int(match[3]),
        num_microbatches=int(match[4]),
        ranks=tuple(tuple(parse_action(word) for word in line.split()) for line in lines),
    )


def parse_action(word: str) -> Action:
    """Return the action a word like ``2F0`` names.

    Raises:
        UsageError: the word names none.
    """
    match = _WORD.fullmatch(word)
    if match is None:
        raise UsageError(f"{word!r} is no action; an action reads like 2F0: stage 2, forward, microbatch 0")
    return Action(cast(Kind, match[2]), int(match[1]), int(match[3]))
