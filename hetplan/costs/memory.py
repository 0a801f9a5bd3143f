"""Peak bytes on one device of a stage, by component, and the same for every span of layers at once.

`D` is how many ranks share (`ShardDegrees`), for dense and expert parameters apart (Rajbhandari 2020,
arXiv:1910.02054, section 5):

| | none | optimizer | gradients | full |
|---|---|---|---|---|
| weights | P w | P w | P w | P w / D |
| gradients | P g | P g | P g / D | P g / D |
| optimizer | P o | P o / D | P o / D | P o / D |

**Activations**: what each layer keeps, times the microbatches in flight, plus the most one layer needs on top of it
(recomputed tensors, gradients passing through; score matrices among them are a component of their own, **scores**).
**Logits** exist for one microbatch, and are gone before any other layer's backward pass: the larger of them and what a
layer needs on top counts. **Buffers**: a microbatch's activations received from the stage before and its gradient from
the stage behind; a gradient bucket of the largest layer before it is scattered (`gradients`); two gathered layers, one
in use and one on its way, and the gradient of the largest (`full`). **Tied weights**: a stage that uses a weight (a
tied head) whose owner (the token table) is on another stage holds a copy, states and all. **Reserve**: what the driver,
the framework and communication libraries hold (`reserve_bytes`). An allocator's rounding and fragmentation grow
activations, scores and buffers, which come and go, by `memory_overhead_fraction`; states and logits, which are few and
large, do not grow. All of it is linear in
the microbatches in flight: `total(i, j) = fixed[i, j] + in_flight * per_microbatch[i, j]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats, LayerCosts, MemoryUse, ShardDegrees
from hetplan.specs.calibration import DeviceConstants
from hetplan.specs.workload import Sharding, Workload

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A weight that several layers use; entries an layer of the chain."""

    params: float
    """On one rank."""
    owners_l: Flags
    users_l: Flags

    def is_copied(self, first: int, end: int) -> bool:
        """Return whether a stage that holds layers first to end needs a copy."""
        return bool(self.users_l[first:end].any() and not self.owners_l[first:end].any())

    def copies(self) -> Floats:
        """Return 1 for each span that needs a copy, shape (layers + 1, layers + 1)."""
        used = span_sum(self.users_l.astype(np.float64)) > 0
        owned = span_sum(self.owners_l.astype(np.float64)) > 0
        return np.asarray(used & ~owned, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """What one option on one device kind needs, layer by layer, under one sharding."""

    weights_bytes_l: Floats
    gradients_bytes_l: Floats
    optimizer_bytes_l: Floats
    saved_bytes_l: Floats
    working_bytes_l: Floats
    scores_bytes_l: Floats
    """Part of `working_bytes_l` that is score matrices."""
    logits_bytes_l: Floats
    layer_buffer_bytes_l: Floats
    """Buffers of gathered weights and gradient buckets; a stage has those of its largest layer."""
    boundary_bytes_l: Floats
    """Activations that leave a layer for the next stage."""
    ties: tuple[Tie, ...]
    tie_bytes_per_param: tuple[float, float, float]
    """Weights, gradients, optimizer states of a copied weight."""
    overhead: float
    """Factor on activations and buffers."""
    reserve_bytes: float

    def use(self, span: tuple[int, int], in_flight: int) -> MemoryUse:
        """Return the peak of a stage that holds layers `span` (half-open)."""
        held = slice(*span)
        saved = float(self.saved_bytes_l[held].sum())
        logits = float(self.logits_bytes_l[held].sum())
        widest = span[0] + int(np.argmax(self.working_bytes_l[held]))
        working = max(0.0, float(self.working_bytes_l[widest]) * self.overhead - logits)
        scores = min(working, float(self.scores_bytes_l[widest]) * self.overhead)
        copied = sum(tie.params for tie in self.ties if tie.is_copied(*span))
        weights, gradients, optimizer = (copied * num_bytes for num_bytes in self.tie_bytes_per_param)
        buffers = float(self.layer_buffer_bytes_l[held].max()) + self._boundary(*span)
        return MemoryUse(
            weights_bytes=float(self.weights_bytes_l[held].sum()) + weights,
            gradients_bytes=float(self.gradients_bytes_l[held].sum()) + gradients,
            optimizer_bytes=float(self.optimizer_bytes_l[held].sum()) + optimizer,
            activations_bytes=in_flight * saved * self.overhead + working - scores,
            scores_bytes=scores,
            logits_bytes=logits,
            buffers_bytes=buffers * self.overhead,
            reserve_bytes=self.reserve_bytes,
        )

    def matrices(self) -> tuple[Floats, Floats]:
        """Return `fixed` and `per_microbatch`, shape (layers + 1, layers + 1); entries with j <= i are 0."""
        states_l = self.weights_bytes_l + self.gradients_bytes_l + self.optimizer_bytes_l
        largest = span_max(self.layer_buffer_bytes_l)
        passing = np.maximum(span_max(self.working_bytes_l) * self.overhead, span_sum(self.logits_bytes_l))
        before = np.concatenate([[0.0], self.boundary_bytes_l[:-1], [0.0]])
        behind = np.concatenate([[0.0], self.boundary_bytes_l[:-1], [0.0]])
        boundary = before[:, None] + behind[None, :]
        fixed = span_sum(states_l) + passing + (largest + boundary) * self.overhead + self.reserve_bytes
        for tie in self.ties:
            fixed = fixed + tie.copies() * (tie.params * sum(self.tie_bytes_per_param))
        upper = np.triu(np.ones_like(fixed), k=1)
        return fixed * upper, span_sum(self.saved_bytes_l) * self.overhead * upper

    def _boundary(self, first: int, end: int) -> float:
        received = float(self.boundary_bytes_l[first - 1]) if first > 0 else 0.0
        sent = float(self.boundary_bytes_l[end - 1]) if end < len(self.boundary_bytes_l) else 0.0
        return received + sent


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What memory depends on besides sharding: the costs of one option and the device it runs on."""

    costs: LayerCosts
    """Shape (layers,)."""
    boundary_bytes_l: Floats
    ties: tuple[Tie, ...]
    constants: DeviceConstants


def memory_model(stage: StageMemory, workload: Workload, sharding: Sharding, degrees: ShardDegrees) -> MemoryModel:
    """Return the memory of one option under one sharding."""
    costs = stage.costs
    whole_l = costs.params + costs.expert_params
    shared_l = costs.params / degrees.dense + costs.expert_params / degrees.expert
    split_weights, split_gradients = sharding == "full", sharding in ("gradients", "full")
    split_optimizer = sharding != "none"
    weights_l = shared_l if split_weights else whole_l
    gradients_l = shared_l if split_gradients else whole_l
    optimizer_l = shared_l if split_optimizer else whole_l
    buffers_l = np.zeros_like(whole_l)
    if split_gradients:
        buffers_l = buffers_l + (whole_l - gradients_l) * workload.gradient_bytes
    if split_weights:
        buffers_l = buffers_l + 2 * (whole_l - weights_l) * workload.weight_bytes
    return MemoryModel(
        weights_bytes_l=(weights_l + costs.frozen_params) * workload.weight_bytes,
        gradients_bytes_l=gradients_l * workload.gradient_bytes,
        optimizer_bytes_l=optimizer_l * workload.optimizer_bytes,
        saved_bytes_l=costs.saved_bytes,
        working_bytes_l=costs.working_bytes,
        scores_bytes_l=np.broadcast_to(costs.scores_bytes, costs.working_bytes.shape),
        logits_bytes_l=costs.logits_bytes,
        layer_buffer_bytes_l=buffers_l,
        boundary_bytes_l=stage.boundary_bytes_l,
        ties=stage.ties,
        tie_bytes_per_param=(
            workload.weight_bytes / (degrees.dense if split_weights else 1),
            workload.gradient_bytes / (degrees.dense if split_gradients else 1),
            workload.optimizer_bytes / (degrees.dense if split_optimizer else 1),
        ),
        overhead=1.0 + stage.constants.memory_overhead_fraction,
        reserve_bytes=stage.constants.reserve_bytes,
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
