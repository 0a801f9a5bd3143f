"""What ranks measured, put beside what the plan's estimate says, part by part.

Per stage: the median seconds of a forward and a backward pass of one microbatch, collectives inside the stage's mesh
included, on its slowest rank. Per step: the parts of the rank with most work. It waits for a message either because the
sender is still busy (bubble) or because the message is on its way (transfer); with all ranks on one host their clocks
are the same and the two are told apart by when the sender's action ended, on several hosts they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hetplan.plan.records import Estimate, Layout
from hetplan.runtime.executor import StepResult
from hetplan.runtime.pipeline import Passed
from hetplan.runtime.ranks import Seat

TINY_S = 1e-9
"""Below this a prediction is rounding, and no ratio to it is shown."""
WARM_UP = 2
"""Steps left out where enough others are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step of one rank."""

    step_s: float
    """Of the slowest rank."""
    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The last steps of one rank."""

    seat: Seat
    steps: tuple[StepTrace, ...]


def measured_document(layout: Layout, estimate: Estimate, traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return measured beside predicted, as nested mappings."""
    steady = [RankTrace(seat=t.seat, steps=_steady(t.steps)) for t in traces]
    step_s = median(step.step_s for step in steady[0].steps)
    parts = _parts(steady)
    predicted = estimate.parts
    pairs = {
        "compute": predicted.compute_s,
        "tp": predicted.tp_s,
        "cp": predicted.cp_s,
        "ep": predicted.ep_s,
        "pp": predicted.pp_s,
        "bubble": predicted.bubble_s,
        "dp": predicted.dp_s,
        "optimizer": predicted.optimizer_s,
        "other": 0.0,
    }
    return {
        "steps": len(steady[0].steps),
        "step_s": _pair(estimate.step_s, step_s),
        "step_spread": _spread([step.step_s for step in steady[0].steps]),
        "parts": {name: _pair(value, parts[name]) for name, value in pairs.items()},
        "waiting": _pair(predicted.pp_s + predicted.bubble_s, _sum_known(parts["pp"], parts["bubble"])),
        "stages": [_stage(stage.replica, stage.stage, layout, estimate, steady) for stage in estimate.stages],
    }


def _steady(steps: tuple[StepTrace, ...]) -> tuple[StepTrace, ...]:
    return steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps


def _pair(predicted: float, measured: float | None) -> dict[str, float | None]:
    ratio = measured / predicted if measured is not None and predicted > TINY_S else None
    return {"predicted_s": predicted, "measured_s": measured, "measured_over_predicted": ratio}


def _sum_known(*values: float | None) -> float:
    return sum(value for value in values if value is not None)


def _spread(values: Sequence[float]) -> float:
    """Return the middle half's width over the median."""
    ordered = sorted(values)
    return (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / median(ordered)


def work_s(steps: Iterable[StepTrace], kinds: str) -> float:
    """Return the median seconds of one microbatch in passes of some kinds, summed over virtual stages."""
    by_stage: dict[tuple[str, int], list[float]] = {}
    for step in steps:
        for passed in step.result.trace:
            if passed.action.kind in kinds:
                by_stage.setdefault((passed.action.kind, passed.action.stage), []).append(passed.work_s)
    return sum(median(values) for values in by_stage.values())


def _stage(row: int, number: int, layout: Layout, estimate: Estimate, traces: Sequence[RankTrace]) -> dict[str, Any]:
    own = [t for t in traces if (t.seat.row, t.seat.stage) == (row, number)]
    (said,) = (s for s in estimate.stages if (s.replica, s.stage) == (row, number))
    stages = layout.replicas[row].stages[number :: layout.replicas[row].pp]
    return {
        "replica": row,
        "stage": number,
        "group": said.group,
        "layers": [[stage.first_layer, stage.end_layer] for stage in stages],
        "forward": _pair(said.forward_s, max(work_s(t.steps, "F") for t in own)),
        "backward": _pair(said.backward_s, max(work_s(t.steps, "BIW") for t in own)),
        "busy": _pair(said.busy_s, max(median(_busy(step) for step in t.steps) for t in own)),
    }


def _busy(step: StepTrace) -> float:
    return sum(passed.work_s for passed in step.result.trace)


def _parts(traces: Sequence[RankTrace]) -> dict[str, float | None]:
    """Return the mean seconds of each part on the rank with most work."""
    busiest = max(traces, key=lambda t: sum(_busy(step) for step in t.steps))
    count = len(busiest.steps)
    axes = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    for step in busiest.steps:
        for passed in step.result.trace:
            for axis, seconds in passed.axes_s.items():
                axes[axis] += seconds / count
    busy = sum(_busy(step) for step in busiest.steps) / count
    wait = sum(passed.wait_s for step in busiest.steps for passed in step.result.trace) / count
    one_host = len({t.seat.node for t in traces}) == 1
    transfer = _transfer(busiest, traces) / count if one_host else None
    dp = sum(step.result.reduce_s + step.result.gather_s for step in busiest.steps) / count
    optimizer = sum(step.result.optimizer_s for step in busiest.steps) / count
    whole = sum(step.step_s for step in busiest.steps) / count
    return {
        "compute": busy - sum(axes.values()),
        **axes,
        "pp": transfer,
        "bubble": wait - (transfer or 0.0),
        "dp": dp,
        "optimizer": optimizer,
        "other": whole - busy - wait - dp - optimizer,
    }


def _transfer(own: RankTrace, traces: Sequence[RankTrace]) -> float:
    """Return the seconds a rank waited for messages whose sender had finished."""
    ends: dict[tuple[int, int, str, int, int], float] = {}
    for trace in traces:
        if (trace.seat.row, trace.seat.copy) != (own.seat.row, own.seat.copy):
            continue
        for index, step in enumerate(trace.steps):
            for passed in step.result.trace:
                key = (index, trace.seat.stage, *_key(passed))
                ends[key] = max(ends.get(key, 0.0), passed.start_s + passed.wait_s + passed.work_s)
    by_message = {(index, *rest): end for (index, _, *rest), end in ends.items()}
    total = 0.0
    for index, step in enumerate(own.steps):
        for passed in step.result.trace:
            kind = "F" if passed.action.kind == "F" else "B"
            sender = passed.action.stage + (-1 if kind == "F" else 1)
            end = by_message.get((index, kind, sender, passed.action.microbatch))
            if end is not None and passed.action.kind != "W":
                ready_s = passed.start_s + passed.wait_s
                total += max(0.0, ready_s - max(passed.start_s, end))
    return total


def _key(passed: Passed) -> tuple[str, int, int]:
    kind = {"F": "F", "B": "B", "I": "B", "W": "W"}[passed.action.kind]
    return kind, passed.action.stage, passed.action.microbatch
