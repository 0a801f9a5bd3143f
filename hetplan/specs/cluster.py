"""The cluster as the user describes it: groups of equal nodes and the networks that join groups.

Records only, in base units; `read_cluster` decodes them from YAML. Two devices talk over the best network that joins
both their groups: RDMA networks of different kinds never talk to each other, so an InfiniBand group and a RoCE group
meet only on a network that names both. Devices of a group are numbered node by node: device `i` of a group with full
nodes of `n` sits in slot `i % n` of node `i // n`; left-out slots are skipped in that count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Feature = Literal["bf16", "fp8", "flash_attention"]
NetworkKind = Literal["infiniband", "roce", "ethernet", "efa", "slingshot"]
RDMA_KINDS: frozenset[str] = frozenset({"infiniband", "roce", "efa", "slingshot"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of accelerator, as its datasheet states it; peaks are dense (no structured sparsity)."""

    name: str
    vendor: str
    memory_bytes: float
    usable_memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    peak_flop_per_s: Mapping[Precision, float]
    """Dense matrix peak; a precision that is missing is not supported in hardware."""
    link_bandwidth_bytes_per_s: float
    """One direction, all fast links (NVLink, xGMI) of a device together; 0: none, or a bridge between two cards."""
    pair_bandwidth_bytes_per_s: float
    """One direction, between two devices of a node (or of a bridged pair of cards); 0: PCIe only."""
    pcie_bandwidth_bytes_per_s: float
    tdp_w: float
    features: frozenset[Feature]
    usd_per_hour: float | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field name -> where its number was read, or `recalled: ...` / `assumed: ...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a node has besides its accelerators."""

    memory_bytes: float | None = None
    cores: int | None = None
    nvme_bandwidth_bytes_per_s: float | None = None
    pcie_bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal nodes. Two groups that list the same node name share that host (a box with unlike cards)."""

    name: str
    device: Device
    nodes: tuple[str, ...]
    devices_per_node: int
    site: str
    usable_memory_bytes: float
    speed: float = 1.0
    """Factor on the device's speed (0.9: 10 % slower than its datasheet or calibration)."""
    usd_per_device_hour: float | None = None
    power_w: float | None = None
    """Power limit of one device; None: the datasheet's TDP."""
    domain_nodes: int = 1
    """Nodes that share one fast-link (NVLink) domain, counted from the first node."""
    host: Host = field(default_factory=Host)
    left_out: frozenset[tuple[int, int]] = frozenset()
    """(node index, slot) of devices that must not be used."""

    @property
    def num_devices(self) -> int:
        """Devices that may be used."""
        return len(self.nodes) * self.devices_per_node - len(self.left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLink:
    """What one pair of places sees of a network."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A named fabric. `bandwidth_bytes_per_s` is of one NIC, one direction."""

    name: str
    joins: tuple[str, ...]
    kind: NetworkKind
    bandwidth_bytes_per_s: float
    latency_s: float
    nics_per_node: int = 1
    oversubscription: float = 1.0
    """Factor by which the fabric's core is narrower than the sum of its edges (>= 1)."""
    shared: bool = False
    """True: `bandwidth_bytes_per_s` is one line shared by all traffic on it (a line between sites)."""
    usd_per_byte: float = 0.0
    pairs: Mapping[tuple[str, str], PairLink] = field(default_factory=dict)
    """(place, place) -> link; a place is a group, a site or a node name; both orders are present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups and networks; every group name in a network exists, names are unique."""

    name: str
    groups: tuple[Group, ...]
    networks: tuple[Network, ...]

    def group(self, name: str) -> Group:
        """Return the group called `name` (KeyError if there is none)."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    @property
    def num_devices(self) -> int:
        """All usable devices."""
        return sum(group.num_devices for group in self.groups)
