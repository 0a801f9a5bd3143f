"""DeepSpeed: its configuration (JSON), a hostfile with each node's own slots, and the user's script under `torchrun`.

DeepSpeed's launcher silently runs on the local devices alone when it finds no hostfile, so the script that uses it
checks the file first, and the preflight holds the world size to the plan's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hetplan.emit.ranks import agents_of, ranks_of
from hetplan.emit.records import Agent, Engine, Job
from hetplan.emit.shell import script
from hetplan.errors import CheckFailedError
from hetplan.specs.workload import Sharding

CONFIG = "ds_config.json"
ZERO: Mapping[Sharding, int] = {"none": 0, "optimizer": 1, "gradients": 2, "full": 3}


def emit_deepspeed(job: Job) -> Engine:
    """Return a plan as a DeepSpeed configuration.

    Raises:
        CheckFailedError: DeepSpeed has no such combination.
    """
    stage = job.layout.replicas[0].stages[0]
    if stage.tp > 1 and job.layout.sharding == "full":
        raise CheckFailedError("deepspeed cannot run tp with ZeRO stage 3 (its automatic tp trains with stages 0 to 2)")
    if stage.ep > 1:
        raise CheckFailedError("deepspeed cannot place experts by its configuration alone (ep)")
    ranks = ranks_of(job, "stages")
    agents = agents_of(ranks)
    return Engine(
        name="deepspeed",
        ranks=ranks,
        program=('"$TRAIN_SCRIPT"', "--deepspeed", "--deepspeed_config", CONFIG),
        fill_in={"TRAIN_SCRIPT": "training script that calls deepspeed.initialize"},
        files={
            CONFIG: json.dumps(_config(job), indent=2) + "\n",
            "hostfile": "".join(f"{agent.node} slots={agent.num_ranks}\n" for agent in agents),
            "launch-deepspeed.sh": _launch(agents, len(ranks)),
        },
        notes=(
            "`launch-deepspeed.sh` starts all nodes from one of them over ssh, with the hostfile, instead of a script "
            "a node; it refuses to start without the hostfile, with which alone `deepspeed` looks beyond its own node",
        ),
    )


def _config(job: Job) -> dict[str, Any]:
    replica = job.layout.replicas[0]
    stage, workload = replica.stages[0], job.workload
    config: dict[str, Any] = {
        "train_batch_size": job.layout.num_samples,
        "train_micro_batch_size_per_gpu": replica.microbatch // stage.dp,
        "gradient_accumulation_steps": replica.num_microbatches,
        "zero_optimization": {"stage": ZERO[job.layout.sharding]},
    }
    if workload.precision in ("bf16", "fp16"):
        config[workload.precision] = {"enabled": True}
    if workload.gradient_bytes == 4 and workload.weight_bytes != 4:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage.tp > 1:
        config["tensor_parallel"] = {"autotp_size": stage.tp}
    return config


def _launch(agents: tuple[Agent, ...], world_size: int) -> str:
    include = "@".join(f"{agent.node}:{','.join(map(str, agent.devices))}" for agent in agents)
    return script(
        f"Starts all {world_size} processes from one node, over ssh, with DeepSpeed's own launcher.",
        [
            "# shellcheck disable=SC1091",
            "source ./common.sh train",
            "ready",
            "if [ ! -s hostfile ]; then\n"
            '    echo "hostfile is missing: only local devices would be used" >&2\n    exit 2\nfi',
            "slots=$(awk -F= '{ total += $2 } END { print total }' hostfile)",
            f'if [ "$slots" -ne {world_size} ]; then\n'
            f'    echo "hostfile has $slots slots, the plan needs {world_size}" >&2\n    exit 2\nfi',
            f'deepspeed --hostfile=hostfile --include="{include}" \\\n'
            '    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" "${PROGRAM[@]}"',
        ],
    )
