"""Which engines can run a plan, and what whoever launches it should know beforehand."""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.costs.prices import Prices
from hetplan.plan.check import check
from hetplan.plan.common_features import lost_features
from hetplan.plan.limits import ENGINES
from hetplan.plan.records import Layout
from hetplan.plan.rules import listed
from hetplan.plan.visible_devices import visible_devices


def engines(layout: Layout, prices: Prices) -> tuple[str, ...]:
    """Return the engines whose abilities cover a layout."""
    able = []
    for name, limits in ENGINES.items():
        broken = check(layout, prices, limits)
        if not [v for v in broken if v.rule == "limits" and not _is_schedule(v.message)]:
            able.append(name)
    return tuple(able)


def _is_schedule(message: str) -> bool:
    """A profile names the schedules a search tries, not all an engine has; cp likewise."""
    return message.startswith(("schedule ", "cp "))


def remarks(layout: Layout, prices: Prices) -> tuple[str, ...]:
    """Return what is unusual about running a layout."""
    return tuple(_remarks(layout, prices))


def _remarks(layout: Layout, prices: Prices) -> Iterator[str]:
    cluster = prices.cluster
    stages = [stage for replica in layout.replicas for stage in replica.stages]
    used = [cluster.group(name) for name in dict.fromkeys(stage.group for stage in stages)]
    yield f"engines that can run it: {listed(engines(layout, prices))}"
    vendors = tuple(dict.fromkeys(group.device.vendor for group in used))
    if len(vendors) > 1:
        yield f"devices of {' and '.join(vendors)}: NCCL and RCCL do not talk to each other; use a bridge such as gloo"
    lost = lost_features(used)
    if "bf16" in lost and prices.workload.precision in ("fp16", "fp32"):
        yield f"group {listed(lost['bf16'])} has no bf16: the whole job runs in {prices.workload.precision}"
    if "flash_attention" in lost and prices.workload.attention == "auto":
        yield f"group {listed(lost['flash_attention'])} has no fused attention: its stages hold score matrices"
    if len({stage.tp for stage in stages}) > 1:
        yield "tp differs between stages: distributed checkpoints need one tp, save in the plain format"
    shared = {
        name for group in used for other in used if other is not group for name in group.nodes if name in other.nodes
    }
    for node, order in visible_devices(layout, cluster).items():
        if node in shared:
            yield f"node {node} holds unlike cards: CUDA_VISIBLE_DEVICES={order} keeps each tp group alike"
