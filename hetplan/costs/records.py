"""What the cost model is asked and what it answers; the verbs are in `hetplan.costs.prices`.

Array suffixes: `_l` one entry a layer of the model's chain; `_ol` options x layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hetplan.specs.workload import Recompute

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """How one stage could run: a mesh shape on a group, the samples a rank sees at once, what is recomputed."""

    group: str
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    samples: int
    """Samples of one microbatch on one rank (the replica's microbatch over `dp`)."""
    recompute: Recompute = "none"

    @property
    def mesh_size(self) -> int:
        """Devices of one mesh."""
        return self.tp * self.cp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """One microbatch on one rank under one option: an entry a layer of the chain (or options x layers)."""

    forward_s: Floats
    """Arithmetic of the forward pass."""
    backward_s: Floats
    """Arithmetic of the backward pass, recomputation included."""
    weight_gradient_s: Floats
    """Part of `backward_s` that makes weight gradients only (zero-bubble schedules move it)."""
    recompute_s: Floats
    """Part of `backward_s` that repeats forward work."""
    tp_forward_s: Floats
    tp_backward_s: Floats
    cp_forward_s: Floats
    cp_backward_s: Floats
    ep_forward_s: Floats
    ep_backward_s: Floats
    """Communication inside the mesh that nothing hides."""
    params: Floats
    """Parameters a rank trains, routed experts apart."""
    expert_params: Floats
    """Parameters of routed experts a rank trains."""
    saved_bytes: Floats
    """Activations kept from a microbatch's forward to its backward pass."""
    working_bytes: Floats
    """Most bytes the layer needs at once on top of what is saved (recomputed activations, score matrices)."""
    logits_bytes: Floats
    """fp32 logits and their gradient (head layers only)."""
    frozen_params: Floats = field(default_factory=lambda: np.zeros(1))
    """Parameters a rank holds that do not train: neither gradient nor optimizer state, copied on every rank."""
    scores_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    """Part of `working_bytes` that is score matrices of materialised attention."""

    @property
    def forward_total_s(self) -> Floats:
        """Forward pass with communication."""
        return self.forward_s + self.tp_forward_s + self.cp_forward_s + self.ep_forward_s

    @property
    def backward_total_s(self) -> Floats:
        """Backward pass with communication."""
        return self.backward_s + self.tp_backward_s + self.cp_backward_s + self.ep_backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDegrees:
    """Over how many data-parallel ranks a layer's weights, gradients or optimizer states are shared out."""

    dense: int = 1
    expert: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Ranks that hold the same slice of a layer on meshes of one group.

    `num_ranks` data-parallel ranks (copies x dp x cp; for experts divided by ep) hold each tp slice;
    `ranks_per_node` of them share a node, so `tp * ranks_per_node` devices of that node use its NICs at once.
    """

    group: str
    num_ranks: int
    ranks_per_node: int
    tp: int
    rings_per_node: int = 0
    """Rings of all stages that leave such a node at once and share its NICs, this holder's included; 0: its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """Seconds to bring one layer run's gradients together, and its weights back out where they are sharded."""

    reduce_s: float
    """All-reduce (nothing sharded) or reduce-scatter."""
    gather_s: float
    """All-gather of updated weights after the optimizer (sharded) or of weights before use (fully sharded)."""
    shared_lines: tuple[str, ...] = ()
    """Networks with one line shared by all traffic on it that the slowest part crosses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Peak bytes on one device of a stage, by component."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    logits_bytes: float
    buffers_bytes: float
    reserve_bytes: float
    scores_bytes: float = 0.0
    """Score matrices that one layer's materialised attention holds for a moment, on top of those it keeps."""

    @property
    def total_bytes(self) -> float:
        """The peak."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.buffers_bytes
            + self.reserve_bytes
            + self.scores_bytes
        )
