"""NCCL topology XML: the PCI tree of one node, as NCCL dumps it (`NCCL_TOPO_DUMP_FILE`) or a cloud ships it.

A dump names accelerators (`<gpu>`) and network ports (`<net>`, speed in Mbit/s); a shipped file may hold the PCI tree
alone, whose functions are then told apart by their PCI class. Which product a PCI id is comes from the public PCI id
list (https://pci-ids.ucw.cz, recalled); an id that is not listed stays a question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from xml.parsers import expat

from hetplan.specs.cluster import NetworkKind
from hetplan.specs.importers.facts import Cards, Facts, Nic, NodeSheet, SourceText, Wiring, distinct
from hetplan.units import show

MOST_ELEMENTS = 1_000_000
_SWITCH_CLASS = "0x068000"
"""An NVSwitch."""
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_NIC_CLASSES: Mapping[str, NetworkKind | None] = {"0x0207": "infiniband", "0x0200": "ethernet"}
_PRODUCTS: Mapping[tuple[str, str], str] = {
    ("0x10de", "0x1db1"): "V100-SXM2-16GB",
    ("0x10de", "0x1db4"): "V100-PCIE-16GB",
    ("0x10de", "0x1db5"): "V100-SXM2-32GB",
    ("0x10de", "0x1eb8"): "T4",
    ("0x10de", "0x20b0"): "A100-SXM4-40GB",
    ("0x10de", "0x20b2"): "A100-SXM4-80GB",
    ("0x10de", "0x20b5"): "A100-PCIE-80GB",
    ("0x10de", "0x20b7"): "A30",
    ("0x10de", "0x20f1"): "A100-PCIE-40GB",
    ("0x10de", "0x2235"): "A40",
    ("0x10de", "0x2236"): "A10",
    ("0x10de", "0x2237"): "A10G",
    ("0x10de", "0x2321"): "H100-NVL",
    ("0x10de", "0x2330"): "H100-SXM5-80GB",
    ("0x10de", "0x2331"): "H100-PCIe",
    ("0x10de", "0x2335"): "H200-SXM-141GB",
    ("0x10de", "0x26b9"): "L40S",
    ("0x10de", "0x27b8"): "L4",
    ("0x1002", "0x738c"): "MI100",
    ("0x1002", "0x740f"): "MI210",
    ("0x1002", "0x74a1"): "MI300X",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Element:
    """One element with where it starts."""

    tag: str
    values: Mapping[str, str]
    line: int
    parent: _Element | None


def read_nccl_xml(source: SourceText) -> Facts:
    """Return the accelerators and network ports of a node.

    Raises:
        SpecError: the text is no such XML, or names no accelerator.
    """
    elements = _elements(source)
    gpus = [element for element in elements if element.tag == "gpu"]
    owners = [gpu.parent for gpu in gpus if gpu.parent is not None] or list(_functions(elements, _GPU_CLASSES))
    if not owners:
        raise source.error("the topology names no accelerator")
    products = Counter(_product(owner) for owner in owners)
    links, remarks = _wiring(source, elements, len(owners))
    sheet = NodeSheet(
        source=source.name,
        cards=tuple(Cards(count=count, product=product) for product, count in products.items()),
        wiring=links,
        nics=_nics(source, elements) or None,
    )
    unknown = distinct(
        f"{owner.values.get('vendor', '?')}:{owner.values.get('device', '?')}"
        for owner in owners
        if _product(owner) is None and "device" in owner.values
    )
    more = tuple(f"PCI id {pci} is not known" for pci in unknown)
    return Facts(sheets=(sheet,), remarks=remarks + more)


def _elements(source: SourceText) -> list[_Element]:
    parser = expat.ParserCreate()
    found: list[_Element] = []
    open_: list[_Element] = []

    def start(tag: str, values: dict[str, str]) -> None:
        element = _Element(tag=tag, values=values, line=parser.CurrentLineNumber, parent=open_[-1] if open_ else None)
        if not found and tag != "system":
            raise source.error(f"expected the root element <system>, found <{tag}>", element.line)
        if len(found) >= MOST_ELEMENTS:
            raise source.error("the topology has too many elements", element.line)
        found.append(element)
        open_.append(element)

    def end(_tag: str) -> None:
        open_.pop()

    def refuse(*_arguments: object) -> None:
        raise source.error("a document type is not allowed here", parser.CurrentLineNumber)

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(source.text, True)
    except expat.ExpatError as error:
        message = f"not valid XML: {expat.ErrorString(error.code)}"
        raise source.error(message, error.lineno, error.offset + 1) from None
    return found


def _functions(elements: list[_Element], classes: tuple[str, ...]) -> Iterator[_Element]:
    for element in elements:
        if element.tag == "pci" and element.values.get("class", "").startswith(classes):
            yield element


def product_of(vendor: str, device: str) -> str | None:
    """Return the catalog's name of a PCI id such as `0x10de`, `0x2330`; None where it is not listed."""
    return _PRODUCTS.get((vendor, device))


def _product(owner: _Element) -> str | None:
    return product_of(owner.values.get("vendor", ""), owner.values.get("device", ""))


def _wiring(source: SourceText, elements: list[_Element], num_gpus: int) -> tuple[Wiring | None, tuple[str, ...]]:
    """Return how the accelerators are linked, None where nothing is said of it; and what was left out."""
    counts: dict[str, dict[str, int]] = {}
    own: list[int] = []
    families = []
    for element in elements:
        if element.tag not in ("nvlink", "xgmi"):
            continue
        busid, target = _busid(element), element.values.get("target", "?")
        if target == busid:
            own.append(element.line)
            continue
        families.append(element.tag)
        peer = "switch" if element.values.get("tclass") == _SWITCH_CLASS else target
        row = counts.setdefault(busid, {})
        row[peer] = row.get(peer, 0) + _count(source, element)
    remarks = (
        (f"{len(own)} fast links point at their own device (first at line {own[0]}) and were left out",) if own else ()
    )
    if not counts:
        return None, remarks
    is_full = len(counts) == num_gpus and all("switch" in row or len(row) == num_gpus - 1 for row in counts.values())
    links = Wiring(
        family="nvlink" if "nvlink" in families else "xgmi",
        links_of_pair=max(max(row.values()) for row in counts.values()),
        links_of_device=max(sum(row.values()) for row in counts.values()),
        is_full=is_full,
        note="" if is_full else f"{len(counts)} of {num_gpus} devices have fast links, not each to every other",
    )
    return links, remarks


def _busid(element: _Element) -> str:
    """The PCI address of the function an element belongs to."""
    place: _Element | None = element
    while place is not None and place.tag != "pci":
        place = place.parent
    return place.values.get("busid", "") if place is not None else ""


def _count(source: SourceText, element: _Element) -> int:
    text = element.values.get("count", "1")
    if not re.fullmatch(r"\d{1,3}", text):
        raise source.error(f"count {show(text)} of a link is no whole number", element.line)
    return int(text)


def _nics(source: SourceText, elements: list[_Element]) -> tuple[Nic, ...]:
    nets = [element for element in elements if element.tag == "net"]
    if nets:
        return tuple(_net(source, element) for element in nets)
    return tuple(
        Nic(name=element.values.get("busid", "?"), kind=kind)
        for pci_class, kind in _NIC_CLASSES.items()
        for element in _functions(elements, (pci_class,))
    )


def _net(source: SourceText, element: _Element) -> Nic:
    """Ports with names of network interfaces go through the host's stack; of others the kind is not said."""
    name, speed = element.values.get("name", "?"), element.values.get("speed", "")
    if not re.fullmatch(r"\d{1,9}", speed):
        raise source.error(f"speed {show(speed)} of {show(name)} is no number of Mbit/s", element.line)
    is_interface = re.match(r"(eth|en|bond|ib)\w*$", name) is not None
    return Nic(
        name=name,
        kind="ethernet" if is_interface and not name.startswith("ib") else None,
        bandwidth_bytes_per_s=int(speed) * 1e6 / 8 or None,
    )
