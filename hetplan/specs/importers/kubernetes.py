"""Nodes of a Kubernetes cluster: `kubectl get nodes -o json` (or yaml), and bare label text.

Labels of NVIDIA's GPU feature discovery and of AMD's node labeller say which accelerators a node has; labels of the
cloud say where it stands. One label holds one product, so a node with unlike cards cannot be told from its labels
alone: what `nvidia-smi` says of it can be merged in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetplan.errors import HetplanError
from hetplan.specs.decode import document_from_text
from hetplan.specs.fields import Fields
from hetplan.specs.importers.facts import Cards, Facts, Nic, NodeSheet, SourceText
from hetplan.specs.importers.nccl_xml import product_of
from hetplan.specs.importers.slurm_topology import REGION_KEYS, ZONE_KEYS
from hetplan.units import parse_quantity, show

MIB = 2.0**20
VENDORS = ("nvidia.com", "amd.com")
DOMAIN_KEYS = ("nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator")
_LABEL = re.compile(r"\s*(?:Labels:\s+)?\"?([a-z0-9.-]+/[\w.-]+)\"?\s*(?:=|:\s)\s*\"?([^\"\s,]*(?: [^\",]*)?)\"?,?\s*")
_NAME = re.compile(r"Name:\s+(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelKeys:
    """Which labels say where a node stands; the first that is there counts."""

    site: tuple[str, ...] = (*ZONE_KEYS, *REGION_KEYS)
    domain: tuple[str, ...] = DOMAIN_KEYS


DEFAULT_KEYS = LabelKeys()


def read_nodes(source: SourceText, keys: LabelKeys = DEFAULT_KEYS) -> Facts:
    """Return the nodes of a list (`items:`) or of a single node.

    Raises:
        SpecError: the file is neither, or a label cannot be read.
    """
    root = document_from_text(source.text, source.name, "")
    rows = root.rows("items") if root.has("items") else (root,)
    sheets = [_node(source, row, keys) for row in rows if row.text("kind", default="Node") == "Node"]
    if not sheets:
        raise source.error("the list holds no node")
    plain = [sheet.nodes[0] for sheet in sheets if not sheet.cards]
    remarks = (f"{len(plain)} nodes without accelerators were left out ({plain[0]}, ...)",) if plain else ()
    return Facts(sheets=tuple(sheet for sheet in sheets if sheet.cards), remarks=remarks)


def _node(source: SourceText, row: Fields, keys: LabelKeys) -> NodeSheet:
    meta = row.fields("metadata")
    status = row.fields("status", required=False)
    labels = {k: str(v) for k, v in meta.fields("labels", required=False).raw_mapping().items()}
    capacity = {k: str(v) for k, v in status.fields("capacity", required=False).raw_mapping().items()}
    line = row.location().line
    efa = capacity.get("vpc.amazonaws.com/efa", "0")
    return NodeSheet(
        source=source.name,
        nodes=(meta.text("name"),),
        cards=_cards(source, line, labels, capacity),
        nics=tuple(Nic(name=f"efa{i}", kind="efa") for i in range(int(efa))) if efa.isdigit() and int(efa) else None,
        host_memory_bytes=_memory(source, line, capacity["memory"]) if "memory" in capacity else None,
        site=_first(labels, keys.site),
        domain=_first(labels, keys.domain),
        unusable=_unusable(row, status),
    )


def _first(labels: Mapping[str, str], keys: Iterable[str]) -> str | None:
    return next((labels[key] for key in keys if labels.get(key)), None)


def _unusable(row: Fields, status: Fields) -> str | None:
    if row.fields("spec", required=False).flag("unschedulable", default=False):
        return "cordoned"
    conditions = status.rows("conditions", required=False)
    if any(c.text("type") == "Ready" and c.text("status") != "True" for c in conditions):
        return "not ready"
    return None


def _cards(source: SourceText, line: int, labels: Mapping[str, str], capacity: Mapping[str, str]) -> tuple[Cards, ...]:
    """Return the accelerators of each vendor; none where no label and no capacity speaks of one."""
    cards = []
    for vendor in VENDORS:
        mig = next((key for key, n in capacity.items() if key.startswith(f"{vendor}/mig-") and n != "0"), None)
        if mig is not None or labels.get(f"{vendor}/gpu.product", "").count("-MIG-"):
            raise source.error(
                f"{mig or vendor}: this node hands out instances of parts of a GPU (MIG), which cannot be planned with",
                line,
            )
        count = _count(source, line, vendor, labels, capacity)
        if count:
            cards.append(_vendor_cards(source, line, (vendor, count), labels))
    return tuple(cards)


def _count(source: SourceText, line: int, vendor: str, labels: Mapping[str, str], capacity: Mapping[str, str]) -> int:
    """Physical devices: the label's count; the capacity of a node that shares devices counts them several times."""
    text = labels.get(f"{vendor}/gpu.count") or capacity.get(f"{vendor}/gpu", "0")
    if not re.fullmatch(r"\d{1,4}", text):
        raise source.error(f"{vendor}: {show(text)} is no number of devices", line)
    if text == "0" and f"{vendor}/gpu.product" in labels:
        raise source.error(f"{vendor}: a product is named but no count and no capacity", line)
    return int(text)


def _vendor_cards(source: SourceText, line: int, vendor_and_count: tuple[str, int], labels: Mapping[str, str]) -> Cards:
    vendor, count = vendor_and_count
    product = labels.get(f"{vendor}/gpu.product") or labels.get(f"{vendor}/gpu.product-name")
    if product is None and vendor == "amd.com":
        product = product_of("0x1002", f"0x{labels.get('amd.com/gpu.device-id', '')}")
    memory = labels.get(f"{vendor}/gpu.memory", "")
    vram = labels.get(f"{vendor}/gpu.vram", "")
    if memory and not re.fullmatch(r"\d{1,9}", memory):
        raise source.error(f"{vendor}/gpu.memory: {show(memory)} is no number of MiB", line)
    return Cards(
        count=count,
        product=product.removesuffix("-SHARED") if product else None,
        usable_memory_bytes=int(memory) * MIB if memory and memory != "0" else None,
        stated_memory_bytes=_memory(source, line, vram) if vram else None,
    )


def _memory(source: SourceText, line: int, text: str) -> float:
    """Return a Kubernetes quantity: `1056270148Ki`, `192G`, bytes."""
    try:
        return parse_quantity(f"{text}B" if re.fullmatch(r"[\d.]+[kKMGTP]?i?", text) else text, "bytes")
    except HetplanError as error:
        raise source.error(str(error), line) from None


def read_labels(source: SourceText, keys: LabelKeys = DEFAULT_KEYS) -> Facts:
    """Return the nodes of label text: `key=value` or `key: "value"` lines, with or without prose around them.

    `Name:` lines (as `kubectl describe node` prints) separate nodes; without one the labels are those of one node.

    Raises:
        SpecError: a label is given twice with unlike values, or none is of an accelerator.
    """
    nodes: list[tuple[str | None, int, dict[str, str]]] = [(None, 1, {})]
    for line, text in enumerate(source.lines, 1):
        if name := _NAME.match(text):
            nodes.append((name[1], line, {}))
        for part in _label_parts(text):
            match = _LABEL.fullmatch(part)
            if match is None:
                continue
            labels = nodes[-1][2]
            if labels.setdefault(match[1], match[2]) != match[2]:
                raise source.error(
                    f"label {match[1]} is {show(match[2])} here and {show(labels[match[1]])} above: "
                    "labels of two nodes without a 'Name:' line between them",
                    line,
                )
    sheets = [_labelled(source, node, keys) for node in nodes]
    found = tuple(sheet for sheet in sheets if sheet.cards)
    if not found:
        raise source.error(f"found no label of an accelerator ({', '.join(f'{v}/gpu.*' for v in VENDORS)})")
    return Facts(sheets=found)


def _label_parts(text: str) -> Sequence[str]:
    return text.split(",") if text.count("=") > 1 else (text,)


def _labelled(source: SourceText, node: tuple[str | None, int, dict[str, str]], keys: LabelKeys) -> NodeSheet:
    name, line, labels = node
    host = name or labels.get("kubernetes.io/hostname")
    return NodeSheet(
        source=source.name,
        nodes=(host,) if host else (),
        cards=_cards(source, line, labels, {}),
        site=_first(labels, keys.site),
        domain=_first(labels, keys.domain),
    )
