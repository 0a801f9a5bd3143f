"""What importers find: facts about nodes, each as one tool printed it; what a tool does not say stays None.

A fact sheet speaks of named nodes, of `num_nodes` nodes of a named group, or of one node without a name. `merge` lays
sheets over each other, `cluster_text` writes them down with a question where nothing was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetplan.errors import Location, SpecError
from hetplan.specs.cluster import Device, NetworkKind
from hetplan.specs.nodes import read_bytes
from hetplan.units import escape

MOST_TEXT_BYTES = 64 * 10**6
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FabricFamily = Literal["nvlink", "xgmi", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """A text file some tool wrote."""

    name: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines without their ends."""
        return self.text.splitlines()

    def error(self, message: str, line: int = 1, column: int = 1) -> SpecError:
        """Return an error at a line, counted from 1."""
        return SpecError(escape(message), location=Location(file=escape(self.name), line=line, column=column))


def without_colours(text: str) -> str:
    """Return what a tool printed without the codes that underline and colour it on a terminal."""
    return _COLOURS.sub("", text)


def read_source(path: Path) -> SourceText:
    """Return the text of a file.

    Raises:
        SpecError: it cannot be read or is no UTF-8 text.
    """
    data = read_bytes(path, MOST_TEXT_BYTES)
    name = str(path)
    try:
        return SourceText(name=name, text=without_colours(data.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceText(name=name, text="").error("the file is not UTF-8 text", line) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """How the accelerators of a node are joined by fast links."""

    family: FabricFamily
    links_of_pair: int = 0
    """Most links between two devices."""
    links_of_device: int = 0
    """Most links of one device when those to each peer are added up."""
    is_full: bool = False
    """Every device is linked to every other."""
    note: str = ""
    """Where it is neither full nor absent: who is joined to whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """Accelerators of one kind in a node."""

    count: int
    product: str | None = None
    """As printed, or a catalog name."""
    usable_memory_bytes: float | None = None
    stated_memory_bytes: float | None = None
    """As sold or written in a table (a product, not a measurement)."""
    power_limit_w: float | None = None
    link_bandwidth_bytes_per_s: float | None = None
    """Measured or reported, all fast links of a device, one direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network port of a node."""

    name: str
    kind: NetworkKind | None = None
    bandwidth_bytes_per_s: float | None = None
    is_active: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSheet:
    """What one source says of some nodes."""

    source: str
    nodes: tuple[str, ...] = ()
    num_nodes: int | None = None
    """Nodes of `group` where they have no names."""
    group: str | None = None
    cards: tuple[Cards, ...] | None = None
    """None: not said; empty: there are none."""
    wiring: Wiring | None = None
    nics: tuple[Nic, ...] | None = None
    host_memory_bytes: float | None = None
    cores: int | None = None
    site: str | None = None
    domain: str | None = None
    """Fast-link domain (rack) the nodes belong to."""
    unusable: str | None = None
    """Why the nodes must not be used now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything one file says."""

    sheets: tuple[NodeSheet, ...] = ()
    fabrics: tuple[tuple[str, ...], ...] = ()
    """Nodes that hang under one root switch."""
    name: str | None = None
    remarks: tuple[str, ...] = ()
    """Worth knowing, with no place in a cluster file."""
    questions: tuple[str, ...] = ()
    """What the source leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """What importers ask the catalog."""

    find_device: Callable[[str], Device]
    """Raises a HetplanError for an unknown name."""
    devices: tuple[Device, ...] = ()
    latency_of: Callable[[NetworkKind, float], tuple[float, str] | None] = lambda _kind, _rate: None
    """Network kind and NIC bandwidth -> latency and the name of the generation it is assumed of."""

    def device(self, product: str | None) -> Device | None:
        """Return the device of a printed name, None where the name does not say which."""
        if product is None:
            return None
        try:
            return self.find_device(product)
        except SpecError:
            return None

    def candidates(self, product: str, memory_bytes: float | None) -> tuple[str, ...]:
        """Return the devices a shortened name may stand for."""
        word = _squeezed(product)
        names = [
            device.name
            for device in self.devices
            if _squeezed(device.name).startswith(word)
            and (memory_bytes is None or abs(device.memory_bytes / memory_bytes - 1) < 0.08)  # GB and GiB look alike
        ]
        return tuple(names)


def _squeezed(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())


def distinct(items: Iterable[str]) -> tuple[str, ...]:
    """Return items without repeats, in order."""
    return tuple(dict.fromkeys(items))
