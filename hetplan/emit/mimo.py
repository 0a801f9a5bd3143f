"""A layout of modules as a MegatronMIMO job: grids, rank offsets and an MPMD launch.

Megatron-Bridge (`megatron.bridge.models.megatron_mimo`, 2026) takes, for each component, degrees and a rank offset; the
language model's is called `language`. It runs components on ranks of their own, or all on the same ranks (then encoders
on one stage), and needs powers of two as tp and dp degrees that divide one another. What a layout asks beyond that is
refused by name. Some of its versions refuse an encoder with fewer data-parallel ranks than the language model, others
run it (its tutorial's 17-rank job does so); the folder says where that matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from hetplan.costs.samples import is_language
from hetplan.emit.shell import comment
from hetplan.errors import CheckFailedError, UsageError
from hetplan.plan.modules import ModuleLayout, Placement
from hetplan.specs.cluster import Cluster
from hetplan.specs.model import Model

LANGUAGE = "language"
OTHER_ENGINES: Mapping[str, str] = {
    "torchtitan": "one mesh holds the whole model; it has no grids for single modules",
    "deepspeed": "its pipeline engine runs one chain on one grid; it has no grids for single modules",
    "flagscale": "its heterogeneous meshes cut one chain; its modules on their own grids are not released yet",
    "hexiscale": "it runs one decoder; it has no encoders",
    "vllm": "it serves; this plan trains",
    "hetplan": "its own executor runs one chain of modules, not yet modules on grids of their own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MimoJob:
    """What is emitted."""

    layout: ModuleLayout
    cluster: Cluster
    model: Model
    plan_text: str
    seq_len: int


def emit_mimo(job: MimoJob) -> dict[str, str]:
    """Return the files of a folder.

    Raises:
        CheckFailedError: MegatronMIMO cannot run the layout; the message says what of it.
    """
    found = tuple(_refusals(job))
    if found:
        raise CheckFailedError(f"MegatronMIMO cannot run {'; nor '.join(found)}")
    return {
        "plan.yaml": job.plan_text,
        "parallelism.py": _settings(job),
        "job.sbatch": _launch(job),
        "README.md": _readme(job),
    }


def refuse_engine(engine: str) -> None:
    """Refuse an engine that has no grids for single modules.

    Raises:
        UsageError: always but for Megatron.
    """
    if engine != "megatron":
        known = OTHER_ENGINES.get(engine)
        reason = (
            f"{engine} cannot run modules on grids of their own: {known}" if known else f"unknown engine {engine!r}"
        )
        raise UsageError(f"{reason}; `--to megatron` writes a MegatronMIMO job")


def component(job: MimoJob, placement: Placement) -> str:
    """Return the name MegatronMIMO knows a unit by."""
    modules = {module.name: module for module in job.model.modules}
    if any(is_language(modules[name]) for name in placement.modules):
        return LANGUAGE
    return "images" if placement.modules[0] in ("vision", "image", "images") else placement.modules[0]


def _refusals(job: MimoJob) -> list[str]:
    placements = job.layout.placements
    names = [component(job, placement) for placement in placements]
    found = []
    if names.count(LANGUAGE) != 1 or len(names) < 2:
        found.append("this: it needs one language model and at least one encoder, each a component of its own")
    if names and names[-1] != LANGUAGE:
        found.append(f"module {placements[-1].name} behind the language model (it has encoders only)")
    spans = {(placement.first_rank, placement.num_ranks) for placement in placements}
    if 1 < len(spans) < len(placements):
        found.append("some components together and others apart (all share their ranks, or none)")
    for placement, name in zip(placements, names, strict=True):
        if placement.tp & (placement.tp - 1):
            found.append(f"tp {placement.tp} of {name} (powers of two only)")
        if len(spans) == 1 and name != LANGUAGE and placement.pp > 1:
            found.append(f"pp {placement.pp} of {name} on shared ranks (one stage only)")
    for first, second in combinations(range(len(placements)), 2):
        a, b = placements[first].dp, placements[second].dp
        if a % b and b % a:
            found.append(f"dp {a} of {names[first]} beside dp {b} of {names[second]} (one divides the other)")
    return found


def _settings(job: MimoJob) -> str:
    lines = [
        '"""Grids and rank offsets of a MegatronMIMO job, made by hetplan; PARALLELISM goes into a recipe."""',
        "",
        "from megatron.bridge.models.megatron_mimo.megatron_mimo_config import (",
        "    MegatronMIMOParallelismConfig,",
        "    ModuleParallelismConfig,",
        ")",
        "",
        "PARALLELISM = MegatronMIMOParallelismConfig(",
        "    module_parallelisms={",
    ]
    for placement in _in_rank_order(job):
        lines += [
            f'        "{component(job, placement)}": ModuleParallelismConfig(',
            f"            tensor_model_parallel_size={placement.tp},",
            f"            pipeline_model_parallel_size={placement.pp},",
            f"            context_parallel_size={placement.cp},",
            f"            data_parallel_size={placement.dp},",
            f"            rank_offset={placement.first_rank},",
            "        ),",
        ]
    lines += ["    }", ")", f"WORLD_SIZE = {job.layout.world_size}", f"MICRO_BATCH_SIZE = {job.layout.samples}"]
    return "\n".join([*lines, f"GLOBAL_BATCH_SIZE = {job.layout.num_samples}", f"SEQ_LENGTH = {job.seq_len}", ""])


def _in_rank_order(job: MimoJob) -> list[Placement]:
    return sorted(job.layout.placements, key=lambda p: (p.first_rank, component(job, p) != LANGUAGE))


def nodes_of(job: MimoJob) -> list[tuple[str, int]]:
    """Return (node, ranks on it) in rank order: each placement takes its group's next devices, node by node.

    Raises:
        CheckFailedError: a group has too few devices.
    """
    free = {
        group.name: [node for node in group.nodes for _ in range(group.devices_per_node)]
        for group in job.cluster.groups
    }
    for name, slots in free.items():
        del slots[job.cluster.group(name).num_devices :]
    taken: list[str] = []
    spans = dict.fromkeys((p.first_rank, p.num_ranks, p.group) for p in _in_rank_order(job))
    for _, count, group in spans:
        if len(free[group]) < count:
            raise CheckFailedError(f"group {group!r} has too few devices for {count} more ranks")
        taken += free[group][:count]
        del free[group][:count]
    counted: list[tuple[str, int]] = []
    for node in taken:
        if counted and counted[-1][0] == node:
            counted[-1] = (node, counted[-1][1] + 1)
        else:
            counted.append((node, 1))
    return counted


def _launch(job: MimoJob) -> str:
    nodes = nodes_of(job)
    names = list(dict.fromkeys(node for node, _ in nodes))
    lines = [
        "#!/usr/bin/env bash",
        "#SBATCH --job-name=hetplan-mimo",
        f"#SBATCH --nodes={len(names)}",
        f"#SBATCH --nodelist={','.join(names)}",
        "#SBATCH --exclusive",
    ]
    text = "\n".join(lines) + "\n" + comment(f"{job.layout.world_size} ranks of one MegatronMIMO job; ranks in order.")
    text += _HEAD
    for placement in _in_rank_order(job):
        words = f"tp={placement.tp},pp={placement.pp},cp={placement.cp},dp={placement.dp}"
        text += f'    --component "{component(job, placement)}={words},rank_offset={placement.first_rank}"\n'
    text += f"    --global-batch-size {job.layout.num_samples}\n    --micro-batch-size {job.layout.samples}\n"
    text += f"    --seq-length {job.seq_len}\n)\n"
    text += f"export WORLD_SIZE={job.layout.world_size}\n" + _TASK
    parts = [f'--nodes=1 --ntasks={count} --nodelist={node} bash -c "$TASK"' for node, count in nodes]
    return text + "srun --kill-on-bad-exit=1 --distribution=block:block " + " \\\n    : ".join(parts) + "\n"


_HEAD = """set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
# The program that builds the model: Megatron-Bridge's example for yours, with what it asks for besides.
PROGRAM="${PROGRAM:?set PROGRAM, such as 'python examples/megatron_mimo/qwen35_vl/finetune_qwen35_vl.py --hf-model ..'}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="${MASTER_PORT:-29500}"
export MASTER_ADDR MASTER_PORT PROGRAM
arguments=(
"""
_TASK = """ARGUMENTS="${arguments[*]}"
export ARGUMENTS
# shellcheck disable=SC2016  # each task expands these
TASK='RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec $PROGRAM $ARGUMENTS'
"""


def _readme(job: MimoJob) -> str:
    rows = [
        f"| {component(job, p)} | {p.first_rank}-{p.end_rank - 1} | {p.tp} | {p.pp} | {p.dp} | {', '.join(p.modules)} |"
        for p in _in_rank_order(job)
    ]
    local = next(p for p in job.layout.placements if component(job, p) == LANGUAGE).dp
    return "\n".join(
        [
            "# MegatronMIMO job",
            "",
            "| component | ranks | tp | pp | dp | modules |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"World size {job.layout.world_size}. A global microbatch has {job.layout.samples} samples,"
            f" {job.layout.samples // local} on each of the language model's {local} data-parallel ranks.",
            "",
            "1. `parallelism.py` holds the grids for a recipe of your own; `job.sbatch` passes the same to a program",
            "   that takes `--component NAME=tp=..,pp=..,cp=..,dp=..,rank_offset=..`, as Megatron-Bridge's do.",
            "2. `PROGRAM='python .../finetune_qwen35_vl.py --hf-model ..' sbatch job.sbatch`",
            "",
            *_warnings(job, local),
            "A node may hold fewer ranks than it has devices: the launch is one `srun` of several programs (MPMD).",
            "",
        ]
    )


def _warnings(job: MimoJob, language_dp: int) -> list[str]:
    fewer = [component(job, p) for p in job.layout.placements if p.dp < language_dp]
    if not fewer:
        return []
    return [
        f"Some versions of Megatron-Bridge refuse {', '.join(fewer)} with fewer data-parallel ranks than the language",
        f"model's {language_dp}; its 17-rank tutorial job is such a layout, so take the version that tutorial names.",
        "",
    ]
