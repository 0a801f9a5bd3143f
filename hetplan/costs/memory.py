"""Peak bytes on one device of a stage, by component, and the same for every span of layers at once.

`D` is how many ranks share (`ShardDegrees`), for dense and expert parameters apart (Rajbhandari 2020,
arXiv:1910.02054, section 5):

| | none | optimizer | gradients | full |
|---|---|---|---|---|
| weights | P w | P w | P w | P w / D |
| gradients | P g | P g | P g / D | P g / D |
| optimizer | P o | P o / D | P o / D | P o / D |

**Activations**: what each layer keeps, times the microbatches in flight, plus the most one layer needs on top of it
(recomputed tensors, gradients passing through). **Logits** exist for one microbatch. **Buffers**: a microbatch's
activations received from the stage before and its gradient from the stage behind; a gradient bucket of the largest
layer before it is scattered (`gradients`); two gathered layers, one in use and one on its way, and the gradient of the
largest (`full`). Activations and buffers grow by the allocator's overhead. All of it is linear in the microbatches in
flight: `total(i, j) = fixed[i, j] + in_flight * per_microbatch[i, j]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.costs.records import Floats, LayerCosts, MemoryUse, ShardDegrees
from hetplan.specs.calibration import DeviceConstants
from hetplan.specs.workload import Sharding, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """What one option on one device kind needs, layer by layer, under one sharding."""

    weights_bytes_l: Floats
    gradients_bytes_l: Floats
    optimizer_bytes_l: Floats
    saved_bytes_l: Floats
    working_bytes_l: Floats
    logits_bytes_l: Floats
    layer_buffer_bytes_l: Floats
    """Buffers of gathered weights and gradient buckets; a stage has those of its largest layer."""
    boundary_bytes_l: Floats
    """Activations that leave a layer for the next stage."""
    overhead: float
    """Factor on activations and buffers."""
    reserve_bytes: float

    def use(self, span: tuple[int, int], in_flight: int) -> MemoryUse:
        """Return the peak of a stage that holds layers `span` (half-open)."""
        held = slice(*span)
        saved = float(self.saved_bytes_l[held].sum())
        working = float(self.working_bytes_l[held].max())
        buffers = float(self.layer_buffer_bytes_l[held].max()) + self._boundary(*span)
        return MemoryUse(
            weights_bytes=float(self.weights_bytes_l[held].sum()),
            gradients_bytes=float(self.gradients_bytes_l[held].sum()),
            optimizer_bytes=float(self.optimizer_bytes_l[held].sum()),
            activations_bytes=(in_flight * saved + working) * self.overhead,
            logits_bytes=float(self.logits_bytes_l[held].sum()),
            buffers_bytes=buffers * self.overhead,
            reserve_bytes=self.reserve_bytes,
        )

    def matrices(self) -> tuple[Floats, Floats]:
        """Return `fixed` and `per_microbatch`, shape (layers + 1, layers + 1); entries with j <= i are 0."""
        states_l = self.weights_bytes_l + self.gradients_bytes_l + self.optimizer_bytes_l + self.logits_bytes_l
        largest = span_max(self.working_bytes_l) + span_max(self.layer_buffer_bytes_l)
        before = np.concatenate([[0.0], self.boundary_bytes_l[:-1], [0.0]])
        behind = np.concatenate([[0.0], self.boundary_bytes_l[:-1], [0.0]])
        boundary = before[:, None] + behind[None, :]
        fixed = span_sum(states_l) + (largest + boundary) * self.overhead + self.reserve_bytes
        upper = np.triu(np.ones_like(fixed), k=1)
        return fixed * upper, span_sum(self.saved_bytes_l) * self.overhead * upper

    def _boundary(self, first: int, end: int) -> float:
        received = float(self.boundary_bytes_l[first - 1]) if first > 0 else 0.0
        sent = float(self.boundary_bytes_l[end - 1]) if end < len(self.boundary_bytes_l) else 0.0
        return received + sent


def memory_model(
    costs: LayerCosts,
    boundary_bytes_l: Floats,
    workload: Workload,
    constants: DeviceConstants,
    sharding: Sharding,
    degrees: ShardDegrees,
) -> MemoryModel:
    """Return the memory of one option (`costs` of shape (layers,)) under one sharding."""
    whole_l = costs.params + costs.expert_params
    shared_l = costs.params / degrees.dense + costs.expert_params / degrees.expert
    weights_l = shared_l if sharding == "full" else whole_l
    gradients_l = shared_l if sharding in ("gradients", "full") else whole_l
    optimizer_l = whole_l if sharding == "none" else shared_l
    buffers_l = np.zeros_like(whole_l)
    if sharding in ("gradients", "full"):
        buffers_l = buffers_l + (whole_l - gradients_l) * workload.gradient_bytes
    if sharding == "full":
        buffers_l = buffers_l + 2 * (whole_l - weights_l) * workload.weight_bytes
    return MemoryModel(
        weights_bytes_l=weights_l * workload.weight_bytes,
        gradients_bytes_l=gradients_l * workload.gradient_bytes,
        optimizer_bytes_l=optimizer_l * workload.optimizer_bytes,
        saved_bytes_l=costs.saved_bytes,
        working_bytes_l=costs.working_bytes,
        logits_bytes_l=costs.logits_bytes,
        layer_buffer_bytes_l=buffers_l,
        boundary_bytes_l=boundary_bytes_l,
        overhead=1.0 + constants.memory_overhead_fraction,
        reserve_bytes=constants.reserve_bytes,
    )


def span_sum(values_l: Floats) -> Floats:
    """Return `out[i, j] = sum(values_l[i:j])`, 0 where j <= i."""
    edges = np.concatenate([[0.0], np.cumsum(values_l)])
    sums: Floats = np.maximum(edges[None, :] - edges[:, None], 0.0)
    return sums


def span_max(values_l: Floats) -> Floats:
    """Return `out[i, j] = max(values_l[i:j])` of non-negative values, 0 where j <= i."""
    count = len(values_l)
    spread = np.triu(np.broadcast_to(values_l, (count, count)))
    out = np.zeros((count + 1, count + 1))
    out[:count, 1:] = np.maximum.accumulate(spread, axis=1)
    return out
