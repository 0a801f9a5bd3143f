"""What decides a model's numbers but neither its cost nor its size: rotary base, norm epsilon, activation.

The operator form of a model leaves these out. They are taken from its configuration where it states them
(`Model.published`), else from what the family's published class uses. Only families whose arithmetic the runtime
follows are built; others (scaled embeddings, linear position biases, latent attention ...) are refused by name.
Rotary scaling for long contexts is not applied: it matters when pretrained weights are read, and none are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hetplan.errors import UsageError
from hetplan.specs.model import Experts, Layer, Model, Parameters, Table
from hetplan.units import show

Value = TypeVar("Value", float, str, bool)

BUILT = (*("gpt", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"),)
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Constants of the forward pass."""

    rope_theta: float = 10_000.0
    """Base of rotary positions (Su 2021, arXiv:2104.09864)."""
    norm_epsilon: float = 1e-5
    activation: str = "silu"
    renormalise: bool = True
    """Weights of the chosen experts sum to 1."""
    learned_positions: bool = False


_FAMILY = {
    "gpt": Numerics(activation="gelu_new"),
    "gpt2": Numerics(activation="gelu_new"),
    "llama": Numerics(norm_epsilon=1e-6),
    "mistral": Numerics(norm_epsilon=1e-6),
    "mixtral": Numerics(norm_epsilon=1e-5, rope_theta=1e6),
    "qwen2": Numerics(norm_epsilon=1e-6),
    "qwen2_moe": Numerics(norm_epsilon=1e-6, renormalise=False),
    "qwen3": Numerics(norm_epsilon=1e-6),
    "qwen3_moe": Numerics(norm_epsilon=1e-6, renormalise=False),
    "starcoder2": Numerics(activation="gelu_pytorch_tanh"),
}
"""Defaults of each family's configuration class in Hugging Face transformers."""


def numerics_of(model: Model) -> Numerics:
    """Return the constants of a model's forward pass.

    Raises:
        UsageError: the runtime does not build this family, or an operator of it.
    """
    if model.family not in _FAMILY or len(model.modules) != 1:
        raise UsageError(
            f"model {model.name} (family {model.family or 'unknown'}) is planned but not run; run builds "
            f"{', '.join(BUILT)}"
        )
    for layer in {id(layer): layer for layer in model.chain}.values():
        _require_built(model, layer)
    found = _FAMILY[model.family]
    activation = _stated(model, ("hidden_act", "activation_function"), found.activation)
    if activation not in ACTIVATIONS:
        raise UsageError(
            f"model {model.name}: activation {show(activation)} is not built (known: {', '.join(ACTIVATIONS)})"
        )
    return replace(
        found,
        rope_theta=_stated(model, ("rope_theta",), found.rope_theta),
        norm_epsilon=_stated(model, ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon"), found.norm_epsilon),
        activation=activation,
        renormalise=_stated(model, ("norm_topk_prob",), found.renormalise),
        learned_positions=any(
            isinstance(operator, Table) and operator.name == "positions" for operator in model.chain[0].operators
        ),
    )


def _stated(model: Model, names: tuple[str, ...], default: Value) -> Value:
    """Return the first of some fields that the configuration states as a value of the default's kind."""
    rotary = model.published.get("rope_parameters")
    for fields in (model.published, rotary if isinstance(rotary, Mapping) else {}):
        for name in names:
            value: Any = fields.get(name)
            if _kind(value) is type(default):
                return type(default)(value)
    return default


def _kind(value: object) -> type | None:
    """Return the kind a configuration's value is read as: whole numbers are numbers."""
    if isinstance(value, bool | str | float):
        return type(value)
    return float if isinstance(value, int) else None


def _require_built(model: Model, layer: Layer) -> None:
    """Refuse what the layers of the runtime do not compute."""
    if layer.kind not in ("embedding", "decoder", "head"):
        raise UsageError(f"model {model.name}: layers of kind {layer.kind} are planned but not run")
    for operator in layer.operators:
        biased = isinstance(operator, Experts) and any(linear.bias for linear in operator.linears)
        if isinstance(operator, Parameters) or biased:
            raise UsageError(f"model {model.name}: {operator.name} of layer {layer.name} is planned but not run")
