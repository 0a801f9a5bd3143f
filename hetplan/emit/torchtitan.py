"""torchtitan: a plan as a Python configuration function (the form of its `config_registry`s, 2026).

The file starts from a configuration torchtitan ships and replaces what the plan decides: degrees, the modules of each
pipeline part (`module_fqns_per_model_part`), microbatches, recomputation. Run with `--module` and `--config` naming it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetplan.emit.ranks import ranks_of
from hetplan.emit.records import Engine, Job
from hetplan.errors import CheckFailedError
from hetplan.plan.module_names import module_names
from hetplan.plan.records import Replica, ScheduleName
from hetplan.specs.workload import Sharding

MODULE = "hetplan_titan"
BASES: Mapping[str, tuple[str, str]] = {
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
}
"""Catalog name -> torchtitan module and the configuration of its registry that has these sizes."""
SCHEDULES: Mapping[ScheduleName, str] = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
_RESHARD: Mapping[Sharding, str] = {"none": "default", "gradients": "never", "full": "always"}
_TEXT = '''"""torchtitan configuration of plan.yaml (sha256 {sha})."""

{imports}

def plan():
    """Return the configuration: what torchtitan ships for the model, with what the plan decides."""
{base}
    config.parallelism = ParallelismConfig(
{parallelism}
    )
    config.training.num_tokens_per_microbatch_per_dp_rank = {micro} * {seq_len}
    config.training.num_tokens_per_train_step = {batch} * {seq_len}
    config.training.max_context_length = {seq_len}
{training}    config.activation_checkpoint = {recompute}
    return config
'''


def emit_torchtitan(job: Job) -> Engine:
    """Return a plan as a torchtitan configuration.

    Raises:
        CheckFailedError: torchtitan has no such mesh.
    """
    stage = job.layout.replicas[0].stages[0]
    if stage.ep > 1 and job.layout.sharding == "none":
        raise CheckFailedError("torchtitan cannot place experts (ep) on ranks that share nothing; shard gradients")
    base = BASES.get(job.model.name)
    fill_in = (
        {}
        if base
        else {
            "TITAN_MODULE": f"torchtitan module of {job.model.name} (torchtitan/models/...)",
            "TITAN_CONFIG": "function of its config_registry with the sizes of the model",
        }
    )
    fill_in["HF_ASSETS_PATH"] = "folder of the tokenizer (--hf_assets_path)"
    program = (
        "-m",
        "torchtitan.train",
        "--module",
        MODULE,
        "--config",
        "plan",
        "--hf_assets_path",
        '"$HF_ASSETS_PATH"',
    )
    return Engine(
        name="torchtitan",
        ranks=ranks_of(job, "stages"),
        program=program,
        fill_in=fill_in,
        files={f"{MODULE}.py": _config(job, base)},
        notes=_notes(job),
    )


def _config(job: Job, base: tuple[str, str] | None) -> str:
    replica = job.layout.replicas[0]
    imports = ["from torchtitan.config import ParallelismConfig"]
    recompute = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}[
        replica.stages[0].recompute
    ]
    if recompute != "None":
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {recompute.split('.')[0]}")
    if base:
        imports.append(f"from torchtitan.models.{base[0]}.config_registry import {base[1]}")
        first = f"    config = {base[1]}()"
    else:
        imports = ["import importlib", "import os", "", *imports]
        first = (
            '    module = os.environ["TITAN_MODULE"]\n'
            '    registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")\n'
            '    config = getattr(registry, os.environ["TITAN_CONFIG"])()'
        )
    parallelism = "\n".join(f"        {name}={value}," for name, value in _parallelism(job, replica).items())
    return _TEXT.format(
        sha=job.plan_sha256,
        imports="\n".join(imports) + "\n",
        base=first,
        parallelism=parallelism,
        micro=replica.microbatch // replica.stages[0].dp,
        batch=job.layout.num_samples,
        seq_len=job.workload.seq_len,
        training=_training(job, replica),
        recompute=recompute,
    )


def _training(job: Job, replica: Replica) -> str:
    """Return what a plan asks beside sizes: CUDA graphs know neither pipelines nor exchanges between experts."""
    lines = ""
    if replica.pp > 1 or replica.stages[0].ep > 1:
        lines += "    config.training.disable_cuda_graphs = True\n"
    if job.workload.precision == "fp32":
        lines += '    config.training.mixed_precision_param = "float32"\n'
    return lines


def _parallelism(job: Job, replica: Replica) -> dict[str, str]:
    stage = replica.stages[0]
    dp = stage.dp * sum(row.copies for row in job.layout.replicas)
    sharded = job.layout.sharding != "none"
    values = {
        "data_parallel_replicate_degree": str(1 if sharded else dp),
        "data_parallel_shard_degree": str(dp if sharded else 1),
        "fsdp_reshard_after_forward": f'"{_RESHARD[job.layout.sharding]}"',
        "tensor_parallel_degree": str(stage.tp),
        "enable_sequence_parallel": str(job.workload.sequence_parallel),
        "context_parallel_degree": str(stage.cp),
        "expert_parallel_degree": str(stage.ep),
        "pipeline_parallel_degree": str(replica.pp),
    }
    if replica.pp > 1:
        values["pipeline_parallel_schedule"] = f'"{SCHEDULES[job.layout.schedule]}"'
        values["num_pp_microbatches"] = str(replica.num_microbatches)
        values["module_fqns_per_model_part"] = _parts(job, replica)
    return values


def _parts(job: Job, replica: Replica) -> str:
    """Return the modules of each part; torchtitan calls a Llama-like output projection `lm_head`."""
    cut = (*(stage.first_layer for stage in replica.stages), replica.stages[-1].end_layer)
    parts = [["lm_head" if name == "output" else name for name in names] for names in module_names(job.model, cut)]
    lines = "".join("            [" + ", ".join(f'"{name}"' for name in names) + "],\n" for names in parts)
    return f"[\n{lines}        ]"


def _notes(job: Job) -> tuple[str, ...]:
    notes = []
    if job.layout.sharding == "gradients":
        notes.append("gradients sharded: FSDP2 without resharding after the forward pass")
    if job.model.name not in BASES:
        notes.append(f"torchtitan ships no configuration of {job.model.name}: name one of the same sizes in site.sh")
    return tuple(notes)
