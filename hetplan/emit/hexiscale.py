"""HexiScale (FlashFlex): pipelines of their own length, tp, layers and batch, as lists on the command line.

Ranks go pipeline by pipeline, stage by stage (Relaxed-System-Lab/HexiScale, llama/generate_hetero_scripts.py). The
lists are also written as the JSON file its script generator reads, with `devices_id`: the number of each rank's node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from hetplan.emit.megatron import stage_decoders
from hetplan.emit.ranks import ranks_of
from hetplan.emit.records import Engine, Job
from hetplan.errors import CheckFailedError, UsageError
from hetplan.plan.records import Replica
from hetplan.specs.model import Model

SIZES: Mapping[int, str] = {4096: "llama-7b", 5120: "llama-13b", 6656: "llama-30b", 8192: "llama-70b"}
"""Width -> the model size HexiScale knows; layers are given apart."""


def emit_hexiscale(job: Job) -> Engine:
    """Return a plan as HexiScale's options.

    Raises:
        CheckFailedError: HexiScale has no such mesh.
        UsageError: it has no such model.
    """
    size = model_size(job.model)
    pipelines = [replica for replica in job.layout.replicas for _ in range(replica.copies)]
    _require(job)
    configs = [[stage.tp for stage in replica.stages] for replica in pipelines]
    partitions = [list(stage_decoders(job.model, replica)) for replica in pipelines]
    ranks = ranks_of(job, "replicas")
    number = {node: i for i, node in enumerate(dict.fromkeys(rank.node for rank in ranks))}
    ids = iter(number[rank.node] for rank in ranks)
    devices = [[[next(ids) for _ in range(tp)] for tp in config] for config in configs]
    program = (
        '"$HEXISCALE_PATH/llama/llama_train.py"',
        *("--model_size", size, "--total-layer-num", str(sum(partitions[0]))),
        *("--hetero_configs", _list(configs), "--layer_partitions", _list(partitions)),
        *("--chunks", *(str(replica.num_microbatches) for replica in pipelines)),
        *("--global_bsz_size", *(str(replica.num_microbatches * replica.microbatch) for replica in pipelines)),
        *("--seq_length", str(job.workload.seq_len), "--mixed_precision", job.workload.precision),
        *(("--checkpoint-layers",) if job.layout.replicas[0].stages[0].recompute == "full" else ()),
        *(("--seq-parallel",) if job.workload.sequence_parallel and max(map(max, configs)) > 1 else ()),
        *("--use-flash-attn", "--run-iter", '"$TRAIN_STEPS"'),
    )
    lists = {"hetero_configs": configs, "layer_partitions": partitions, "devices_id": devices}
    return Engine(
        name="hexiscale",
        ranks=ranks,
        program=program,
        fill_in={"HEXISCALE_PATH": "folder of HexiScale, where llama/ is", "TRAIN_STEPS": "steps to train"},
        files={
            "hetero_configs.json": "{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in lists.items()) + "\n}\n"
        },
        notes=(
            "hetero_configs.json is what llama/generate_hetero_scripts.py takes as --all_hetero_configs_path; its "
            f"--devices_id counts nodes: {', '.join(f'{i} {node}' for node, i in number.items())}",
        ),
    )


def model_size(model: Model) -> str:
    """Return HexiScale's name of a model's size.

    Raises:
        UsageError: it has none.
    """
    width = model.chain[0].width
    if model.family != "llama" or width not in SIZES:
        raise UsageError(
            f"hexiscale cannot run {model.name}: it has Llama models of width {', '.join(map(str, SIZES))} only"
        )
    return SIZES[width]


def _require(job: Job) -> None:
    stages = [stage for replica in job.layout.replicas for stage in replica.stages]
    if any(stage.dp > 1 for stage in stages):
        raise CheckFailedError("hexiscale cannot split the samples of a microbatch inside a stage (dp)")
    if len({stage.recompute for stage in stages}) > 1:
        raise CheckFailedError("hexiscale cannot recompute some stages only")
    short: list[Replica] = [r for r in job.layout.replicas if not all(stage_decoders(job.model, r))]
    if short:
        raise CheckFailedError("hexiscale cannot run a stage without a decoder layer")


def _list(value: object) -> str:
    return f'"{json.dumps(value)}"'
