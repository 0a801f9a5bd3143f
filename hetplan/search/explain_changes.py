"""What single changes would bring: the same layout priced again, or a quick plan of a changed cluster.

Changes of speed (networks, devices) re-price the same layout: what they save is what it waited for. Changes of what
fits (memory) and of what there is (nodes) need another plan, so a quick one is made for both sides of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetplan.costs.prices import Prices, price
from hetplan.errors import HetplanError
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.records import Estimate, Layout
from hetplan.search.grown import with_faster_devices, with_faster_network, with_more_memory, with_nodes
from hetplan.search.quick import quick
from hetplan.search.records import SearchRequest
from hetplan.specs.cluster import Cluster
from hetplan.specs.workload import Recompute
from hetplan.units import format_seconds

LEAST_GAIN = 0.002
"""Changes that save less are not worth a line."""
GIB = 2.0**30
NETWORK_FACTOR = 2.0
DEVICE_FACTOR = 1.1
MEMORY_FACTOR = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one more node of a group would bring."""

    group: str
    num_devices: int
    """Devices of the node."""
    before_s: float
    """Step time of the best plan known for the cluster as it is."""
    after_s: float
    usd_before: float | None
    usd_after: float | None

    @property
    def fraction(self) -> float:
        """Part of the step time that is saved (0.08: 8 % shorter)."""
        return 1.0 - self.after_s / self.before_s

    @property
    def sentence(self) -> str:
        """The gain in words."""
        node = f"one more node of group {self.group} ({self.num_devices} devices)"
        if self.fraction < LEAST_GAIN:
            return f"{node}: no shorter step"
        return f"{node}: step {format_seconds(self.after_s)}, {100 * self.fraction:.1f} % shorter"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change and the step time under it."""

    words: str
    before_s: float
    after_s: float
    missing_bytes: float = 0.0
    """Memory a device would lack; above 0: it does not fit."""

    @property
    def fraction(self) -> float:
        """Part of the step time that is saved."""
        return 1.0 - self.after_s / self.before_s

    @property
    def sentence(self) -> str:
        """The change in words."""
        lacks = f", but a device would lack {self.missing_bytes / GIB:.2f} GiB" if self.missing_bytes > 0 else ""
        return f"{self.words}: step {format_seconds(self.after_s)}, {100 * self.fraction:.1f} % shorter{lacks}"


def node_gains(best: Estimate, prices: Prices, request: SearchRequest) -> tuple[Gain, ...]:
    """Return what one more node of each group would bring over `best`, best first, but for excluded groups."""
    gains = []
    for group in prices.cluster.groups:
        if group.name in request.limits.exclude:
            continue
        cluster = with_nodes(prices.cluster, group.name, len(group.nodes) + 1)
        found = _quick(_repriced(prices, cluster), request)
        after = found if found is not None and found.step_s < best.step_s else best
        gains.append(
            Gain(
                group=group.name,
                num_devices=group.devices_per_node,
                before_s=best.step_s,
                after_s=after.step_s,
                usd_before=best.usd_per_step,
                usd_after=after.usd_per_step,
            )
        )
    return tuple(sorted(gains, key=lambda gain: -gain.fraction))


def best_known(layout: Layout, prices: Prices, request: SearchRequest) -> Estimate:
    """Return the faster of a layout and the quick plan of its cluster."""
    own = estimate(layout, prices)
    found = _quick(prices, request)
    return found if found is not None and found.step_s < own.step_s else own


def _quick(prices: Prices, request: SearchRequest) -> Estimate | None:
    wanted = replace(request, objective="time", time_budget_s=None, compare=False)
    try:
        found = quick(prices, wanted)
    except HetplanError:
        return None
    return found.estimate if found is not None else None


def _repriced(prices: Prices, cluster: Cluster) -> Prices:
    return price(cluster, prices.model, prices.workload, prices.calibration)


def what_ifs(layout: Layout, prices: Prices, request: SearchRequest, best: Estimate | None) -> tuple[WhatIf, ...]:
    """Return the single changes that would shorten the step, most helpful first.

    `best`: what plans of other clusters are compared with; None: nothing is planned again.
    """
    changes = [*_speed_changes(layout, prices), *_layout_changes(layout, prices, request)]
    if best is not None:
        changes += _memory_changes(best, prices, request)
    return tuple(sorted((c for c in changes if c.fraction >= LEAST_GAIN), key=lambda change: -change.fraction))


def _speed_changes(layout: Layout, prices: Prices) -> Iterator[WhatIf]:
    before_s = estimate(layout, prices).step_s
    used = {stage.group for replica in layout.replicas for stage in replica.stages}
    for network in prices.cluster.networks:
        cluster = with_faster_network(prices.cluster, network.name, NETWORK_FACTOR)
        after_s = estimate(layout, _repriced(prices, cluster)).step_s
        yield WhatIf(words=f"network {network.name} twice as fast", before_s=before_s, after_s=after_s)
    for group in prices.cluster.groups:
        if group.name in used:
            cluster = with_faster_devices(prices.cluster, group.name, DEVICE_FACTOR)
            after_s = estimate(layout, _repriced(prices, cluster)).step_s
            yield WhatIf(words=f"devices of group {group.name} 10 % faster", before_s=before_s, after_s=after_s)


def _layout_changes(layout: Layout, prices: Prices, request: SearchRequest) -> Iterator[WhatIf]:
    before_s = estimate(layout, prices).step_s
    for words, other in _other_layouts(layout):
        violations = check(other, prices, request.limits)
        if any(violation.rule not in ("memory", "limits") for violation in violations):
            continue
        found = estimate(other, prices)
        missing = max(stage.memory.total_bytes - stage.capacity_bytes for stage in found.stages)
        yield WhatIf(words=words, before_s=before_s, after_s=found.step_s, missing_bytes=max(0.0, missing))


def _other_layouts(layout: Layout) -> Iterator[tuple[str, Layout]]:
    if all(replica.num_microbatches % 2 == 0 for replica in layout.replicas):
        yield "microbatches twice as large", with_microbatches(layout, 2, 1)
    if all(replica.microbatch % 2 == 0 for replica in layout.replicas):
        yield "microbatches half as large", with_microbatches(layout, 1, 2)
    if any(stage.recompute != "none" for replica in layout.replicas for stage in replica.stages):
        yield "no recompute", with_recompute(layout, "none")
    if layout.sharding in ("gradients", "full"):
        yield "sharding of optimizer states only", replace(layout, sharding="optimizer")


def with_microbatches(layout: Layout, larger: int, smaller: int) -> Layout:
    """Return the layout with microbatches `larger / smaller` times as large and as many samples a step."""
    replicas = tuple(
        replace(
            replica,
            microbatch=replica.microbatch * larger // smaller,
            num_microbatches=replica.num_microbatches * smaller // larger,
        )
        for replica in layout.replicas
    )
    return replace(layout, replicas=replicas)


def with_recompute(layout: Layout, recompute: Recompute) -> Layout:
    """Return the layout with the same recomputation on every stage."""
    replicas = tuple(
        replace(replica, stages=tuple(replace(stage, recompute=recompute) for stage in replica.stages))
        for replica in layout.replicas
    )
    return replace(layout, replicas=replicas)


def _memory_changes(best: Estimate, prices: Prices, request: SearchRequest) -> Iterator[WhatIf]:
    before_s = best.step_s
    for group in prices.cluster.groups:
        if group.name in request.limits.exclude:
            continue
        cluster = with_more_memory(prices.cluster, group.name, MEMORY_FACTOR)
        found = _quick(_repriced(prices, cluster), request)
        after_s = min(before_s, found.step_s) if found is not None else before_s
        yield WhatIf(
            words=f"25 % more memory on group {group.name} (planned again)", before_s=before_s, after_s=after_s
        )
