"""States of a mixed-precision Adam run under ZeRO with offloading, in closed form.

With ``P`` parameters in all, ``Q`` in the largest layer and ``N`` devices (a layer's 16-bit weights and gradients are
live at once, ``4 Q`` bytes; states are 18 bytes a parameter: 2 weights, 4 gradients, 12 optimizer):

| sharding full | on a device | on the host, a node with n of the N devices |
|---|---|---|
| optimizer and weights offloaded | 4 Q | 18 P n / N |
| optimizer offloaded | 4 Q + 2 P / N | 16 P n / N |
| nothing offloaded | 4 Q + 18 P / N | 4 Q n while a layer is built |

| sharding gradients | on a device | on the host |
|---|---|---|
| optimizer offloaded | 2 P | 16 P n / N |
| nothing offloaded | 4 P + 16 P / N | 4 P n while the model is built |

Host figures are multiplied by `BUFFER_FACTOR` (pinned buffers). Under full sharding layers are built one at a time;
under gradient sharding every rank builds the whole model on its host first, which may take more than the states do.
Source: DeepSpeed documentation, "Memory Requirements" (ZeRO-2 and ZeRO-3 estimators).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetplan.errors import UsageError
from hetplan.specs.model import Model, layer_params, model_params

Offload = Literal["none", "optimizer", "optimizer and weights"]
BUFFER_FACTOR = 1.5
"""Assumed by DeepSpeed's estimators too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the states belong to and how many devices share them."""

    params: int
    largest_layer_params: int
    devices_per_node: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if min(self.params, self.largest_layer_params, self.devices_per_node, self.num_nodes) < 1:
            raise UsageError("parameters, devices and nodes must all be at least 1")

    @property
    def num_devices(self) -> int:
        """Devices that share the states."""
        return self.devices_per_node * self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of states, no activations."""

    device_bytes: float
    host_bytes: float
    """Of one node's memory."""


def job_of(model: Model, devices_per_node: int, num_nodes: int = 1) -> Job:
    """Return the job of a model of hetplan's."""
    return Job(
        params=model_params(model),
        largest_layer_params=max(layer_params(layer) for layer in model.chain),
        devices_per_node=devices_per_node,
        num_nodes=num_nodes,
    )


def zero3_bytes(job: Job, offload: Offload = "none") -> StateBytes:
    """Return the states under full sharding (ZeRO-3)."""
    layer = 4.0 * job.largest_layer_params
    share = job.params / job.num_devices
    build = layer * job.devices_per_node * BUFFER_FACTOR
    on_node = job.devices_per_node * share
    if offload == "optimizer and weights":
        return StateBytes(device_bytes=layer, host_bytes=18 * on_node * BUFFER_FACTOR)
    if offload == "optimizer":
        return StateBytes(device_bytes=layer + 2 * share, host_bytes=16 * on_node * BUFFER_FACTOR)
    return StateBytes(device_bytes=layer + 18 * share, host_bytes=build)


def zero2_bytes(job: Job, offload: Offload = "none") -> StateBytes:
    """Return the states with optimizer and gradients sharded (ZeRO-2).

    Raises:
        UsageError: weights cannot be offloaded where they are not sharded.
    """
    if offload == "optimizer and weights":
        raise UsageError("weights are offloaded under full sharding only")
    share = job.params / job.num_devices
    build = 4.0 * job.params * job.devices_per_node * BUFFER_FACTOR
    if offload == "optimizer":
        host = max(build, 16 * job.devices_per_node * share * BUFFER_FACTOR)
        return StateBytes(device_bytes=2.0 * job.params, host_bytes=host)
    return StateBytes(device_bytes=4.0 * job.params + 16 * share, host_bytes=build)
