"""Which shapes are measured: a grid with awkward members, and the planned model's own products.

Awkward: widths no multiple of 64 or of 8 (GPT-2 XL's 1600, a vocabulary of 50257), odd heads, a microbatch of few
tokens. Large products are left out where one would take longer than `LONGEST_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetplan.specs.cluster import Precision
from hetplan.specs.model import Attention, Linear, Model

LONGEST_S = 0.25
QUICK_LONGEST_S = 0.06
"""Assumed: one product may take so long, so that a round of repetitions fits its time."""

ROWS = (16, 128, 512, 2048)
WIDTHS = ((256, 256), (256, 1024), (1024, 1024), (1024, 4096), (4096, 4096), (1600, 1600), (1000, 1000), (1021, 1021))
LARGE_WIDTHS = ((8192, 8192), (8192, 28672), (5120, 13824), (4096, 50257))
QUICK_ROWS = (32, 512)
QUICK_WIDTHS = ((256, 256), (256, 1024), (1024, 1024), (1021, 1021), (1000, 1000))

ATTENTIONS = ((1, 8, 128, 64), (4, 8, 128, 32), (1, 8, 512, 64), (1, 12, 512, 80), (1, 8, 1024, 128), (1, 5, 333, 44))
LARGE_ATTENTIONS = ((1, 32, 4096, 128), (1, 32, 8192, 128), (4, 16, 2048, 64))
QUICK_ATTENTIONS = ((2, 8, 128, 32), (1, 8, 512, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """Rows x inputs times inputs x outputs."""

    rows: int
    inputs: int
    outputs: int

    @property
    def flop(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Causal attention over `samples` sequences."""

    samples: int
    heads: int
    seq_len: int
    head_dim: int

    @property
    def flop(self) -> float:
        """Of a forward pass."""
        return 2.0 * self.samples * self.heads * self.seq_len * (self.seq_len + 1) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user plans to run."""

    seq_len: int
    samples: tuple[int, ...]
    tps: tuple[int, ...]
    precisions: tuple[Precision, ...]
    quick: bool
    sequence_parallel: bool = True

    @property
    def longest_s(self) -> float:
        """Longest single product."""
        return QUICK_LONGEST_S if self.quick else LONGEST_S


def gemm_shapes(wish: Wish, model: Model | None, flop_per_s: float) -> tuple[GemmShape, ...]:
    """Return the grid and the model's own products that a device of this speed can do in time, smallest first."""
    rows, widths = (QUICK_ROWS, QUICK_WIDTHS) if wish.quick else (ROWS, WIDTHS + LARGE_WIDTHS)
    grid = [GemmShape(rows=r, inputs=i, outputs=o) for r in rows for i, o in widths]
    own = list(_own_gemms(wish, model)) if model else []
    fits = {shape for shape in (*grid, *own) if shape.flop <= flop_per_s * wish.longest_s}
    return tuple(sorted(fits, key=lambda shape: (shape.flop, shape.rows, shape.inputs)))


def attention_shapes(wish: Wish, model: Model | None, flop_per_s: float) -> tuple[AttentionShape, ...]:
    """Return the grid and the model's own heads that a device of this speed can do in time, smallest first."""
    sizes = QUICK_ATTENTIONS if wish.quick else ATTENTIONS + LARGE_ATTENTIONS
    grid = [AttentionShape(samples=b, heads=h, seq_len=s, head_dim=d) for b, h, s, d in sizes]
    own = list(_own_attentions(wish, model)) if model else []
    fits = {shape for shape in (*grid, *own) if 3.5 * shape.flop <= flop_per_s * wish.longest_s / 2}
    return tuple(sorted(fits, key=lambda shape: (shape.flop, shape.samples, shape.heads)))


def _own_gemms(wish: Wish, model: Model) -> Iterable[GemmShape]:
    for samples in wish.samples:
        for tp in wish.tps:
            for linear in _linears(model):
                inputs = linear.inputs // tp if linear.split == "row" else linear.inputs
                outputs = linear.outputs // tp if linear.split in ("column", "vocab") else linear.outputs
                if inputs and outputs:
                    yield GemmShape(rows=samples * wish.seq_len, inputs=inputs, outputs=outputs)


def _own_attentions(wish: Wish, model: Model) -> Iterable[AttentionShape]:
    found = {op for layer in model.chain for op in layer.operators if isinstance(op, Attention)}
    for attention in sorted(found, key=lambda op: op.num_heads):
        for samples in wish.samples:
            for tp in wish.tps:
                if attention.num_heads % tp == 0 and attention.qk_head_dim == attention.value_head_dim:
                    yield AttentionShape(
                        samples=samples,
                        heads=attention.num_heads // tp,
                        seq_len=wish.seq_len,
                        head_dim=attention.qk_head_dim,
                    )


def _linears(model: Model) -> Sequence[Linear]:
    return [op for layer in model.chain for op in layer.operators if isinstance(op, Linear)]
