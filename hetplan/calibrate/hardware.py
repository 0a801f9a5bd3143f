"""The cluster a run used, from what a table says about it: device names, counts and a line on the network."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from hetplan.calibrate.runs import Run
from hetplan.catalog.devices import device_names, find_device
from hetplan.errors import SpecError, UsageError
from hetplan.specs.cluster import Cluster, Device, Group, Network, NetworkKind

NETWORK = "between-nodes"
"""Name of the network of every cluster made here."""
ALIASES = {
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "A100-CLASS": "A100-SXM4-80GB",
    "A100-SXM-40GB": "A100-SXM4-40GB",
    "A100": "A100-SXM4-80GB",
    "A800-SXM-80GB": "A800-SXM4-80GB",
    "H100-SXM-80GB": "H100-SXM5-80GB",
    "H100": "H100-SXM5-80GB",
    "H100-96GB-HBM2E-500W": "H100-SXM-96GB-HBM2e-500W",
    "H800-SXM-80GB": "H800-SXM5-80GB",
    "H800": "H800-SXM5-80GB",
    "H200": "H200-SXM-141GB",
    "H200-SXM": "H200-SXM-141GB",
    "GB200-NVL72": "GB200",
    "GB300-NVL72": "GB300",
    "B200": "B200-SXM",
    "B300": "B300-SXM",
    "GH200": "GH200-96GB",
    "V100-16GB": "V100-SXM2-16GB",
    "V100-32GB": "V100-SXM2-32GB",
    "V100": "V100-SXM2-16GB",
}
"""Names tables use -> catalog names."""
SAME_DIE = {"H100-SXM-96GB-HBM2e-500W": "H100-SXM5-80GB"}
"""Devices whose peak is unpublished -> one with the same die; what differs is memory and power (assumed)."""
DOMAINS = {"GB200": 16, "GB300": 16}
"""Nodes of one fast-link domain: racks of 72 devices are used as 16 nodes of four, so that degrees divide (assumed)."""
_KINDS: tuple[tuple[str, NetworkKind, float], ...] = (
    ("omni-path", "infiniband", 3e-6),
    ("ib", "infiniband", 3e-6),
    ("infiniband", "infiniband", 3e-6),
    ("rdma", "infiniband", 5e-6),
    ("roce", "roce", 5e-6),
    ("efa", "efa", 15e-6),
    ("slingshot", "slingshot", 2e-6),
)
"""Word -> kind and latency in seconds, as in the catalog of networks."""
PLAIN_ETHERNET_GBIT = 1.0
"""Of a node on an Ethernet whose rate a table does not print (assumed: workstations' own ports)."""
_DEFAULT_GBIT_PER_DEVICE = {"B200-SXM": 400.0, "B300-SXM": 800.0, "GB200": 400.0, "GB300": 800.0, "GH200-96GB": 200.0}
"""NIC rate a device has where a table prints none: that of the vendor's reference system; others 200 Gbit/s."""


def device_called(name: str) -> Device:
    """Return the catalog device a table calls `name`.

    Raises:
        UsageError: the catalog has no such device.
    """
    plain = re.sub(r"\(.*?\)", "", name).strip()
    try:
        return _with_peaks(find_device(ALIASES.get(plain.upper(), plain)))
    except SpecError:
        known = {entry.casefold(): entry for entry in device_names()}
        if plain.casefold() in known:
            return find_device(known[plain.casefold()])
        raise UsageError(f"the catalog has no device {plain!r}") from None


def _with_peaks(device: Device) -> Device:
    if device.peak_flop_per_s or device.name not in SAME_DIE:
        return device
    return replace(device, peak_flop_per_s=find_device(SAME_DIE[device.name]).peak_flop_per_s)


def parts_of(run: Run) -> list[tuple[Device, int]]:
    """Return the kinds of device a run used and how many of each; `V100x12+T4x4` names several.

    Raises:
        UsageError: a device or a count is not known.
    """
    total = run.integer("n_devices")
    if total is None:
        raise UsageError("the number of devices is not given")
    pieces = run.device.split("+")
    if len(pieces) == 1:
        return [(device_called(run.device), total)]
    parts = []
    for piece in pieces:
        found = re.fullmatch(r"(.+?)x(\d+)", piece.strip())
        if found is None:
            raise UsageError(f"how many of each device is not given in {run.device!r}")
        parts.append((device_called(found.group(1)), int(found.group(2))))
    return parts


def cluster_of(run: Run) -> Cluster:
    """Return the cluster of a run, one group a kind of device, joined by one network.

    Raises:
        UsageError: a device or a count is not known.
    """
    per_node = run.integer("devices_per_node", 8) or 8
    groups = []
    for device, count in parts_of(run):
        slots = min(per_node, count)
        groups.append(
            Group(
                name=device.name,
                device=device,
                nodes=tuple(f"{device.name}-{index}" for index in range(math.ceil(count / slots))),
                devices_per_node=slots,
                site="main",
                usable_memory_bytes=device.usable_memory_bytes,
                domain_nodes=DOMAINS.get(device.name, 1),
            )
        )
    network = network_of(run, tuple(groups))
    return Cluster(name=run.configuration, groups=tuple(groups), networks=(network,))


def network_of(run: Run, groups: tuple[Group, ...]) -> Network:
    """Return the network between nodes: the slowest rate a line names, a NIC a device where it says so."""
    text = run.inter_net
    kind, latency_s = next(
        ((kind, s) for word, kind, s in _KINDS if re.search(rf"\b{word}", text, re.IGNORECASE)),
        ("ethernet", 30e-6),
    )
    per_node = min(group.devices_per_node for group in groups)
    nics, gbit = nics_of(text, per_node)
    if gbit is None and re.search(r"\bethernet\b", text, re.IGNORECASE):
        nics, gbit = 1, PLAIN_ETHERNET_GBIT
    elif gbit is None:
        nics, gbit = per_node, min(_DEFAULT_GBIT_PER_DEVICE.get(group.device.name, 200.0) for group in groups)
    network = Network(
        name=NETWORK,
        joins=tuple(group.name for group in groups),
        kind="ethernet",
        bandwidth_bytes_per_s=gbit * 1e9 / 8,
        latency_s=latency_s,
        nics_per_node=nics,
    )
    return replace(network, kind=kind)


def nics_of(text: str, per_node: int) -> tuple[int, float | None]:
    """Return NICs a node and Gbit/s of each that a line such as `8x HDR IB 200Gb/s` or `3200Gb/s node` tells."""
    rates = [float(rate) for rate in re.findall(r"(\d+(?:\.\d+)?)\s*Gb(?:it)?/s", text)]
    if not rates:
        return per_node, None
    rate = min(rates)
    if re.search(r"per GPU|per device", text):
        return per_node, rate
    counted = re.match(r"\s*(\d+)\s*x(?!\s*[pg]\d)", text)
    if counted:
        return int(counted.group(1)), rate
    if re.search(r"Gb/s\s+(per )?node", text):
        return per_node, rate / per_node
    glued = re.match(r"\s*(\d+)x\d", text)
    return (int(glued.group(1)) if glued else 1), rate
