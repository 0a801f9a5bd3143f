"""Collectives that autograd can pass through, for the ranks of one stage.

Activations are rows of tokens, ``[samples * seq, width]``. Under tensor parallelism every rank of the tp group holds
all rows between the linears of a column/row pair; with sequence parallelism (Korthikanti 2022, arXiv:2205.05198) each
holds an equal run of rows outside of it. Forward and backward of each function are each other's transposes:

    enter   no sequence parallelism: identity / all-reduce;  with it: all-gather of rows / reduce-scatter
    leave   no sequence parallelism: all-reduce / identity;  with it: reduce-scatter of rows / all-gather
    exchange rows by counts: all-to-all / all-to-all with counts swapped (experts)

Why not DTensor: stages of one pipeline have different tp, words of a vocabulary are cut unevenly, and on CPU its
dispatch costs a third of a small layer's time. Every collective reports its seconds to the mesh's `Clock`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Clock:
    """Seconds spent in the collectives of each axis since `take`; `report` is told when the rank waits for others."""

    def __init__(self, report: Callable[[bool], object] = bool) -> None:
        self._report = report
        self.seconds = {"tp": 0.0, "cp": 0.0, "ep": 0.0}

    @contextmanager
    def on(self, axis: str) -> Iterator[None]:
        """Count what happens inside."""
        start_s = time.perf_counter()
        self._report(True)
        yield
        self._report(False)
        self.seconds[axis] += time.perf_counter() - start_s

    def take(self) -> dict[str, float]:
        """Return the seconds of each axis and start again from nothing."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One direction of a stage's mesh as this rank sees it; degree 1 needs no process group."""

    degree: int = 1
    rank: int = 0
    group: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The mesh of a stage as this rank sees it."""

    tp: Axis = field(default_factory=Axis)
    cp: Axis = field(default_factory=Axis)
    ep: Axis = field(default_factory=Axis)
    sequence_parallel: bool = False
    clock: Clock = field(default_factory=Clock)


def enter(rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return all rows of the tp group, for linears cut by column."""
    if mesh.tp.degree == 1:
        return rows
    return _gathered(rows, mesh) if mesh.sequence_parallel else _Copied.apply(rows, mesh)


def leave(rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the sum of the tp group's partial rows: this rank's run of them with sequence parallelism, else all."""
    if mesh.tp.degree == 1:
        return rows
    return _Scattered.apply(rows, mesh) if mesh.sequence_parallel else _Summed.apply(rows, mesh)


def _gathered(rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    return _Gathered.apply(rows, mesh)


def gather_sequence(rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the rows of all cp ranks, one rank after the other along a new first dimension."""
    return _Stacked.apply(rows, mesh)


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], mesh: Mesh) -> torch.Tensor:
    """Send `sent[i]` rows, in order, to rank `i` of the ep group and return what the others sent."""
    return _Exchanged.apply(rows, sent, received, mesh)


def gather_flat(whole: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
    """Begin to gather equal runs into `whole`; return the work to wait for."""
    return _all_gather(whole, own, group=group, async_op=True)


def scatter_flat(own: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
    """Begin to sum `whole` over a group and keep this rank's run of it; return the work to wait for."""
    return _reduce_scatter(own, whole, group=group, async_op=True)


def all_gather_rows(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the rows of all ranks of an axis, in their order."""
    whole = rows.new_empty((axis.degree * rows.shape[0], *rows.shape[1:]))
    _all_gather(whole, rows.contiguous(), group=axis.group)
    return whole


def reduce_scatter_rows(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return this rank's equal run of the sum over an axis."""
    mine = rows.new_empty((rows.shape[0] // axis.degree, *rows.shape[1:]))
    _reduce_scatter(mine, rows.contiguous(), group=axis.group)
    return mine


def _all_reduce(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    whole = rows.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=axis.group)
    return whole


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.mesh.clock.on("tp"):
            return _all_reduce(gradient, ctx.mesh.tp), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        with mesh.clock.on("tp"):
            return _all_reduce(rows, mesh.tp)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        with mesh.clock.on("tp"):
            return all_gather_rows(rows, mesh.tp)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.mesh.clock.on("tp"):
            return reduce_scatter_rows(gradient, ctx.mesh.tp), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        with mesh.clock.on("tp"):
            return reduce_scatter_rows(rows, mesh.tp)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.mesh.clock.on("tp"):
            return all_gather_rows(gradient, ctx.mesh.tp), None


class _Stacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        with mesh.clock.on("cp"):
            return all_gather_rows(rows[None], mesh.cp)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.mesh.clock.on("cp"):
            return reduce_scatter_rows(gradient, ctx.mesh.cp)[0], None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], mesh: Mesh) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.mesh = sent, received, mesh
        return _all_to_all(rows, sent, received, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.mesh), None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], mesh: Mesh) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    with mesh.clock.on("ep"):
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=mesh.ep.group)
    return arrived
