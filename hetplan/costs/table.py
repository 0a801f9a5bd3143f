"""Costs of every layer of a chain under every option: equal layers are worked out once and spread over the chain.

Suffixes: `_o` one entry an option, `_ou` options x unlike layers, `_ol` options x layers of the chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetplan.costs.activations import RECOMPUTED_KINDS, input_bytes_o, layer_activations
from hetplan.costs.batch import Batch
from hetplan.costs.communication import layer_communication
from hetplan.costs.compute import Amount, layer_arithmetic
from hetplan.costs.records import LayerCosts
from hetplan.costs.training import as_trained
from hetplan.specs.model import Experts, Layer, Linear, Operator, Parameters, Table, operator_params

FIELDS = tuple(LayerCosts.__dataclass_fields__)


def unlike_layers(chain: Sequence[Layer]) -> tuple[tuple[Layer, ...], npt.NDArray[np.intp]]:
    """Return the layers of a chain that differ in more than their name, and for each place which of them it holds."""
    places: dict[tuple[object, ...], int] = {}
    found: list[Layer] = []
    index_l = np.empty(len(chain), dtype=np.intp)
    for place, layer in enumerate(chain):
        trains = (layer.gradients, layer.adapters)
        key = (layer.kind, layer.width, layer.operators, layer.tokens_per_sample, layer.dropout, trains)
        if key not in places:
            places[key] = len(found)
            found.append(layer)
        index_l[place] = places[key]
    return tuple(found), index_l


def cost_table(layers: Sequence[Layer], index_l: npt.NDArray[np.intp], batch: Batch) -> LayerCosts:
    """Return the costs of a chain, shape (options, layers), from its unlike `layers` and where each stands."""
    columns = [layer_costs(layer, batch) for layer in layers]
    spread = {}
    for name in FIELDS:
        values_ou = np.stack([np.broadcast_to(column[name], batch.num_options) for column in columns], axis=1)
        spread[name] = values_ou[:, index_l]
    return LayerCosts(**spread)


def layer_costs(layer: Layer, batch: Batch) -> dict[str, Amount]:
    """Return the fields of `LayerCosts` for one layer, each an array over options or a plain number."""
    work = layer_arithmetic(layer, batch)
    talk = layer_communication(layer, batch)
    kept = layer_activations(layer, batch)
    repeats_all_o = batch.full_o & (layer.kind in RECOMPUTED_KINDS)
    repeats_core_o = batch.selective_o & (layer.kind in RECOMPUTED_KINDS)
    recompute_o = np.where(repeats_all_o, work.forward_s, np.where(repeats_core_o, work.core_s, 0.0))
    saved_o = np.where(repeats_core_o, kept.kept_bytes, kept.kept_bytes + kept.score_bytes)
    repeated_o = np.where(repeats_core_o, kept.score_bytes, 0.0)
    repeated_o = np.where(repeats_all_o, kept.kept_bytes + kept.score_bytes, repeated_o)
    scores_o = kept.score_gradient_bytes + np.where(repeats_core_o | repeats_all_o, kept.score_bytes, 0.0)
    params, expert_params = rank_params(layer, batch)
    row: dict[str, Amount] = {
        "forward_s": work.forward_s,
        "backward_s": work.data_s + work.weight_s + recompute_o,
        "weight_gradient_s": work.weight_s,
        "recompute_s": recompute_o,
        "tp_forward_s": talk.tp_forward_s,
        "tp_backward_s": talk.tp_backward_s + np.where(repeats_all_o, talk.tp_forward_s, 0.0),
        "cp_forward_s": talk.cp_forward_s,
        "cp_backward_s": talk.cp_backward_s + np.where(repeats_all_o, talk.cp_forward_s, 0.0),
        "ep_forward_s": talk.ep_forward_s,
        "ep_backward_s": talk.ep_backward_s + np.where(repeats_all_o, talk.ep_forward_s, 0.0),
        "params": params,
        "expert_params": expert_params,
        "frozen_params": 0.0,
        "saved_bytes": np.where(repeats_all_o, input_bytes_o(layer, batch), saved_o),
        "working_bytes": kept.transient_bytes + repeated_o,
        "scores_bytes": scores_o,
        "logits_bytes": kept.logits_bytes,
    }
    return as_trained(layer, batch, row)


def rank_params(layer: Layer, batch: Batch) -> tuple[Amount, Amount]:
    """Return the parameters a rank holds of a layer: those every data-parallel rank copies, and routed experts."""
    dense: Amount = 0.0
    expert: Amount = 0.0
    for operator in layer.operators:
        if isinstance(operator, Experts):
            dense = dense + _split_params(operator.router, batch) + operator.extra_params
            inside = sum(_split_params(linear, batch) for linear in operator.linears)
            expert = expert + operator.num_experts / batch.ep_o * inside
        else:
            dense = dense + _split_params(operator, batch)
    return dense, expert


def _split_params(operator: Operator, batch: Batch) -> Amount:
    """Return the parameters of one operator on one rank; tp cuts weights, and biases of cut outputs."""
    params = float(operator_params(operator))
    match operator:
        case Linear(split="column" | "vocab") | Table(split="vocab"):
            return params / batch.tp_o
        case Linear(split="row"):
            bias = operator.outputs if operator.bias and not operator.tied else 0
            return (params - bias) / batch.tp_o + bias
        case Parameters(cut_by=most) if most > 1:
            return params / batch.tp_o
        case _:
            return params
