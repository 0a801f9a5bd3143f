"""What would make an impossible request possible: each change tried alone, and the nodes it would take.

A change counts as a fix only where a valid plan was found under it, so its step time is that plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hetplan.costs.prices import Prices, price
from hetplan.errors import HetplanError
from hetplan.plan.limits import Limits
from hetplan.plan.rules import listed
from hetplan.search.diagnosis import Fix, Need
from hetplan.search.grown import with_nodes
from hetplan.search.lightest import fits
from hetplan.search.problem import Problem, build_problem
from hetplan.search.quick import quick
from hetplan.search.records import Candidate, SearchRequest
from hetplan.specs.cluster import Cluster, Precision
from hetplan.specs.workload import RECOMPUTES, SHARDINGS, Workload

MOST_NODES = 1 << 14
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A request that differs in one thing."""

    words: str
    prices: Prices
    request: SearchRequest


def attempt(prices: Prices, request: SearchRequest) -> Candidate | None:
    """Return a good valid plan, or at least one that fits, or None."""
    near = fits(build_problem(prices, request.limits))
    if near is None:
        return None
    return quick(prices, request) or Candidate(layout=near.layout, estimate=near.estimate)


def tried(changes: Iterator[Change]) -> tuple[Fix, ...]:
    """Return what each change brings."""
    return tuple(Fix(words=change.words, step_s=_step_s(change)) for change in changes)


def _step_s(change: Change) -> float | None:
    try:
        found = attempt(change.prices, change.request)
    except HetplanError:
        return None
    return found.estimate.step_s if found is not None else None


def changes(problem: Problem, request: SearchRequest) -> Iterator[Change]:
    """Yield every limit of the request that is narrower than it must be, lifted alone."""
    prices = problem.prices
    for words, limits in _wider_limits(request.limits):
        yield Change(words=words, prices=prices, request=replace(request, limits=limits))
    for words, workload in _lighter_workloads(prices.workload, prices.cluster, request.limits):
        other = price(prices.cluster, prices.model, workload, prices.calibration)
        yield Change(words=words, prices=other, request=request)


def _wider_limits(limits: Limits) -> Iterator[tuple[str, Limits]]:
    mixed = {"uniform_degrees": False, "uniform_cuts": False, "uniform_microbatches": False, "equal_cuts": False}
    excluded = listed(sorted(limits.exclude))
    wider: tuple[tuple[bool, str, dict[str, Any]], ...] = (
        ("full" not in limits.recompute, "allow full recompute", {"recompute": RECOMPUTES}),
        ("full" not in limits.sharding, "allow sharding full", {"sharding": SHARDINGS}),
        (limits.microbatch not in (None, (1,)), "allow a microbatch of 1", {"microbatch": (1,)}),
        (limits.pinned_layers is not None, "leave the layers of each stage free", {"pinned_layers": None}),
        (limits.tp is not None, "allow any tp", {"tp": None}),
        (limits.pp is not None and limits.pinned_layers is None, "allow any pp", {"pp": None}),
        (limits.ep is not None, "allow any ep", {"ep": None}),
        (bool(limits.exclude), f"use {excluded} as well", {"exclude": frozenset()}),
        (limits.equal_cuts, "allow unequal stages", {"equal_cuts": False}),
        (limits.uniform_degrees or limits.uniform_cuts, "allow stages that differ (another engine)", mixed),
        (not limits.allow_mixed_vendors, "allow several vendors in one job", {"allow_mixed_vendors": True}),
    )
    for is_narrow, words, fields in wider:
        if is_narrow:
            yield words, replace(limits, **fields)


def _lighter_workloads(workload: Workload, cluster: Cluster, limits: Limits) -> Iterator[tuple[str, Workload]]:
    used = [group for group in cluster.groups if group.name not in limits.exclude]
    for precision in PRECISIONS:
        if precision == workload.precision or not all(precision in g.device.peak_flop_per_s for g in used):
            continue
        lighter = replace(workload, precision=precision)
        if _state_bytes(lighter) < _state_bytes(workload) or not any(
            workload.precision in g.device.peak_flop_per_s for g in used
        ):
            yield f"precision {precision} instead of {workload.precision}", lighter
            break
    if workload.gradient_precision == "fp32" and workload.weight_bytes < 4:
        yield "gradients in the weights' precision", replace(workload, gradient_precision=None)
    if not workload.sequence_parallel:
        yield "sequence parallelism", replace(workload, sequence_parallel=True)


def _state_bytes(workload: Workload) -> int:
    """Return bytes of weights, gradients and activations an element takes."""
    return workload.weight_bytes + workload.gradient_bytes + workload.activation_bytes


def shorter(problem: Problem, request: SearchRequest) -> Iterator[Change]:
    """Yield the request with samples cut over devices, and with samples cut in half: fewer activations a device."""
    prices, seq_len = problem.prices, problem.prices.workload.seq_len
    cps = tuple(cp for cp in (2, 4, 8) if seq_len % (2 * cp) == 0)
    if request.limits.cp == (1,) and cps:
        limits = replace(request.limits, cp=(1, *cps))
        yield Change(words=f"allow cp {listed(cps)}", prices=prices, request=replace(request, limits=limits))
    if seq_len % 2 == 0:
        workload = replace(prices.workload, seq_len=seq_len // 2)
        other = price(prices.cluster, prices.model, workload, prices.calibration)
        yield Change(words=f"sequences of {seq_len // 2} tokens", prices=other, request=request)


def nodes_needed(problem: Problem, request: SearchRequest, group: str) -> Need | None:
    """Return the smallest number of nodes of a group with which something fits, None where no number does.

    Doubles the nodes until a layout fits, then bisects; the test counts memory and rules only, so it is fast.
    """
    prices = problem.prices
    existing = len(prices.cluster.group(group).nodes)

    def enough(count: int) -> bool:
        cluster = with_nodes(prices.cluster, group, count)
        other = price(cluster, prices.model, prices.workload, prices.calibration)
        return fits(build_problem(other, request.limits)) is not None

    count = smallest(enough, existing)
    if count is None:
        return None
    cluster = with_nodes(prices.cluster, group, count)
    return Need(group=group, nodes=count, devices=cluster.group(group).num_devices, existing_nodes=existing)


def smallest(enough: Callable[[int], bool], below: int, most: int = MOST_NODES) -> int | None:
    """Return the least number above `below` that is enough, None where `most` is not; `enough` must be monotonic."""
    low, high = below, below + 1
    while not enough(high):
        if high >= most:
            return None
        low, high = high, min(most, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high
