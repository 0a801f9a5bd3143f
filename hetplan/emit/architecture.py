"""A model's sizes as Megatron-LM's arguments, where its arguments can say the model.

Names are Megatron-LM's, with underscores (FlagScale's keys); `flags` turns them into options. What costs nothing (norm
epsilon, rotary base and scaling, dropout) comes from the model's published configuration; what that does not say is
left to variables of `site.sh`. A model of another build (latent attention, windows, extra norms, shared experts, other
rotary scaling) gets no arguments: whoever knows it fills them in as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetplan.emit.rotary import positions
from hetplan.specs.model import Activation, Attention, Experts, Layer, Linear, Model, Norm, Table
from hetplan.specs.workload import Workload

Value = int | str | bool | float

SILU_FAMILIES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
"""Families whose gated activation is SwiGLU and whose decoder is the plain one (their published configurations)."""
GELU_FAMILIES = frozenset({"gpt2", "modules", ""})
_ACTIVATIONS = {True: ("silu", "swish"), False: ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")}
"""Gated or not -> names of the function its published configuration may give."""
_EPSILON = {"gpt2": 1e-5}
"""Norm epsilon of families whose published files leave it to their class (transformers, GPT2Config)."""
_DROPOUT = 0.1
"""Megatron-LM's default, for models that say no more than that they drop."""
_PLAIN = frozenset({"q", "k", "v", "qkv", "output", "out", "gate", "up", "down", "attention_norm", "mlp_norm", "norm1"})
_PLAIN_MORE = frozenset({"norm2", "q_norm", "k_norm", "attention", "activation", "gelu", "experts"})

SITE_QUESTIONS: Mapping[str, str] = {
    "ROTARY_BASE": "rotary base of the model (rope_theta of its configuration)",
    "NORM_EPSILON": "epsilon of the model's norms (rms_norm_eps or layer_norm_epsilon)",
}


def architecture(model: Model, workload: Workload) -> dict[str, Value] | None:
    """Return a model's arguments, or None where Megatron-LM's arguments alone cannot say it."""
    decoders = [layer for layer in model.chain if layer.kind == "decoder"]
    kinds = {layer.kind for layer in model.chain}
    first = decoders[0] if decoders else None
    if first is None or kinds - {"embedding", "decoder", "head"} or any(layer != first for layer in decoders):
        return None
    attention = next((o for o in first.operators if isinstance(o, Attention)), None)
    if attention is None or not _is_plain(model, first, attention):
        return None
    sizes: dict[str, Value] = {
        "num_layers": len(decoders),
        "hidden_size": first.width,
        "num_attention_heads": attention.num_heads,
        "kv_channels": attention.qk_head_dim,
        "seq_length": workload.seq_len,
        "max_position_embeddings": max(workload.seq_len, model.max_seq_len or 0),
    }
    if attention.num_kv_heads != attention.num_heads:
        sizes |= {"group_query_attention": True, "num_query_groups": attention.num_kv_heads}
    placed = positions(model)
    if placed is None:
        return None
    return sizes | _mlp(model, first) | _norms(model, first) | _dropout(model, first) | placed | ends(model)


def _is_plain(model: Model, layer: Layer, attention: Attention) -> bool:
    gated = any(isinstance(o, Activation) and o.gated for o in _inside(layer))
    families = SILU_FAMILIES if gated else GELU_FAMILIES
    names = {operator.name for operator in layer.operators}
    plain = attention.window is None and attention.causal and attention.qk_head_dim == attention.value_head_dim
    function = model.published.get("hidden_act", model.published.get("activation_function"))
    known = model.family in families and (function is None or function in _ACTIVATIONS[gated])
    return plain and known and names <= _PLAIN | _PLAIN_MORE


def _inside(layer: Layer) -> list[object]:
    found: list[object] = []
    for operator in layer.operators:
        found.append(operator)
        if isinstance(operator, Experts):
            found += [operator.activation, *operator.linears]
    return found


def _mlp(model: Model, layer: Layer) -> dict[str, Value]:
    experts = next((o for o in layer.operators if isinstance(o, Experts)), None)
    width = next(o.width for o in _inside(layer) if isinstance(o, Activation))
    gated = any(isinstance(o, Activation) and o.gated for o in _inside(layer))
    sizes: dict[str, Value] = {"ffn_hidden_size": width}
    if gated:
        sizes["swiglu"] = True
    if experts is not None:
        sizes |= {"num_experts": experts.num_experts, "moe_router_topk": experts.top_k, "moe_ffn_hidden_size": width}
        sizes["moe_token_dispatcher_type"] = "alltoall"
        if model.family == "qwen3_moe" and not model.published.get("norm_topk_prob", False):
            sizes["moe_router_pre_softmax"] = True
    return sizes


def _norms(model: Model, layer: Layer) -> dict[str, Value]:
    norms = [o for o in layer.operators if isinstance(o, Norm)]
    rms = all(norm.params <= norm.width for norm in norms)
    epsilon = _number(model, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    sizes: dict[str, Value] = {
        "normalization": "RMSNorm" if rms else "LayerNorm",
        "norm_epsilon": _EPSILON.get(model.family, "$NORM_EPSILON") if epsilon is None else epsilon,
    }
    if any(norm.name in ("q_norm", "k_norm") for norm in norms):
        sizes["qk_layernorm"] = True
    biases = {o.name: o.bias for o in _inside(layer) if isinstance(o, Linear)}
    if not any(biases.get(name, False) for name in ("output", "out", "up", "down")):
        sizes["disable_bias_linear"] = True
        if biases.get("q", False) or biases.get("qkv", False):
            sizes["add_qkv_bias"] = True
    return sizes


def _dropout(model: Model, layer: Layer) -> dict[str, Value]:
    """Return both dropouts: Megatron-LM drops a tenth where it is not told otherwise."""
    default = _DROPOUT if layer.dropout else 0.0
    hidden = _number(model, "resid_pdrop", "hidden_dropout", "hidden_dropout_prob")
    attention = _number(model, "attn_pdrop", "attention_dropout")
    if hidden is None:
        hidden = default if attention is None else 0.0
    return {"hidden_dropout": hidden, "attention_dropout": default if attention is None else attention}


def _number(model: Model, *keys: str) -> float | None:
    """Return the first of some published fields that is a number."""
    values = (model.published.get(key) for key in keys)
    return next((float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)), None)


def ends(model: Model) -> dict[str, Value]:
    """Return the vocabulary, and whether embedding and head share their weights."""
    tables = [o for layer in model.chain for o in layer.operators if isinstance(o, Table)]
    heads = [o for layer in model.chain if layer.kind == "head" for o in layer.operators if isinstance(o, Linear)]
    sizes: dict[str, Value] = {}
    if tables:
        sizes["vocab_size"] = tables[0].rows
    if heads and not heads[-1].tied:
        sizes["untie_embeddings_and_output_weights"] = True
    return sizes


def questions(sizes: Mapping[str, Value]) -> dict[str, str]:
    """Return the variables some arguments leave open, and what to write there."""
    text = " ".join(str(value) for value in sizes.values())
    return {name: what for name, what in SITE_QUESTIONS.items() if f"${name}" in text}


def flags(sizes: Mapping[str, Value]) -> tuple[str, ...]:
    """Return arguments as options and their values, shell words."""
    words: list[str] = []
    for name, value in sizes.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(f'"{value}"' if str(value).startswith("$") else str(value))
    return tuple(words)
