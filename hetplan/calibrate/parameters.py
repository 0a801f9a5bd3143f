"""The few constants that are fitted, as a vector of offsets from hetplan's assumptions.

A positive constant moves by a factor, `value = assumed x exp(offset)`, a fraction of overlap or a penalty by addition.
Each has bounds and a prior width: how far, in its own coordinate, it would not surprise to find it from where it
starts. Offsets rather than values, because the assumed fractions of peak depend on the device's power limit
(`costs.constants`): one vector can thus be carried from device to device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from hetplan.calibrate.express import Setup
from hetplan.costs.constants import constants_of
from hetplan.costs.records import Floats
from hetplan.specs.calibration import Calibration, DeviceConstants, NetworkConstants, Overlap
from hetplan.specs.cluster import Cluster, Group
from hetplan.specs.model import Experts

Record = Literal["device", "network", "overlap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One fitted constant."""

    record: Record
    name: str
    width: float
    """Prior standard deviation, in log for factors."""
    lowest: float
    highest: float
    """Bounds of the constant's value."""
    adds: bool = False
    step: float = 0.05
    """Of the finite difference."""

    def moved(self, value: float, offset: float) -> float:
        """Return the constant at an offset from `value`, within its bounds."""
        new = round(value + offset, 12) if self.adds else value * math.exp(offset)
        return min(max(new, self.lowest), self.highest)


PARAMETERS: tuple[Parameter, ...] = (
    Parameter(record="device", name="gemm_peak_fraction", width=0.25, lowest=0.05, highest=1.0),
    Parameter(record="device", name="fp8_fraction", width=0.2, lowest=0.2, highest=1.3),
    Parameter(record="device", name="expert_fraction", width=0.4, lowest=0.05, highest=1.3),
    Parameter(record="device", name="expert_overhead_s", width=5e-4, lowest=0.0, highest=2e-2, adds=True, step=5e-5),
    Parameter(record="device", name="exchange_fraction", width=0.5, lowest=0.05, highest=4.0, step=0.2),
    Parameter(record="device", name="exchange_merged", width=0.5, lowest=0.0, highest=1.0, adds=True, step=0.2),
    Parameter(record="device", name="gemm_half_flop", width=1.0, lowest=1e7, highest=2e11, step=0.2),
    Parameter(record="device", name="misaligned_penalty", width=0.08, lowest=0.0, highest=0.45, adds=True),
    Parameter(record="device", name="attention_fraction", width=0.35, lowest=0.02, highest=1.0),
    Parameter(record="device", name="memory_fraction", width=0.3, lowest=0.1, highest=1.2),
    Parameter(record="device", name="layer_overhead_s", width=1.2, lowest=1e-6, highest=5e-3, step=0.2),
    Parameter(record="device", name="link_fraction", width=0.6, lowest=0.02, highest=1.0),
    Parameter(record="device", name="link_latency_s", width=0.8, lowest=5e-7, highest=1e-3, step=0.2),
    Parameter(record="device", name="pcie_fraction", width=0.5, lowest=0.02, highest=1.0),
    Parameter(record="network", name="bandwidth_fraction", width=0.5, lowest=0.02, highest=1.0),
    Parameter(record="overlap", name="gradients", width=0.3, lowest=0.0, highest=1.0, adds=True, step=0.1),
    Parameter(record="overlap", name="tp_fraction", width=0.25, lowest=0.0, highest=0.95, adds=True, step=0.1),
    Parameter(record="overlap", name="sends_block", width=0.5, lowest=0.0, highest=1.0, adds=True, step=0.2),
)


def blocks(devices: Sequence[str]) -> tuple[tuple[str, Parameter], ...]:
    """Return the vector's entries for clusters of some devices: (device, parameter), shared ones under ``""``."""
    own = [(device, entry) for device in devices for entry in PARAMETERS if entry.record == "device"]
    shared = [("", entry) for entry in PARAMETERS if entry.record != "device"]
    return tuple(own + shared)


def matters(entry: Parameter, setup: Setup) -> bool:
    """Return whether a constant can matter to a configuration at all, from what the configuration has."""
    stages = [stage for replica in setup.layout.replicas for stage in replica.stages]
    nodes = sum(len(group.nodes) for group in setup.cluster.groups)
    match entry.name:
        case "fp8_fraction":
            return setup.workload.precision == "fp8"
        case "expert_fraction" | "expert_overhead_s":
            return any(isinstance(op, Experts) for layer in setup.model.chain for op in layer.operators)
        case "exchange_fraction" | "exchange_merged":
            return any(stage.ep > 1 for stage in stages)
        case "bandwidth_fraction":
            return nodes > 1
        case "pcie_fraction" | "link_fraction":
            linked = all(group.device.link_bandwidth_bytes_per_s > 0 for group in setup.cluster.groups)
            return linked if entry.name == "link_fraction" else not linked or len(setup.cluster.groups) > 1
        case "sends_block":
            return any(replica.pp > 1 for replica in setup.layout.replicas)
        case "tp_fraction":
            return any(stage.tp > 1 for stage in stages)
        case _:
            return True


def limits(cluster: Cluster, entries: Sequence[tuple[str, Parameter]]) -> tuple[Floats, Floats]:
    """Return the least and greatest offsets that keep the constants of a cluster's devices within their bounds."""
    groups = {group.device.name: group for group in cluster.groups}
    low, high = np.empty(len(entries)), np.empty(len(entries))
    for k, (device, entry) in enumerate(entries):
        group = groups.get(device, cluster.groups[0])
        records = {"device": constants_of(group, Calibration()), "network": NetworkConstants(), "overlap": Overlap()}
        value = getattr(records[entry.record], entry.name)
        for bounds, bound in ((low, entry.lowest), (high, entry.highest)):
            bounds[k] = bound - value if entry.adds else math.log(bound / value)
    return low, high


def widths(entries: Sequence[tuple[str, Parameter]]) -> Floats:
    """Return the prior widths of a vector's entries."""
    return np.array([entry.width for _, entry in entries])


def calibration_of(cluster: Cluster, entries: Sequence[tuple[str, Parameter]], offsets: Floats) -> Calibration:
    """Return the calibration of a cluster at some offsets; a single device's entries hold for every device."""
    owners = {device for device, _ in entries if device}
    devices = {}
    for group in cluster.groups:
        owner = group.device.name if group.device.name in owners else next(iter(owners))
        devices[group.device.name] = _device(group, owner, entries, offsets)
    shared = {(e.record, e.name): (e, float(o)) for (d, e), o in zip(entries, offsets, strict=True) if not d}
    network, overlap = NetworkConstants(), Overlap()
    hidden = _moved(overlap, "overlap", shared)
    network = replace(network, origin="fitted", **_moved(network, "network", shared))
    return Calibration(
        devices=devices,
        networks={entry.name: network for entry in cluster.networks},
        overlap=replace(
            overlap,
            gradients=hidden["gradients"],
            tp_fraction=hidden["tp_fraction"],
            sends_block=hidden["sends_block"],
        ),
    )


def _device(group: Group, owner: str, entries: Sequence[tuple[str, Parameter]], offsets: Floats) -> DeviceConstants:
    assumed = constants_of(group, Calibration())
    own = {(e.record, e.name): (e, float(o)) for (d, e), o in zip(entries, offsets, strict=True) if d == owner}
    return replace(assumed, origin="fitted", **_moved(assumed, "device", own))


def _moved(
    record: DeviceConstants | NetworkConstants | Overlap,
    kind: Record,
    offsets: dict[tuple[Record, str], tuple[Parameter, float]],
) -> dict[str, float]:
    names = {field.name for field in fields(record)}
    return {
        name: entry.moved(getattr(record, name), offset)
        for (owner, name), (entry, offset) in offsets.items()
        if owner == kind and name in names
    }
