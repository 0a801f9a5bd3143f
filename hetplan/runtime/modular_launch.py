"""Training of a module plan on this machine: one process a rank, batches divided by the balancer.

Every rank draws the same batches from the same seed. Where the plan asks for balanced batches, the cost model of
`hetplan.balance` starts from the plan's own prices, divides each batch, and is corrected after every step by the
processor seconds all ranks report, so all ranks hold the same model and divide alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hetplan.balance import CostModel
from hetplan.errors import HetplanError, UsageError
from hetplan.plan.modules import ModuleLayout
from hetplan.runtime.modular import ModularRank, require_runnable
from hetplan.runtime.modular_batch import Division, Sample, divide, samples_of
from hetplan.runtime.modular_model import merge_of, modules_of, sizes_of
from hetplan.specs.data import Row
from hetplan.specs.model import Model

MOST_RANKS = 64
FEATURES = 6
"""Items, tokens and squares of the encoder, then of the language model."""
LEAST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModularJob:
    """What every rank is told."""

    model: Model
    layout: ModuleLayout
    rows: tuple[Row, ...]
    """Lengths of samples; batches are taken from them in turn."""
    steps: int
    theta: tuple[tuple[float, ...], ...]
    """Seconds a unit of each feature, encoder and language model: where the balancer starts."""
    balanced: bool
    learning_rate: float = 3e-4
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModularStep:
    """One optimizer step as it went."""

    step: int
    loss: float
    slowest_s: float
    """Processor seconds of the busiest rank."""
    mean_s: float
    """The same of the mean rank."""


def features_of(sample: Sample, merge: int) -> tuple[float, ...]:
    """Return what a sample costs by."""
    sizes = [float(size * merge) for size in sample.images]
    squares = sum(size * size for size in sizes)
    return (float(len(sizes)), sum(sizes), squares, 1.0, float(sample.length), float(sample.length) ** 2)


def run_modules(job: ModularJob) -> tuple[ModularStep, ...]:
    """Train on this machine and return what every step did.

    Raises:
        UsageError: the plan asks for what this executor does not run.
        HetplanError: a rank failed.
    """
    require_runnable(job.layout)
    for module in modules_of(job.model):
        sizes_of(module)
    if job.layout.world_size > MOST_RANKS:
        raise UsageError(f"the plan has {job.layout.world_size} ranks; at most {MOST_RANKS} are started on one machine")
    if len(job.rows) < job.layout.num_samples:
        raise UsageError(f"a batch of {job.layout.num_samples} needs as many samples; there are {len(job.rows)}")
    context = mp.get_context("spawn")
    told: SimpleQueue[Any] = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="hetplan-") as folder:
        processes = mp.start_processes(  # type: ignore[no-untyped-call]
            _rank_main, args=(folder, job, told), nprocs=job.layout.world_size, join=False, start_method="spawn"
        )
        try:
            while not processes.join():
                pass
        except mp.ProcessException as error:
            last = str(error).strip().splitlines()[-1]
            raise HetplanError(f"a rank failed: {last}") from error
    found: list[ModularStep] = []
    while not told.empty():
        found.append(told.get())
    return tuple(found)


def _rank_main(rank: int, folder: str, job: ModularJob, told: SimpleQueue[Any]) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=job.layout.world_size)
    try:
        _train(rank, job, told)
    finally:
        dist.destroy_process_group()


def _train(rank: int, job: ModularJob, told: SimpleQueue[Any]) -> None:
    own = ModularRank(job.model, job.layout, rank, job.seed)
    held = [parameter for _, module in own.modules() for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(held, lr=job.learning_rate) if held else None
    costs = CostModel(np.array(job.theta))
    merge, size = merge_of(job.model), job.layout.num_samples
    order = np.random.default_rng(job.seed).permutation(len(job.rows))
    for step in range(job.steps):
        chosen = [int(order[(step * size + i) % len(order)]) for i in range(size)]
        batch = samples_of([job.rows[i] for i in chosen], first_number=step * size)
        table = np.array([features_of(sample, merge) for sample in batch])
        loads = np.maximum(costs.loads(table), LEAST_S) if job.balanced else None
        division = divide(batch, job.layout, loads)
        own.spent.encoder_s.clear()
        own.spent.language_s.clear()
        loss = torch.tensor(own.step(batch, division), dtype=torch.float64)
        dist.all_reduce(loss)
        if optimizer is not None:
            optimizer.step()
        spent = _reported(own, job.layout)
        _correct(costs, table, division, spent)
        if rank == 0:
            told.put(_told(step, float(loss), spent))


Reports = Sequence[tuple[dict[int, float], dict[int, float], int | None, int | None]]


def _reported(own: ModularRank, layout: ModuleLayout) -> Reports:
    """Return what all ranks spent by microbatch, with their shard of the encoder and of the language model."""
    found: list[Any] = [None] * layout.world_size
    dist.all_gather_object(found, (own.spent.encoder_s, own.spent.language_s, own.encoder_shard, own.language_shard))
    return found


def _correct(costs: CostModel, table: np.ndarray[Any, Any], division: Division, reports: Reports) -> None:
    """Show the cost model every shard of every microbatch that one rank ran whole."""
    for encoder_s, language_s, encoder_shard, language_shard in reports:
        for unit, (book, shard, parts) in enumerate(
            ((encoder_s, encoder_shard, division.encoder), (language_s, language_shard, division.language))
        ):
            for j, seconds in book.items():
                members = list(parts[j][shard]) if shard is not None else []
                if members:
                    measured = np.full(2, np.nan)
                    measured[unit] = seconds
                    costs.observe(table[members].sum(axis=0), measured)


def _told(step: int, loss: float, reports: Reports) -> ModularStep:
    totals = [sum(encoder_s.values()) + sum(language_s.values()) for encoder_s, language_s, _, _ in reports]
    return ModularStep(step=step, loss=loss, slowest_s=max(totals), mean_s=sum(totals) / len(totals))
