"""A plan's layout as one rank lives it: its layers, its buckets, its pipeline, and one optimizer step at a time.

A step is: the rank's program; then the buckets' collectives, all in flight at once; one sum over all ranks of squared
gradient norm and loss; the update of the shards a rank owns; and, where states are shared out, the gathering of
weights. The gradient is that of the mean loss over the *global* batch, whoever computed which samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetplan.plan.program import program
from hetplan.runtime.attention import Tokens, positions_of
from hetplan.runtime.buckets import AdamSettings, Bucket, Kinds, Optimizer, route_gradients
from hetplan.runtime.checkpoint import Reader
from hetplan.runtime.edges import Message, messages
from hetplan.runtime.groups import Channel, Groups
from hetplan.runtime.linear import Deferred
from hetplan.runtime.model import Block, Decoder, build_layer, start_values
from hetplan.runtime.parallel import Axis, Clock, Mesh
from hetplan.runtime.pieces import bucket_plans, group_ranks
from hetplan.runtime.pipeline import Feed, Passed, Pipeline, Report, Work
from hetplan.runtime.ranks import (
    AxisName,
    Seat,
    Task,
    axis_ranks,
    coordinates,
    position_ranges,
    rows_of,
    sample_range,
)
from hetplan.runtime.weights import bracketed, runs_together
from hetplan.specs.model import Model

AXES: tuple[AxisName, ...] = ("tp", "cp", "ep")
Samples = Callable[[int, int], torch.Tensor]
"""(first, count) -> token ids of consecutive samples of this step, [count, seq_len + 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a layout is trained."""

    kinds: Kinds
    device: torch.device
    seed: int = 0
    adam: AdamSettings = field(default_factory=AdamSettings)
    clip_norm: float = 1.0
    """Norm above which the global gradient is scaled down; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step, as this rank saw it."""

    loss: float
    """Mean over the global batch, the same on every rank."""
    grad_norm: float
    """Of the global gradient before clipping."""
    trace: tuple[Passed, ...]
    start_s: float
    program_s: float
    """Seconds of the rank's program."""
    reduce_s: float
    """Seconds from the program's end to the last gradient's arrival and the sum of norms."""
    optimizer_s: float
    gather_s: float


class Executor:
    """One rank of a layout."""

    def __init__(self, model: Model, task: Task, settings: Settings, groups: Groups, *, report: Report = bool) -> None:
        self.model, self.task, self.settings = model, task, settings
        self.seat = next(seat for seat in task.seats if seat.rank == groups.rank)
        self._world = groups.of(tuple(seat.rank for seat in task.seats))
        self._deferred, self._report, self._channels = Deferred(), report, groups.channels
        self.mesh = _mesh(task, self.seat, groups, report)
        self.parameters: dict[str, nn.Parameter] = {}
        self.layers = self._build_layers()
        start_values(self.parameters.values(), settings.seed, _num_decoders(model))
        self.gradients: dict[str, torch.Tensor] = {}
        self.buckets = self._build_buckets(groups)
        self._loose = {place.piece.name for bucket in self.buckets for place in bucket.places if not place.whole}
        self._handles = route_gradients(self.parameters, self.gradients, self._deferred)
        self.optimizer = Optimizer(self.buckets, settings.adam)
        self._pipeline = Pipeline(self._work(), report)
        for bucket in self.buckets:
            bucket.release()

    def _build_layers(self) -> dict[int, list[Block]]:
        stages = self.task.replica(self.seat).stages
        layers: dict[int, list[Block]] = {}
        for number in self.task.virtual_stages(self.seat):
            layers[number] = []
            for index in range(stages[number].first_layer, stages[number].end_layer):
                layer = build_layer(
                    self.model,
                    index,
                    self.mesh,
                    dtype=self.settings.kinds.weights,
                    device=self.settings.device,
                    shared=self.parameters,
                )
                _set_recompute(layer, stages[number].recompute)
                layers[number].append(layer)
        return layers

    def _build_buckets(self, groups: Groups) -> tuple[Bucket, ...]:
        layout, rank = self.task.layout, self.seat.rank
        plans = bucket_plans(self.model, self.task, by_layer=layout.sharding == "full")
        mine = [plan for plan in plans if rank in plan.ranks]
        buckets = tuple(
            Bucket(plan, rank, groups.of(plan.ranks), layout.sharding, self.settings.kinds) for plan in mine
        )
        for bucket in buckets:
            bucket.adopt(self.parameters, self.gradients)
        return buckets

    def _work(self) -> Work:
        task, seat = self.task, self.seat
        replica = task.replica(seat)
        order = program(task.layout.schedule, replica.pp, replica.num_microbatches, replica.vpp)
        incoming, outgoing = _boundaries(task, seat)
        return Work(
            rank=seat.rank,
            actions=order.ranks[seat.stage],
            num_stages=len(replica.stages),
            layers=bracketed(self.layers, self.buckets, task),
            incoming=incoming,
            outgoing=outgoing,
            num_rows=sum(end - first for first, end in rows_of(task, seat)),
            width=self.model.chain[0].width,
            dtype=self.settings.kinds.weights,
            device=self.settings.device,
            mesh=self.mesh,
            deferred=self._deferred,
            channels=self._channels,
        )

    def gradients_of(self, samples: Samples) -> tuple[float, list[Passed]]:
        """Run the program of one step; return this rank's part of the mean loss and the trace.

        Gradients, unreduced, are then in `gradients`.
        """
        task = self.task
        scale = 1.0 / (task.global_batch * task.seq_len)
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for name in self._loose:
            self.gradients[name].zero_()
        for bucket in self.buckets:
            if not runs_together(bucket, task):
                bucket.fetch()
        losses, trace = self._pipeline.run(self._feed(samples), scale)
        counts = self.mesh.tp.rank == 0
        return losses * scale if counts else 0.0, trace

    def reduce(self) -> None:
        """Sum gradients over the ranks that hold the same pieces."""
        for name, gradient in self.gradients.items():
            copies = self.parameters[name].held.copies_of_gradient
            if copies > 1:
                gradient.mul_(1.0 / copies)
        for bucket in self.buckets:
            bucket.start_reduce(self.gradients)
        for bucket in self.buckets:
            bucket.wait()
            bucket.release()

    def step(self, samples: Samples, learning_rate: float) -> StepResult:
        """Run one optimizer step."""
        start_s = time.monotonic()
        loss, trace = self.gradients_of(samples)
        program_s = time.monotonic()
        self._report(True)
        self.reduce()
        square, loss = self._sum(self.optimizer.square_norm(), loss)
        norm = square**0.5
        reduced_s = time.monotonic()
        self._report(False)
        limit = self.settings.clip_norm
        self.optimizer.step(learning_rate, min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0)
        updated_s = time.monotonic()
        self._report(True)
        self._spread()
        self._pipeline.finish()
        return StepResult(
            loss=loss,
            grad_norm=norm,
            trace=tuple(trace),
            start_s=start_s,
            program_s=program_s - start_s,
            reduce_s=reduced_s - program_s,
            optimizer_s=updated_s - reduced_s,
            gather_s=time.monotonic() - updated_s,
        )

    def meet(self) -> None:
        """Wait for all ranks of the job."""
        self._sum(0.0)

    def restore(self, reader: Reader) -> None:
        """Take weights and optimizer states from a checkpoint.

        Raises:
            RunError: the checkpoint is damaged, or of another model.
        """
        reader.restore(self.optimizer)
        self._spread()

    def most(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        if self._world is None:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.settings.device)
        self._report(True)
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self._world)
        most = float(total)
        self._report(False)
        return most

    def _spread(self) -> None:
        """Bring the updated weights to every rank that holds them."""
        staying = [bucket for bucket in self.buckets if not bucket.comes_and_goes]
        for bucket in staying:
            bucket.start_gather()
        for bucket in staying:
            bucket.wait()
            bucket.copy_out()

    def _sum(self, *values: float) -> tuple[float, ...]:
        """Return the sums of some numbers over all ranks."""
        if self._world is None:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.settings.device)
        self._report(True)
        dist.all_reduce(total, group=self._world)
        found = tuple(total.tolist())
        self._report(False)
        return found

    def _feed(self, samples: Samples) -> Feed:
        task, seat, device = self.task, self.seat, self.settings.device
        replica, stage = task.replica(seat), task.stage(seat)
        cp_rank = coordinates(seat, stage)[1]
        positions = positions_of(task.seq_len, stage.cp, cp_rank, device)
        first, end = sample_range(task, seat)
        last_stage = len(replica.stages) - 1

        def feed(number: int, microbatch: int) -> Tokens:
            if number not in (0, last_stage):
                return Tokens(num_samples=end - first, positions=positions)
            before = task.first_sample(seat) + microbatch * replica.microbatch
            read = samples(before + first, end - first).to(device)
            cut = position_ranges(task.seq_len, stage.cp, cp_rank)
            ids = torch.cat([read[:, a:b] for a, b in cut], dim=1).reshape(-1) if number == 0 else None
            labels = torch.cat([read[:, a + 1 : b + 1] for a, b in cut], dim=1).reshape(-1)
            return Tokens(
                num_samples=end - first,
                positions=positions,
                ids=ids,
                labels=labels if number == last_stage else None,
            )

        return feed

    def close(self) -> None:
        """Undo what ties parameters to the buckets."""
        for handle in self._handles:
            handle.remove()


def required_groups(model: Model, task: Task) -> list[tuple[int, ...]]:
    """Return the sets of ranks a layout needs process groups of, in the order all ranks make them."""
    plans = bucket_plans(model, task, by_layer=task.layout.sharding == "full")
    axes = {str(axis): {axis_ranks(task, seat, axis) for seat in task.seats} for axis in AXES}
    world = tuple(seat.rank for seat in task.seats)
    return sorted({world, *group_ranks(plans, axes)})


def required_channels(task: Task) -> list[Channel]:
    """Return the edges of a layout along which messages go, in the order all ranks make groups of them."""
    found: set[Channel] = set()
    for seat in task.seats:
        for (direction, stage), sent in _boundaries(task, seat)[1].items():
            boundary = stage if direction == "F" else stage - 1
            found |= {(direction, boundary, m.sender, m.receiver) for m in sent if m.sender != m.receiver}
    return sorted(found)


def _mesh(task: Task, seat: Seat, groups: Groups, report: Report) -> Mesh:
    def axis(name: AxisName) -> Axis:
        ranks = axis_ranks(task, seat, name)
        return Axis(degree=len(ranks), rank=ranks.index(seat.rank), group=groups.of(ranks))

    return Mesh(
        clock=Clock(report),
        tp=axis("tp"),
        cp=axis("cp"),
        ep=axis("ep"),
        sequence_parallel=task.sequence_parallel_in(seat),
    )


Messages = dict[tuple[str, int], tuple[Message, ...]]


def _boundaries(task: Task, seat: Seat) -> tuple[Messages, Messages]:
    """Return what a rank receives and sends for each of its virtual stages."""
    replica = task.replica(seat)
    incoming: Messages = {}
    outgoing: Messages = {}
    for number in range(len(replica.stages) - 1):
        here, there = (task.mesh_of(seat, (number + step) % replica.pp) for step in (0, 1))
        for direction, senders, receivers in (("F", here, there), ("B", there, here)):
            sender = number if direction == "F" else number + 1
            receiver = number + 1 if direction == "F" else number
            found = messages(task, senders, receivers)
            if sender % replica.pp == seat.stage:
                outgoing[direction, sender] = tuple(m for m in found if m.sender == seat.rank)
            if receiver % replica.pp == seat.stage:
                incoming[direction, receiver] = tuple(m for m in found if m.receiver == seat.rank)
    return incoming, outgoing


def _num_decoders(model: Model) -> int:
    return sum(layer.kind == "decoder" for layer in model.chain)


def _set_recompute(layer: Block, recompute: Any) -> None:
    """Tell a layer what to make again in its backward pass."""
    if recompute == "full" and isinstance(layer, Decoder):
        layer.recompute = "full"
    if recompute == "selective" and isinstance(layer, Decoder):
        layer.attention.recomputes_scores = True
