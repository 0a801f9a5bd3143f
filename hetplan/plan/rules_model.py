"""Which degrees a model can be cut by.

Tensor parallelism gives every rank whole attention heads, whole key/value heads and equal slices of every projection.
Vocabularies are padded by every engine and set no limit. Context parallelism gives every rank two equal pieces of the
sequence, one early and one late, so that causal attention is balanced; expert parallelism gives every rank as many
routed experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

from hetplan.plan.rules import Case, Violation, listed
from hetplan.specs.model import Attention, Experts, Layer, Linear, Model, Parameters


def valid_tp(model: Model) -> tuple[int, ...]:
    """Return every tensor-parallel degree all layers of the model can be cut by, ascending."""
    return layers_tp(model.chain)


def layers_tp(layers: Iterable[Layer]) -> tuple[int, ...]:
    """Return every tensor-parallel degree these layers can be cut by, ascending (modules may differ)."""
    common = gcd(*(width for layer in _unlike(layers) for width, _ in _tp_widths(layer)))
    return _divisors(common) if common else (1,)


def valid_ep(model: Model) -> tuple[int, ...]:
    """Return every expert-parallel degree the model can be cut by, ascending."""
    return _layers_ep(model.chain)


def _layers_ep(layers: Iterable[Layer]) -> tuple[int, ...]:
    common = gcd(*(o.num_experts for layer in _unlike(layers) for o in layer.operators if isinstance(o, Experts)))
    return _divisors(common) if common else (1,)


def degree_errors(
    model: Model, *, tp: int = 1, cp: int = 1, ep: int = 1, seq_len: int | None = None
) -> tuple[str, ...]:
    """Return why the model cannot be cut by these degrees (empty: it can)."""
    return _errors(_unlike(model.chain), (tp, cp, ep), seq_len)


def _errors(layers: tuple[Layer, ...], degrees: tuple[int, int, int], seq_len: int | None) -> tuple[str, ...]:
    tp, cp, ep = degrees
    return (*_tp_errors(layers, tp), *_cp_errors(cp, seq_len), *_ep_errors(layers, ep))


def _unlike(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return the different layers of a chain; equal ones are the same object repeated."""
    return tuple({id(layer): layer for layer in layers}.values())


def _divisors(value: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return tuple(sorted({*small, *(value // d for d in small)}))


def _tp_widths(layer: Layer) -> Iterator[tuple[int, str]]:
    """Yield what tp must divide, in words: heads first, so that a message names the plainest reason."""
    if layer.kind in ("embedding", "head"):
        return
    for operator in layer.operators:
        if isinstance(operator, Attention):
            yield operator.num_kv_heads, f"{operator.num_kv_heads} key/value heads"
            yield operator.num_heads, f"{operator.num_heads} attention heads"
    for operator in layer.operators:
        if isinstance(operator, Parameters) and operator.cut_by > 1:
            yield operator.cut_by, f"the degree {operator.cut_by} a {layer.kind} is stated to be cut by"
    for operator in layer.operators:
        linears = operator.linears if isinstance(operator, Experts) else (operator,)
        for linear in linears:
            if isinstance(linear, Linear) and linear.split == "column":
                yield linear.outputs, f"the {linear.outputs} outputs of {linear.name}"
            elif isinstance(linear, Linear) and linear.split == "row":
                yield linear.inputs, f"the {linear.inputs} inputs of {linear.name}"


def _tp_errors(layers: tuple[Layer, ...], tp: int) -> Iterator[str]:
    if tp == 1:
        return
    for layer in layers:
        for width, words in _tp_widths(layer):
            if width % tp:
                yield f"tp {tp} does not divide {words} (valid: {listed(layers_tp(layers))})"
                return


def _cp_errors(cp: int, seq_len: int | None) -> Iterator[str]:
    if cp > 1 and seq_len is not None and seq_len % (2 * cp):
        yield f"cp {cp} needs a sequence length that is a multiple of {2 * cp}, not {seq_len}"


def _ep_errors(layers: tuple[Layer, ...], ep: int) -> Iterator[str]:
    if ep == 1:
        return
    counts = sorted({o.num_experts for layer in layers for o in layer.operators if isinstance(o, Experts)})
    if not counts:
        yield f"ep {ep} needs routed experts, and there are none (valid: 1)"
    elif any(count % ep for count in counts):
        yield f"ep {ep} does not divide {listed(counts)} routed experts (valid: {listed(_layers_ep(layers))})"


def degrees_divide(case: Case) -> Iterator[Violation]:
    """Every stage's tp, cp and ep cut its layers evenly, and ep the stage's dp x cp ranks."""
    chain, seq_len = case.prices.model.chain, case.prices.workload.seq_len
    all_layers = _unlike(chain)
    known: dict[tuple[object, ...], tuple[str, ...]] = {}
    for where, _, stage in case.stages():
        layers = _unlike(chain[stage.first_layer : stage.end_layer])
        degrees = (stage.tp, stage.cp, stage.ep)
        key = (*degrees, *map(id, layers))
        if key not in known:
            without_ep = _errors(layers, (stage.tp, stage.cp, 1), seq_len)
            known[key] = (*without_ep, *_ep_errors(all_layers, stage.ep))
        for message in known[key]:
            yield Violation(rule="degrees divide the model", where=where, message=message)
        if (stage.dp * stage.cp) % stage.ep:
            yield Violation(
                rule="ep inside dp x cp",
                where=where,
                message=f"ep {stage.ep} does not divide the stage's dp x cp = {stage.dp} x {stage.cp} ranks",
            )


MODEL_RULES = (degrees_divide,)
