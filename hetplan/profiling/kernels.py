"""Products, attention, elementwise work, the optimizer's update, copies and launches of one device.

Each is counted in the bytes or flop the cost model gives it (`hetplan.costs.compute`, `hetplan.costs.optimizer`), so a
figure is what the model needs to get that piece of work right.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from hetplan.profiling.records import AttentionFigure, GemmFigure, Timing, TrafficFigure
from hetplan.profiling.shapes import AttentionShape, GemmShape
from hetplan.profiling.stopwatch import Stopwatch
from hetplan.runtime.buckets import square_sum
from hetplan.specs.cluster import Precision

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
PROBE = GemmShape(rows=512, inputs=1024, outputs=1024)
ELEMENTS = 1 << 20
"""Assumed: about the activations of one layer and microbatch."""
COPY_BYTES = 64 << 20
PARAMS = 1 << 22


def gemm(shape: GemmShape, precision: Precision, watch: Stopwatch) -> GemmFigure:
    """Return the figure of one product, inputs and weight as `torch.nn.Linear` lays them out."""
    dtype = DTYPES[precision]
    inputs = torch.randn(shape.rows, shape.inputs, device=watch.device).to(dtype)
    weight = torch.randn(shape.outputs, shape.inputs, device=watch.device).to(dtype)
    with torch.no_grad(), _tf32(allowed=precision == "tf32"):
        timing = watch.time(lambda: functional.linear(inputs, weight))
    return GemmFigure(rows=shape.rows, inputs=shape.inputs, outputs=shape.outputs, precision=precision, timing=timing)


def attention(shape: AttentionShape, precision: Precision, watch: Stopwatch) -> tuple[AttentionFigure, AttentionFigure]:
    """Return the forward and backward figures of causal attention as torch's own kernel does it."""
    size = (shape.samples, shape.heads, shape.seq_len, shape.head_dim)
    made = [torch.randn(size, device=watch.device).to(DTYPES[precision]).requires_grad_() for _ in range(3)]
    query, key, value = made
    gradient = torch.randn(size, device=watch.device).to(DTYPES[precision])
    both = watch.passes(
        lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True),
        lambda out: torch.autograd.grad(out, made, gradient),
    )

    def figure(way: str, timing: Timing) -> AttentionFigure:
        return AttentionFigure(
            samples=shape.samples,
            heads=shape.heads,
            seq_len=shape.seq_len,
            head_dim=shape.head_dim,
            precision=precision,
            way="forward" if way == "forward" else "backward",
            timing=timing,
        )

    return figure("forward", both.forward), figure("backward", both.backward)


def elementwise(precision: Precision, watch: Stopwatch) -> Iterator[TrafficFigure]:
    """Yield norms, activations and sums, in the bytes the cost model counts for them."""
    dtype = DTYPES[precision]
    once = float(ELEMENTS * torch.empty((), dtype=dtype).element_size())
    width = 1024
    x = torch.randn(ELEMENTS // width, width, device=watch.device).to(dtype).requires_grad_()
    y = torch.randn(ELEMENTS // width, width, device=watch.device).to(dtype)
    weight = torch.ones(width, device=watch.device).to(dtype)
    norm = watch.passes(
        lambda: functional.layer_norm(x, (width,), weight, weight), lambda out: torch.autograd.grad(out, x, y)
    )
    gelu = watch.passes(lambda: functional.gelu(x), lambda out: torch.autograd.grad(out, x, y))
    yield TrafficFigure(name="norm forward", num_bytes=2 * once, timing=norm.forward)
    yield TrafficFigure(name="norm backward", num_bytes=3 * once, timing=norm.backward)
    yield TrafficFigure(name="activation forward", num_bytes=2 * once, timing=gelu.forward)
    yield TrafficFigure(name="activation backward", num_bytes=3 * once, timing=gelu.backward)
    with torch.no_grad():
        yield TrafficFigure(name="sum", num_bytes=3 * once, timing=watch.time(lambda: x + y))


def update(watch: Stopwatch) -> TrafficFigure:
    """Return the end of a step as the executor does it, in the bytes the cost model counts for AdamW.

    Gradients are set to zero, their squares summed up, and AdamW with fp32 states, fused, updates the weights.
    """
    weights = torch.nn.Parameter(torch.randn(PARAMS, device=watch.device))
    gradient = torch.randn(PARAMS, device=watch.device)
    optimizer = torch.optim.AdamW([weights], lr=1e-4, fused=True)

    def work() -> None:
        gradient.zero_()
        square_sum(gradient)
        weights.grad = gradient
        optimizer.step()

    moved = 2 * 4 + 2 * 8 + 2 * 4
    return TrafficFigure(name="optimizer", num_bytes=float(moved * PARAMS), timing=watch.time(work))


def copies(watch: Stopwatch) -> Iterator[TrafficFigure]:
    """Yield a copy inside the device's memory, and between it and the host where they are apart."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    yield TrafficFigure(name="copy", num_bytes=2.0 * COPY_BYTES, timing=watch.time(lambda: target.copy_(source)))
    if watch.device == "cpu":
        return
    host = torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory()
    to_device = watch.time(lambda: target.copy_(host, non_blocking=True))
    from_device = watch.time(lambda: host.copy_(target, non_blocking=True))
    yield TrafficFigure(name="host to device", num_bytes=float(COPY_BYTES), timing=to_device)
    yield TrafficFigure(name="device to host", num_bytes=float(COPY_BYTES), timing=from_device)


def launch(watch: Stopwatch) -> Timing:
    """Return what a kernel costs that has nothing to do, by the wall clock (the host's part counts)."""
    x = torch.zeros(8, device=watch.device)
    many = 100

    def work() -> None:
        for _ in range(many):
            x.add_(1.0)

    timing = watch.time_waiting(work)
    return Timing(seconds=timing.seconds / many, spread=timing.spread, repeats=timing.repeats)


class _tf32:  # noqa: N801 - used as a function
    """Let fp32 products use tf32 inside the block, or not."""

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._before = False

    def __enter__(self) -> None:
        self._before = bool(torch.backends.cuda.matmul.allow_tf32)
        torch.backends.cuda.matmul.allow_tf32 = self._allowed

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self._before
