"""Numbers that turn datasheet peaks into seconds: measured, fitted, or assumed when nothing better is known.

A calibration file overrides datasheet and cluster file alike. Constants are per device kind and software stack, few
and physical, so that they can be fitted from a handful of observed runs; each carries where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hetplan.specs.layer_table import LayerTable, LinkFits

ANY_NETWORK = "*"
"""Names the constants of every network that has none of its own."""
Origin = Literal["measured", "fitted", "datasheet", "assumed"]
PipelineTiming = Literal["exact", "lock-step", "blocking", "columns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConstants:
    """How one device kind turns work into time. The defaults are assumptions, marked as such by `origin`."""

    gemm_peak_fraction: float = 0.72
    """Fraction of the dense peak a large, well-shaped GEMM reaches."""
    fp8_fraction: float = 1.0
    """Factor on that fraction for 8-bit GEMMs (scaling, casts the GEMM's own kernel does)."""
    expert_fraction: float = 1.0
    """Factor on a GEMM's speed where it is the grouped product of routed experts."""
    expert_overhead_s: float = 0.0
    """Host and device time a layer of routed experts adds to one forward pass (twice that to a backward pass)."""
    exchange_fraction: float = 1.0
    """Factor on the links' usable bandwidth in an all-to-all; above 1 where part of it hides behind compute."""
    exchange_merged: float = 0.0
    """How far an all-to-all sends a token once to each node (1) instead of once to each of its experts (0)."""
    gemm_half_flop: float = 2.0e9
    """FLOPs of a GEMM that reaches half of that fraction (launch and tile quantisation)."""
    misaligned_penalty: float = 0.12
    """Fraction of speed lost when a GEMM dimension is not a multiple of 64 elements (twice that: of 8)."""
    attention_fraction: float = 0.40
    """Fraction of the dense peak fused attention reaches."""
    memory_fraction: float = 0.72
    """Fraction of the memory bandwidth that elementwise work reaches."""
    layer_overhead_s: float = 20e-6
    """Host and launch time a layer adds to one forward pass (twice that to a backward pass) of small layers."""
    link_fraction: float = 0.80
    """Fraction of the nominal bandwidth collectives reach inside a node."""
    pcie_fraction: float = 0.45
    """Fraction of the nominal PCIe bandwidth that traffic between two devices of a node reaches through the host."""
    link_latency_s: float = 4e-6
    """Latency of one collective step inside a node."""
    collective_fraction: float = 1.0
    """Factor on the rate of a single transfer inside a node that a ring of ranks reaches."""
    collective_latency_s: float | None = None
    """Latency of one collective step inside a node where it is not that of a transfer."""
    update_fraction: float = 1.0
    """Factor on the rate of elementwise work that the optimizer's update reaches."""
    memory_overhead_fraction: float = 0.06
    """Allocator overhead, as a fraction of activations and buffers."""
    reserve_bytes: float = 1.5e9
    """Memory the driver, the framework and communication libraries hold."""
    idle_power_fraction: float = 0.25
    """Draw of a device that waits, as a fraction of its power limit."""
    origin: Origin = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConstants:
    """How one network turns bytes into time."""

    bandwidth_fraction: float = 0.85
    """Fraction of the nominal NIC bandwidth large messages reach."""
    latency_s: float | None = None
    """Overrides the cluster file's latency."""
    collective_fraction: float = 1.0
    """Factor on the rate of a single transfer that a ring of ranks reaches."""
    collective_latency_s: float | None = None
    """Latency of one collective step where it is not that of a transfer."""
    origin: Origin = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What hides behind what."""

    gradients: float = 0.8
    """Fraction of the last microbatch's backward pass that can hide gradient synchronisation."""
    gathers: bool = True
    """Fully sharded layers fetch the next layer's weights while one computes."""
    tp_fraction: float = 0.0
    """Fraction of tensor-parallel communication hidden behind compute."""
    sends_block: float = 0.0
    """Part of a transfer between stages for which the sending rank does nothing else (1: sends that block)."""
    pipeline: PipelineTiming = "exact"
    """exact: stages run ahead and transfers hide as the schedule lets them. lock-step, blocking, columns: nothing
    hides; closed forms of planners that know no schedule (see `plan.timing`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants by device name and network name; what is missing falls back to the assumed defaults."""

    devices: Mapping[str, DeviceConstants] = field(default_factory=dict)
    networks: Mapping[str, NetworkConstants] = field(default_factory=dict)
    overlap: Overlap = field(default_factory=Overlap)
    relative_error: float | None = None
    """Expected relative error of a predicted step time, where the calibration states one."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    layers: LayerTable | None = None
    """Measured layers; where they are given, formulas for layers are not asked."""
    links: LinkFits | None = None
    """Bandwidth by message size; where it is given, constants of networks are not asked."""

    def device(self, name: str) -> DeviceConstants:
        """Return the constants of a device kind."""
        return self.devices.get(name, DeviceConstants())

    def network(self, name: str) -> NetworkConstants:
        """Return the constants of a network: its own, else those of any network (`*`)."""
        return self.networks.get(name, self.networks.get(ANY_NETWORK, NetworkConstants()))
