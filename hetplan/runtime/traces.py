"""What ranks measured, put beside what the plan's estimate says, part by part.

Per stage: the median seconds of a forward and a backward pass of one microbatch, collectives inside the stage's mesh
included, on its slowest rank. Per step: the parts of the rank with most work. It waits for a message either because the
sender is still busy (bubble) or because the message is on its way (transfer); with all ranks on one host their clocks
are the same and the two are told apart by when the sender's action ended, on several hosts they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """Return the median seconds of each part on the rank with most work; the parts of one step sum to it."""
    busiest = max(traces, key=lambda t: sum(_busy(step) for step in t.steps))
    one_host = len({t.seat.node for t in traces}) == 1
    transfers = _transfers(busiest, traces) if one_host else [0.0] * len(busiest.steps)
    rows = [_step_parts(step, transfer) for step, transfer in zip(busiest.steps, transfers, strict=True)]
    parts: dict[str, float | None] = {name: median(row[name] for row in rows) for name in rows[0]}
    return parts if one_host else {**parts, "pp": None}


def _step_parts(step: StepTrace, transfer_s: float) -> dict[str, float]:
    """Return the parts of one step."""
    result = step.result
    axes = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    for passed in result.trace:
        for axis, seconds in passed.axes_s.items():
            axes[axis] += seconds
    busy, wait = _busy(step), sum(passed.wait_s for passed in result.trace)
    dp = result.reduce_s + result.gather_s
    return {
        "compute": busy - sum(axes.values()),
        **axes,
        "pp": transfer_s,
        "bubble": wait - transfer_s,
        "dp": dp,
        "optimizer": result.optimizer_s,
        "other": step.step_s - busy - wait - dp - result.optimizer_s,
    }


def _transfers(own: RankTrace, traces: Sequence[RankTrace]) -> list[float]:
    """Return, step by step, the seconds a rank waited for messages whose sender had finished."""
    mates = [t for t in traces if (t.seat.row, t.seat.copy) == (own.seat.row, own.seat.copy)]
    found = []
    for index, step in enumerate(own.steps):
        ends: dict[tuple[str, int, int], float] = {}
        for mate in mates:
            for passed in mate.steps[index].result.trace:
                end_s = passed.start_s + passed.wait_s + passed.work_s
                ends[_key(passed)] = max(ends.get(_key(passed), 0.0), end_s)
        found.append(sum(_late(passed, ends) for passed in step.result.trace))
    return found


def _late(passed: Passed, ends: Mapping[tuple[str, int, int], float]) -> float:
    """Return how long an action waited for its message after the sender's action had ended."""
    kind, stage, microbatch = _key(passed)
    end_s = ends.get((kind, stage + (-1 if kind == "F" else 1), microbatch)) if kind != "W" else None
    return 0.0 if end_s is None else max(0.0, passed.start_s + passed.wait_s - max(passed.start_s, end_s))


def _key(passed: Passed) -> tuple[str, int, int]:
    kind = {"F": "F", "B": "B", "I": "B", "W": "W"}[passed.action.kind]
    return kind, passed.action.stage, passed.action.microbatch
