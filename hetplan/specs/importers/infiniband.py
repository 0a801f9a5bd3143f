"""Network ports as `ibstat`, `ibv_devinfo` and the files of `/sys/class/infiniband` describe them.

The rate of a port in Gb/s is what travels in one direction; a port whose state is not active is listed but not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hetplan.specs.cluster import NetworkKind
from hetplan.specs.importers.facts import Facts, Nic, NodeSheet, SourceText
from hetplan.units import show

_SYSFS = re.compile(r"(?:/sys/class/infiniband/)?([\w.-]+)/ports/(\d+)/(rate|state|link_layer):\s*(.+?)\s*")
_RATE = re.compile(r"([\d.]+) Gb/sec(?: \((?:\d+X )?\w+\))?")
_KINDS: Mapping[str, NetworkKind] = {"InfiniBand": "infiniband", "Ethernet": "ethernet"}
_KEYS = ("state", "rate", "link_layer")


def read_sysfs(source: SourceText) -> Facts:
    """Return the ports of lines such as `mlx5_0/ports/1/rate: 400 Gb/sec (4X NDR)`.

    Raises:
        SpecError: a line is no attribute, or a rate cannot be read.
    """
    ports: dict[str, dict[str, tuple[str, int]]] = {}
    for line, text in enumerate(source.lines, 1):
        if not text.strip():
            continue
        match = _SYSFS.fullmatch(text)
        if match:
            ports.setdefault(f"{match[1]}:{match[2]}", {})[match[3]] = (match[4], line)
        elif not re.match(r"(?:/sys/class/infiniband/)?[\w.-]+/[\w./-]+:", text):
            raise source.error(f"{show(text)} is no attribute of a port", line)
    return _facts(source, ports)


def read_ibstat(source: SourceText) -> Facts:
    """Return the ports `ibstat` lists.

    Raises:
        SpecError: a port has no state, rate or link layer.
    """
    ports: dict[str, dict[str, tuple[str, int]]] = {}
    adapter, port = "", ""
    for line, text in enumerate(source.lines, 1):
        words = text.strip()
        if match := re.fullmatch(r"CA '([^']+)'", words):
            adapter, port = match[1], ""
        elif match := re.fullmatch(r"Port (\d+):", words):
            if not adapter:
                raise source.error("a port stands before any adapter", line)
            port = f"{adapter}:{match[1]}"
            ports[port] = {}
        elif port and (match := re.fullmatch(r"(State|Rate|Link layer): (.+)", words)):
            value = f"{match[2]} Gb/sec" if match[1] == "Rate" else match[2]
            ports[port][match[1].lower().replace(" ", "_")] = (value, line)
    return _facts(source, ports)


def read_devinfo(source: SourceText) -> Facts:
    """Return the ports `ibv_devinfo` lists; their rates only stand in its verbose form.

    Raises:
        SpecError: a port has no state or link layer.
    """
    ports: dict[str, dict[str, tuple[str, int]]] = {}
    adapter, port, width = "", "", 0
    for line, text in enumerate(source.lines, 1):
        key, _, value = (part.strip() for part in text.partition(":"))
        if key == "hca_id":
            adapter, port = value, ""
        elif key == "port" and adapter:
            port, width = f"{adapter}:{value}", 0
            ports[port] = {}
        elif port and key in ("state", "link_layer"):
            ports[port][key] = (value, line)
        elif port and key == "active_width" and (match := re.match(r"(\d+)X", value)):
            width = int(match[1])
        elif port and key == "active_speed" and width and (match := re.match(r"([\d.]+) Gbps", value)):
            ports[port]["rate"] = (f"{float(match[1]) * width:g} Gb/sec", line)
    return _facts(source, ports, rate_needed=False)


def _facts(
    source: SourceText, ports: Mapping[str, Mapping[str, tuple[str, int]]], *, rate_needed: bool = True
) -> Facts:
    if not ports:
        raise source.error("the text lists no port")
    for name, port in ports.items():
        missing = [key for key in _KEYS if key not in port and (rate_needed or key != "rate")]
        if missing:
            line = min((where for _, where in port.values()), default=1)
            raise source.error(f"port {name} has no {missing[0].replace('_', ' ')}: the text is cut", line)
    nics = tuple(_nic(source, name, port) for name, port in ports.items())
    idle = tuple(f"port {nic.name} is not active and was left out" for nic in nics if not nic.is_active)
    return Facts(sheets=(NodeSheet(source=source.name, nics=nics),), remarks=idle)


def _nic(source: SourceText, name: str, port: Mapping[str, tuple[str, int]]) -> Nic:
    layer, line = port["link_layer"]
    if layer not in _KINDS:
        raise source.error(f"link layer {show(layer)} is neither InfiniBand nor Ethernet", line)
    rate: float | None = None
    if "rate" in port:
        text, line = port["rate"]
        match = _RATE.fullmatch(text)
        if match is None or not re.fullmatch(r"\d+(\.\d+)?", match[1]):
            raise source.error(f"expected a rate such as '400 Gb/sec (4X NDR)', found {show(text)}", line)
        rate = float(match[1]) * 1e9 / 8
    return Nic(
        name=name.partition(":")[0],
        kind=_KINDS[layer],
        bandwidth_bytes_per_s=rate or None,
        is_active="ACTIVE" in port["state"][0].upper() and bool(rate or rate is None),
    )
