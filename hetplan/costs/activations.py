"""Bytes that autograd keeps from a layer's forward to its backward pass, tensor by tensor, for many options at once.

Kept: the input of every norm, linear and activation (once where operators share it), queries, keys and values, and,
where attention materialises them, probabilities, dropout mask and dropped probabilities; dropout masks of one byte.
Gradients of score matrices come and go within one layer's backward pass.
For a GPT layer of hidden size h, a heads, b sequences of s tokens this is `s b h (34 + 5 a s / h)`; tensor parallelism
divides all but norm inputs, the inputs of cut linears and residual dropout masks, `s b h (10 + 24/t + 5 a s / (h t))`;
sequence parallelism divides those too (Korthikanti 2022, arXiv:2205.05198, eq. 1, 2, 4). Selective recomputation keeps
no score matrices (eq. 6, `34 s b h / t`), full recomputation only the layer's input. Fused attention keeps its output
(the next linear's input) and an fp32 log-sum a head instead of scores. cp divides the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hetplan.costs.batch import Batch
from hetplan.costs.compute import Amount, linear_shape
from hetplan.costs.records import Floats
from hetplan.specs.model import Activation, Attention, Experts, Layer, Linear, Loss, Norm, Operator, Table

SCORES_ON_TOP = {True: 1, False: 2}
"""Matrices of the size of the scores that a backward pass holds on top of those kept, with dropout and without.

The gradient of the dropped probabilities takes the place of these, which are then free; dropout's backward pass makes
one more. Without dropout nothing is free before softmax's backward pass has turned one gradient into another."""
RECOMPUTED_KINDS = ("encoder", "decoder", "projector", "mtp")
"""Layers that recomputation touches; embedding and head keep what they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of one microbatch on one rank; arrays over options or plain zeros."""

    kept_bytes: Amount = 0.0
    """Everything autograd keeps but score matrices."""
    score_bytes: Amount = 0.0
    """Score matrices of materialised attention."""
    transient_bytes: Amount = 0.0
    """Gradients of the widest operator's input and output, alive at once in the backward pass."""
    score_gradient_bytes: Amount = 0.0
    """Part of `transient_bytes`: gradients of score matrices."""
    logits_bytes: Amount = 0.0


def layer_activations(layer: Layer, batch: Batch) -> Activations:
    """Return what one layer keeps without any recomputation."""
    tokens_o = batch.tokens_o(layer.tokens_per_sample)
    parts = [operator_activations(operator, layer, batch) for operator in layer.operators]
    if layer.dropout and layer.kind != "head":
        num_masks = max(1, sum(_ends_block(operator) for operator in layer.operators))
        masks_o = num_masks * tokens_o * layer.width / batch.sequence_o
        parts.append(Activations(kept_bytes=masks_o))
    sums = {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Activations)}
    widest: Amount = 0.0
    for part in parts:
        widest = np.maximum(widest, part.transient_bytes)
    held = np.where(sums["score_gradient_bytes"] >= widest, sums["score_gradient_bytes"], 0.0)
    return Activations(**(sums | {"transient_bytes": widest, "score_gradient_bytes": held}))


def input_bytes_o(layer: Layer, batch: Batch) -> Floats:
    """Return the bytes of a layer's input, all that full recomputation keeps."""
    tokens_o = batch.tokens_o(layer.tokens_per_sample)
    return tokens_o * layer.width * batch.workload.activation_bytes / batch.sequence_o


def _ends_block(operator: Operator) -> bool:
    """Return whether a residual sum (with its dropout) follows."""
    return isinstance(operator, Experts) or (isinstance(operator, Linear) and operator.split == "row")


def operator_activations(operator: Operator, layer: Layer, batch: Batch) -> Activations:
    """Return what one operator keeps."""
    tokens_o = batch.tokens_o(layer.tokens_per_sample)
    element = batch.workload.activation_bytes
    match operator:
        case Linear():
            return _linear(operator, batch, tokens_o)
        case Norm():
            split = batch.tp_o if operator.sharded else batch.sequence_o
            return Activations(kept_bytes=tokens_o * operator.width * element / split)
        case Activation():
            return Activations(kept_bytes=_activation_o(operator, batch, tokens_o))
        case Attention():
            return _attention(operator, layer, batch, tokens_o)
        case Table():
            return Activations(transient_bytes=tokens_o * operator.width * element + _table_gradient(operator, batch))
        case Experts():
            return _experts(operator, layer, batch, tokens_o)
        case Loss():
            low_precision_copy = element if element < 4 else 0
            return Activations(logits_bytes=tokens_o * operator.vocab * (8 + low_precision_copy) / batch.tp_o)
        case _:
            return Activations()


def _table_gradient(table: Table, batch: Batch) -> Amount:
    """Return the gradient of a whole table, which a lookup makes before it is added to the accumulated one."""
    if batch.workload.gradient_bytes == batch.workload.weight_bytes:
        return 0.0
    rows = float(table.rows * table.width * batch.workload.weight_bytes)
    return rows / batch.tp_o if table.split == "vocab" else rows


def _linear(linear: Linear, batch: Batch, tokens_o: Floats) -> Activations:
    """Return a linear's input, kept in the form in which it arrived (cut over the sequence, or over features)."""
    element = batch.workload.activation_bytes
    rows_o, inputs, outputs = linear_shape(linear, batch, tokens_o)
    transient_o = rows_o * (inputs + outputs) * element
    if linear.split == "vocab":
        transient_o = rows_o * inputs * element
    if not linear.reads_new_input:
        return Activations(transient_bytes=transient_o)
    kept_o = rows_o * inputs * element
    if linear.split in ("column", "vocab"):
        kept_o = kept_o / batch.sequence_o
    return Activations(kept_bytes=kept_o, transient_bytes=transient_o)


def _activation_o(activation: Activation, batch: Batch, tokens_o: Floats) -> Floats:
    width = activation.width * (2 if activation.gated else 1)
    return tokens_o * width * batch.workload.activation_bytes / batch.tp_o


def _attention(attention: Attention, layer: Layer, batch: Batch, tokens_o: Floats) -> Activations:
    element = batch.workload.activation_bytes
    heads_o = attention.num_heads / batch.tp_o
    kv_heads_o = np.maximum(1.0, attention.num_kv_heads / batch.tp_o)
    widths_o = heads_o * attention.qk_head_dim + kv_heads_o * (attention.qk_head_dim + attention.value_head_dim)
    log_sums_o = np.where(batch.flash_o, 4.0 * tokens_o * heads_o, 0.0)
    seq_len = layer.tokens_per_sample or batch.workload.seq_len
    bytes_a_score = 2 * element + 1 if layer.dropout else element
    scores_o = np.where(batch.flash_o, 0.0, tokens_o * seq_len * heads_o * bytes_a_score)
    passing_o = np.where(
        batch.flash_o, 0.0, SCORES_ON_TOP[bool(layer.dropout)] * tokens_o * seq_len * heads_o * element
    )
    return Activations(
        kept_bytes=tokens_o * widths_o * element + log_sums_o,
        score_bytes=scores_o,
        transient_bytes=passing_o,
        score_gradient_bytes=passing_o,
    )


def _experts(experts: Experts, layer: Layer, batch: Batch, tokens_o: Floats) -> Activations:
    """Return router logits (fp32), routed inputs, what the experts keep, and outputs that wait to be weighted."""
    element = batch.workload.activation_bytes
    routed_o = tokens_o * experts.top_k
    router = _linear(experts.router, batch, tokens_o)
    kept_o = router.kept_bytes + 4.0 * tokens_o * experts.num_experts / batch.sequence_o
    kept_o = kept_o + routed_o * layer.width * element / batch.sequence_o
    kept_o = kept_o + _activation_o(experts.activation, batch, routed_o)
    transient_o = batch.zeros_o
    for linear in experts.linears:
        rows_o, inputs, outputs = linear_shape(linear, batch, routed_o)
        transient_o = np.maximum(transient_o, rows_o * (inputs + outputs) * element)
        if linear.reads_new_input:
            kept_o = kept_o + rows_o * inputs * element
    return Activations(kept_bytes=kept_o, transient_bytes=transient_o)
