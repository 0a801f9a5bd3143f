"""What is asked of one training step: sequence length, batch, precision and what an optimizer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetplan.errors import UsageError
from hetplan.specs.cluster import Precision

AttentionKernel = Literal["auto", "flash", "materialised"]
"""auto: flash where every device of a stage's group supports it."""

Recompute = Literal["none", "selective", "full"]
"""selective: attention scores and softmax only (Korthikanti 2022); full: everything but a layer's input."""
Sharding = Literal["none", "optimizer", "gradients", "full"]
"""What data-parallel ranks share instead of copying: ZeRO stages 0-3 (Rajbhandari 2020, arXiv:1910.02054)."""

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "full")

BYTES_PER_ELEMENT: dict[str, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step of full training with AdamW."""

    seq_len: int
    global_batch: int
    """Samples a step, over all replicas."""
    precision: Precision = "bf16"
    """GEMM precision. fp8 keeps weights and activations in bf16."""
    gradient_precision: Precision | None = None
    """Precision gradients are kept and reduced in; None: that of the weights (Megatron-LM keeps fp32)."""
    attention: AttentionKernel = "auto"
    sequence_parallel: bool = True
    """Split norms and residuals over the tp group (Korthikanti 2022, arXiv:2205.05198)."""

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.global_batch < 1:
            raise UsageError("sequence length and global batch must be at least 1")

    @property
    def weight_bytes(self) -> int:
        """Bytes a parameter takes in the copy the GEMMs read."""
        return 2 if self.precision == "fp8" else BYTES_PER_ELEMENT[self.precision]

    @property
    def activation_bytes(self) -> int:
        """Bytes an activation element takes."""
        return self.weight_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes a gradient element takes while it is accumulated."""
        return self.weight_bytes if self.gradient_precision is None else BYTES_PER_ELEMENT[self.gradient_precision]

    @property
    def optimizer_bytes(self) -> int:
        """AdamW's two fp32 moments, plus an fp32 master copy when the weights are narrower."""
        return 8 if self.weight_bytes == 4 else 12
