"""Encoder work placed into the bubbles of the language model's pipeline.

Every rank of the pipeline holds one of `pieces` pieces of the encoder (its layers in order), so `pp / pieces` replicas
of the encoder work beside one pipeline. For microbatch `j`, the pieces run one after the other, forward before the
language model's first stage starts on `j`, backward after it has made the gradient of `j`:

    end of encoder forward (j)  <= start of F(0, j)          (the first ordering)
    start of encoder backward (j) >= end of B(0, j)          (the second ordering)

The language model's program is not touched, but may start later: the least start is found by bisection for which
every forward piece, microbatches in the order of their deadlines, fits the idle capacity left, each at the replica
where it ends first. Backward pieces follow the same way; what is left runs after the pipeline. Inside an action the
arithmetic is idle at the rate at which tp communicates, so encoder work proceeds there at that rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hetplan.errors import UsageError
from hetplan.plan.idle import Pipeline, Run, idle_spans, timeline

BISECTIONS = 24
FOREVER_S = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWork:
    """What the encoder does for one microbatch of one pipeline, on all its pieces together."""

    forward_s: float
    backward_s: float
    """0: frozen."""
    pieces: int = 1
    """Ranks of the pipeline over which one replica of the encoder is cut; divides pp."""
    transfer_s: float = 0.0
    """From the last piece to the language model's first stage, and between pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """One piece of encoder work in the idle time of a rank."""

    microbatch: int
    piece: int
    rank: int
    phase: Literal["forward", "backward"]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FillPlan:
    """A step with the encoder in the bubbles; the clock starts with the weight gather."""

    step_s: float
    delay_s: float
    """How much later than the gather's end the language model starts."""
    tail_s: float
    """How long the encoder still works when the language model's step would be over."""
    fills: tuple[Fill, ...]
    deadlines_s: tuple[float, ...]
    """By microbatch: start of the language model's first forward."""
    gradients_s: tuple[float, ...]
    """By microbatch: end of the language model's last backward."""


class _Capacity:
    """What is left of a rank's idle time."""

    def __init__(self, spans: Sequence[tuple[float, float, float]]) -> None:
        self._spans = [list(span) for span in spans]

    def take(self, ready_s: float, work_s: float, *, keep: bool) -> tuple[float, float]:
        """Return (start, end) of `work_s` seconds of work from `ready_s` on; `keep`: take the capacity."""
        at = max(0, bisect_right(self._spans, ready_s, key=lambda span: span[0]) - 1)
        start = end = -1.0
        left = work_s
        while left > 1e-15:
            first, last, rate = self._spans[at]
            first = max(first, ready_s)
            room = (last - first) * rate
            if room <= 0:
                at += 1
                continue
            start = first if start < 0 else start
            used = min(room, left)
            end = first + used / rate
            left -= used
            if keep:
                at = self._cut(at, first, end)
            else:
                at += 1
        return (start, end) if start >= 0 else (ready_s, ready_s)

    def _cut(self, at: int, first: float, end: float) -> int:
        """Take [first, end) out of a span and return the place of the next one."""
        before, last, rate = self._spans[at]
        rest = [[before, first, rate]] if first > before else []
        after = [[end, last, rate]] if end < last else []
        self._spans[at : at + 1] = rest + after
        return at + len(rest)


def fill_bubbles(pipeline: Pipeline, encoder: EncoderWork) -> FillPlan:
    """Return the step with the encoder's work in the pipeline's idle time.

    Raises:
        UsageError: the pieces do not divide the ranks of the pipeline.
    """
    if pipeline.order.pp % encoder.pieces:
        raise UsageError(f"{encoder.pieces} pieces do not divide pp {pipeline.order.pp}")
    runs = timeline(pipeline.order, pipeline.durations)
    starts, ends = _stage_zero(runs)
    low, high = pipeline.gather_s, pipeline.gather_s + encoder.forward_s * len(starts)
    if _forward(pipeline, runs, encoder, low, starts)[1]:
        high = low
    for _ in range(BISECTIONS if high > low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if _forward(pipeline, runs, encoder, middle, starts)[1] else (middle, high)
    fills, _, capacities = _forward(pipeline, runs, encoder, high, starts)
    gradients = {j: high + end for j, end in ends.items()}
    if encoder.backward_s > 0:
        order = sorted(gradients, key=lambda j: gradients[j])
        fills += _place(encoder, "backward", capacities, [(j, gradients[j] + encoder.transfer_s) for j in order])
    over_s = high + max(run[-1].end_s for run in runs) + pipeline.reduce_s
    step_s = max([over_s, *(fill.end_s for fill in fills)])
    return FillPlan(
        step_s=step_s,
        delay_s=high - pipeline.gather_s,
        tail_s=step_s - over_s,
        fills=tuple(fills),
        deadlines_s=tuple(high + starts[j] for j in sorted(starts)),
        gradients_s=tuple(gradients[j] for j in sorted(gradients)),
    )


def _stage_zero(runs: tuple[tuple[Run, ...], ...]) -> tuple[dict[int, float], dict[int, float]]:
    """Return, by microbatch, when the first stage starts forward and ends backward."""
    starts, ends = {}, {}
    for action, start_s, end_s in runs[0]:
        if action.stage == 0 and action.kind == "F":
            starts[action.microbatch] = start_s
        elif action.stage == 0 and action.kind in ("B", "I"):
            ends[action.microbatch] = end_s
    return starts, ends


def _forward(
    pipeline: Pipeline,
    runs: tuple[tuple[Run, ...], ...],
    encoder: EncoderWork,
    begin_s: float,
    starts: dict[int, float],
) -> tuple[list[Fill], bool, list[_Capacity]]:
    """Place all forward work for a language model that starts at `begin_s`; return whether all deadlines are met."""
    capacities = _capacities(pipeline, runs, begin_s)
    order = sorted(starts, key=lambda j: starts[j])
    fills = _place(encoder, "forward", capacities, [(j, 0.0) for j in order])
    last = {fill.microbatch: fill.end_s for fill in fills if fill.piece == encoder.pieces - 1}
    met = all(last[j] + encoder.transfer_s <= begin_s + starts[j] + 1e-12 for j in order)
    return fills, met, capacities


def _capacities(pipeline: Pipeline, runs: tuple[tuple[Run, ...], ...], begin_s: float) -> list[_Capacity]:
    """Return each rank's idle time when the pipeline starts at `begin_s`, without end after its last action."""
    shift = begin_s - pipeline.gather_s
    found = []
    for spans, rank in zip(idle_spans(pipeline, runs), runs, strict=True):
        last = begin_s + rank[-1].end_s
        own = [(0.0, begin_s + rank[0].start_s, 1.0)]
        own += [
            (span.start_s + shift, span.end_s + shift, span.rate) for span in spans if span.cause in ("waiting", "tp")
        ]
        found.append(_Capacity([*sorted(own), (last, FOREVER_S, 1.0)]))
    return found


def _place(
    encoder: EncoderWork,
    phase: Literal["forward", "backward"],
    capacities: list[_Capacity],
    ready: list[tuple[int, float]],
) -> list[Fill]:
    """Place every microbatch's pieces at the replica where the last of them ends first."""
    seconds = (encoder.forward_s if phase == "forward" else encoder.backward_s) / encoder.pieces
    pieces = list(range(encoder.pieces))
    if phase == "backward":
        pieces.reverse()
    fills = []
    for j, ready_s in ready:
        best = min(
            range(len(capacities) // encoder.pieces),
            key=lambda replica: _trial(encoder, capacities, replica, pieces, (ready_s, seconds)),
        )
        at = ready_s
        for piece in pieces:
            rank = best * encoder.pieces + piece
            start_s, end_s = capacities[rank].take(at, seconds, keep=True)
            at = end_s + (encoder.transfer_s if encoder.pieces > 1 else 0.0)
            fills.append(Fill(microbatch=j, piece=piece, rank=rank, phase=phase, start_s=start_s, end_s=end_s))
    return fills


def _trial(
    encoder: EncoderWork, capacities: list[_Capacity], replica: int, pieces: list[int], work: tuple[float, float]
) -> float:
    """Return when the last piece would end at one replica."""
    at, seconds = work
    for piece in pieces:
        at = capacities[replica * encoder.pieces + piece].take(at, seconds, keep=False)[1]
        at += encoder.transfer_s if encoder.pieces > 1 else 0.0
    return at
