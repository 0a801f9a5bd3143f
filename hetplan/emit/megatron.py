"""Megatron-LM's `pretrain_gpt.py`: a plan as its options (names as in megatron/training/arguments.py, core 0.16+).

Which layers a stage holds is said in the shortest way that says it: nothing (equal stages), the first and last stage's
numbers, virtual stages of equal size, or a layout string.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hetplan.emit.architecture import Value, architecture, flags, questions
from hetplan.emit.ranks import RankOrder, fewest_agents
from hetplan.emit.records import Engine, Job
from hetplan.errors import UsageError
from hetplan.plan.megatron_layout import flag_counts, layout_of_cut, layout_text
from hetplan.plan.records import Layout, Replica
from hetplan.plan.rules import listed
from hetplan.specs.model import Experts, Model
from hetplan.specs.workload import Workload

MODEL_ARGS = "MEGATRON_MODEL_ARGS"
_RECOMPUTE = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    "full": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
}
_FSDP = (
    "--use-distributed-optimizer",
    "--use-megatron-fsdp",
    "--ckpt-format",
    "fsdp_dtensor",
    "--no-gradient-accumulation-fusion",
)
_SHARDING = {
    "none": ("--overlap-grad-reduce",),
    "optimizer": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "gradients": (*_FSDP, "--data-parallel-sharding-strategy", "optim_grads"),
    "full": (*_FSDP, "--data-parallel-sharding-strategy", "optim_grads_params"),
}


def emit_megatron(job: Job) -> Engine:
    """Return a plan as options of `pretrain_gpt.py`."""
    replica = job.layout.replicas[0]
    order, ranks = fewest_agents(job, ("stages", "pipelines"))
    sizes = architecture(job.model, job.workload)
    fill_in = {
        "MEGATRON_PATH": "folder of Megatron-LM, where pretrain_gpt.py is",
        "TOKENIZER_MODEL": "tokenizer: a Hugging Face name or folder",
        "DATA_PATH": "prefix of the preprocessed data",
        "LEARNING_RATE": "peak learning rate",
        "TRAIN_STEPS": "steps to train",
    }
    model_words: tuple[str, ...] = ('"${MODEL_ARGS[@]}"',)
    prelude = f'read -r -a MODEL_ARGS <<< "${MODEL_ARGS}"'
    if sizes is None:
        fill_in[MODEL_ARGS] = f"the options that describe {job.model.name} (--num-layers, --hidden-size, ...)"
    else:
        fill_in |= questions(sizes)
        model_words, prelude = flags(sizes), ""
    model_words = (*model_words, *flags(implementation(job)))
    program = ('"$MEGATRON_PATH/pretrain_gpt.py"', *model_words, *_parallel(job, order), *_training(job))
    exclusive = (replica.stages[0].tp > 1 or replica.stages[0].cp > 1) and job.layout.sharding in ("none", "optimizer")
    return Engine(
        name="megatron",
        ranks=ranks,
        program=program,
        prelude=prelude,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if exclusive else {},
        fill_in=fill_in,
        notes=tuple(_notes(job)),
    )


def older_groups(job: Job) -> tuple[str, ...]:
    """Return the groups in use whose devices came before Ampere: Transformer Engine speaks of Ampere and later."""
    used = dict.fromkeys(stage.group for replica in job.layout.replicas for stage in replica.stages)
    devices = {name: job.cluster.group(name).device for name in used}
    return tuple(
        name for name, device in devices.items() if device.vendor == "NVIDIA" and "bf16" not in device.features
    )


def implementation(job: Job) -> dict[str, Value]:
    """Return Megatron-LM's arguments for the kernels it runs with.

    Experts in one grouped GEMM need Ampere. Old devices run without Transformer Engine where that can be done:
    Megatron-LM's own norms cannot be split by sequence, and its own attention cannot be split by context.
    """
    old = older_groups(job)
    experts = any(isinstance(o, Experts) for layer in job.model.chain for o in layer.operators)
    grouped: dict[str, Value] = {"moe_grouped_gemm": True} if experts and not old else {}
    if not old or _needs_engine(job):
        return grouped
    return {
        "transformer_impl": "local",
        "no_persist_layer_norm": True,
        "no_rope_fusion": True,
        "no_gradient_accumulation_fusion": True,
    }


def _needs_engine(job: Job) -> bool:
    stages = [stage for replica in job.layout.replicas for stage in replica.stages]
    split = job.workload.sequence_parallel and any(stage.tp > 1 for stage in stages)
    return split or any(stage.cp > 1 for stage in stages) or job.workload.precision == "fp8"


def _parallel(job: Job, order: RankOrder) -> Iterator[str]:
    replica = job.layout.replicas[0]
    stage = replica.stages[0]
    degrees = {
        "--tensor-model-parallel-size": stage.tp,
        "--pipeline-model-parallel-size": replica.pp,
        "--context-parallel-size": stage.cp,
        "--expert-model-parallel-size": stage.ep,
    }
    for name, value in degrees.items():
        if value > 1 or name.startswith(("--tensor", "--pipeline")):
            yield from (name, str(value))
    if stage.tp > 1 and job.workload.sequence_parallel:
        yield "--sequence-parallel"
    if order == "pipelines":
        yield "--use-tp-pp-dp-mapping"
    yield from layer_flags(job.model, replica)
    yield from _RECOMPUTE[stage.recompute]
    yield from _SHARDING[job.layout.sharding]


def layer_flags(model: Model, replica: Replica) -> tuple[str, ...]:
    """Return the options that say which layers each stage of a replica holds."""
    if len(replica.stages) == 1:
        return ()
    cut = (*(stage.first_layer for stage in replica.stages), replica.stages[-1].end_layer)
    stages = layout_of_cut(model, cut)
    counts = tuple(stage.num_decoders for stage in stages)
    ends = all(
        stage.has_embedding == (i == 0) and stage.has_loss == (i == len(stages) - 1) and not stage.num_mtp
        for i, stage in enumerate(stages)
    )
    if ends and len(set(counts)) == 1:
        return ("--num-virtual-stages-per-pipeline-rank", str(replica.vpp)) if replica.vpp > 1 else ()
    if ends and replica.vpp == 1 and min(counts) > 0 and (words := _end_flags(counts)):
        return words
    return ("--pipeline-model-parallel-layout", f"'{layout_text(stages)}'")


def _end_flags(counts: Sequence[int]) -> tuple[str, ...]:
    """Return first/last stage options that give these decoder layers, or nothing."""
    pp, total = len(counts), sum(counts)
    for first, last in ((counts[0], None), (None, counts[-1]), (counts[0], counts[-1])):
        try:
            same = flag_counts(total, pp, first=first, last=last) == tuple(counts)
        except UsageError:
            continue
        if same:
            words = (("--decoder-first-pipeline-num-layers", first), ("--decoder-last-pipeline-num-layers", last))
            return tuple(word for name, count in words if count is not None for word in (name, str(count)))
    return ()


def _training(job: Job) -> Iterator[str]:
    replica = job.layout.replicas[0]
    yield from ("--micro-batch-size", str(replica.microbatch // replica.stages[0].dp))
    yield from ("--global-batch-size", str(job.layout.num_samples))
    yield from precision_flags(job.workload)
    if job.workload.attention != "auto":
        yield from ("--attention-backend", "flash" if job.workload.attention == "flash" else "unfused")
    yield from ("--optimizer", "adam", "--lr", '"$LEARNING_RATE"', "--train-iters", '"$TRAIN_STEPS"')
    yield from ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", '"$TOKENIZER_MODEL"')
    yield from ("--data-path", '"$DATA_PATH"')


def precision_flags(workload: Workload) -> tuple[str, ...]:
    """Return the options of a precision; bf16 gradients are kept and reduced in fp32 unless told otherwise."""
    words = {"bf16": ("--bf16",), "fp16": ("--fp16",), "fp8": ("--bf16", "--fp8-format", "hybrid")}
    found = words.get(workload.precision, ())
    if found and workload.gradient_bytes == 4:
        return (*found, "--accumulate-allreduce-grads-in-fp32")
    return (*found, "--grad-reduce-in-bf16") if "--bf16" in found else found


def _notes(job: Job) -> Iterator[str]:
    old = older_groups(job)
    if old and _needs_engine(job):
        yield (
            f"devices of {listed(old)} came before Ampere: Transformer Engine must be built for them (CUDA 12); plan "
            "with --no-sequence-parallel and without cp to run without it"
        )
    if mixed := _mixed_rows(job.layout):
        yield f"copies of one stage run on unlike groups ({mixed}): each step waits for the slowest"


def _mixed_rows(layout: Layout) -> str:
    columns = zip(*(replica.stages[: replica.pp] for replica in layout.replicas), strict=True)
    names = [tuple(dict.fromkeys(stage.group for stage in column)) for column in columns]
    return "; ".join(" and ".join(groups) for groups in dict.fromkeys(names) if len(groups) > 1)


def stage_decoders(model: Model, replica: Replica) -> tuple[int, ...]:
    """Return the decoder layers of each (virtual) stage."""
    cut = (*(stage.first_layer for stage in replica.stages), replica.stages[-1].end_layer)
    kinds = [layer.kind for layer in model.chain]
    return tuple(kinds[first:end].count("decoder") for first, end in pairwise(cut))
