"""hetplan's own executor: every rank runs `hetplan run` on the plan, which says everything else."""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.emit.ranks import ranks_of
from hetplan.emit.records import PLAN_FILE, Engine, Job


def emit_hetplan(job: Job) -> Engine:
    """Return what hetplan's executor needs: the plan, in ranks that go node by node."""
    return Engine(
        name="hetplan",
        ranks=ranks_of(job, "nodes"),
        program=("-m", "hetplan", "run", PLAN_FILE, "--data", '"$DATA_PATH"', "--steps", '"$TRAIN_STEPS"'),
        fill_in={
            "DATA_PATH": "what to train on: token numbers (.bin), or any file, read as bytes",
            "TRAIN_STEPS": "steps to train",
        },
        notes=tuple(_notes(job)),
    )


def _notes(job: Job) -> Iterator[str]:
    used = {stage.group for replica in job.layout.replicas for stage in replica.stages}
    vendors = sorted({group.device.vendor for group in job.cluster.groups if group.name in used})
    if len(vendors) > 1:
        yield (
            f"devices of {' and '.join(vendors)}: NCCL and RCCL do not talk to each other, so groups that hold both "
            "need a bridge such as gloo"
        )
