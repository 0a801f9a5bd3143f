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

Gradients are summed up whole until the end of a step, whatever is sharded: replicas of unlike microbatch counts cannot
reduce each microbatch together. ZeRO stages 0 to 3 (Rajbhandari 2020, arXiv:1910.02054). fully_shard of torch is not
used: it needs the same sequence of passes on every rank of a group, and replicas here differ in microbatches, cuts and
tp.

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

_RUN = 1024


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

    @property
    def decaying(self) -> slice:
        """The run of the shard that weight decay applies to."""
        return slice(0, min(max(self.plan.num_decaying - self.shard.start, 0), self.master.numel()))

    @property
    def constant(self) -> slice:
        """The rest of the shard."""
        return slice(self.decaying.stop, self.master.numel())

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
    """AdamW over this rank's shards of all buckets.

    The fused kernel is called as it is: `torch.optim` brings in the compiler, a second of every rank's start.
    """

    def __init__(self, buckets: Sequence[Bucket], settings: AdamSettings) -> None:
        self.buckets, self._settings = tuple(buckets), settings
        self._first = [torch.zeros_like(bucket.master) for bucket in self.buckets]
        self._second = [torch.zeros_like(bucket.master) for bucket in self.buckets]
        self._num_steps = 0

    def square_norm(self) -> float:
        """Return this rank's share of the squared norm of the global gradient."""
        shares = [square_sum(bucket.reduced) for bucket in self.buckets if bucket.counts]
        return float(torch.stack(shares).sum()) if shares else 0.0

    def step(self, learning_rate: float, scale: float) -> None:
        """Update the masters by the reduced gradients times `scale`."""
        self._num_steps += 1
        wide = [_scaled(bucket.reduced, bucket.master.dtype, scale) for bucket in self.buckets]
        for decays in (True, False):
            runs = [bucket.decaying if decays else bucket.constant for bucket in self.buckets]
            lists: list[list[torch.Tensor]] = [[], [], [], []]
            for bucket, run, tensors in zip(
                self.buckets, runs, zip(wide, self._first, self._second, strict=True), strict=True
            ):
                if run.stop > run.start:
                    for into, tensor in zip(lists, (bucket.master, *tensors), strict=True):
                        into.append(tensor[run])
            if lists[0]:
                self._update(lists, learning_rate, self._settings.weight_decay if decays else 0.0)

    def _update(self, lists: list[list[torch.Tensor]], learning_rate: float, weight_decay: float) -> None:
        masters, gradients, first, second = lists
        count = [torch.tensor(float(self._num_steps), device=master.device) for master in masters]
        with torch.no_grad():
            torch._fused_adamw_(
                masters,
                gradients,
                first,
                second,
                [],
                count,
                lr=learning_rate,
                beta1=self._settings.betas[0],
                beta2=self._settings.betas[1],
                weight_decay=weight_decay,
                eps=self._settings.epsilon,
                amsgrad=False,
                maximize=False,
            )

    def states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both moments of a bucket's shard."""
        return self._first[index], self._second[index]

    def restore(self, index: int, moments: tuple[torch.Tensor, torch.Tensor], num_steps: int) -> None:
        """Set both moments of a bucket's shard."""
        self._num_steps = num_steps
        self._first[index].copy_(moments[0])
        self._second[index].copy_(moments[1])


def square_sum(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares in fp64, of short runs summed up in fp32: long ones would lose digits."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    edge = gradient.numel() // _RUN * _RUN
    runs = torch.linalg.vector_norm(gradient[:edge].view(-1, _RUN), dim=1, dtype=wide)
    rest = torch.linalg.vector_norm(gradient[edge:], dtype=wide)
    return runs.to(torch.float64).square().sum() + rest.to(torch.float64).square()


def _scaled(gradient: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return a gradient in the states' type, scaled; in place where the type is the same."""
    if gradient.dtype == dtype:
        return gradient if scale == 1.0 else gradient.mul_(scale)
    return gradient.to(dtype).mul_(scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """AdamW (Loshchilov 2019, arXiv:1711.05101)."""

    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
