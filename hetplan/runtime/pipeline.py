"""One rank's share of a step: the actions of its program, with activations and gradients sent as they come about.

The order of work is the plan's `Program`. Receives of the next actions are posted ahead; sends are started and kept
until they have completed, never waited for inside a step: on gloo a send ends only when the other side has posted its
receive, so waiting for one can lock two stages against each other. Tags number a message by microbatch, boundary and
direction; NCCL has none, so there every direction of every boundary has a communicator of its own (`Groups.channels`),
on which messages keep the program's order.

Every action is timed: seconds spent waiting for what it needs, and seconds of work with the part of it that was spent
in collectives of the stage's own mesh.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetplan.plan.program import Action
from hetplan.runtime.attention import Tokens
from hetplan.runtime.edges import Message
from hetplan.runtime.groups import Channel
from hetplan.runtime.linear import Deferred
from hetplan.runtime.parallel import Mesh

AHEAD = 2
"""Actions whose receives are posted before they are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One action as it happened."""

    action: Action
    start_s: float
    """On the host's monotonic clock."""
    wait_s: float
    work_s: float
    axes_s: Mapping[str, float]
    """Part of `work_s` in collectives, by axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Everything one rank needs to run its program."""

    rank: int
    actions: tuple[Action, ...]
    num_stages: int
    """Virtual stages of the replica."""
    layers: Mapping[int, Sequence[nn.Module]]
    """Virtual stage -> its layers."""
    incoming: Mapping[tuple[str, int], tuple[Message, ...]]
    """(F or B, virtual stage) -> activations or gradients this rank receives for it, one microbatch."""
    outgoing: Mapping[tuple[str, int], tuple[Message, ...]]
    """(F or B, virtual stage) -> activations or gradients of it that this rank sends."""
    num_rows: int
    width: int
    dtype: torch.dtype
    device: torch.device
    mesh: Mesh
    deferred: Deferred
    channels: Mapping[Channel, Any] = field(default_factory=dict)
    """Groups messages go by; empty: that of all ranks."""


Feed = Callable[[int, int], Tokens]
"""(virtual stage, microbatch) -> its tokens."""
Report = Callable[[bool], object]
"""Told whether the rank waits for others (True) or works (False)."""


class Pipeline:
    """Runs the actions of one rank, step after step."""

    def __init__(self, work: Work, report: Report) -> None:
        self._work = work
        self._report = report
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._pending: dict[tuple[str, int, int], list[tuple[Any, torch.Tensor, Message]]] = {}
        self._local: dict[tuple[str, int, int, int], torch.Tensor] = {}
        self._held: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}

    def run(self, feed: Feed, loss_scale: float) -> tuple[float, list[Passed]]:
        """Run one step; return the sum of this rank's unscaled losses and the trace.

        Gradients are of the losses times `loss_scale`.
        """
        self._posted = 0
        self._losses: list[torch.Tensor] = []
        trace = []
        for number, action in enumerate(self._work.actions):
            self._post(number + AHEAD)
            trace.append(self._act(action, feed, loss_scale))
            while self._sent and self._sent[0][0].is_completed():
                self._sent.popleft()
        return float(torch.stack(self._losses).sum()) if self._losses else 0.0, trace

    def finish(self) -> None:
        """Wait for what is still on its way out."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _post(self, end: int) -> None:
        """Post the receives of all actions before number `end + 1`."""
        while self._posted <= min(end, len(self._work.actions) - 1):
            action = self._work.actions[self._posted]
            self._posted += 1
            key, messages = self._incoming(action)
            if not messages:
                continue
            entries = []
            for message in messages:
                if message.sender == self._work.rank:
                    continue
                rows = torch.empty(
                    (message.num_rows, self._work.width), dtype=self._work.dtype, device=self._work.device
                )
                channel = self._channel(key, message)
                work = dist.irecv(rows, src=message.sender, group=channel, tag=self._tag(*key))
                entries.append((work, rows, message))
            self._pending[key] = entries

    def _incoming(self, action: Action) -> tuple[tuple[str, int, int], tuple[Message, ...]]:
        """Return what an action needs from a neighbouring stage: (direction, boundary, microbatch) and messages."""
        direction = "F" if action.kind == "F" else "B"
        boundary = action.stage - (direction == "F")
        messages = () if action.kind == "W" else self._work.incoming.get((direction, action.stage), ())
        return (direction, boundary, action.microbatch), messages

    def _channel(self, key: tuple[str, int, int], message: Message) -> Any:
        """Return the process group a message goes by; None: that of all ranks."""
        return self._work.channels.get((key[0], key[1], message.sender, message.receiver))

    def _tag(self, direction: str, boundary: int, microbatch: int) -> int:
        """Return a number that no other message between two ranks of a replica has within a step."""
        return (microbatch * self._work.num_stages + boundary) * 2 + (direction == "B")

    def _act(self, action: Action, feed: Feed, loss_scale: float) -> Passed:
        start_s = time.monotonic()
        self._report(True)
        arrived = self._receive(*self._incoming(action))
        self._report(False)
        ready_s = time.monotonic()
        if action.kind == "F":
            self._forward(action, arrived, feed, loss_scale)
        elif action.kind == "W":
            self._work.deferred.run()
        else:
            self._backward(action, arrived)
        return Passed(
            action=action,
            start_s=start_s,
            wait_s=ready_s - start_s,
            work_s=time.monotonic() - ready_s,
            axes_s=self._work.mesh.clock.take(),
        )

    def _receive(self, key: tuple[str, int, int], messages: tuple[Message, ...]) -> torch.Tensor | None:
        """Return the rows of all messages of a boundary, in this rank's order."""
        if not messages:
            return None
        entries = self._pending.pop(key)
        for work, _, _ in entries:
            work.wait()
        for message in messages:
            if message.sender == self._work.rank:
                entries.append((None, self._local.pop((*key, message.sender)), message))
        if len(entries) == 1 and len(entries[0][2].kept) == 1:
            return entries[0][1]
        whole = torch.empty((self._work.num_rows, self._work.width), dtype=self._work.dtype, device=self._work.device)
        for _, rows, message in entries:
            first = 0
            for a, b in message.kept:
                whole[a:b] = rows[first : first + b - a]
                first += b - a
        return whole

    def _send(self, key: tuple[str, int, int], rows: torch.Tensor, messages: tuple[Message, ...]) -> None:
        for message in messages:
            parts = [rows[a:b] for a, b in message.sent]
            out = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
            if message.receiver == self._work.rank:
                self._local[(*key, message.sender)] = out
            else:
                channel = self._channel(key, message)
                work = dist.isend(out, dst=message.receiver, group=channel, tag=self._tag(*key))
                self._sent.append((work, out))

    def _forward(self, action: Action, arrived: torch.Tensor | None, feed: Feed, loss_scale: float) -> None:
        inputs = None if arrived is None else arrived.requires_grad_()
        rows = inputs
        tokens = feed(action.stage, action.microbatch)
        for layer in self._work.layers[action.stage]:
            rows = layer(rows, tokens)
        if rows is None:
            raise ValueError("a stage holds at least one layer")
        if action.stage == self._work.num_stages - 1:
            self._losses.append(rows.detach())
            rows = rows * loss_scale
        else:
            key = ("F", action.stage, action.microbatch)
            self._send(key, rows.detach(), self._work.outgoing["F", action.stage])
        self._held[action.stage, action.microbatch] = (inputs, rows)

    def _backward(self, action: Action, gradient: torch.Tensor | None) -> None:
        inputs, rows = self._held.pop((action.stage, action.microbatch))
        if action.kind == "I":
            self._work.deferred.begin()
        torch.autograd.backward(rows, gradient)
        if action.kind == "I":
            self._work.deferred.end()
        if inputs is not None and inputs.grad is not None:
            key = ("B", action.stage - 1, action.microbatch)
            self._send(key, inputs.grad, self._work.outgoing["B", action.stage])
