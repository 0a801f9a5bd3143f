"""The best cut of the chain over a sequence of stages of a replica, and what it takes by a closed form.

With `t_s` both passes of stage s and `c_s` what it sends, a replica of m microbatches takes

    sum_s (t_s + c_s) + (m - 1) max_s (t_s + c_s)

in lock step; under other timings this closed form only ranks cuts. At the least pace a cut can have, the cut with
the least sum is found; then paces a little above it are tried as long as the sum can still gain what the pace loses.
Suffix `_ij`: spans of layers, first and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetplan.costs.records import Floats
from hetplan.plan.timing import SHORT_PIPELINE, columns_s
from hetplan.search.classes_counts import Paces
from hetplan.search.problem import Problem, Tables

MOST_PACES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequenced:
    """A cut of the chain over stages in order."""

    meshes: tuple[int, ...]
    classes: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    modes: tuple[int, ...]
    """Recompute mode of each stage."""
    num_microbatches: int
    pipeline_s: float


class Cutter:
    """Cuts for one microbatch size and count."""

    def __init__(self, problem: Problem, tables: Tables, num_microbatches: int) -> None:
        self._problem = problem
        self._tables = tables
        self._m = num_microbatches
        self._timing = problem.prices.calibration.overlap.pipeline
        self._spans: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self._decoders = np.array([layer.kind == "decoder" for layer in problem.prices.model.chain])

    def pace_table(self, meshes: Sequence[int]) -> Paces:
        """Return what bounds need to know of each kind."""
        tables = self._tables
        repeated_l = tables.weight_l >= 1 - 1e-9
        fits = tables.furthest_fit(1)
        ends = np.cumsum(np.concatenate([[0], repeated_l]))
        starts = ends[: fits.shape[-1]]
        most = [int(np.max(ends[fits[m].max(axis=0)] - starts)) for m in meshes]
        near_mm = self._tables.near_mm
        sent = np.array([min(float(near_mm[m, other]) for other in meshes) for m in meshes])
        if self._timing == "columns":
            sent = np.zeros(len(meshes))
        return Paces(
            unit_k=np.array([float(tables.unit_m[m]) for m in meshes]),
            sent_k=sent,
            most_k=np.array(most, dtype=np.int64),
            weight=float(tables.weight_l.sum()),
            repeated=int(repeated_l.sum()),
        )

    def best(self, meshes: Sequence[int], classes: Sequence[int], limit_s: float) -> Sequenced | None:
        """Return the best cut of a sequence of stages, None where nothing fits or none is below the limit."""
        num = len(meshes)
        sent = self._sent(meshes, classes)
        costs, modes = [], []
        for s, mesh in enumerate(meshes):
            seconds_ij, modes_ij = self._span(mesh, min(self._m, num - s))
            costs.append(seconds_ij + sent[s])
            modes.append(modes_ij)
        found = self._least(costs, limit_s)
        if found is None:
            return None
        value, spans = found
        return Sequenced(
            meshes=tuple(meshes),
            classes=tuple(classes),
            spans=spans,
            modes=tuple(int(modes[s][span]) for s, span in enumerate(spans)),
            num_microbatches=self._m,
            pipeline_s=value,
        )

    def _least(self, costs: list[Floats], limit_s: float) -> tuple[float, tuple[tuple[int, int], ...]] | None:
        pace = _least_pace(costs)
        if not np.isfinite(pace) or self._m * pace >= limit_s:
            return None
        best: tuple[float, tuple[tuple[int, int], ...]] | None = None
        loosest = _least_sum(costs, np.inf)
        through_s = sum(float(cost[span]) for cost, span in zip(costs, loosest, strict=True))
        if through_s + (self._m - 1) * pace >= limit_s:
            return None
        for _ in range(MOST_PACES):
            spans = _least_sum(costs, pace)
            stage_s = [float(cost[span]) for cost, span in zip(costs, spans, strict=True)]
            value = self._seconds(stage_s)
            if best is None or value < best[0]:
                best = value, spans
            gain = sum(stage_s) - through_s
            if gain <= 0:
                break
            following = min(float(cost[(cost > pace) & np.isfinite(cost)].min(initial=np.inf)) for cost in costs)
            if not np.isfinite(following) or (self._m - 1) * (following - pace) >= gain:
                break
            pace = following
        return best

    def _seconds(self, pace_s: Sequence[float]) -> float:
        """Return the closed form of stages that compute and send in `pace_s` each."""
        if self._timing == "columns":
            return columns_s(self._m, pace_s, [0.0] * (len(pace_s) - 1))
        return sum(pace_s) + (self._m - 1) * max(pace_s)

    def _sent(self, meshes: Sequence[int], classes: Sequence[int]) -> list[float]:
        """Return the seconds each stage sends for a microbatch."""
        num = len(meshes)
        if num == 1 or self._timing == "exact":
            return [0.0] * num
        between = [self._transfer_s(meshes, classes, s) for s in range(num - 1)]
        if self._timing == "columns":
            return [*(2 * seconds for seconds in between), 0.0]
        if self._timing == "blocking":
            return [2 * (a + b) for a, b in pairwise([0.0, *between, 0.0])]
        first = between[0] * (1 if num <= SHORT_PIPELINE else 2)
        middle = [between[s - 1] + between[s] for s in range(1, num - 1)]
        return [first, *middle, 2 * between[-1]]

    def _transfer_s(self, meshes: Sequence[int], classes: Sequence[int], s: int) -> float:
        """Return one transfer from stage s to the next; neighbours of a class that fits into a domain share it."""
        tables, problem = self._tables, self._problem
        a, b = meshes[s], meshes[s + 1]
        held = sum(problem.meshes[m].size for m, c in zip(meshes, classes, strict=True) if c == classes[s])
        near = classes[s] == classes[s + 1] and held <= problem.domain_g[problem.meshes[a].group]
        return float(tables.near_mm[a, b] if near else tables.far_mm[a, b])

    def _span(self, mesh: int, held: int) -> tuple[Floats, Floats]:
        """Return seconds of both passes of every span that fits, and the recompute mode that is fastest."""
        if (mesh, held) not in self._spans:
            tables = self._tables
            fits_rij = tables.fixed_mrll[mesh] + held * tables.flight_mrll[mesh] <= 1.0
            prefix_rl = tables.prefix_mrl[mesh]
            with np.errstate(invalid="ignore"):
                seconds_rij = prefix_rl[:, None, :] - prefix_rl[:, :, None]
            edges = np.arange(seconds_rij.shape[-1])
            proper = edges[None, :] > edges[:, None]
            least = self._problem.limits.min_decoder_layers
            if least > 0:
                decoders = np.concatenate([[0], np.cumsum(self._decoders)])
                proper &= decoders[None, :] - decoders[:, None] >= least
            seconds_rij = np.where(fits_rij & proper & np.isfinite(seconds_rij), seconds_rij, np.inf)
            modes_ij = np.argmin(seconds_rij, axis=0)
            self._spans[mesh, held] = (seconds_rij.min(axis=0), modes_ij)
        return self._spans[mesh, held]


def _least_pace(costs: Sequence[Floats]) -> float:
    """Return the least max over stages of any cut."""
    reached = costs[0][0]
    for cost in costs[1:]:
        reached = np.maximum(reached[:, None], cost).min(axis=0)
    return float(reached[-1])


def _least_sum(costs: Sequence[Floats], pace: float) -> tuple[tuple[int, int], ...]:
    """Return the cut with the least sum among those with no stage above a pace."""
    limit = pace * (1 + 1e-12)
    reached = np.where(costs[0][0] <= limit, costs[0][0], np.inf)
    before = []
    for cost in costs[1:]:
        total_ij = reached[:, None] + np.where(cost <= limit, cost, np.inf)
        before.append(np.argmin(total_ij, axis=0))
        reached = total_ij.min(axis=0)
    end = len(reached) - 1
    spans = []
    for chosen in reversed(before):
        first = int(chosen[end])
        spans.append((first, end))
        end = first
    spans.append((0, end))
    return tuple(reversed(spans))
