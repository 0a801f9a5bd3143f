"""A linear product whose weight gradient goes straight to where it is accumulated, now or later.

``y = x W^T``; backward: ``dx = dy W`` at once and ``dW += dy^T x`` into the parameter's `Sink`. A sink that is told to
wait keeps ``(dy, x)`` until `Deferred.run`: that is the split of the backward pass that zero-bubble schedules need
(Qi 2023, arXiv:2401.10241). A weight without a sink gets its gradient from autograd as usual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Deferred:
    """Weight gradients still to be made, in the order of their backward passes."""

    def __init__(self) -> None:
        self.waits = False
        self._passes: deque[list[Callable[[], None]]] = deque()

    def begin(self) -> None:
        """Start a backward pass whose weight gradients wait."""
        self.waits = True
        self._passes.append([])

    def end(self) -> None:
        """End that backward pass."""
        self.waits = False

    def put(self, work: Callable[[], None]) -> None:
        """Do the work, or keep it while a pass waits."""
        if self.waits:
            self._passes[-1].append(work)
        else:
            work()

    def run(self) -> None:
        """Make the weight gradients of the oldest pass."""
        with torch.no_grad():
            for work in self._passes.popleft():
                work()


class Sink:
    """Where the gradient of one weight is summed up."""

    def __init__(self, gradient: torch.Tensor, deferred: Deferred) -> None:
        self.gradient = gradient
        self._deferred = deferred

    def part(self, index: int) -> Sink:
        """Return the sink of one expert's weight."""
        return Sink(self.gradient[index], self._deferred)

    def add_product(self, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add ``rows^T inputs``."""

        def work() -> None:
            if self.gradient.dtype == rows.dtype:
                self.gradient.addmm_(rows.t(), inputs)
            else:
                self.gradient.add_(rows.t() @ inputs)

        self._deferred.put(work)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, sink: Sink | None) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.sink = weight, sink
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (rows,) = ctx.saved_tensors
        to_rows = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        if ctx.sink is None:
            return to_rows, gradient.t() @ rows, None
        ctx.sink.add_product(gradient, rows)
        return to_rows, None, None


def product(rows: torch.Tensor, weight: torch.Tensor, sink: Sink | None) -> torch.Tensor:
    """Return ``rows @ weight.T``; the weight's gradient goes to `sink`, or to autograd without one."""
    return _Product.apply(rows, weight, sink)


class Linear(nn.Module):
    """The rows of this rank's slice of a weight."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product without the bias of a weight cut by rows of inputs (see `add_bias`)."""
        return product(rows, self.weight, getattr(self.weight, "sink", None))

    def with_bias(self, rows: torch.Tensor) -> torch.Tensor:
        """Return product and bias."""
        return self.add_bias(self(rows))

    def add_bias(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows with the bias, if there is one."""
        return rows if self.bias is None else rows + self.bias


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an elementwise function by its name in a configuration."""
    if name == "silu":
        return functional.silu
    if name == "relu":
        return functional.relu
    return functional.gelu if name == "gelu" else _tanh_gelu


def _tanh_gelu(rows: torch.Tensor) -> torch.Tensor:
    return functional.gelu(rows, approximate="tanh")
