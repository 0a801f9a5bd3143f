"""Kubernetes: a JobSet with one replicated job for each run of alike nodes; Kubeflow's jobs too where all are alike.

A node's label names one product and its capacity is one number (SkyPilot pull request 8230), so a node with unlike
cards cannot be asked for: it is refused. Pods find their launch script by the completion index of their job; rank 0 is
pod 0 of the first job, whose name JobSet makes known by DNS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetplan.emit.ranks import components_of
from hetplan.emit.records import MASTER_PORT, Component, Launched, LaunchFiles
from hetplan.emit.shell import FILL_IN, comment
from hetplan.emit.yaml import yaml_text
from hetplan.errors import UsageError
from hetplan.specs.cluster import Device

RESOURCES: Mapping[str, tuple[str, str]] = {
    "NVIDIA": ("nvidia.com/gpu", "nvidia.com/gpu.product"),
    "AMD": ("amd.com/gpu", "amd.com/gpu.product-name"),
}
"""Vendor -> resource of its device plugin, label of its feature discovery that names the product."""
_PREFIXES = ("NVIDIA-", "Tesla-", "AMD-Instinct-", "AMD_Instinct")
FOLDER = "/hetplan"


def launch_kubernetes(launched: Launched) -> LaunchFiles:
    """Return a JobSet, and a TrainJob and a PyTorchJob where all nodes are alike.

    Raises:
        UsageError: a node holds unlike cards, or a vendor's resource is not known.
    """
    components = components_of(launched.job, launched.engine.ranks)
    _require(launched, components)
    name = f"hetplan-{launched.job.plan_sha256[:8]}"
    files = {"jobset.yaml": _jobset(launched, components, name), "pod.sh": _pod(components)}
    uniform = len(components) == 1 and len(launched.agents) == len(launched.nodes)
    if uniform:
        files["trainjob.yaml"] = _trainjob(launched, components[0], name)
        files["pytorchjob.yaml"] = _pytorchjob(launched, components[0], name)
    steps = (
        f"Replace every {FILL_IN} in `jobset.yaml` and `site.sh` (MASTER_ADDR is set by the pods).",
        f"`kubectl create configmap {name} --from-file=.` in this folder.",
        "`kubectl apply -f jobset.yaml` (needs the JobSet controller)"
        + (
            "; or, all nodes being alike, `trainjob.yaml` (Kubeflow Trainer) or `pytorchjob.yaml` (training operator)."
            if uniform
            else "."
        ),
    )
    return LaunchFiles(files=files, steps=steps, notes=tuple(_notes(launched, components)))


MOST_BYTES = 2**20
"""A ConfigMap holds 1 MiB (Kubernetes documentation, "ConfigMaps")."""
NODE_BYTES, RANK_BYTES = 1000, 90
"""Assumed, rounded up: what one node's scripts and one rank's line of expected.json take."""


def _require(launched: Launched, components: Sequence[Component]) -> None:
    for component in components:
        if len(component.groups) > 1:
            raise UsageError(
                f"kubernetes cannot ask for node {component.nodes[0]}: it holds unlike cards "
                f"({', '.join(component.groups)}), but a node's label names one product and its count is one number"
            )
        device = _device(launched, component)
        if device.vendor not in RESOURCES:
            raise UsageError(f"kubernetes: the resource name of {device.vendor} devices is not known")


def _device(launched: Launched, component: Component) -> Device:
    return launched.job.cluster.group(component.groups[0]).device


def product_label(device: Device) -> str:
    """Return the product as feature discovery labels it (spaces as dashes), or a mark where no alias says it."""
    names = (alias.replace(" ", "-") for alias in device.aliases)
    return next((name for name in names if name.startswith(_PREFIXES)), FILL_IN)


def job_name(component: Component) -> str:
    """Return a component's name as a DNS label."""
    return component.name.lower().replace("_", "-").replace(".", "-")


def _jobset(launched: Launched, components: Sequence[Component], name: str) -> str:
    head = f"{name}-{job_name(components[0])}-0-0.{name}"
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "annotations": {"hetplan/plan-sha256": launched.job.plan_sha256}},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [_replicated(launched, i, part, name, head) for i, part in enumerate(components)],
        },
    }
    text = comment(
        f"{launched.world_size} ranks; one replicated job a group of alike nodes, in the order of their ranks."
    )
    return text + yaml_text(document)


def _replicated(launched: Launched, index: int, component: Component, name: str, head: str) -> dict[str, Any]:
    count = len(component.nodes)
    return {
        "name": job_name(component),
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "completions": count,
                "parallelism": count,
                "backoffLimit": 0,
                "template": {"spec": _pod_spec(launched, index, component, name, head)},
            }
        },
    }


def _pod_spec(launched: Launched, index: int, component: Component, name: str, head: str) -> dict[str, Any]:
    device = _device(launched, component)
    resource, label = RESOURCES[device.vendor]
    container = {
        "name": "train",
        "image": FILL_IN,
        "workingDir": FOLDER,
        "command": ["bash", f"{FOLDER}/pod.sh", str(index)],
        "env": [{"name": "MASTER_ADDR", "value": head}, {"name": "MASTER_PORT", "value": str(MASTER_PORT)}],
        "ports": [{"containerPort": MASTER_PORT}],
        "resources": {"limits": {resource: component.num_devices}},
        "volumeMounts": [{"name": "hetplan", "mountPath": FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "restartPolicy": "Never",
        "nodeSelector": {label: product_label(device)},
        "containers": [container],
        "volumes": [
            {"name": "hetplan", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _pod(components: Sequence[Component]) -> str:
    cases = "".join(f"    {i}) nodes=({' '.join(part.nodes)}) ;;\n" for i, part in enumerate(components))
    return (
        "#!/usr/bin/env bash\n"
        + comment("Runs in every pod: component, completion index -> the launch script of the node it stands for.")
        + "set -euo pipefail\n"
        + 'case "$1" in\n'
        + cases
        + '    *) echo "there is no component $1" >&2; exit 2 ;;\nesac\n'
        + f'cd {FOLDER}\nexec bash "launch-${{nodes[${{JOB_COMPLETION_INDEX:?}}]}}.sh" "${{HETPLAN_MODE:-train}}"\n'
    )


def _trainjob(launched: Launched, component: Component, name: str) -> str:
    device = _device(launched, component)
    resource, label = RESOURCES[device.vendor]
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": FILL_IN,
                "numNodes": len(component.nodes),
                "numProcPerNode": component.num_ranks,
                "command": [
                    "bash",
                    "-c",
                    f'export MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"; bash {FOLDER}/pod.sh 0',
                ],
                "resourcesPerNode": {"limits": {resource: component.num_devices}},
            },
        },
    }
    text = comment(
        f"All nodes are alike ({label}={product_label(device)}). The runtime mounts ConfigMap {name} at {FOLDER}."
    )
    return text + yaml_text(document)


def _pytorchjob(launched: Launched, component: Component, name: str) -> str:
    """Return a PyTorchJob: one master, the other nodes workers; the operator counts them in RANK."""
    spec = _pod_spec(launched, 0, component, name, f"{name}-master-0")
    container = spec["containers"][0] | {"name": "pytorch"}
    container["command"] = ["bash", "-c", f'JOB_COMPLETION_INDEX="$RANK" exec bash {FOLDER}/pod.sh 0']
    pod = {name: part for name, part in spec.items() if name != "restartPolicy"} | {"containers": [container]}
    replicas = {"Master": 1, "Worker": len(component.nodes) - 1}
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "runPolicy": {"backoffLimit": 0, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {
                role: {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}
                for role, count in replicas.items()
                if count
            },
        },
    }
    return comment("The same ranks for Kubeflow's training operator v1.") + yaml_text(document)


def _notes(launched: Launched, components: Sequence[Component]) -> list[str]:
    notes = []
    unknown = [part.name for part in components if product_label(_device(launched, part)) == FILL_IN]
    if unknown:
        notes.append(
            f"the product label of {', '.join(unknown)} is not known: `kubectl get nodes --show-labels` tells it"
        )
    if NODE_BYTES * len(launched.nodes) + RANK_BYTES * launched.world_size > MOST_BYTES:
        notes.append("the folder is too large for one ConfigMap (1 MiB): put it on a volume mounted at " + FOLDER)
    return notes
