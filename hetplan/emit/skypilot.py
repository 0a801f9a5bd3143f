"""SkyPilot: one task where all nodes are alike, else a job group with a task for each run of alike nodes.

Tasks of a job group start together and know each other as `TASK-INDEX.GROUP` (SkyPilot 0.12, on Kubernetes); a node
with unlike cards cannot be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetplan.emit.kubernetes import job_name
from hetplan.emit.ranks import components_of
from hetplan.emit.records import Component, Launched, LaunchFiles
from hetplan.emit.shell import comment
from hetplan.emit.yaml import yaml_text
from hetplan.errors import UsageError

TASK_FILE = "sky.yaml"


def launch_skypilot(launched: Launched) -> LaunchFiles:
    """Return a SkyPilot task or job group.

    Raises:
        UsageError: a node holds unlike cards.
    """
    components = components_of(launched.job, launched.engine.ranks)
    for component in components:
        if len(component.groups) > 1:
            raise UsageError(
                f"skypilot cannot ask for node {component.nodes[0]}: it holds unlike cards "
                f"({', '.join(component.groups)}); it knows one accelerator a node"
            )
    name = f"hetplan-{launched.job.plan_sha256[:8]}"
    tasks = [_task(launched, component, name, components) for component in components]
    if len(components) == 1:
        text, command = yaml_text(tasks[0]), f"sky launch {TASK_FILE}"
    else:
        header = {"name": name, "execution": "parallel"}
        text = "---\n".join(yaml_text(part) for part in (header, *tasks))
        command = f"sky jobs launch {TASK_FILE}"
    head = comment(
        f"{launched.world_size} ranks of plan sha256 {launched.job.plan_sha256}; nodes are the plan's, by index."
    )
    notes: tuple[str, ...] = (
        "SkyPilot chooses the machines: the plan's node names stand for them in the order of their index",
    )
    if len(components) > 1:
        notes = (*notes, "tasks of a job group reach each other by name on Kubernetes only")
    steps = ("Fill in `site.sh`; check the accelerator names against `sky show-gpus`.", f"In this folder: `{command}`.")
    return LaunchFiles(files={TASK_FILE: head + text}, steps=steps, notes=notes)


def _task(launched: Launched, component: Component, name: str, components: Sequence[Component]) -> dict[str, Any]:
    nodes = " ".join(component.nodes)
    if len(components) == 1:
        address = 'MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n1)"'
    else:
        address = f'MASTER_ADDR="{job_name(components[0])}-0.${{SKYPILOT_JOBGROUP_NAME}}"'
    run = (
        f"nodes=({nodes})\n{address}\nexport MASTER_ADDR\n"
        'bash "launch-${nodes[$SKYPILOT_NODE_RANK]}.sh" "${HETPLAN_MODE:-train}"'
    )
    device = launched.job.cluster.group(component.groups[0]).device
    return {
        "name": job_name(component) if len(components) > 1 else name,
        "workdir": ".",
        "num_nodes": len(component.nodes),
        "resources": {"accelerators": f"{accelerator(device.name)}:{component.num_devices}"},
        "envs": {"HETPLAN_MODE": "train"},
        "run": run,
    }


SKY_NAMES = {
    "A100-SXM4-80GB": "A100-80GB",
    "A100-PCIE-80GB": "A100-80GB",
    "A100-SXM4-40GB": "A100",
    "A100-PCIE-40GB": "A100",
    "H100-SXM5-80GB": "H100",
    "H200-SXM-141GB": "H200",
    "V100-SXM2-16GB": "V100",
    "V100-SXM2-32GB": "V100-32GB",
    "B200-SXM": "B200",
    "RTX-4090": "RTX4090",
    "RTX-3090": "RTX3090",
    "RTX-A6000": "RTXA6000",
}
"""Catalog name -> accelerator name (docs.skypilot.co, `sky show-gpus`); others keep their own."""


def accelerator(device: str) -> str:
    """Return how SkyPilot calls a device."""
    return SKY_NAMES.get(device, device)
