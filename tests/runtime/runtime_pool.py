"""A pool of ranks that runs many layouts: processes that import torch cost seconds each, so they are started once.

The parent imports torch and forks; every child joins one gloo job and then does what it is told, layout by layout.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runtime_cases import Case, first_value_seed, model_of, sample_rows
from runtime_planted import PLANTED

from hetplan.runtime.buckets import AdamSettings, Bucket, Kinds
from hetplan.runtime.executor import Executor, Settings, required_channels, required_groups
from hetplan.runtime.groups import Groups
from hetplan.runtime.ranks import Task, plain_seats

NUM_RANKS = 8
NUM_STEPS = 5
LEARNING_RATE = 1e-3
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(kw_only=True)
class Outcome:
    """What the ranks of a layout found."""

    gradients: list[tuple[str, Any, tuple[int, int], torch.Tensor]] = field(default_factory=list)
    """(name, box, flat range within the box, values) of every rank."""
    parameters: list[tuple[str, Any, torch.Tensor]] = field(default_factory=list)
    """(name, box, values) of every rank after the steps."""
    num_steps: int = NUM_STEPS
    losses: list[list[float]] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)


def settings_of(case: Case) -> Settings:
    """How a case is trained."""
    dtype = DTYPES[case.precision]
    return Settings(
        kinds=Kinds(weights=dtype, gradients=dtype, states=dtype),
        device=torch.device("cpu"),
        seed=first_value_seed,
        adam=AdamSettings(),
        clip_norm=case.clip_norm,
    )


def task_of(case: Case) -> Task:
    """The layout of a case on as many ranks as it needs."""
    return Task(
        layout=case.layout,
        seats=plain_seats(case.layout),
        seq_len=case.seq_len,
        sequence_parallel=case.sequence_parallel,
    )


def _reduced(bucket: Bucket) -> Iterator[tuple[str, Any, tuple[int, int], torch.Tensor]]:
    """Yield the reduced gradients a rank has of a bucket, piece by piece."""
    sharded = bucket.sharding in ("gradients", "full") and len(bucket.plan.ranks) > 1
    have = bucket.shard if sharded else slice(0, bucket.length)
    values = bucket.reduced if sharded else bucket.gradients
    for place in bucket.places:
        low, high = max(have.start, place.first), min(have.stop, place.end)
        if low < high:
            part = values[low - have.start : high - have.start].clone()
            yield place.piece.name, place.piece.box, (low - place.first, high - place.first), part


def _train(case: Case, groups: Groups, num_steps: int) -> Outcome | None:
    model, task = model_of(case.model), task_of(case)
    groups.make(required_groups(model, task))
    groups.channels.clear()
    if case.channels:
        groups.make_channels(required_channels(task))
    if groups.rank >= len(task.seats):
        return None
    executor = Executor(model, task, settings_of(case), groups)
    outcome = Outcome()

    def samples(step: int) -> Any:
        rows = torch.from_numpy(sample_rows(case, step))
        return lambda first, count: rows[first : first + count]

    executor.gradients_of(samples(0))
    executor.reduce()
    for bucket in executor.buckets:
        outcome.gradients += _reduced(bucket)
    executor._pipeline.finish()
    results = [executor.step(samples(step), LEARNING_RATE) for step in range(num_steps)]
    for bucket in executor.buckets:
        bucket.fetch()
    outcome.parameters = [
        (name, parameter.held.box, parameter.detach().clone()) for name, parameter in executor.parameters.items()
    ]
    outcome.losses = [[result.loss for result in results]]
    outcome.norms = [[result.grad_norm for result in results]]
    executor.close()
    return outcome


def _serve(rank: int, store_path: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    groups = Groups(rank, timeout_s=60)
    while (order := pipe.recv()) is not None:
        case, planted, num_steps = order
        try:
            with PLANTED[planted]() if planted else _nothing():
                pipe.send(_train(case, groups, num_steps))
        except Exception:  # noqa: BLE001 - the parent shows it
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class Pool:
    """Ranks that wait for layouts."""

    def __init__(self) -> None:
        import_module(
            "torch.fx.experimental.symbolic_shapes"
        )  # every backward pass brings it in: once, before the fork
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, case: Case, planted: str | None = None, num_steps: int = NUM_STEPS) -> Outcome:
        """Train a case on the ranks of its layout and return what all of them found."""
        for pipe in self._pipes:
            pipe.send((case, planted, num_steps))
        whole = Outcome(num_steps=num_steps)
        answers = [pipe.recv() if pipe.poll(120) else "no answer" for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
            if answer is not None:
                whole.gradients += answer.gradients
                whole.parameters += answer.parameters
                whole.losses += answer.losses
                whole.norms += answer.norms
        return whole

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
