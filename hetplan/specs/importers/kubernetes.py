"""Nodes of a Kubernetes cluster: `kubectl get nodes -o json` (or yaml), and bare label text.

Labels of NVIDIA's GPU feature discovery and of AMD's node labeller say which accelerators a node has; labels of the
cloud say where it stands. One label holds one product, so a node with unlike cards cannot be told from its labels
alone: what `nvidia-smi` says of it can be merged in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.errors import HetplanError, SpecError
from hetplan.specs.decode import document_from_text
from hetplan.specs.importers.facts import Cards, Facts, Nic, NodeSheet, SourceText
from hetplan.specs.importers.nccl_xml import product_of
from hetplan.specs.importers.slurm_topology import REGION_KEYS, ZONE_KEYS
from hetplan.units import parse_quantity, show

MIB = 2.0**20
VENDORS = ("nvidia.com", "amd.com")
DOMAIN_KEYS = ("nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator")
_LABEL = re.compile(r"\s*(?:Labels:\s+)?\"?([a-z0-9.-]+/[\w.-]+)\"?\s*(?:=|:\s)\s*\"?([^\"\s,]*(?: [^\",]*)?)\"?,?\s*")
_HEADER = re.compile(r"NAME\s.*\sLABELS\s*")
_ROW = re.compile(r"(\S+)\s+\S.*\s\S+=")
_NAME = re.compile(r"Name:\s+(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelKeys:
    """Which labels say where a node stands; the first that is there counts."""

    site: tuple[str, ...] = (*ZONE_KEYS, *REGION_KEYS)
    domain: tuple[str, ...] = DOMAIN_KEYS


DEFAULT_KEYS = LabelKeys()
MakeError = Callable[[str], SpecError]
"""Message -> an error at the node in hand."""


def read_nodes(source: SourceText, keys: LabelKeys = DEFAULT_KEYS) -> Facts:
    """Return the nodes of a list (`items:`) or of a single node.

    Raises:
        SpecError: the file is neither, or a label cannot be read.
    """
    root = _document(source)
    items = root.get("items", [root])
    rows = [_Row(source, item) for item in items] if isinstance(items, list) else []
    sheets = [_node(row, keys) for row in rows if row.item.get("kind", "Node") == "Node"]
    if not sheets:
        raise source.error("the list holds no node")
    plain = [sheet.nodes[0] for sheet in sheets if not sheet.cards]
    remarks = (f"nodes without accelerators were left out: {len(plain)} ({plain[0]}, ...)",) if plain else ()
    return Facts(sheets=tuple(sheet for sheet in sheets if sheet.cards), remarks=remarks)


def _document(source: SourceText) -> dict[str, Any]:
    """The file as plain values; JSON by its own parser, which takes a thousand nodes in a blink."""
    if not source.text.lstrip().startswith("{"):
        return dict(document_from_text(source.text, source.name, "").raw_mapping())
    try:
        root = json.loads(source.text)
    except json.JSONDecodeError as error:
        raise source.error(f"not valid JSON: {error.msg}", error.lineno, error.colno) from None
    except (RecursionError, ValueError) as error:
        raise source.error(f"not valid JSON: {error}") from None
    return dict(root)


class _Row:
    """One node; errors find the line of its name."""

    def __init__(self, source: SourceText, item: object) -> None:
        self.source = source
        self.item: dict[str, Any] = item if isinstance(item, dict) else {}
        self.name = str(self.mapping(self.item, "metadata").get("name", ""))
        if not self.name:
            raise source.error("a node has no name (metadata.name)")

    def mapping(self, outer: Mapping[str, Any], key: str) -> dict[str, Any]:
        """A mapping inside another, an empty one if it is absent."""
        value = outer.get(key)
        return value if isinstance(value, dict) else {}

    def texts(self, outer: Mapping[str, Any], key: str) -> dict[str, str]:
        """A mapping of texts."""
        return {str(name): str(value) for name, value in self.mapping(outer, key).items()}

    def error(self, message: str) -> SpecError:
        """Return an error at the line of the node's name."""
        found = re.search(rf"""["']?name["']?:\s*["']?{re.escape(self.name)}["']?""", self.source.text)
        line = self.source.text.count("\n", 0, found.start()) + 1 if found else 1
        return self.source.error(f"node {show(self.name)}: {message}", line)


def _node(row: _Row, keys: LabelKeys) -> NodeSheet:
    status = row.mapping(row.item, "status")
    labels = row.texts(row.mapping(row.item, "metadata"), "labels")
    capacity = row.texts(status, "capacity")
    efa = capacity.get("vpc.amazonaws.com/efa", "0")
    num_efa = int(efa) if re.fullmatch(r"\d{1,3}", efa) else 0
    return NodeSheet(
        source=row.source.name,
        nodes=(row.name,),
        cards=_cards(row.error, labels, capacity),
        nics=tuple(Nic(name=f"efa{i}", kind="efa") for i in range(num_efa)) or None,
        host_memory_bytes=_memory(row.error, capacity["memory"]) if "memory" in capacity else None,
        site=_first(labels, keys.site),
        domain=_first(labels, keys.domain),
        unusable=_unusable(row, status),
    )


def _first(labels: Mapping[str, str], keys: Iterable[str]) -> str | None:
    return next((labels[key] for key in keys if labels.get(key)), None)


def _unusable(row: _Row, status: Mapping[str, Any]) -> str | None:
    if row.mapping(row.item, "spec").get("unschedulable") is True:
        return "cordoned"
    conditions = status.get("conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        is_ready = isinstance(condition, dict) and condition.get("type") == "Ready"
        if is_ready and str(condition.get("status")) != "True":
            return "not ready"
    return None


def _cards(error: MakeError, labels: Mapping[str, str], capacity: Mapping[str, str]) -> tuple[Cards, ...]:
    """Return the accelerators of each vendor; none where no label and no capacity speaks of one."""
    cards = []
    for vendor in VENDORS:
        mig = next((key for key, n in capacity.items() if key.startswith(f"{vendor}/mig-") and n != "0"), None)
        if mig is not None or labels.get(f"{vendor}/gpu.product", "").count("-MIG-"):
            raise error(
                f"{mig or vendor}: this node hands out instances of parts of a GPU (MIG), which cannot be planned with",
            )
        count = _count(error, vendor, labels, capacity)
        if count:
            cards.append(_vendor_cards(error, (vendor, count), labels))
    return tuple(cards)


def _count(error: MakeError, vendor: str, labels: Mapping[str, str], capacity: Mapping[str, str]) -> int:
    """Physical devices: the label's count; the capacity of a node that shares devices counts them several times."""
    text = labels.get(f"{vendor}/gpu.count") or capacity.get(f"{vendor}/gpu", "0")
    if not re.fullmatch(r"\d{1,4}", text):
        raise error(f"{vendor}: {show(text)} is no number of devices")
    if text == "0" and f"{vendor}/gpu.product" in labels:
        raise error(f"{vendor}: a product is named but no count and no capacity")
    return int(text)


def _vendor_cards(error: MakeError, vendor_and_count: tuple[str, int], labels: Mapping[str, str]) -> Cards:
    vendor, count = vendor_and_count
    product = labels.get(f"{vendor}/gpu.product") or labels.get(f"{vendor}/gpu.product-name")
    if product is None and vendor == "amd.com":
        product = product_of("0x1002", f"0x{labels.get('amd.com/gpu.device-id', '')}")
    memory = labels.get(f"{vendor}/gpu.memory", "")
    vram = labels.get(f"{vendor}/gpu.vram", "")
    if memory and not re.fullmatch(r"\d{1,9}", memory):
        raise error(f"{vendor}/gpu.memory: {show(memory)} is no number of MiB")
    return Cards(
        count=count,
        product=product.removesuffix("-SHARED") if product else None,
        usable_memory_bytes=int(memory) * MIB if memory and memory != "0" else None,
        stated_memory_bytes=_memory(error, vram) if vram else None,
    )


def _memory(error: MakeError, text: str) -> float:
    """Return a Kubernetes quantity: `1056270148Ki`, `192G`, bytes."""
    try:
        return parse_quantity(f"{text}B" if re.fullmatch(r"[\d.]+[kKMGTP]?i?", text) else text, "bytes")
    except HetplanError as wrong:
        raise error(str(wrong)) from None


def read_labels(source: SourceText, keys: LabelKeys = DEFAULT_KEYS) -> Facts:
    """Return the nodes of label text: `key=value` or `key: "value"` lines, with or without prose around them.

    `Name:` lines (as `kubectl describe node` prints) or rows under a header that ends in LABELS (`kubectl get nodes
    --show-labels`) tell nodes apart; without them the labels are those of one node.

    Raises:
        SpecError: a label is given twice with unlike values, or none is of an accelerator.
    """
    nodes: list[tuple[str | None, int, dict[str, str]]] = [(None, 1, {})]
    is_table = False
    for line, text in enumerate(source.lines, 1):
        name = _ROW.match(text) if is_table else _NAME.match(text)
        if name is not None:
            nodes.append((name[1], line, {}))
        is_table = is_table or _HEADER.fullmatch(text) is not None
        for part in _label_parts(text.split()[-1] if is_table and name else text):
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
        cards=_cards(lambda message: source.error(message, line), labels, {}),
        site=_first(labels, keys.site),
        domain=_first(labels, keys.domain),
    )
