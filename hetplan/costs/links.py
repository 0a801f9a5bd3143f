"""Which link two places share, and how fast one traffic stream crosses it.

Rules, one a function:

* **Inside a node** (or a fast-link domain) `n` ranks reach `min(all fast links, (n - 1) x one pair)`: a switch gives
  every pair the whole figure, directly wired devices use the links to their `n - 1` peers. Two ranks use one pair; a
  bridge joins neighbours only. Devices without fast links go over PCIe, whose switches and root complex interleaved
  rings (those of a dp axis beside a tp axis) share, as they would share a NIC; between sockets a ring is slower.
* **Between nodes** two groups talk over the network that joins both and offers a node most:
  `nics x bandwidth / oversubscription`; a network joins what it lists and nothing else, so RDMA fabrics of different
  kinds meet only on a network that names both groups. A shared line is one bandwidth for everything on it.
* **Sharing NICs**: `rings` streams that leave a node at once divide its NICs evenly; a stream with `ranks` devices on
  the node drives at most the NICs next to those devices, one NIC each at least.
* **One host**: two groups whose only node is the same host meet on its PCIe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetplan.costs.constants import constants_of
from hetplan.errors import CalibrationError
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster, Group, Network, PairLink

DEVICES_A_SOCKET = 4
"""Devices that hang off one socket of a host (assumed; most boxes of eight cards have two sockets)."""
SOCKETS_FRACTION = 0.6
"""Part of its rate that a ring keeps between sockets (assumed: 20.8 GB/s of an inter-socket link, both ways busy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two nodes (or two devices of a node)."""

    latency_s: float
    bandwidth_bytes_per_s: float
    """Usable, all NICs of a node together (a shared line: the line)."""
    nic_bytes_per_s: float
    """Usable, one NIC."""
    network: str = ""
    """Empty: inside a node."""
    shared: bool = False
    usd_per_byte: float = 0.0
    ring_fraction: float = 1.0
    """Factor on these rates that a collective's ring reaches."""
    own_ring_latency_s: float | None = None
    """Latency of a collective's step where it is not that of a transfer."""
    hosted: bool = False
    """Inside a node, over the host's PCIe."""

    def ring_bytes_per_s(self, ranks: int, rings: int) -> float:
        """Return the rate of one of `rings` interleaved rings of `ranks` devices each in a node.

        All of the link's where a switch or wires join the devices; on a host's PCIe the rings share it, and those that
        span sockets meet between them.
        """
        rate = self.bandwidth_bytes_per_s * self.ring_fraction
        if not self.hosted:
            return rate
        return rate / max(1, rings) * (SOCKETS_FRACTION if ranks * rings > DEVICES_A_SOCKET else 1.0)

    @property
    def ring_latency_s(self) -> float:
        """Latency of one step of a collective."""
        return self.latency_s if self.own_ring_latency_s is None else self.own_ring_latency_s


def inside_link(group: Group, num_ranks: int, calibration: Calibration, stride: int = 1) -> Link:
    """Return the link `num_ranks` devices of one node or fast-link domain share, each `stride` places from the next.

    Raises:
        CalibrationError: they have neither fast links nor PCIe.
    """
    constants = constants_of(group, calibration)
    device = group.device
    total, pair = device.link_bandwidth_bytes_per_s, device.pair_bandwidth_bytes_per_s
    if num_ranks <= 2 and pair > 0 and (total > 0 or stride == 1):
        nominal = pair
    elif total > 0:
        nominal = min(total, pair * (num_ranks - 1)) if pair > 0 else total
    else:
        return pcie_link(group, group, calibration)
    usable = nominal * constants.link_fraction
    return Link(
        latency_s=constants.link_latency_s,
        bandwidth_bytes_per_s=usable,
        nic_bytes_per_s=usable,
        ring_fraction=constants.collective_fraction,
        own_ring_latency_s=constants.collective_latency_s,
    )


def pcie_link(first: Group, second: Group, calibration: Calibration) -> Link:
    """Return the link between devices of two groups that sit in one host.

    Raises:
        CalibrationError: a device states no PCIe bandwidth.
    """
    usable, latency_s, ring_fraction, ring_latency_s = math.inf, 0.0, math.inf, 0.0
    for group in (first, second):
        constants = constants_of(group, calibration)
        nominal = group.device.pcie_bandwidth_bytes_per_s
        if group.host.pcie_bandwidth_bytes_per_s is not None:
            nominal = min(nominal, group.host.pcie_bandwidth_bytes_per_s)
        if nominal <= 0:
            raise CalibrationError(
                f"device {group.device.name!r} (group {group.name!r}) states neither fast links for this many devices"
                " nor a PCIe bandwidth: give it a pcie_bandwidth in the cluster file"
            )
        usable = min(usable, nominal * constants.pcie_fraction)
        latency_s = max(latency_s, constants.link_latency_s)
        own_s = constants.collective_latency_s
        ring_latency_s = max(ring_latency_s, constants.link_latency_s if own_s is None else own_s)
        ring_fraction = min(ring_fraction, constants.collective_fraction)
    return Link(
        latency_s=latency_s,
        bandwidth_bytes_per_s=usable,
        nic_bytes_per_s=usable,
        ring_fraction=ring_fraction,
        own_ring_latency_s=ring_latency_s,
        hosted=True,
    )


def link_between(cluster: Cluster, first: str, second: str, calibration: Calibration | None = None) -> Link | None:
    """Return the best link between nodes of two groups (or two nodes of one); None where nothing joins them."""
    known = calibration or Calibration()
    a, b = cluster.group(first), cluster.group(second)
    if first != second and len(a.nodes) == 1 and a.nodes == b.nodes:
        return pcie_link(a, b, known)
    links = [
        _network_link(network, a, b, known)
        for network in cluster.networks
        if first in network.joins and second in network.joins
    ]
    return max(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s), default=None)


def crossing_bytes_per_s(link: Link, group: Group, *, rings: int, ranks: int) -> float:
    """Return what one of `rings` streams reaches on leaving a node (or fast-link domain) of `group`.

    `ranks`: devices it has there. Devices of one host that meet on PCIe have lanes of their own.
    """
    if not link.network:
        return link.bandwidth_bytes_per_s
    if link.shared:
        return link.bandwidth_bytes_per_s / rings
    share = link.bandwidth_bytes_per_s * group.domain_nodes / rings
    nics_per_device = link.bandwidth_bytes_per_s / link.nic_bytes_per_s / group.devices_per_node
    return min(share, ranks * link.nic_bytes_per_s * max(1.0, nics_per_device))


def _network_link(network: Network, first: Group, second: Group, calibration: Calibration) -> Link:
    """Return what nodes of two groups see of one network."""
    constants = calibration.network(network.name)
    pair = _pair(network, first, second)
    latency_s = network.latency_s if constants.latency_s is None else constants.latency_s
    nic = network.bandwidth_bytes_per_s
    if pair is not None:
        latency_s, nic = pair.latency_s, pair.bandwidth_bytes_per_s
    usable = nic * constants.bandwidth_fraction / network.oversubscription
    return Link(
        latency_s=latency_s,
        bandwidth_bytes_per_s=usable if network.shared else usable * network.nics_per_node,
        nic_bytes_per_s=usable,
        network=network.name,
        shared=network.shared,
        usd_per_byte=network.usd_per_byte,
        ring_fraction=constants.collective_fraction,
        own_ring_latency_s=constants.collective_latency_s,
    )


def _pair(network: Network, first: Group, second: Group) -> PairLink | None:
    """Return the stated link between two groups: the groups' own entry, else their slowest nodes', else the sites'."""
    if not network.pairs:
        return None
    stated = network.pairs.get((first.name, second.name))
    if stated is not None:
        return stated
    firsts, seconds = set(first.nodes), set(second.nodes)
    nodes = [link for (a, b), link in network.pairs.items() if a in firsts and b in seconds and a != b]
    if nodes:
        return PairLink(
            latency_s=max(link.latency_s for link in nodes),
            bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in nodes),
        )
    return network.pairs.get((first.site, second.site))
