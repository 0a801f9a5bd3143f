"""Seconds of communication inside a stage's mesh that nothing hides, for many options at once.

**tp.** A linear whose outputs are cut (`column`, `vocab`) needs its whole input, once where several in a row read the
same one (q, k, v; gate, up); a linear whose inputs are cut (`row`) and a vocabulary-cut table sum their outputs over
the group. With sequence parallelism the former is an all-gather and the latter a reduce-scatter; backward they swap,
and the gathered input, which was not kept, is gathered again behind the data-gradient product, of which only the
excess counts (Korthikanti 2022, arXiv:2205.05198). Without it, the former costs an all-reduce backward only, the latter
an all-reduce forward only (Shoeybi 2019, arXiv:1909.08053). Cross-entropy adds three all-reduces of one fp32 number a
token. A share `Overlap.tp_fraction` of all this is hidden.

**cp.** Ring attention: keys and values go around in `cp - 1` steps, each behind the attention of the chunk at hand;
the excess counts. Backward moves keys, values and their gradients (Liu 2023, arXiv:2310.01889).

**ep.** Two all-to-alls forward (dispatch, combine) and two backward of the routed tokens; nothing hides them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hetplan.costs.batch import Batch
from hetplan.costs.compute import Amount, operator_arithmetic
from hetplan.costs.records import Floats
from hetplan.specs.model import Attention, Experts, Layer, Linear, Loss, Operator, Table

LOSS_ALL_REDUCES = 3
"""Maximum, sum of exponentials, logit of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Exposed seconds of one microbatch on one rank; arrays over options or plain zeros."""

    tp_forward_s: Amount = 0.0
    tp_backward_s: Amount = 0.0
    cp_forward_s: Amount = 0.0
    cp_backward_s: Amount = 0.0
    ep_forward_s: Amount = 0.0
    ep_backward_s: Amount = 0.0


def layer_communication(layer: Layer, batch: Batch) -> Communication:
    """Return what one layer exposes."""
    tokens_o = batch.tokens_o(layer.tokens_per_sample)
    parts = []
    whole = False
    for operator in layer.operators:
        if isinstance(operator, Linear) and operator.split in ("column", "vocab"):
            if operator.reads_new_input or not whole:
                parts.append(_gathered_input(operator, layer, batch, tokens_o))
            whole = True
            continue
        if isinstance(operator, Experts) or (isinstance(operator, Linear) and operator.reads_new_input):
            whole = False
        parts.append(_operator(operator, layer, batch, tokens_o))
    return Communication(
        **{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Communication)}
    )


def _operator(operator: Operator, layer: Layer, batch: Batch, tokens_o: Floats) -> Communication:
    """Return what one operator exposes, but for linears that need their whole input."""
    match operator:
        case Linear(split="row"):
            return _summed_output(operator.outputs, batch, tokens_o)
        case Table(split="vocab"):
            return _summed_output(operator.width, batch, tokens_o)
        case Loss():
            one_s = batch.tp_rings.all_reduce_s(4.0 * tokens_o)
            return Communication(tp_forward_s=LOSS_ALL_REDUCES * one_s * batch.tp_exposed)
        case Attention():
            return _ring_attention(operator, layer, batch, tokens_o)
        case Experts():
            return _experts(operator, layer, batch, tokens_o)
        case _:
            return Communication()


def _gathered_input(linear: Linear, layer: Layer, batch: Batch, tokens_o: Floats) -> Communication:
    bytes_o = tokens_o * linear.inputs * batch.workload.activation_bytes
    if not batch.workload.sequence_parallel:
        return Communication(tp_backward_s=batch.tp_rings.all_reduce_s(bytes_o) * batch.tp_exposed)
    half_o = batch.tp_rings.reduce_scatter_s(bytes_o)
    product_o = operator_arithmetic(linear, layer, batch, tokens_o).data_s
    again_o = np.maximum(0.0, half_o - product_o)
    return Communication(
        tp_forward_s=half_o * batch.tp_exposed,
        tp_backward_s=(half_o + again_o) * batch.tp_exposed,
    )


def _summed_output(width: int, batch: Batch, tokens_o: Floats) -> Communication:
    bytes_o = tokens_o * width * batch.workload.activation_bytes
    if not batch.workload.sequence_parallel:
        return Communication(tp_forward_s=batch.tp_rings.all_reduce_s(bytes_o) * batch.tp_exposed)
    half_o = batch.tp_rings.reduce_scatter_s(bytes_o) * batch.tp_exposed
    return Communication(tp_forward_s=half_o, tp_backward_s=half_o)


def _ring_attention(attention: Attention, layer: Layer, batch: Batch, tokens_o: Floats) -> Communication:
    steps_o = batch.cp_o - 1
    if not steps_o.any():
        return Communication()
    heads_o = np.maximum(1.0, attention.num_kv_heads / batch.tp_o)
    width = attention.qk_head_dim + attention.value_head_dim
    chunk_bytes_o = tokens_o * heads_o * width * batch.workload.activation_bytes
    latency_o = batch.cp_rings.pass_latency_s_o / np.maximum(1.0, steps_o)
    send_o = latency_o + chunk_bytes_o * batch.cp_rings.s_per_byte_o
    work = operator_arithmetic(attention, layer, batch, tokens_o)
    hidden_forward_o, hidden_backward_o = work.forward_s / batch.cp_o, work.data_s / batch.cp_o
    return Communication(
        cp_forward_s=steps_o * np.maximum(0.0, send_o - hidden_forward_o),
        cp_backward_s=steps_o * np.maximum(0.0, 2 * send_o - hidden_backward_o),
    )


def _outer_share_o(experts: Experts, batch: Batch) -> Floats:
    """Return which part of the copies between nodes travels.

    A token's `k` experts lie on `D (1 - (1 - 1/D) ** k)` of `D` nodes on average; where the exchange sends a token once
    to each node (as DeepEP does, DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2), so many copies travel, not `k`.
    """
    nodes_o = batch.ep_rings.num_domains_o
    once_o = nodes_o * (1.0 - (1.0 - 1.0 / nodes_o) ** experts.top_k) / experts.top_k
    merged_o = batch.exchange_merged_o
    return 1.0 - merged_o + merged_o * once_o


def _experts(experts: Experts, layer: Layer, batch: Batch, tokens_o: Floats) -> Communication:
    """Return the all-to-alls, and gathering routed tokens over the tp group that cuts each expert."""
    element = batch.workload.activation_bytes
    routed_bytes_o = tokens_o * experts.top_k * layer.width * element
    sent_o = routed_bytes_o / batch.tp_o / batch.exchange_fraction_o
    exchange_o = np.where(batch.ep_o > 1, batch.ep_rings.exchange_s(sent_o, _outer_share_o(experts, batch)), 0.0)
    gathered_o = np.where(batch.ep_o > 1, routed_bytes_o, tokens_o * layer.width * element)
    if batch.workload.sequence_parallel:
        tp_o = 2 * batch.tp_rings.reduce_scatter_s(gathered_o)
    else:
        tp_o = batch.tp_rings.all_reduce_s(gathered_o)
    return Communication(
        tp_forward_s=tp_o * batch.tp_exposed,
        tp_backward_s=tp_o * batch.tp_exposed,
        ep_forward_s=2 * exchange_o,
        ep_backward_s=2 * exchange_o,
    )
