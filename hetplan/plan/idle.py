"""Where the ranks of a pipeline idle, and why.

A step is: weights gathered over the data-parallel ranks, the pipeline's program, gradients reduced. A rank's arithmetic
idles

- *gather*, *reduce*: while weights come in or gradients go out and nothing hides it;
- *warm-up*, *cool-down*: before its first action, and after its last until the pipeline ends;
- *waiting*: between actions, for what another rank still makes;
- *tp*: inside actions, while a tensor-parallel group communicates; an action whose seconds are `share` communication
  leaves `share` of the device idle throughout (many gaps of less than a millisecond each).

The causes are disjoint, so their parts of the step add up (the breakdown of arXiv:2408.03505, table 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hetplan.plan.program import Action, Program
from hetplan.plan.timing import Durations, action_seconds, source_of

Cause = Literal["gather", "warm-up", "waiting", "tp", "cool-down", "reduce"]
CAUSES: tuple[Cause, ...] = ("gather", "warm-up", "waiting", "tp", "cool-down", "reduce")


class Span(NamedTuple):
    """A stretch in which a part `rate` of a rank's arithmetic idles."""

    start_s: float
    end_s: float
    rate: float
    cause: Cause


class Run(NamedTuple):
    """One action as it runs; the clock starts with the pipeline."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A program with its seconds."""

    order: Program
    durations: Durations
    """Communication inside the mesh included."""
    tp_forward: tuple[float, ...]
    """Part of each virtual stage's forward seconds in which tp communicates."""
    tp_backward: tuple[float, ...]
    gather_s: float = 0.0
    reduce_s: float = 0.0

    def tp_share(self, action: Action) -> float:
        """Return the part of an action in which tp communicates."""
        return (self.tp_forward if action.kind == "F" else self.tp_backward)[action.stage]


def timeline(order: Program, durations: Durations) -> tuple[tuple[Run, ...], ...]:
    """Return when every rank runs what, by the rules of `plan.timing` (transfers of a pair of ranks queue)."""
    split = any(action.kind == "I" for rank in order.ranks for action in rank)
    stages = order.pp * order.vpp
    arrival: dict[Action, float] = {}
    line_s: dict[tuple[int, int], float] = {}
    runs: list[list[Run]] = [[] for _ in order.ranks]
    free_s = [0.0] * order.pp
    at = [0] * order.pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                source = source_of(action, stages, split=split)
                if source is not None and source not in arrival:
                    break
                start = max(free_s[rank], arrival[source] if source is not None else 0.0)
                end = start + action_seconds(action, durations)
                free_s[rank] = end
                runs[rank].append(Run(action, start, end))
                arrival[action] = _sent_s(action, end, order, durations, line_s)
                if durations.sends_block:
                    free_s[rank] += durations.sends_block * (arrival[action] - end)
                at[rank] += 1
                moved = True
    return tuple(tuple(run) for run in runs)


def _sent_s(
    action: Action, end: float, order: Program, durations: Durations, line_s: dict[tuple[int, int], float]
) -> float:
    """Return when the result of an action is where it is needed."""
    stage = action.stage
    to = stage + 1 if action.kind == "F" else stage - 1
    if action.kind == "W" or not 0 <= to < order.pp * order.vpp or order.pp == 1:
        return end
    line = (stage % order.pp, to % order.pp)
    line_s[line] = max(end, line_s.get(line, 0.0)) + durations.p2p_s[min(stage, to)]
    return line_s[line]


def idle_spans(pipeline: Pipeline, runs: tuple[tuple[Run, ...], ...]) -> tuple[tuple[Span, ...], ...]:
    """Return the idle stretches of every rank over the whole step; the clock starts with the gather."""
    begin = pipeline.gather_s
    end = begin + max(run[-1].end_s for run in runs)
    spans = []
    for rank in runs:
        own = [Span(0.0, begin, 1.0, "gather")]
        free = begin
        for place, (action, start_s, end_s) in enumerate(rank):
            own.append(Span(free, begin + start_s, 1.0, "waiting" if place else "warm-up"))
            own.append(Span(begin + start_s, begin + end_s, pipeline.tp_share(action), "tp"))
            free = begin + end_s
        own += [Span(free, end, 1.0, "cool-down"), Span(end, end + pipeline.reduce_s, 1.0, "reduce")]
        spans.append(tuple(span for span in own if span.end_s > span.start_s and span.rate > 0))
    return tuple(spans)


def step_of(pipeline: Pipeline, runs: tuple[tuple[Run, ...], ...]) -> float:
    """Return the seconds of the step."""
    return pipeline.gather_s + max(run[-1].end_s for run in runs) + pipeline.reduce_s


def bubbles_by_cause(pipeline: Pipeline) -> Mapping[Cause, float]:
    """Return the part of the step ranks idle on average, by cause."""
    runs = timeline(pipeline.order, pipeline.durations)
    step_s = step_of(pipeline, runs)
    found: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    for rank in idle_spans(pipeline, runs):
        for span in rank:
            found[span.cause] += (span.end_s - span.start_s) * span.rate / step_s / len(runs)
    return found
