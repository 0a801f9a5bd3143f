"""Slurm: one `sbatch` script, a heterogeneous job where nodes differ, one component a run of alike nodes.

A component's nodes come in `SLURM_JOB_NODELIST_HET_GROUP_n` (plain jobs: `SLURM_JOB_NODELIST`), n counted in the order
of the components. Every task finds its launch script by its host's name, else by its place in those lists, so the plan
may be moved to other nodes of the same kind by editing --nodelist alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.emit.ranks import components_of
from hetplan.emit.records import Component, Launched, LaunchFiles
from hetplan.emit.shell import comment
from hetplan.specs.hostlist import hostlist_text

JOB = "job.sbatch"
TASK = "slurm-task.sh"


def launch_slurm(launched: Launched) -> LaunchFiles:
    """Return an sbatch script and the script of its tasks."""
    components = components_of(launched.job, launched.engine.ranks)
    steps = (
        "Put this folder on a file system all nodes share; fill in `site.sh` (MASTER_ADDR is set from the job).",
        "Add what your site asks for (partition, account, time) to each component of `job.sbatch`.",
        f"`sbatch {JOB} preflight` checks the nodes; `sbatch {JOB}` trains.",
    )
    notes: tuple[str, ...] = ()
    if len(components) > 1:
        notes = (
            f"a heterogeneous Slurm job of {len(components)} components: "
            + ", ".join(f"{i} {component.name}" for i, component in enumerate(components)),
        )
    return LaunchFiles(files={JOB: _job(launched, components), TASK: _task(components)}, steps=steps, notes=notes)


def _directives(component: Component) -> list[str]:
    return [
        f"#SBATCH --nodes={len(component.nodes)}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={component.num_devices}",
        f"#SBATCH --nodelist={hostlist_text(component.nodes)}",
    ]


def _list_variable(index: int, num_components: int) -> str:
    return "SLURM_JOB_NODELIST" if num_components == 1 else f"SLURM_JOB_NODELIST_HET_GROUP_{index}"


def _job(launched: Launched, components: Sequence[Component]) -> str:
    lines = ["#!/usr/bin/env bash", f"#SBATCH --job-name=hetplan-{launched.job.plan_sha256[:8]}"]
    for i, component in enumerate(components):
        if i:
            lines.append("#SBATCH hetjob")
        lines += _directives(component)
    text = "\n".join(lines) + "\n"
    text += comment(f"{launched.world_size} ranks of plan sha256 {launched.job.plan_sha256}; components in rank order.")
    text += 'set -euo pipefail\ncd "$SLURM_SUBMIT_DIR"\n'
    names = [_list_variable(i, len(components)) for i in range(len(components))]
    text += "nodes=()\n"
    for name in names:
        text += f'mapfile -t -O "${{#nodes[@]}}" nodes < <(scontrol show hostnames "${name}")\n'
    text += f'if [ "${{#nodes[@]}}" -ne {len(launched.nodes)} ]; then\n'
    text += f'    echo "the job has ${{#nodes[@]}} nodes, the plan needs {len(launched.nodes)}" >&2\n    exit 2\nfi\n'
    text += 'export HETPLAN_NODES="${nodes[*]}"\n'
    parts = [
        f"srun {f'--het-group={i} ' if len(components) > 1 else ''}--ntasks-per-node=1 --kill-on-bad-exit=1 "
        f'bash {TASK} "${{1:-train}}"'
        for i in range(len(components))
    ]
    first, *others = parts
    for other in others:
        first += " \\\n    : " + other.removeprefix("srun ")
    return text + first + "\n"


def _task(components: Sequence[Component]) -> str:
    planned = " ".join(node for component in components for node in component.nodes)
    return (
        "#!/usr/bin/env bash\n"
        + comment("Runs on every node: starts the launch script of this node; on other nodes than planned, by place.")
        + "set -euo pipefail\n"
        + f"planned=({planned})\n"
        + _TASK
    )


_TASK = """name="${SLURMD_NODENAME:-$(hostname -s)}"
read -r -a given <<< "$HETPLAN_NODES"
sorted() { printf '%s\\n' "$@" | sort; }
head="${planned[0]}"
if [ "$(sorted "${planned[@]}")" != "$(sorted "${given[@]}")" ]; then
    head="${given[0]}"
    for i in "${!given[@]}"; do
        if [ "${given[$i]}" = "$name" ]; then
            echo "$name takes the place of ${planned[$i]}" >&2
            name="${planned[$i]}"
            break
        fi
    done
fi
MASTER_ADDR="$head" exec bash "launch-$name.sh" "${1:-train}"
"""
