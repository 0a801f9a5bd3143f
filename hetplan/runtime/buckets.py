"""Gradients summed over whoever holds the same pieces, and the optimizer's states shared out among them.

A bucket lies flat in memory: its gradients in one tensor, its weights in another. Parameters of which a rank's slice is
one piece are views of both, so nothing is copied; slices that other cuts divide further are copied in and out.

=============  ==========================================================================================
sharding       what a bucket of `n` ranks does after the last backward pass
=============  ==========================================================================================
none           all-reduce; every rank updates everything
optimizer      all-reduce; each rank updates and keeps states of one n-th; all-gather of weights
gradients      reduce-scatter; the rest as above
full           the same, and weights are held in n-ths between uses (`Bucket.fetch`, `Bucket.release`)
=============  ==========================================================================================

ZeRO stages 0 to 3 (Rajbhandari 2020, arXiv:1910.02054). fully_shard of torch is not used: it needs the same sequence of
passes on every rank of a group, and replicas here differ in microbatches, cuts and tp.

Collectives of different buckets run side by side: all are started, in one global order, before the first is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetplan.runtime.linear import Deferred, Sink
from hetplan.runtime.parallel import gather_flat, scatter_flat
from hetplan.runtime.pieces import BucketPlan, Piece, inside
from hetplan.specs.workload import Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Types of numbers a run keeps."""

    weights: torch.dtype
    gradients: torch.dtype
    states: torch.dtype = torch.float32
    """Of the optimizer and of the weights it updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where one piece lies: in the bucket and in the rank's slice of the parameter."""

    piece: Piece
    first: int
    end: int
    where: tuple[slice, ...]
    parameter: nn.Parameter
    whole: bool


class Bucket:
    """Pieces that the same ranks hold, as one rank sees them."""

    def __init__(self, plan: BucketPlan, rank: int, group: Any, sharding: Sharding, kinds: Kinds) -> None:
        self.plan, self.group, self.sharding, self.kinds = plan, group, sharding, kinds
        self.parts = len(plan.ranks) if sharding != "none" else 1
        self.part = plan.ranks.index(rank) if sharding != "none" else 0
        self.counts = rank == plan.ranks[0] or sharding != "none"
        """Whether this rank's share counts in the global norm."""
        self.length = -(-plan.num_elements // self.parts) * self.parts
        self.places: tuple[_Place, ...] = ()
        self._work: Any = None

    def adopt(self, parameters: Mapping[str, nn.Parameter], gradients: dict[str, torch.Tensor]) -> None:
        """Lay the parameters' weights and gradients into the bucket, keeping their values.

        `gradients` gets a tensor for each parameter, a view of the bucket where its slice is one piece.
        """
        device = next(iter(parameters.values())).device
        self.weights = torch.zeros(self.length, dtype=self.kinds.weights, device=device)
        self.gradients = torch.zeros(self.length, dtype=self.kinds.gradients, device=device)
        places, first = [], 0
        for piece in self.plan.pieces:
            parameter = parameters[piece.name]
            end = first + piece.num_elements
            whole = parameter.held.box == piece.box
            where = inside(piece.box, parameter.held.box)
            places.append(_Place(piece=piece, first=first, end=end, where=where, parameter=parameter, whole=whole))
            self.weights[first:end] = parameter.data[where].reshape(-1)
            if whole:
                parameter.data = self.weights[first:end].view(parameter.shape)
                gradients[piece.name] = self.gradients[first:end].view(parameter.shape)
            elif piece.name not in gradients:
                gradients[piece.name] = torch.zeros(parameter.shape, dtype=self.kinds.gradients, device=device)
            first = end
        self.places = tuple(places)
        own = self.weights[self.shard]
        self._apart = own.dtype != self.kinds.states or self.comes_and_goes
        self.master = own.to(self.kinds.states, copy=True) if self._apart else own

    @property
    def shard(self) -> slice:
        """The run of the bucket whose states this rank keeps."""
        size = self.length // self.parts
        return slice(self.part * size, (self.part + 1) * size)

    def optimized(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return this rank's masters as two parameters: those that decay and the others."""
        edge = min(max(self.plan.num_decaying - self.shard.start, 0), self.master.numel())
        return nn.Parameter(self.master[:edge]), nn.Parameter(self.master[edge:])

    def start_reduce(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Begin to sum this rank's gradients with those of the other ranks."""
        for place in self.places:
            if not place.whole:
                own = gradients[place.piece.name]
                self.gradients[place.first : place.end] = own[place.where].reshape(-1)
        self.reduced = self.gradients[self.shard]
        if len(self.plan.ranks) == 1:
            return
        if self.sharding in ("gradients", "full"):
            self.reduced = torch.empty_like(self.reduced)
            self._work = scatter_flat(self.reduced, self.gradients, self.group)
        else:
            self._work = dist.all_reduce(self.gradients, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the collective that was started last."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def start_gather(self) -> None:
        """Begin to bring the updated weights of all shards together."""
        if self._apart:
            self.weights[self.shard] = self.master.to(self.weights.dtype)
        if self.parts > 1:
            self._work = gather_flat(self.weights, self.weights[self.shard].clone(), self.group)

    @property
    def comes_and_goes(self) -> bool:
        """Whether the whole weights exist only between `fetch` and `release`."""
        return self.sharding == "full" and self.parts > 1

    def fetch(self) -> None:
        """Bring the whole weights here; every rank of the group must do so."""
        storage = self.weights.untyped_storage()
        if not self.comes_and_goes or storage.size():
            return
        storage.resize_(self.length * self.weights.element_size())
        self.start_gather()
        self.wait()
        self.copy_out()

    def release(self) -> None:
        """Give back the memory of the whole weights."""
        if self.comes_and_goes:
            self.weights.untyped_storage().resize_(0)

    def copy_out(self) -> None:
        """Give slices that other cuts divide their new weights."""
        for place in self.places:
            if not place.whole:
                own = self.weights[place.first : place.end]
                place.parameter.data[place.where] = own.view(place.parameter.data[place.where].shape)


def route_gradients(
    parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, torch.Tensor], deferred: Deferred
) -> list[Any]:
    """Let backward passes add to `gradients` instead of `parameter.grad`; return handles that undo it."""
    handles = []
    for name, parameter in parameters.items():
        parameter.sink = Sink(gradients[name], deferred)
        handles.append(parameter.register_post_accumulate_grad_hook(_adder(gradients[name])))
    return handles


def _adder(total: torch.Tensor) -> Callable[[nn.Parameter], None]:
    def add(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            total.add_(parameter.grad)
            parameter.grad = None

    return add


class Optimizer:
    """AdamW over this rank's shards of all buckets, with clipping by the norm of the whole model's gradient."""

    def __init__(self, buckets: Sequence[Bucket], settings: AdamSettings) -> None:
        self.buckets = tuple(buckets)
        self._pairs = tuple(bucket.optimized() for bucket in self.buckets)
        groups = [
            {"params": [pair[i] for pair in self._pairs if pair[i].numel()], "weight_decay": decay}
            for i, decay in enumerate((settings.weight_decay, 0.0))
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            fused=True,
        )

    def square_norm(self) -> float:
        """Return this rank's share of the squared norm of the global gradient."""
        shares = [bucket.reduced.to(torch.float64).square().sum() for bucket in self.buckets if bucket.counts]
        return float(torch.stack(shares).sum()) if shares else 0.0

    def step(self, learning_rate: float, scale: float) -> None:
        """Update the masters by the reduced gradients times `scale`."""
        for bucket, pair in zip(self.buckets, self._pairs, strict=True):
            gradient = bucket.reduced
            wide = gradient if gradient.dtype == bucket.master.dtype else gradient.to(bucket.master.dtype)
            if scale != 1.0:
                wide = wide.mul_(scale) if wide is gradient else wide.mul(scale)
            edge = pair[0].numel()
            pair[0].grad, pair[1].grad = wide[:edge], wide[edge:]
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        for pair in self._pairs:
            pair[0].grad = pair[1].grad = None

    def states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of both moments of a bucket's shard (zeros before the first step)."""
        moments = []
        for key in ("exp_avg", "exp_avg_sq"):
            halves = [self._adam.state[part].get(key, torch.zeros_like(part)) for part in self._pairs[index]]
            moments.append(torch.cat([half.detach() for half in halves]))
        return moments[0], moments[1]

    def restore(self, index: int, moments: tuple[torch.Tensor, torch.Tensor], num_steps: int) -> None:
        """Set both moments of a bucket's shard."""
        edge = self._pairs[index][0].numel()
        for part, where in zip(self._pairs[index], (slice(0, edge), slice(edge, None)), strict=True):
            if part.numel():
                self._adam.state[part] = {
                    "step": torch.tensor(float(num_steps), device=part.device),
                    "exp_avg": moments[0][where].clone(),
                    "exp_avg_sq": moments[1][where].clone(),
                }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """AdamW (Loshchilov 2019, arXiv:1711.05101)."""

    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
