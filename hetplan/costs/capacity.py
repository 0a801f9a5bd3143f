"""Weights alone: what a model takes at a number of bits, what a device can hold of it, and what loading it takes.

Inference and adapter training keep no gradients or optimizer states of the weights, so whether a model fits is first a
question of its weights. A layer's bytes count every expert; tensor parallelism divides what it cuts and copies the
rest (norms, routers, single key/value heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hetplan.errors import UsageError
from hetplan.specs.model import Experts, Layer, Linear, Model, Operator, Table, layer_params, operator_params

Loading = Literal["sharded", "each rank", "one rank a node"]
"""How weights reach the devices: each rank reads its part; each rank reads all of it before sharding; one a node."""

MOST_BITS = 64


def bytes_of_bits(bits: float) -> float:
    """Return the bytes a parameter takes at a number of bits.

    Raises:
        UsageError: the number of bits makes no sense.
    """
    if not 0 < bits <= MOST_BITS:
        raise UsageError(f"{bits} bits a parameter make no sense")
    return bits / 8


def weight_bytes(model: Model, bits: float) -> float:
    """Return the bytes of all weights, every trained layer included."""
    return bytes_of_bits(bits) * sum(layer_params(layer) for layer in model.chain if layer.counted)


def layer_bytes(layer: Layer, bits: float, tp: int = 1) -> float:
    """Return the bytes one device of a tensor-parallel group holds of a layer."""
    return bytes_of_bits(bits) * sum(_params_on_a_rank(operator, tp) for operator in layer.operators)


def _params_on_a_rank(operator: Operator, tp: int) -> float:
    match operator:
        case Linear() | Table() if operator.split == "none":
            return float(operator_params(operator))
        case Linear() | Table():
            return operator_params(operator) / tp
        case Experts():
            inside = sum(_params_on_a_rank(linear, tp) for linear in operator.linears)
            return operator_params(operator.router) + operator.num_experts * inside + operator.extra_params
        case _:
            return float(operator_params(operator))


def largest_decoder(model: Model) -> Layer:
    """Return the decoder layer with most parameters.

    Raises:
        UsageError: the model has no decoder layer.
    """
    decoders = [layer for layer in model.chain if layer.kind == "decoder"]
    if not decoders:
        raise UsageError(f"{model.name} has no decoder layer")
    return max(decoders, key=layer_params)


def layers_held(model: Model, room_bytes: float, bits: float, tp: int = 1) -> int:
    """Return how many of its largest decoder layers a device with `room_bytes` for weights holds."""
    return int(room_bytes / layer_bytes(largest_decoder(model), bits, tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPeak:
    """Bytes of weights on one device (or its host) while they are loaded, and afterwards."""

    peak_bytes: float
    steady_bytes: float


def load_peak(model: Model, bits: float, num_ranks: int, loading: Loading = "each rank") -> LoadPeak:
    """Return what loading a model that `num_ranks` devices share takes on the device that takes most.

    "each rank": every rank materialises the whole model before it keeps its part.

    Raises:
        UsageError: there is no rank.
    """
    if num_ranks < 1:
        raise UsageError("weights need at least one rank")
    whole = weight_bytes(model, bits)
    peak = whole / num_ranks if loading == "sharded" else whole
    return LoadPeak(peak_bytes=peak, steady_bytes=whole / num_ranks)


def usable_tp_bytes(capacities: Sequence[float], ratios: Sequence[int]) -> float:
    """Return the bytes a tensor-parallel group of unlike devices can use when shares are as `ratios`.

    The device that is full first ends it: ``sum(ratios) x min(capacity_i / ratio_i)``.

    Raises:
        UsageError: the ratios do not match the devices.
    """
    if len(capacities) != len(ratios) or not ratios or min(ratios) < 1:
        raise UsageError(f"{len(capacities)} devices need as many ratios of at least 1, not {list(ratios)}")
    return sum(ratios) * min(capacity / ratio for capacity, ratio in zip(capacities, ratios, strict=True))


def tp_ratio_errors(model: Model, ratios: Sequence[int]) -> tuple[str, ...]:
    """Return which widths cannot be cut in the proportion of `ratios` (empty: all can): their sum must divide them."""
    total = sum(ratios)
    errors: dict[str, None] = {}
    for layer in {id(layer): layer for layer in model.chain}.values():
        if layer.kind not in ("decoder", "encoder", "mtp"):
            continue
        for operator in layer.operators:
            for linear in operator.linears if isinstance(operator, Experts) else (operator,):
                if not isinstance(linear, Linear) or linear.split not in ("column", "row"):
                    continue
                width = linear.outputs if linear.split == "column" else linear.inputs
                if width % total:
                    errors[f"{linear.name}: {width} is no multiple of {total}, the sum of the ratios"] = None
    return tuple(errors)


def best_tp_ratios(capacities: Sequence[float], model: Model | None = None, most: int = 64) -> tuple[int, ...]:
    """Return the ratios with the smallest sum up to `most` that use most of unlike devices' memory.

    Ratios that the model's widths do not allow are passed over.

    Raises:
        UsageError: no ratios are possible.
    """
    best: tuple[float, tuple[int, ...]] | None = None
    whole = sum(capacities)
    for total in range(len(capacities), most + 1):
        ratios = _shares(total, capacities)
        if ratios is None or (model is not None and tp_ratio_errors(model, ratios)):
            continue
        used = usable_tp_bytes(capacities, ratios)
        if best is None or used > best[0] * (1 + 1e-9):
            best = (used, ratios)
        if best[0] >= whole * (1 - 1e-9):
            break
    if best is None:
        raise UsageError("no ratios divide the model's widths")
    return best[1]


def _shares(total: int, capacities: Sequence[float]) -> tuple[int, ...] | None:
    """Return whole ratios that sum to `total` and fill devices as evenly as they can, None where one would be 0."""
    shares = [max(1, int(total * capacity / sum(capacities))) for capacity in capacities]
    while sum(shares) < total:
        fill = [(share + 1) / capacity for share, capacity in zip(shares, capacities, strict=True)]
        shares[fill.index(min(fill))] += 1
    return tuple(shares) if sum(shares) == total else None
