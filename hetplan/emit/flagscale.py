"""FlagScale: an experiment and a train configuration (YAML) with process meshes, and a hostfile with device types.

FlagScale starts the ranks itself (`python run.py`), one `torchrun` a host of the hostfile with static rendezvous.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from hetplan.emit.architecture import architecture, ends
from hetplan.emit.megatron import implementation, stage_decoders
from hetplan.emit.ranks import agents_of, ranks_of
from hetplan.emit.records import MASTER_PORT, Engine, Job, Rank
from hetplan.emit.yaml import FILL_IN, yaml_text
from hetplan.errors import CheckFailedError
from hetplan.plan.flagscale_meshes import checkpoint_format, mesh_numbers, mesh_warnings, meshes_of
from hetplan.specs.model import Linear


def emit_flagscale(job: Job) -> Engine:
    """Return a plan as FlagScale's configuration.

    Raises:
        CheckFailedError: meshes cannot say the plan.
    """
    _require(job)
    ranks = ranks_of(job, "stages")
    return Engine(
        name="flagscale",
        ranks=ranks,
        files={
            "experiment.yaml": _experiment(job, ranks),
            "train-hetero.yaml": yaml_text(_train(job)),
            "hostfile": hostfile(job, ranks),
        },
        steps=(
            "Replace every FILL_IN in `train-hetero.yaml` (data, tokenizer, rates) and `experiment.yaml`.",
            "Copy `experiment.yaml`, `hostfile` to a folder `conf`, `train-hetero.yaml` to `conf/train/hetero.yaml`.",
            "In FlagScale: `python run.py --config-path CONF --config-name experiment action=run`.",
        ),
        notes=tuple(_notes(job)),
    )


def _require(job: Job) -> None:
    replica = job.layout.replicas[0]
    names = {stage.cp for stage in replica.stages}
    if len(names) > 1:
        words = ", ".join(f"stage {i}: {stage.cp}" for i, stage in enumerate(replica.stages))
        raise CheckFailedError(f"flagscale cannot run stages with different cp ({words})")
    recompute = {stage.recompute for stage in replica.stages}
    if "selective" in recompute and len(recompute) > 1:
        raise CheckFailedError("flagscale cannot recompute selectively in some stages only (all, or full in some)")
    tied = any(isinstance(o, Linear) and o.tied for o in job.model.chain[-1].operators)
    if tied and replica.stages[0].tp != replica.stages[-1].tp:
        raise CheckFailedError(
            f"flagscale cannot share embeddings between stages with different tp (first stage: {replica.stages[0].tp}, "
            f"last stage: {replica.stages[-1].tp})"
        )
    odd = [i for i, stage in enumerate(replica.stages) if replica.microbatch % stage.dp]
    if odd:
        raise CheckFailedError(f"flagscale cannot divide a microbatch of {replica.microbatch} by dp of stage {odd[0]}")


def _train(job: Job) -> dict[str, Any]:
    replica = job.layout.replicas[0]
    meshes = meshes_of(job.layout)
    hetero: dict[str, Any] = {
        "enable_hetero": True,
        "hetero_use_cpu_communication": _mixed_vendors(job),
        "hetero_pipeline_layer_split": list(stage_decoders(job.model, replica)),
        "hetero_process_meshes": list(mesh_numbers(meshes)),
        "hetero_device_types": _mesh_devices(job),
        "hetero_current_device_type": _mesh_devices(job)[0],
        "standalone_embedding_stage": False,
    }
    precision: dict[str, Any] = {word: True for word in ("bf16", "fp16") if job.workload.precision == word}
    if precision and job.workload.gradient_bytes == 4:
        precision["accumulate_allreduce_grads_in_fp32"] = True
    elif "bf16" in precision:
        precision["grad_reduce_in_bf16"] = True
    system: dict[str, Any] = {
        "tensor_model_parallel_size": replica.stages[0].tp,
        "pipeline_model_parallel_size": replica.pp,
        "context_parallel_size": replica.stages[0].cp,
        "sequence_parallel": job.workload.sequence_parallel and any(stage.tp > 1 for stage in replica.stages),
        "use_distributed_optimizer": job.layout.sharding == "optimizer",
        "precision": precision,
        "checkpoint": {"ckpt_format": checkpoint_format(meshes), "save_interval": 1000},
        "hetero": hetero,
    }
    if recompute := _recompute(job):
        system["recompute"] = recompute
    return {"system": system, "model": _model(job), "data": _data()}


def _recompute(job: Job) -> dict[str, Any]:
    replica = job.layout.replicas[0]
    words = [stage.recompute for stage in replica.stages]
    if set(words) == {"none"}:
        return {}
    if set(words) == {"selective"}:
        return {"recompute_granularity": "selective"}
    full: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    if set(words) == {"full"}:
        return full
    rows = [[len(list(run)), replica.num_microbatches, int(word == "full")] for word, run in groupby(words)]
    return full | {"recompute_granularity_per_stage_micro_batch": rows}


def _model(job: Job) -> dict[str, Any]:
    replica = job.layout.replicas[0]
    unsaid = {"num_layers": sum(stage_decoders(job.model, replica)), **ends(job.model)}
    sizes = architecture(job.model, job.workload) or unsaid
    known = {name: FILL_IN if str(value).startswith("$") else value for name, value in sizes.items()}
    known.pop("vocab_size", None)
    known |= implementation(job)
    return known | {
        "micro_batch_size": replica.microbatch // replica.stages[0].dp,
        "global_batch_size": job.layout.num_samples,
        "train_samples": FILL_IN,
        "optimizer": {"lr": FILL_IN},
    }


def _data() -> dict[str, Any]:
    return {"data_path": FILL_IN, "split": 1, "tokenizer": {"tokenizer_type": FILL_IN, "tokenizer_path": FILL_IN}}


def _mesh_devices(job: Job) -> list[str]:
    """Return the device type of each mesh, in order."""
    found: list[str] = []
    last: tuple[object, ...] | None = None
    for stage in job.layout.replicas[0].stages:
        key = (stage.group, stage.tp, stage.cp, stage.dp, stage.ep)
        if key != last:
            found.append(job.cluster.group(stage.group).device.name)
        last = key
    return found


def _mixed_vendors(job: Job) -> bool:
    used = {stage.group for stage in job.layout.replicas[0].stages}
    return len({group.device.vendor for group in job.cluster.groups if group.name in used}) > 1


def _experiment(job: Job, ranks: tuple[Rank, ...]) -> str:
    agents = agents_of(ranks)
    runner = {
        "backend": "torchrun",
        "rdzv_backend": "static",
        "nnodes": len(agents),
        "hostfile": "hostfile",
        "master_addr": agents[0].node,
        "master_port": MASTER_PORT,
    }
    document = {
        "defaults": ["_self_", {"train": "hetero"}],
        "experiment": {
            "exp_name": f"hetplan-{job.plan_sha256[:8]}",
            "exp_dir": "./outputs",
            "task": {"type": "train", "backend": "megatron", "entrypoint": "./flagscale/train/hetero/train_gpt.py"},
            "runner": runner,
            "envs": {"CUDA_DEVICE_MAX_CONNECTIONS": 1, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        },
        "action": "run",
    }
    return yaml_text(document)


def hostfile(job: Job, ranks: tuple[Rank, ...]) -> str:
    """Return FlagScale's hostfile: a line a node, in rank order.

    Raises:
        CheckFailedError: ranks come back to a node, which a hostfile cannot say.
    """
    agents = agents_of(ranks)
    nodes = [agent.node for agent in agents]
    if len(set(nodes)) < len(nodes):
        again = next(node for i, node in enumerate(nodes) if node in nodes[:i])
        raise CheckFailedError(f"flagscale cannot come back to a node: it numbers ranks host by host ({again})")
    device = {rank.node: job.cluster.group(rank.group).device.name for rank in ranks}
    return "".join(f"{agent.node} slots={agent.num_ranks} type={device[agent.node]}\n" for agent in agents)


def _notes(job: Job) -> Iterator[str]:
    meshes = meshes_of(job.layout)
    yield from mesh_warnings(meshes, "torch_dist")
    if architecture(job.model, job.workload) is None:
        yield f"the model section holds the layers of {job.model.name} only; complete it"
