"""Model FLOPs of one sample: the useful work a step does, whatever the layout.

Each linear does `2 T k n` forward and twice that backward (6 a parameter and token, tied heads included, tables not);
attention twice `2 T c a d` for a mean context `c`, which causal masks halve and windows cap; of a mixture only the
experts a token visits count. Recomputation does not.
"""

from __future__ import annotations

from hetplan.costs.compute import context_tokens
from hetplan.specs.model import Attention, Experts, Layer, Linear, Model, Operator
from hetplan.specs.workload import Workload


def model_flop(model: Model, workload: Workload) -> float:
    """Return the FLOPs of one sample, forward and backward."""
    return 3.0 * sum(forward_flop(layer, workload) for layer in model.chain)


def forward_flop(layer: Layer, workload: Workload) -> float:
    """Return the forward FLOPs of one sample through one layer."""
    tokens = layer.tokens_per_sample or workload.seq_len
    return sum(_forward_flop(operator, tokens) for operator in layer.operators)


def _forward_flop(operator: Operator, tokens: int) -> float:
    match operator:
        case Linear():
            return 2.0 * tokens * operator.inputs * operator.outputs
        case Attention():
            width = operator.qk_head_dim + operator.value_head_dim
            return 2.0 * tokens * context_tokens(operator, tokens) * operator.num_heads * width
        case Experts():
            visited = sum(_forward_flop(linear, tokens) for linear in operator.linears)
            return _forward_flop(operator.router, tokens) + operator.top_k * visited
        case _:
            return 0.0
