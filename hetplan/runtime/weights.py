"""Fully sharded weights: a layer's are brought together before each use and given back after it.

Forward and backward passes of one layer are bracketed: ``fetch -> run -> release`` going forward; going backward a
marker on the layer's output fetches before its gradient flows in, and one on its input releases after it has flowed
out. This is done where all ranks of a bucket run the same program; buckets shared by unlike replicas, or by both ends
of a pipeline (tied tables), are brought together once a step instead, which costs their memory for that long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetplan.runtime.attention import Tokens
from hetplan.runtime.buckets import Bucket
from hetplan.runtime.model import Block
from hetplan.runtime.ranks import Task


def bracketed(
    layers: Mapping[int, Sequence[Block]], buckets: Sequence[Bucket], task: Task
) -> Mapping[int, Sequence[nn.Module]]:
    """Return the layers, each with the fetching of its weights around it where that is done at each use."""
    if task.layout.sharding != "full":
        return layers
    return {number: [_bracket(layer, buckets, task) for layer in own] for number, own in layers.items()}


def _bracket(layer: Block, buckets: Sequence[Bucket], task: Task) -> nn.Module:
    names = {parameter.held.name for parameter in layer.parameters()}
    own = [
        bucket
        for bucket in buckets
        if bucket.comes_and_goes and runs_together(bucket, task) and names & {p.name for p in bucket.plan.pieces}
    ]
    return _Bracketed(layer, own) if own else layer


def runs_together(bucket: Bucket, task: Task) -> bool:
    """Return whether all ranks of a bucket run the same program, so that they may gather weights at each use."""
    seats = [seat for seat in task.seats if seat.rank in bucket.plan.ranks]
    return len({(seat.row, seat.stage) for seat in seats}) == 1


class _Bracketed(nn.Module):
    def __init__(self, layer: Block, buckets: Sequence[Bucket]) -> None:
        super().__init__()
        self.layer = layer
        self._buckets = tuple(buckets)

    def fetch(self) -> None:
        for bucket in self._buckets:
            bucket.fetch()

    def release(self) -> None:
        for bucket in self._buckets:
            bucket.release()

    def forward(self, rows: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
        self.fetch()
        if rows is not None:
            rows = _Marker.apply(rows, self.release)
        out = self.layer(rows, tokens)
        self.release()
        return out if rows is None else _Marker.apply(out, self.fetch)


class _Marker(torch.autograd.Function):
    """Identity that calls something when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        ctx.then = then
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.then()
        return gradient, None
