"""Training steps of one rank from the first to the last: data, rates, checkpoints, metrics.

What is told to the outside goes through a `Tell`: rank 0 tells of every step, and all ranks together of the run when it
ends. Everything here is the same whether the ranks were started by this machine or by a launcher on many.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetplan.errors import RunError, UsageError
from hetplan.runtime.buckets import AdamSettings, Kinds
from hetplan.runtime.checkpoint import Progress, Reader, Writer, complete_steps, folder_of
from hetplan.runtime.data import TokenFile
from hetplan.runtime.executor import Executor, Settings, StepResult, required_channels, required_groups
from hetplan.runtime.groups import Groups
from hetplan.runtime.pipeline import Report
from hetplan.runtime.ranks import Task
from hetplan.runtime.schedule import LearningRate
from hetplan.runtime.traces import RankTrace, StepTrace
from hetplan.specs.model import Model
from hetplan.specs.workload import Workload

Tell = Callable[[Mapping[str, Any]], None]
KEPT_STEPS = 20
"""Steps whose traces are kept, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where checkpoints go and how often."""

    root: Path | None = None
    every: int = 0
    """Steps; 0: at the end only."""
    keep: int = 2
    resume: Path | None = None
    """A checkpoint's folder, or a folder of checkpoints, of which the last is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything a rank must know."""

    model: Model
    task: Task
    workload: Workload
    data: TokenFile
    steps: int
    rate: LearningRate
    saving: Saving = field(default_factory=Saving)
    adam: AdamSettings = field(default_factory=AdamSettings)
    clip_norm: float = 1.0
    seed: int = 0
    mfu_s: float = 0.0
    """MFU times step time of the plan's estimate: dividing by the measured step time gives its MFU."""
    threads: int = 1
    timeout_s: float = 120.0
    device: str = "cpu"
    """auto, cpu or cuda."""


def kinds_of(workload: Workload) -> Kinds:
    """Return the types of numbers a workload's precision means."""
    types = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    weights = types[workload.precision]
    return Kinds(weights=weights, gradients=types.get(workload.gradient_precision or "", weights))


def train(job: Job, groups: Groups, device: torch.device, tell: Tell, report: Report) -> RankTrace:
    """Train to the last step as one rank; return what it measured.

    Raises:
        RunError: the loss is not a number, or a checkpoint cannot be written or read.
    """
    groups.make(required_groups(job.model, job.task))
    if device.type == "cuda":
        groups.make_channels(required_channels(job.task))
    settings = Settings(
        kinds=kinds_of(job.workload), device=device, seed=job.seed, adam=job.adam, clip_norm=job.clip_norm
    )
    executor = Executor(job.model, job.task, settings, groups, report=report)
    start = _resumed(job, executor)
    writer = Writer(job.saving.root, groups.rank, executor.meet) if job.saving.root is not None else None
    tell({"event": "start", "step": start.step, "samples": start.samples})
    traces: list[StepTrace] = []
    samples = start.samples
    for step in range(start.step, job.steps):
        before_s = time.monotonic()
        result = executor.step(job.data.samples(samples), job.rate.at(step))
        samples += job.task.global_batch
        step_s = executor.most(time.monotonic() - before_s)
        memory_bytes = executor.most(_peak_bytes(device))
        traces = [*traces[-KEPT_STEPS + 1 :], StepTrace(step_s=step_s, result=result)]
        if not math.isfinite(result.loss):
            raise RunError(f"the loss of step {step + 1} is {result.loss}: a lower --lr or a longer --warmup may help")
        tell(_metrics(job, step, step_s, result, memory_bytes))
        done = Progress(step=step + 1, samples=samples, seed=job.seed, model=job.model.name)
        due = job.saving.every > 0 and (step + 1) % job.saving.every == 0
        if writer is not None and (due or step + 1 == job.steps):
            writer.write(executor.optimizer, done, job.saving.keep)
            tell({"event": "checkpoint", "step": step + 1, "path": str(folder_of(writer.root, step + 1))})
    return RankTrace(seat=executor.seat, steps=tuple(traces))


def gathered(trace: RankTrace, world_size: int) -> list[RankTrace]:
    """Return the traces of all ranks on rank 0, nothing elsewhere."""
    if world_size == 1:
        return [trace]
    found: list[Any] | None = [None] * world_size if trace.seat.rank == 0 else None
    dist.gather_object(trace, found, dst=0)
    return [] if found is None else found


def _resumed(job: Job, executor: Executor) -> Progress:
    """Return where to start, after taking over a checkpoint if one is named."""
    if job.saving.resume is None:
        return Progress(step=0, samples=0, seed=job.seed, model=job.model.name)
    reader = Reader(checkpoint_at(job.saving.resume))
    executor.restore(reader)
    return reader.progress


def checkpoint_at(path: Path) -> Path:
    """Return a checkpoint's folder: the path itself, or the last complete one in it.

    Raises:
        UsageError: there is none.
    """
    if (path / "index.json").is_file():
        return path
    steps = complete_steps(path)
    if not steps:
        raise UsageError(f"there is no complete checkpoint in {path}")
    return folder_of(path, steps[-1])


def _metrics(job: Job, step: int, step_s: float, result: StepResult, memory_bytes: float) -> dict[str, Any]:
    return {
        "event": "step",
        "step": step + 1,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": job.rate.at(step),
        "step_s": step_s,
        "tokens_per_s": job.task.global_batch * job.task.seq_len / step_s,
        "mfu": job.mfu_s / step_s,
        "memory_bytes": memory_bytes,
        "tokens": (step + 1) * job.task.global_batch * job.task.seq_len,
    }


def _peak_bytes(device: torch.device) -> float:
    """Return the most memory this process has held: of the device, or of the host for a CPU rank."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
