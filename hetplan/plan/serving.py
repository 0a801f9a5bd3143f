"""Whether the weights of a model fit devices for inference, and which layers each pipeline stage then holds.

A device gives `fraction` of its memory to weights; the rest is for the key/value cache, activations and the runtime.
Stages on unlike devices hold layers so that the fullest device is as empty as can be: the cut minimises the largest of
``weight bytes of the stage / memory of its device``, exactly, over all cuts of the chain in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetplan.costs.capacity import layer_bytes, weight_bytes
from hetplan.errors import InfeasibleError, UsageError
from hetplan.plan.cuts import balanced_cut
from hetplan.plan.rules_model import valid_tp
from hetplan.specs.cluster import Cluster, Group
from hetplan.specs.model import Model

GIB = 2.0**30
FRACTION = 0.9
"""Part of a device's memory weights may take, as inference servers set it by default."""
BITS_OF_FP8, BITS_OF_16 = 8.0, 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStage:
    """What the devices of one stage hold."""

    num_decoders: int
    weights_bytes: float
    """On one device."""
    capacity_bytes: float


def serving_stages(
    model: Model, capacities: Sequence[float], bits: float, *, tp: int = 1, fraction: float = FRACTION
) -> tuple[ServingStage, ...]:
    """Return the stages of a pipeline of tensor-parallel groups whose devices have `capacities` bytes of memory.

    Raises:
        InfeasibleError: the weights fit no cut; the message says by how much.
        UsageError: there are more stages than layers, or tp does not divide the model.
    """
    if tp not in valid_tp(model):
        raise UsageError(f"tp {tp} does not divide {model.name} (valid: {', '.join(map(str, valid_tp(model)))})")
    held_l = np.array([layer_bytes(layer, bits, tp) if layer.counted else 0.0 for layer in model.chain])
    cut = balanced_cut([held_l / capacity for capacity in capacities])
    kinds = [layer.kind for layer in model.chain]
    stages = tuple(
        ServingStage(
            num_decoders=kinds[first:end].count("decoder"),
            weights_bytes=float(held_l[first:end].sum()),
            capacity_bytes=capacity,
        )
        for (first, end), capacity in zip(pairwise(cut), capacities, strict=True)
    )
    fullest = max(stages, key=lambda stage: stage.weights_bytes / stage.capacity_bytes)
    room = fullest.capacity_bytes * fraction
    if fullest.weights_bytes > room:
        raise InfeasibleError(
            f"{len(capacities)} stages of tp {tp} do not hold the weights of {model.name}: even the best cut puts "
            f"{fullest.weights_bytes / GIB:.2f} GiB on a device that gives {room / GIB:.2f} GiB to weights"
        )
    return stages


def fewest_stages(
    model: Model, capacity_bytes: float, bits: float, *, tp: int = 1, fraction: float = FRACTION
) -> int | None:
    """Return the smallest number of equal stages that holds the weights, None where no number does."""
    for count in range(1, len(model.chain) + 1):
        try:
            serving_stages(model, [capacity_bytes] * count, bits, tp=tp, fraction=fraction)
        except InfeasibleError:
            continue
        return count
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether some devices hold the weights of a model."""

    name: str
    num_devices: int
    bits: float
    weights_bytes: float
    capacity_bytes: float
    """All devices together."""
    fits: bool
    reason: str

    @property
    def left_bytes(self) -> float:
        """Memory beside the weights; negative: they do not even fill it."""
        return self.capacity_bytes - self.weights_bytes


def default_bits(group: Group, wanted: float | None) -> float:
    """Return the bits a group stores weights in: what is asked, but 16 where it asks fp8 of devices without it."""
    if wanted is None:
        return BITS_OF_FP8 if "fp8" in group.device.features else BITS_OF_16
    return wanted


def verdicts(
    cluster: Cluster, model: Model, bits: float | None = None, *, fraction: float = FRACTION
) -> tuple[Verdict, ...]:
    """Return a verdict for each group of a cluster alone: the candidates of one file.

    `bits`: of a parameter; None: 8 where the devices compute in fp8, else 16.
    """
    return tuple(_verdict(group, model, default_bits(group, bits), fraction) for group in cluster.groups)


def _verdict(group: Group, model: Model, bits: float, fraction: float) -> Verdict:
    needed = weight_bytes(model, bits)
    capacity = group.num_devices * group.usable_memory_bytes
    fits, reason = _capacity_reason(needed, capacity, fraction)
    if fits:
        fits, reason = _cut_reason(group, model, bits, fraction)
    return Verdict(
        name=group.name,
        num_devices=group.num_devices,
        bits=bits,
        weights_bytes=needed,
        capacity_bytes=capacity,
        fits=fits,
        reason=reason,
    )


def _capacity_reason(needed: float, capacity: float, fraction: float) -> tuple[bool, str]:
    words = f"{needed / GIB:.0f} GiB of weights on {capacity / GIB:.0f} GiB"
    if needed > capacity:
        return False, f"{words}: {(needed - capacity) / GIB:.0f} GiB short"
    if needed > capacity * fraction:
        return False, f"{words}: no room for the key/value cache (weights may take {100 * fraction:.0f} %)"
    return True, words


def _cut_reason(group: Group, model: Model, bits: float, fraction: float) -> tuple[bool, str]:
    """Return whether whole layers can be dealt out over tensor-parallel groups of the node's size."""
    for tp in _degrees(group, model):
        if not num_tp_groups(group, tp):
            continue
        count = min(num_tp_groups(group, tp), len(model.chain))
        try:
            stages = serving_stages(model, [group.usable_memory_bytes] * count, bits, tp=tp, fraction=fraction)
        except InfeasibleError:
            continue
        fullest = max(stage.weights_bytes for stage in stages)
        fewest = fewest_stages(model, group.usable_memory_bytes, bits, tp=tp, fraction=fraction)
        return True, (
            f"tp {tp}, {count} stages: at most {fullest / GIB:.1f} of {group.usable_memory_bytes / GIB:.1f} GiB a "
            f"device; {fewest} stages would do"
        )
    return False, "one layer is too large for a device at every tp inside a node"


def num_tp_groups(group: Group, tp: int) -> int:
    """Return how many tensor-parallel groups of `tp` devices fit the fast-link domains of a group."""
    free: dict[int, int] = {}
    for node in range(len(group.nodes)):
        usable = sum((node, slot) not in group.left_out for slot in range(group.devices_per_node))
        domain = node // group.domain_nodes
        free[domain] = free.get(domain, 0) + usable
    return sum(count // tp for count in free.values())


def _degrees(group: Group, model: Model) -> Iterator[int]:
    """Yield the tensor-parallel degrees that stay inside a node, largest first."""
    inside = group.devices_per_node * group.domain_nodes
    yield from (tp for tp in reversed(valid_tp(model)) if tp <= min(inside, group.num_devices))
