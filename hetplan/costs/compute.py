"""Seconds of arithmetic of one layer's operators, for many options at once.

Every operator is a roofline, `max(flop / (peak x efficiency), bytes / (memory bandwidth x fraction))`:

* **GEMM** (`rows x inputs` times `inputs x outputs`): `2 rows inputs outputs` flop at efficiency
  `gemm_peak_fraction x flop / (flop + gemm_half_flop) x (1 - misalignment)`. The backward pass holds two more of the
  same size, for the gradient of the input and of the weight; the latter also reads and writes the accumulated gradient.
* **Attention**, fused: its flop (causal masks halve them, windows cap the context) at a fraction of the peak; its
  backward pass does 2.5 times as many (five products for two; Dao 2022, arXiv:2205.14135). Materialised: two batched
  GEMMs over full square scores, and the passes of scale-mask-softmax and dropout over the score matrix.
* **Norms, activations, residuals, dropout, tables, routing** are memory traffic: each tensor read or written once.
* **Loss**: fp32 logits are written once and read three times forward (maximum, sum, target), read and written once
  backward.

fp8 applies to GEMMs inside layers; head, router and everything else stay in bf16, and each fp8 GEMM pays for casting
its inputs. Suffix `_o`: one entry an option.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hetplan.costs.batch import Batch
from hetplan.costs.records import Floats
from hetplan.specs.model import (
    Activation,
    Attention,
    Experts,
    Layer,
    Linear,
    Loss,
    Norm,
    Operator,
    Parameters,
    Table,
)

Amount = Floats | float

FLASH_BACKWARD_FACTOR = 2.5
"""Backward over forward flop of fused attention: five matrix products instead of two."""
SCORE_PASSES = {"forward": 4.0, "backward": 7.0}
"""Elements moved per score: write scores, softmax (read, write), read probabilities; backward: read them twice, write
the gradient, softmax backward (two reads, one write), read it for queries and keys (held in cache once)."""
DROPOUT_PASSES = {"forward": 2.0, "backward": 2.0}
"""Elements moved per score by attention dropout, its one-byte mask apart: read, write."""


TENSOR_ELEMENTS = 8
"""Batched products of 16-bit elements run on matrix units where their widths are multiples of 16 bytes (NVIDIA,
Matrix Multiplication Background User's Guide); other head sizes fall back to vector units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Seconds of one microbatch on one rank; entries are arrays over options or plain zeros."""

    forward_s: Amount = 0.0
    data_s: Amount = 0.0
    """Backward pass but for weight gradients."""
    weight_s: Amount = 0.0
    """Weight gradients."""
    core_s: Amount = 0.0
    """Part of the forward pass that selective recomputation repeats."""


def total(parts: list[Arithmetic]) -> Arithmetic:
    """Return the sum of operators."""
    return Arithmetic(**{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Arithmetic)})


def slowed(work: Arithmetic, factor: Amount) -> Arithmetic:
    """Return work that takes `factor` times as long."""
    return Arithmetic(**{field.name: getattr(work, field.name) * factor for field in fields(Arithmetic)})


def layer_arithmetic(layer: Layer, batch: Batch) -> Arithmetic:
    """Return the seconds of one layer, launch overhead included."""
    tokens_o = batch.tokens_o(layer.tokens_per_sample)
    parts = [operator_arithmetic(operator, layer, batch, tokens_o) for operator in layer.operators]
    parts.append(Arithmetic(forward_s=batch.overhead_s_o, data_s=2 * batch.overhead_s_o))
    return total(parts)


def operator_arithmetic(operator: Operator, layer: Layer, batch: Batch, tokens_o: Floats) -> Arithmetic:
    """Return the seconds of one operator for `tokens_o` tokens a rank."""
    match operator:
        case Linear():
            low = layer.kind not in ("head", "embedding")
            residual = _residual(layer, batch, tokens_o) if operator.split == "row" else Arithmetic()
            return total([_linear(operator, batch, tokens_o, low_precision=low), residual])
        case Attention():
            return _attention(operator, layer, batch, tokens_o)
        case Norm():
            split = batch.tp_o if operator.sharded else batch.sequence_o
            return _traffic(batch, tokens_o * operator.width / split, reads_writes=(2, 3))
        case Activation():
            moved = (3, 5) if operator.gated else (2, 3)
            return _traffic(batch, tokens_o * operator.width / batch.tp_o, reads_writes=moved)
        case Table():
            return _table(operator, layer, batch, tokens_o)
        case Experts():
            return total([_experts(operator, layer, batch, tokens_o), _residual(layer, batch, tokens_o)])
        case Loss():
            return _loss(operator, batch, tokens_o)
        case Parameters():
            return Arithmetic()


def linear_shape(linear: Linear, batch: Batch, tokens_o: Floats) -> tuple[Floats, Amount, Amount]:
    """Return rows, inputs and outputs of a linear on one rank.

    Replicated linears (`split` none) run on the rank's share of the sequence where sequence parallelism splits it.
    """
    match linear.split:
        case "column" | "vocab":
            return tokens_o, float(linear.inputs), linear.outputs / batch.tp_o
        case "row":
            return tokens_o, linear.inputs / batch.tp_o, float(linear.outputs)
        case "none":
            return tokens_o / batch.sequence_o, float(linear.inputs), float(linear.outputs)


def _linear(linear: Linear, batch: Batch, tokens_o: Floats, *, low_precision: bool) -> Arithmetic:
    rows_o, inputs, outputs = linear_shape(linear, batch, tokens_o)
    return _gemms(batch, (rows_o, inputs, outputs), low_precision=low_precision)


def _gemms(
    batch: Batch, shape: tuple[Floats, Amount, Amount], *, low_precision: bool, num_weights: Amount = 1.0
) -> Arithmetic:
    """Return forward, data and weight gradient of a product; `num_weights` weights share its rows evenly."""
    rows_o, inputs, outputs = shape
    workload = batch.workload
    element = workload.activation_bytes
    weights = num_weights * inputs * outputs
    peak_o = batch.gemm_flop_per_s_o if low_precision else batch.dense_flop_per_s_o
    slowed_o = misalignment_o((rows_o, inputs, outputs))
    speed_o = peak_o * (1.0 - batch.misaligned_penalty_o * slowed_o)
    arithmetic_o = (2.0 * rows_o * inputs * outputs + batch.half_flop_o) / speed_o
    cast = element + 1 if low_precision and workload.precision == "fp8" else 0
    moved = element * (rows_o * inputs + rows_o * outputs) + weights * workload.weight_bytes
    accumulated = element * (rows_o * inputs + rows_o * outputs) + 2.0 * weights * workload.gradient_bytes
    memory_o = batch.memory_bytes_per_s_o
    one_way_o = np.maximum(arithmetic_o, moved / memory_o)
    return Arithmetic(
        forward_s=one_way_o + cast * rows_o * inputs / memory_o,
        data_s=one_way_o + cast * rows_o * outputs / memory_o,
        weight_s=np.maximum(arithmetic_o, accumulated / memory_o),
    )


def misalignment_o(sizes: tuple[Amount, ...]) -> Amount:
    """Return 0 where all sizes are multiples of 64, 1 where of 8, else 2: how often the penalty applies."""
    steps: Amount = 0.0
    for size in sizes:
        off_64 = np.asarray(np.mod(size, 64) != 0, dtype=np.float64)
        off_8 = np.asarray(np.mod(size, 8) != 0, dtype=np.float64)
        steps = np.maximum(steps, off_64 + off_8)
    return steps


def context_tokens(attention: Attention, seq_len: int) -> float:
    """Return how many tokens a query meets on average."""
    window = min(attention.window or seq_len, seq_len)
    if not attention.causal:
        return float(window)
    return window - window * (window - 1) / (2 * seq_len)


def _attention(attention: Attention, layer: Layer, batch: Batch, tokens_o: Floats) -> Arithmetic:
    seq_len = layer.tokens_per_sample or batch.workload.seq_len
    heads_o = attention.num_heads / batch.tp_o
    width = attention.qk_head_dim + attention.value_head_dim
    flop_o = 2.0 * tokens_o * context_tokens(attention, seq_len) * heads_o * width
    fused_o = (flop_o + batch.half_flop_o) / batch.attention_flop_per_s_o
    if batch.flash_o.all():
        return Arithmetic(forward_s=fused_o, data_s=FLASH_BACKWARD_FACTOR * fused_o)
    forward_o, backward_o = _materialised_s(attention, layer, batch, tokens_o)
    return Arithmetic(
        forward_s=np.where(batch.flash_o, fused_o, forward_o),
        data_s=np.where(batch.flash_o, FLASH_BACKWARD_FACTOR * fused_o, backward_o),
        core_s=np.where(batch.flash_o, 0.0, forward_o),
    )


def _materialised_s(attention: Attention, layer: Layer, batch: Batch, tokens_o: Floats) -> tuple[Floats, Floats]:
    """Return forward and backward seconds of attention that writes its scores."""
    seq_len = layer.tokens_per_sample or batch.workload.seq_len
    element = batch.workload.activation_bytes
    scores_o = tokens_o * seq_len * attention.num_heads / batch.tp_o
    slowed_o = misalignment_o((float(seq_len), float(attention.qk_head_dim), float(attention.value_head_dim)))
    speed_o = batch.dense_flop_per_s_o * (1.0 - batch.misaligned_penalty_o * slowed_o)
    if attention.qk_head_dim % TENSOR_ELEMENTS or attention.value_head_dim % TENSOR_ELEMENTS:
        speed_o = np.minimum(speed_o, batch.vector_flop_per_s_o)
    flop_o = 2.0 * scores_o * (attention.qk_head_dim + attention.value_head_dim)
    products_o = (flop_o + 2 * batch.half_flop_o) / speed_o
    masks = 1.0 if layer.dropout else 0.0
    passes = {way: SCORE_PASSES[way] + masks * DROPOUT_PASSES[way] for way in SCORE_PASSES}
    memory_o = batch.memory_bytes_per_s_o
    forward_o = products_o + scores_o * (passes["forward"] * element + masks) / memory_o
    backward_o = 2 * products_o + scores_o * (passes["backward"] * element + masks) / memory_o
    return forward_o, backward_o


def _traffic(batch: Batch, elements_o: Floats, *, reads_writes: tuple[float, float]) -> Arithmetic:
    """Return the seconds of moving `elements_o` elements so many times forward and backward."""
    once_o = elements_o * batch.workload.activation_bytes / batch.memory_bytes_per_s_o
    forward, backward = reads_writes
    return Arithmetic(forward_s=forward * once_o, data_s=backward * once_o)


def _residual(layer: Layer, batch: Batch, tokens_o: Floats) -> Arithmetic:
    """Return bias, dropout and residual sum after a block: two reads and a write, and a one-byte mask."""
    elements_o = tokens_o * layer.width / batch.sequence_o
    plain = _traffic(batch, elements_o, reads_writes=(3, 3))
    if not layer.dropout:
        return plain
    mask_o = elements_o / batch.memory_bytes_per_s_o
    return total([plain, _traffic(batch, elements_o, reads_writes=(0, 2)), Arithmetic(forward_s=mask_o, data_s=mask_o)])


def _table(table: Table, layer: Layer, batch: Batch, tokens_o: Floats) -> Arithmetic:
    """Return a lookup: read and write rows; backward adds gradients to rows that are read and written."""
    elements_o = tokens_o * table.width
    memory_o = batch.memory_bytes_per_s_o
    element, gradient = batch.workload.activation_bytes, batch.workload.gradient_bytes
    return Arithmetic(
        forward_s=2 * elements_o * element / memory_o,
        weight_s=elements_o * (element + 2 * gradient) / memory_o,
    )


def _experts(experts: Experts, layer: Layer, batch: Batch, tokens_o: Floats) -> Arithmetic:
    """Return router, permutation and the experts' grouped products; tokens are spread evenly over experts."""
    routed_o = tokens_o * experts.top_k
    num_local_o = experts.num_experts / batch.ep_o
    parts = [_linear(experts.router, batch, tokens_o, low_precision=False)]
    for linear in experts.linears:
        rows_o, inputs, outputs = linear_shape(linear, batch, routed_o)
        product = _gemms(batch, (rows_o, inputs, outputs), low_precision=True, num_weights=num_local_o)
        parts.append(slowed(product, 1.0 / batch.expert_fraction_o))
    width_o = routed_o * experts.activation.width / batch.tp_o
    parts.append(_traffic(batch, width_o, reads_writes=(3, 5) if experts.activation.gated else (2, 3)))
    parts.append(_traffic(batch, routed_o * layer.width / batch.sequence_o, reads_writes=(4, 4)))
    parts.append(Arithmetic(forward_s=batch.expert_overhead_s_o, data_s=2 * batch.expert_overhead_s_o))
    return total(parts)


def _loss(loss: Loss, batch: Batch, tokens_o: Floats) -> Arithmetic:
    logits_o = tokens_o * loss.vocab / batch.tp_o
    element = batch.workload.activation_bytes
    memory_o = batch.memory_bytes_per_s_o
    return Arithmetic(
        forward_s=logits_o * (element + 4 * 4) / memory_o,
        data_s=logits_o * (4 + 4 + element) / memory_o,
    )
