"""What a set of replicas costs once everything is known: devices, recomputation, the exact estimate and the rule book.

Stage times only grow from one recomputation to the next, and how much a stage must hold depends on its own
recomputation alone, so the best layout of a set of replicas has on each stage the first recomputation that fits. How
many ranks share a layer's state is known only now; a stage that turns out too large takes the next recomputation. Where
a rank holds several virtual stages, each of them may give way, and every way is tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from hetplan.costs.prices import Prices
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.records import Estimate, Layout, Replica, Stage, StageEstimate
from hetplan.search.exhaustive_columns import Columns
from hetplan.search.exhaustive_combine import Combination
from hetplan.search.exhaustive_place import ORDERS, placements
from hetplan.search.exhaustive_shapes import Context, Shape
from hetplan.search.records import Candidate, SearchRequest
from hetplan.specs.workload import Recompute

__all__ = ["ORDERS", "Priced", "Pricer", "layout_of", "objective_value"]


def row_key(replica: Replica) -> tuple[object, ...]:
    """Return what rows of a layout are sorted by; recomputation does not move a row to other devices."""
    stages = tuple(
        (stage.group, stage.first_layer, stage.end_layer, stage.tp, stage.cp, stage.dp, stage.ep)
        for stage in replica.stages
    )
    return (len(stages), stages, replica.microbatch, replica.num_microbatches, replica.vpp)


def objective_value(found: Estimate, request: SearchRequest, num_devices: int = 0) -> float | None:
    """Return what the request minimises; None where a plan does not qualify (no price, over the time budget)."""
    match request.objective:
        case "time":
            return found.step_s
        case "energy":
            return found.joules_per_step
        case "cost":
            return found.usd_per_step
        case "cost-within-time":
            return None if _is_late(found, request) else found.usd_per_step
        case "devices":
            return None if _is_late(found, request) else float(num_devices)


def _is_late(found: Estimate, request: SearchRequest) -> bool:
    return request.time_budget_s is not None and found.step_s > request.time_budget_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A valid layout and its value."""

    value: float
    candidate: Candidate


class Pricer:
    """Prices sets of replicas, and counts what is dropped and why."""

    def __init__(self, prices: Prices, request: SearchRequest) -> None:
        self.prices = prices
        self.request = request
        self.dropped: Counter[str] = Counter()
        self.num_priced = 0

    def price(self, layout: Layout, context: Context) -> list[Priced]:
        """Return the valid layouts among the ways to place a layout and to choose what to recompute."""
        layout = replace(layout, replicas=tuple(sorted(layout.replicas, key=row_key)))
        found: list[Priced] = []
        for placed in placements(layout, self.prices.cluster):
            found.extend(self._settle(placed, context))
        return found

    def _settle(self, layout: Layout, context: Context) -> Iterator[Priced]:
        waiting, seen = [layout], {layout}
        while waiting:
            placed = waiting.pop()
            self.num_priced += 1
            violations = check(placed, self.prices, self.request.limits)
            if any(violation.unpriceable for violation in violations):
                self.dropped[violations[0].rule] += 1
                continue
            found = estimate(placed, self.prices)
            if not violations:
                value = objective_value(found, self.request, placed.num_devices)
                if value is not None:
                    yield Priced(value=value, candidate=Candidate(layout=placed, estimate=found))
                continue
            too_large = [(stage.replica, stage.stage) for stage in found.stages if _overflows(stage)]
            smaller = list(_next_recomputations(placed, too_large, context.recomputes))
            if not smaller:
                self.dropped[violations[0].rule] += 1
            waiting.extend(other for other in smaller if other not in seen)
            seen.update(smaller)


def _overflows(stage: StageEstimate) -> bool:
    return stage.memory.total_bytes > stage.capacity_bytes


def _next_recomputations(
    layout: Layout, too_large: Sequence[tuple[int, int]], recomputes: Sequence[Recompute]
) -> Iterator[Layout]:
    """Yield the layouts in which each rank that is too large has one virtual stage at its next recomputation."""
    choices = []
    for row, rank in too_large:
        replica = layout.replicas[row]
        stages = range(rank, len(replica.stages), replica.pp)
        choices.append([(row, v) for v in stages if replica.stages[v].recompute != recomputes[-1]])
    if not choices:
        return
    for changed in product(*choices):
        yield _with_next(layout, frozenset(changed), recomputes)


def _with_next(layout: Layout, changed: frozenset[tuple[int, int]], recomputes: Sequence[Recompute]) -> Layout:
    def stage_of(row: int, v: int, stage: Stage) -> Stage:
        if (row, v) not in changed:
            return stage
        return replace(stage, recompute=recomputes[recomputes.index(stage.recompute) + 1])

    return replace(
        layout,
        replicas=tuple(
            replace(replica, stages=tuple(stage_of(row, v, stage) for v, stage in enumerate(replica.stages)))
            for row, replica in enumerate(layout.replicas)
        ),
    )


def layout_of(columns: Columns, shapes: Sequence[Shape], combination: Combination, context: Context) -> Layout:
    """Return the layout a set of replicas stands for, equal replicas written once."""
    replicas = []
    for (row, m), equal in groupby(combination):
        shape = shapes[int(columns.shape[row])]
        meshes = shape.meshes * shape.vpp
        cut = columns.cuts[row].tolist()
        modes = columns.modes[row].tolist()
        stages = tuple(
            Stage(
                group=mesh.group,
                first_layer=cut[v],
                end_layer=cut[v + 1],
                tp=mesh.tp,
                cp=mesh.cp,
                dp=mesh.dp,
                ep=mesh.ep,
                recompute=context.recomputes[modes[v]],
            )
            for v, mesh in enumerate(meshes)
        )
        microbatch = int(columns.microbatch[row])
        replicas.append(
            Replica(stages=stages, microbatch=microbatch, num_microbatches=m, copies=len(list(equal)), vpp=shape.vpp)
        )
    return Layout(replicas=tuple(replicas), schedule=context.schedule, sharding=context.sharding)
