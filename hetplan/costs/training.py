"""Costs of layers that do not train, or train by adapters only.

A frozen layer makes no weight gradients, keeps no gradient and no optimizer state, and, where nothing upstream trains,
has no backward pass and keeps no activations. Adapters are dense products that train, beside the frozen ones; their
outputs are added to those of the layer, and traffic between ranks is the layer's own.
"""

from __future__ import annotations

import numpy as np

from hetplan.costs.activations import operator_activations
from hetplan.costs.batch import Batch
from hetplan.costs.compute import Amount, operator_arithmetic, total
from hetplan.specs.model import Layer, Linear

_BACKWARD = ("backward_s", "recompute_s", "tp_backward_s", "cp_backward_s", "ep_backward_s", "saved_bytes")


def as_trained(layer: Layer, batch: Batch, row: dict[str, Amount]) -> dict[str, Amount]:
    """Return the costs `row` of a layer that trains in full, as they are under its `gradients` and `adapters`."""
    if layer.gradients == "all":
        return row
    weight_s = row["weight_gradient_s"]
    frozen = row["params"] + row["expert_params"]
    changed = row | {"weight_gradient_s": 0.0, "params": 0.0, "expert_params": 0.0, "frozen_params": frozen}
    changed["backward_s"] = row["backward_s"] - weight_s
    if layer.gradients == "none":
        return changed | dict.fromkeys((*_BACKWARD, "logits_bytes"), 0.0)
    return _with_adapters(layer, batch, changed) if layer.adapters else changed


def _with_adapters(layer: Layer, batch: Batch, row: dict[str, Amount]) -> dict[str, Amount]:
    tokens_o = batch.tokens_o(layer.tokens_per_sample)
    work = total([operator_arithmetic(adapter, layer, batch, tokens_o) for adapter in layer.adapters])
    kept: Amount = sum(operator_activations(adapter, layer, batch).kept_bytes for adapter in layer.adapters)
    again_o = np.where(batch.full_o, work.forward_s, 0.0)
    return row | {
        "forward_s": row["forward_s"] + work.forward_s,
        "backward_s": row["backward_s"] + work.data_s + work.weight_s + again_o,
        "recompute_s": row["recompute_s"] + again_o,
        "weight_gradient_s": work.weight_s,
        "params": sum(_rank_params(adapter, batch) for adapter in layer.adapters),
        "saved_bytes": row["saved_bytes"] + np.where(batch.full_o, 0.0, kept),
    }


def _rank_params(adapter: Linear, batch: Batch) -> Amount:
    weight = float(adapter.inputs * adapter.outputs)
    return weight if adapter.split == "none" else weight / batch.tp_o
