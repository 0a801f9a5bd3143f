"""Columns of the final mix: patterns with a whole-layer cut, and the exact seconds of their pipeline.

A column knows its stages and how long its pipeline takes for m microbatches (`plan.timing`, the same critical path
`estimate` uses). What follows the pipelines (gradients, optimizer) depends on the whole mix and is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from hetplan.costs.records import Floats
from hetplan.plan.limits import Limits
from hetplan.plan.records import Replica, ScheduleName, Stage
from hetplan.plan.stages import whole_params
from hetplan.plan.timing import Durations, pipeline_finish
from hetplan.search.after import Ending
from hetplan.search.cuts import best_cuts
from hetplan.search.patterns import Patterns
from hetplan.search.problem import Mesh, Problem, Tables
from hetplan.specs.workload import Recompute, Sharding

EXACT_PASSES = 4000
"""Stages times microbatches of a pipeline up to which its critical path is followed to the end."""


Place = tuple[int, tuple[int, int], int]
"""Where a stage is: mesh, (first, end) layer, recompute mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnStage:
    """One stage of a column."""

    mesh: Mesh
    first_layer: int
    end_layer: int
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A replica shape: cut, meshes and microbatch size, with its seconds."""

    stages: tuple[ColumnStage, ...]
    microbatch: int
    sharding: Sharding
    used_g: tuple[int, ...]
    durations: Durations
    schedule: ScheduleName = "1f1b"
    after_s: tuple[float, ...] = ()
    """What follows each stage's last backward pass, as far as the class of plans tells."""

    def step_s(self, num_microbatches: int) -> float:
        """Return when the last stage is done with what follows its last backward pass.

        Exact for pipelines of up to `EXACT_PASSES` forward passes; longer ones go on at the mean pace of the second
        half of so many, which is mostly within 0.05 % of the exact path.
        """
        known = max(EXACT_PASSES // len(self.stages), 3 * len(self.stages))
        if num_microbatches <= known:
            return self._done_s(num_microbatches)
        half = known // 2
        late, early = self._done_s(known), self._done_s(half)
        ahead = late + (num_microbatches - known) * (late - early) / (known - half)
        return max(ahead, self.least_s(num_microbatches))

    def _done_s(self, num_microbatches: int) -> float:
        ends = _rank_ends_s(self.schedule, len(self.stages), num_microbatches, self.durations)
        return max(end + after for end, after in zip(ends, self.after_s, strict=True)) if self.after_s else max(ends)

    def least_s(self, num_microbatches: int) -> float:
        """Return seconds it takes at least: each stage's work, and that between the first and the last journey."""
        m, num = num_microbatches, len(self.stages)
        forward, backward, p2p = self.durations.forward_s, self.durations.backward_s, (*self.durations.p2p_s, 0.0)
        latency = sum(forward) + sum(backward) + 2 * sum(p2p)
        before = least = 0.0
        for s in range(num):
            tau, held = forward[s] + backward[s], num - s
            journeys = 2 * (latency - before) + (m - 1 - held) * tau if m > held else latency - before
            least = max(least, before + max(m * tau, journeys))
            before += tau + 2 * p2p[s]
        return least

    def most_microbatches(self, limit_s: float) -> int:
        """Return the most microbatches with which the column is done within `limit_s` (0: none)."""
        low, high = 0, 1
        while self.least_s(high) <= limit_s:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.least_s(middle) <= limit_s else (low, middle)
        busiest = max(f + b for f, b in zip(self.durations.forward_s, self.durations.backward_s, strict=True))
        while low > 0 and (over := self.step_s(low) - limit_s) > 0:
            low, high = max(0, low - max(1, math.ceil(over / busiest * (1 - 1e-9)))), low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.step_s(middle) <= limit_s else (low, middle)
        return low

    def replica(self, num_microbatches: int, copies: int) -> Replica:
        """Return the row of a layout it makes."""
        return Replica(
            stages=tuple(
                Stage(
                    group=stage.mesh.name,
                    first_layer=stage.first_layer,
                    end_layer=stage.end_layer,
                    tp=stage.mesh.tp,
                    cp=stage.mesh.cp,
                    dp=stage.mesh.dp,
                    ep=stage.mesh.ep,
                    recompute=stage.recompute,
                )
                for stage in self.stages
            ),
            microbatch=self.microbatch,
            num_microbatches=num_microbatches,
            copies=copies,
        )


@lru_cache(maxsize=65536)
def _rank_ends_s(schedule: ScheduleName, pp: int, num_microbatches: int, durations: Durations) -> tuple[float, ...]:
    return pipeline_finish(schedule, pp, num_microbatches, 1, durations).rank_s


def make_columns(
    problem: Problem, tables: Tables, patterns: Patterns, held: int, limit_s: Floats | None = None
) -> list[Column | None]:
    """Return each pattern with its best cut when stages hold at most `held` microbatches; None where none fits.

    `limit_s`: stage time beyond which a cut is of no use, (N,).
    """
    schedule: ScheduleName = "1f1b"
    cuts = best_cuts(problem, tables, patterns, held, limit_s)
    found: list[Column | None] = []
    for row in range(len(patterns)):
        if not np.isfinite(cuts.least_tau_s[row]):
            found.append(None)
            continue
        num = int(patterns.stages[row])
        ends = [0, *cuts.ends[row, :num].tolist()]
        spans = list(pairwise(ends))
        places = [
            (int(m), span, int(r))
            for m, span, r in zip(cuts.mesh[row, :num], spans, cuts.modes[row, :num], strict=True)
        ]
        found.append(column_of(problem, tables, places, schedule))
    return found


def column_of(problem: Problem, tables: Tables, places: Sequence[Place], schedule: ScheduleName) -> Column:
    """Return the column with these stages."""
    used = [0] * len(problem.devices_g)
    for m, _, _ in places:
        used[problem.meshes[m].group] += problem.meshes[m].size
    return Column(
        stages=tuple(
            ColumnStage(mesh=problem.meshes[m], first_layer=first, end_layer=end, recompute=tables.recomputes[mode])
            for m, (first, end), mode in places
        ),
        microbatch=tables.microbatch,
        sharding=tables.sharding,
        used_g=tuple(used),
        durations=_durations(problem, tables, places),
        schedule=schedule,
    )


def _durations(problem: Problem, tables: Tables, places: Sequence[Place]) -> Durations:
    forward = tuple(float(tables.forward_mrl[m, r, a:b].sum()) for m, (a, b), r in places)
    backward = tuple(float(tables.backward_mrl[m, r, a:b].sum()) for m, (a, b), r in places)
    p2p = transfers_s(problem, tables, [m for m, _, _ in places])
    return Durations(forward_s=forward, backward_s=backward, weight_s=(0.0,) * len(places), p2p_s=tuple(p2p))


def transfers_s(problem: Problem, tables: Tables, meshes: list[int]) -> list[float]:
    """Return one-way seconds between neighbouring stages: near while a fast-link domain has room for both."""
    found = []
    room = 0
    for m, n in pairwise(meshes):
        mesh = problem.meshes[m]
        room = room or problem.domain_g[mesh.group] // mesh.size
        room -= 1
        near = room > 0 and m == n
        found.append(
            float(tables.near_mm[m, n] if near or mesh.name != problem.meshes[n].name else tables.far_mm[m, n])
        )
        room = room if m == n else 0
    return found


def improve(problem: Problem, tables: Tables, column: Column, num_microbatches: int, ending: Ending) -> Column:
    """Return the column with layers moved between neighbouring stages while it gets faster; pinned layers stay."""
    if problem.limits.pinned_layers is not None:
        return column
    best, best_s = column, column.step_s(num_microbatches)
    for _ in range(4 * len(column.stages)):
        better = None
        for candidate in _neighbours(problem, tables, best, num_microbatches):
            candidate = finished(problem, candidate, ending)
            seconds = candidate.step_s(num_microbatches)
            if seconds < best_s * (1 - 1e-9):
                better, best_s = candidate, seconds
        if better is None:
            return best
        best = better
    return best


def _neighbours(problem: Problem, tables: Tables, column: Column, num_microbatches: int) -> Iterator[Column]:
    index = {mesh: m for m, mesh in enumerate(problem.meshes)}
    meshes = [index[stage.mesh] for stage in column.stages]
    ends = [stage.end_layer for stage in column.stages]
    for boundary in range(len(ends) - 1):
        for move in (-1, 1):
            moved = list(ends)
            moved[boundary] += move
            places = _fit(problem, tables, meshes, moved, num_microbatches)
            if places is not None:
                yield column_of(problem, tables, places, column.schedule)


def _fit(
    problem: Problem, tables: Tables, meshes: list[int], ends: list[int], num_microbatches: int
) -> Sequence[Place] | None:
    """Return the stages with the fastest recompute mode that fits, or None where a stage is empty or does not fit."""
    places = []
    decoders = [layer.kind == "decoder" for layer in problem.prices.model.chain]
    for s, (m, (first, end)) in enumerate(zip(meshes, pairwise([0, *ends]), strict=True)):
        if end <= first or not _allowed(problem.limits, s, sum(decoders[first:end])):
            return None
        held = min(num_microbatches, len(meshes) - s)
        taken = tables.fixed_mrll[m, :, first, end] + held * tables.flight_mrll[m, :, first, end]
        with np.errstate(invalid="ignore"):
            seconds = tables.prefix_mrl[m, :, end] - tables.prefix_mrl[m, :, first]
        fits = np.where((taken <= 1.0) & np.isfinite(seconds), seconds, np.inf)
        mode = int(np.argmin(fits))
        if not np.isfinite(fits[mode]):
            return None
        places.append((m, (first, end), mode))
    return places


def _allowed(limits: Limits, stage: int, decoders: int) -> bool:
    """Return whether a stage may hold so many decoder layers."""
    if limits.pinned_layers is not None and limits.pinned_layers[stage] != decoders:
        return False
    return decoders >= limits.min_decoder_layers


def finished(problem: Problem, column: Column, ending: Ending, factor: float = 1.0) -> Column:
    """Return the column with what follows each stage under an ending, times `factor`."""
    index = {mesh: m for m, mesh in enumerate(problem.meshes)}
    after = tuple(
        factor * ending.of_stage(index[stage.mesh], (stage.first_layer, stage.end_layer), backward_s)
        for stage, backward_s in zip(column.stages, column.durations.backward_s, strict=True)
    )
    if len(after) > 1:
        first, last = column.stages[0], column.stages[-1]
        at = index[first.mesh], index[last.mesh]
        if tie_s := ending.tie_s(*at):
            reduced = ending.reduced_s(at[0], _params(problem, first), np.array(column.durations.backward_s[0]))
            held_up = float(ending.tied_s(*at, reduced, _params(problem, last)))
            after = (max(after[0] + factor * tie_s, factor * held_up), *after[1:])
    return replace(column, after_s=after)


def _params(problem: Problem, stage: ColumnStage) -> Floats:
    return np.asarray(whole_params(problem.prices)[0][stage.first_layer : stage.end_layer].sum())


def distinct(columns: Iterable[Column | None]) -> list[Column]:
    """Return the columns that exist, each once, in order."""
    return list(dict.fromkeys(column for column in columns if column is not None))
