"""Measured collectives -> constants of a device's links and of a network.

Measurements become fractions of nominal bandwidths, which a cluster file states:

* inside a node, ``link_fraction = bus bandwidth / what the devices' links offer that many ranks``;
* between nodes, ``bandwidth_fraction = what a node sends a second / (NICs x their bandwidth)``. Where groups of one
  rank a node ran side by side (strided), they used nothing but the network and are taken; else the largest group.

A latency is the start of the fitted line divided by the steps of a binary tree up and down (``2 log2``), or of a ring
for collectives without a tree (``n - 1``); between nodes what the steps inside a node are assumed to take comes off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.errors import UsageError
from hetplan.specs.calibration import Calibration, DeviceConstants, NetworkConstants
from hetplan.specs.cluster import Device, Network
from hetplan.specs.importers.nccl_tests import CollectiveLog, GroupBandwidths, LinkFit, fit
from hetplan.specs.read_calibration import calibration_text
from hetplan.units import format_rate, format_seconds

MOST_FRACTION = 1.5
Measurement = CollectiveLog | GroupBandwidths


@dataclass(frozen=True, slots=True, kw_only=True)
class Nominal:
    """What the measured links are sold as; None where that is not known."""

    device: Device | None = None
    network: Network | None = None
    num_nodes: int | None = None
    """Overrides what the files say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFindings:
    """Constants, the story of each, and what could not be told."""

    calibration: Calibration
    questions: tuple[str, ...]

    @property
    def text(self) -> str:
        """The calibration file, questions first."""
        asked = "".join(f"# QUESTION: {question}\n" for question in self.questions)
        return asked + calibration_text(self.calibration)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One measurement: of a device's links or of a network."""

    between_nodes: bool
    bytes_per_s: float
    num_ranks: int
    latency_s: float | None
    story: str


def link_calibration(measured: Sequence[Measurement], nominal: Nominal) -> LinkFindings:
    """Return the constants some measurements tell.

    Raises:
        UsageError: a measured bandwidth is far above what its links are sold as.
    """
    devices: dict[str, DeviceConstants] = {}
    networks: dict[str, NetworkConstants] = {}
    provenance: dict[str, str] = {}
    questions: list[str] = []
    for item in measured:
        found = _log(item, nominal) if isinstance(item, CollectiveLog) else _groups(item, nominal)
        if isinstance(found, str):
            questions.append(found)
            continue
        for number, one in enumerate(found, 1):
            provenance[f"{Path(item.source).name} {number}"] = one.story
            if one.between_nodes and nominal.network is not None:
                networks[nominal.network.name] = _network(one, nominal.network, networks)
            elif not one.between_nodes and nominal.device is not None:
                devices[nominal.device.name] = _device(one, nominal.device, devices)
            else:
                what = "network (--cluster and --network)" if one.between_nodes else "device (--device)"
                questions.append(f"{one.story}: of which {what}? Without it no fraction of the nominal can be written")
    calibration = Calibration(devices=devices, networks=networks, provenance=provenance)
    return LinkFindings(calibration=calibration, questions=tuple(questions))


def _log(log: CollectiveLog, nominal: Nominal) -> list[_Found] | str:
    num_nodes = nominal.num_nodes or len(log.hosts) or None
    if num_nodes is None:
        return (
            f"{log.source}: on how many nodes did its {log.num_ranks} ranks run (--nodes)? The log does not list them"
        )
    if log.num_ranks % num_nodes:
        raise UsageError(f"{log.source}: {log.num_ranks} ranks are no multiple of {num_nodes} nodes")
    line = fit(log)
    between = num_nodes > 1
    rate = log.factor(num_nodes if between else log.num_ranks) / line.s_per_byte
    latency_s = _latency(log, line, num_nodes)
    where = f"{num_nodes} nodes of {log.num_ranks // num_nodes}" if between else f"{log.num_ranks} devices of a node"
    story = (
        f"{log.collective} over {where}: {format_rate(rate)} {'a node' if between else 'bus bandwidth'}, "
        f"{format_seconds(line.start_s)} at 0 B, fit within {line.relative_error:.0%}"
    )
    return [_Found(between_nodes=between, bytes_per_s=rate, num_ranks=log.num_ranks, latency_s=latency_s, story=story)]


def _latency(log: CollectiveLog, line: LinkFit, num_nodes: int) -> float:
    """Latency of one step between nodes, or inside the only node."""
    ranks = log.num_ranks // num_nodes
    is_tree = log.collective == "all_reduce"
    inner = math.log2(ranks) if is_tree else ranks - 1.0
    start_s = line.start_s / 2 if is_tree else line.start_s
    if num_nodes == 1:
        return _rounded(start_s / inner)
    outer = math.log2(num_nodes) if is_tree else num_nodes - 1.0
    return _rounded(max(0.0, start_s - inner * DeviceConstants().link_latency_s) / outer)


def _groups(table: GroupBandwidths, nominal: Nominal) -> list[_Found] | str:
    if table.nodes_and_devices is None:
        return f"{table.source}: of how many nodes with how many devices is it? Name it like ..._2nodes_8gpus_per_node"
    num_nodes, per_node = table.nodes_and_devices
    num_nodes = nominal.num_nodes or num_nodes
    found: list[_Found] = []
    inside = [size for size in table.consecutive if 1 < size <= per_node]
    if inside:
        size = max(inside)
        story = f"{size} devices of a node side by side: {format_rate(table.consecutive[size])} bus bandwidth"
        found.append(_group_found(table.consecutive[size], size, story, between=False))
    if num_nodes > 1 and num_nodes in table.strided:
        rate = table.strided[num_nodes] * per_node
        story = (
            f"{per_node} groups of one device on each of {num_nodes} nodes (strided): "
            f"{format_rate(table.strided[num_nodes])} each, {format_rate(rate)} a node"
        )
        found.append(_group_found(rate, num_nodes, story, between=True))
    elif num_nodes > 1 and num_nodes * per_node in table.consecutive:
        ranks = num_nodes * per_node
        rate = table.consecutive[ranks] * ((num_nodes - 1) / num_nodes) / ((ranks - 1) / ranks)
        found.append(_group_found(rate, ranks, f"{ranks} ranks together: {format_rate(rate)} a node", between=True))
    return found or f"{table.source}: no group lies inside a node or goes over all nodes"


def _group_found(rate: float, num_ranks: int, story: str, *, between: bool) -> _Found:
    return _Found(between_nodes=between, bytes_per_s=rate, num_ranks=num_ranks, latency_s=None, story=story)


def _network(found: _Found, network: Network, known: dict[str, NetworkConstants]) -> NetworkConstants:
    offered = network.bandwidth_bytes_per_s * network.nics_per_node / network.oversubscription
    before = known.get(network.name, NetworkConstants())
    return replace(
        before,
        bandwidth_fraction=_fraction(found, offered, network.name),
        latency_s=found.latency_s if found.latency_s is not None else before.latency_s,
        origin="measured",
    )


def _device(found: _Found, device: Device, known: dict[str, DeviceConstants]) -> DeviceConstants:
    before = known.get(device.name, DeviceConstants())
    total, pair = device.link_bandwidth_bytes_per_s, device.pair_bandwidth_bytes_per_s
    offered = pair if found.num_ranks == 2 else min(total, pair * (found.num_ranks - 1)) if pair else total
    latency_s = before.link_latency_s if found.latency_s is None else found.latency_s
    if offered <= 0:
        fraction = _fraction(found, device.pcie_bandwidth_bytes_per_s, f"PCIe of {device.name}")
        return replace(before, pcie_fraction=fraction, link_latency_s=latency_s)
    return replace(before, link_fraction=_fraction(found, offered, device.name), link_latency_s=latency_s)


def _fraction(found: _Found, offered: float, name: str) -> float:
    fraction = found.bytes_per_s / offered
    if fraction > MOST_FRACTION:
        raise UsageError(
            f"{found.story}: that is {fraction:.1f} times the {format_rate(offered)} {name} is stated to have; "
            "is the number of nodes right, and is this the link that was measured?"
        )
    return _rounded(fraction)


def _rounded(value: float) -> float:
    """Four digits, more than which no measurement has."""
    return float(f"{value:.4g}")
