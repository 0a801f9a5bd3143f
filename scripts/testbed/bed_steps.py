"""One rank of a testbed: runs a few optimizer steps of several layouts and writes how long each took.

    python bed_steps.py JOB RESULT

JOB is a pickled `Job`; rank 0 writes RESULT, a JSON list with the step times of each layout (the slowest rank's, step
by step) and where they went. Processes are started once for all layouts; those a layout does not use wait.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bed_job import Job

from hetplan.plan.placement import mesh_devices
from hetplan.plan.records import Layout
from hetplan.runtime.buckets import Kinds
from hetplan.runtime.executor import Executor, Settings, StepResult, required_groups
from hetplan.runtime.groups import Groups
from hetplan.runtime.ranks import Seat, Task
from hetplan.specs.model import Loss

WARM_UP = 1


def seats_of(layout: Layout, rank_of: Mapping[tuple[str, int], tuple[int, str]]) -> tuple[Seat, ...]:
    """Return who is who, for a layout whose devices are named."""
    seats = []
    for row, replica in enumerate(layout.replicas):
        for number, stage in enumerate(replica.stages[: replica.pp]):
            for copy, devices in enumerate(mesh_devices(stage, replica.copies).tolist()):
                for place, device in enumerate(devices):
                    rank, host = rank_of[stage.group, device]
                    seats.append(
                        Seat(
                            rank=rank,
                            node=host,
                            group=stage.group,
                            index=0,
                            row=row,
                            copy=copy,
                            stage=number,
                            place=place,
                        )
                    )
    return tuple(sorted(seats, key=lambda seat: seat.rank))


def run_layout(job: Job, layout: Layout, groups: Groups) -> list[dict[str, Any]] | None:
    """Return this rank's times of every step; None where the layout does not use it."""
    task = Task(layout=layout, seats=seats_of(layout, job.rank_of), seq_len=job.seq_len)
    groups.make(required_groups(job.model, task))
    world = tuple(seat.rank for seat in task.seats)
    if groups.rank not in world:
        return None
    kinds = Kinds(weights=torch.float32, gradients=torch.float32)
    executor = Executor(job.model, task, Settings(kinds=kinds, device=torch.device("cpu")), groups)
    vocab = min(op.vocab for layer in job.model.chain for op in layer.operators if isinstance(op, Loss))
    rows = torch.randint(vocab, (task.global_batch, job.seq_len + 1))
    found = []
    for _ in range(WARM_UP + job.num_steps):
        if len(world) > 1:
            dist.barrier(groups.of(world))
        start_s = time.monotonic()
        result = executor.step(lambda first, count: rows[first : first + count], 1e-4)
        found.append({"step_s": time.monotonic() - start_s, **_parts(result)})
    executor.close()
    return found[WARM_UP:]


def _parts(result: StepResult) -> dict[str, float]:
    work_s = {"F": 0.0, "B": 0.0, "I": 0.0, "W": 0.0}
    for passed in result.trace:
        work_s[passed.action.kind] += passed.work_s
    return {
        "program_s": result.program_s,
        "reduce_s": result.reduce_s,
        "optimizer_s": result.optimizer_s,
        "gather_s": result.gather_s,
        "forward_s": work_s["F"],
        "backward_s": work_s["B"] + work_s["I"] + work_s["W"],
        "talk_s": sum(sum(passed.axes_s.values()) for passed in result.trace),
    }


def main() -> None:
    job: Job = pickle.loads(Path(sys.argv[1]).read_bytes())
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    groups = Groups(rank, timeout_s=120)
    results = []
    for number, layout in enumerate(job.layouts):
        mine = run_layout(job, layout, groups)
        everyone: list[Any] = [None] * num_ranks
        dist.all_gather_object(everyone, mine)
        took = [each for each in everyone if each is not None]
        slowest = [max(step["step_s"] for step in steps) for steps in zip(*took, strict=True)]
        results.append({"steps_s": slowest, "ranks": everyone})
        if rank == 0:
            print(f"layout {number}: {min(slowest):.3f} to {max(slowest):.3f} s", flush=True)
        gc.collect()
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
