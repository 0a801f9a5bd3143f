"""Peak bytes of one physical stage, with the exact number of microbatches its schedule holds there.

Virtual stages of a rank add up, except for what they take turns to use (logits, buffers) and what a device holds once
(the framework's reserve).
"""

from __future__ import annotations

from hetplan.costs.prices import Prices
from hetplan.costs.records import MemoryUse
from hetplan.plan.program import held_counts
from hetplan.plan.records import Layout, Replica
from hetplan.plan.stages import SAVED, option_of, span_sums
from hetplan.plan.sync import Mesh, shard_degrees


def mesh_memory(layout: Layout, prices: Prices, mesh: Mesh) -> tuple[int, MemoryUse]:
    """Return the microbatches a physical stage holds at its peak, and the bytes on one of its devices."""
    row, q = mesh
    replica = layout.replicas[row]
    moments = held_counts(layout.schedule, replica.pp, replica.num_microbatches, replica.vpp)[q]
    counts = _peak_counts(prices, replica, q, moments)
    uses = []
    for chunk, count in enumerate(counts):
        v = chunk * replica.pp + q
        stage = replica.stages[v]
        degrees = shard_degrees(layout, row, v)
        span = (stage.first_layer, stage.end_layer)
        uses.append(prices.memory(option_of(stage, replica), span, count, layout.sharding, degrees))
    return sum(counts), uses[0] if len(uses) == 1 else _together(uses)


def _peak_counts(prices: Prices, replica: Replica, q: int, moments: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the held microbatches of each virtual stage at the moment that holds most bytes."""
    if len(moments) == 1:
        return moments[0]
    saved = [
        span_sums(prices, option_of(stage, replica), stage.first_layer, stage.end_layer)[SAVED]
        for stage in replica.stages[q :: replica.pp]
    ]
    return max(moments, key=lambda counts: sum(c * s for c, s in zip(counts, saved, strict=True)))


def _together(uses: list[MemoryUse]) -> MemoryUse:
    return MemoryUse(
        weights_bytes=sum(use.weights_bytes for use in uses),
        gradients_bytes=sum(use.gradients_bytes for use in uses),
        optimizer_bytes=sum(use.optimizer_bytes for use in uses),
        activations_bytes=sum(use.activations_bytes for use in uses),
        logits_bytes=max(use.logits_bytes for use in uses),
        buffers_bytes=max(use.buffers_bytes for use in uses),
        reserve_bytes=max(use.reserve_bytes for use in uses),
        scores_bytes=max(use.scores_bytes for use in uses),
    )
