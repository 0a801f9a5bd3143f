"""Which tool wrote a file, told from its content; a format can also be named.

Formats are tried from the most to the least particular. A file no format claims is refused: nothing is half-read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetplan.errors import UsageError
from hetplan.specs.importers.facts import Facts, SourceText
from hetplan.specs.importers.infiniband import read_devinfo, read_ibstat, read_sysfs
from hetplan.specs.importers.kubernetes import LabelKeys, read_labels, read_nodes
from hetplan.specs.importers.nccl_xml import read_nccl_xml
from hetplan.specs.importers.nvidia_smi import read_full_query, read_nvlink_status, read_query, read_topo
from hetplan.specs.importers.nvidia_smi_table import read_table
from hetplan.specs.importers.rocm import read_amd_topology, read_showtopo
from hetplan.specs.importers.skypilot import read_task
from hetplan.specs.importers.slurm_json import read_slurm_json
from hetplan.specs.importers.slurm_nodes import read_partition_table, read_scontrol, read_sinfo
from hetplan.specs.importers.slurm_topology import read_topology_conf, read_topology_yaml
from hetplan.units import hint, show

SIGN_WITHIN = 200_000
"""Characters in which a file must show what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One kind of file that describes nodes."""

    what: str
    read: Callable[[SourceText], Facts]
    sign: re.Pattern[str]
    """Found in such files and in no other kind."""


def _format(what: str, read: Callable[[SourceText], Facts], sign: str) -> Format:
    return Format(what=what, read=read, sign=re.compile(sign, re.MULTILINE))


CLUSTER_FORMATS: Mapping[str, Format] = {
    "nccl-xml": _format("NCCL topology XML", read_nccl_xml, r"\A\s*(<\?xml[^>]*>\s*)?(<!DOCTYPE[\s\S]*?)?<system\b"),
    "rocm-showtopo": _format(
        "rocm-smi --showtopo", read_showtopo, r"ROCm System Management|Link Type between two GPUs"
    ),
    "amd-topology": _format("amd-smi topology", read_amd_topology, r"^\s*LINK TYPE TABLE"),
    "nvidia-smi": _format("nvidia-smi", read_table, r"^\|\s*NVIDIA-SMI \d"),
    "nvidia-topo": _format("nvidia-smi topo -m", read_topo, r"^\s*GPU0\s+(GPU1|NIC0|mlx\d_\d|CPU Affinity)"),
    "nvidia-nvlink": _format("nvidia-smi nvlink --status", read_nvlink_status, r"^GPU \d+: .* \(UUID: "),
    "nvidia-q": _format("nvidia-smi -q", read_full_query, r"^Attached GPUs\s*:"),
    "nvidia-query": _format(
        "nvidia-smi --query-gpu=name,memory.total,power.limit --format=csv",
        read_query,
        r"\A\s*(?=[^\n]*\b(gpu_)?name\b)[a-z_.]+( \[[^\]]+\])?(, ?[a-z_.]+( \[[^\]]+\])?)*\s*$",
    ),
    "ib-sysfs": _format("files of /sys/class/infiniband", read_sysfs, r"^(/sys/class/infiniband/)?[\w.-]+/ports/\d+/"),
    "ibstat": _format("ibstat", read_ibstat, r"^CA '[^']+'"),
    "ibv-devinfo": _format("ibv_devinfo -v", read_devinfo, r"^hca_id:\s"),
    "slurm-topology-conf": _format(
        "Slurm topology.conf", read_topology_conf, r"^\s*(SwitchName|BlockName|BlockSizes)="
    ),
    "slurm-topology-yaml": _format(
        "Slurm topology.yaml", read_topology_yaml, r"^\s*- topology:|^switches:|^topologies:"
    ),
    "scontrol": _format("scontrol show node", read_scontrol, r"^\s*NodeName=\S+ .*=|^\s*NodeName=\S+\s*$"),
    "sinfo": _format("sinfo with a header", read_sinfo, r"\A\s*[A-Z:_ ]*\bNODELIST\b"),
    "partition-table": _format("a markdown table of partitions", read_partition_table, r"^\s*\|.*GPUs?\b.*\|\s*$"),
    "slurm-json": _format(
        "scontrol show node --json, sinfo --json",
        read_slurm_json,
        r"\A\s*\{(?![\s\S]*\"apiVersion\")[\s\S]*\"(sinfo|nodes)\"\s*:\s*\[\s*\{",
    ),
    "k8s-nodes": _format(
        "kubectl get nodes -o json", read_nodes, r"\A\s*\{[\s\S]*\"(items|metadata)\"\s*:|\A\s*(---\s*)?apiVersion: v1"
    ),
    "k8s-labels": _format("labels of Kubernetes nodes", read_labels, r"(nvidia|amd)\.com/gpu"),
    "skypilot": _format("a SkyPilot task", read_task, r"^resources:\s*$"),
}


def read_facts(source: SourceText, name: str | None = None, keys: LabelKeys | None = None) -> Facts:
    """Return what a file says of nodes; `name` is its format where it is not to be told from its content.

    Raises:
        SpecError: the file is damaged, or of no known format.
        UsageError: there is no format of that name.
    """
    if name is None:
        start = source.text[:SIGN_WITHIN]
        name = next((key for key, one in CLUSTER_FORMATS.items() if one.sign.search(start)), None)
        if name is None:
            known = ", ".join(one.what for one in CLUSTER_FORMATS.values())
            raise source.error(f"this is none of the kinds of file that describe nodes: {known}")
    if name not in CLUSTER_FORMATS:
        raise UsageError(f"unknown format {show(name)}{hint(name, CLUSTER_FORMATS)}")
    if keys is not None and name == "k8s-nodes":
        return read_nodes(source, keys)
    if keys is not None and name == "k8s-labels":
        return read_labels(source, keys)
    return CLUSTER_FORMATS[name].read(source)
