"""A model's sizes as Megatron-LM's arguments, where its arguments can say the model.

Names are Megatron-LM's, with underscores (FlagScale's keys); `flags` turns them into options. What a `Model` does not
hold (rotary base, norm epsilon) is left to variables of `site.sh`. A model of another build (latent attention, windows,
extra norms, shared experts) gets no arguments: whoever knows it fills them in as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetplan.specs.model import Activation, Attention, Experts, Layer, Linear, Model, Norm, Table
from hetplan.specs.workload import Workload

Value = int | str | bool

SILU_FAMILIES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
"""Families whose gated activation is SwiGLU and whose decoder is the plain one (their published configurations)."""
GELU_FAMILIES = frozenset({"gpt2", "modules", ""})
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
    return sizes | _mlp(first) | _norms(model, first) | _ends(model)


def _is_plain(model: Model, layer: Layer, attention: Attention) -> bool:
    gated = any(isinstance(o, Activation) and o.gated for o in _inside(layer))
    families = SILU_FAMILIES if gated else GELU_FAMILIES
    names = {operator.name for operator in layer.operators}
    plain = attention.window is None and attention.causal and attention.qk_head_dim == attention.value_head_dim
    return plain and model.family in families and names <= _PLAIN | _PLAIN_MORE


def _inside(layer: Layer) -> list[object]:
    found: list[object] = []
    for operator in layer.operators:
        found.append(operator)
        if isinstance(operator, Experts):
            found += [operator.activation, *operator.linears]
    return found


def _mlp(layer: Layer) -> dict[str, Value]:
    experts = next((o for o in layer.operators if isinstance(o, Experts)), None)
    width = next(o.width for o in _inside(layer) if isinstance(o, Activation))
    gated = any(isinstance(o, Activation) and o.gated for o in _inside(layer))
    sizes: dict[str, Value] = {"ffn_hidden_size": width}
    if gated:
        sizes["swiglu"] = True
    if experts is not None:
        sizes |= {"num_experts": experts.num_experts, "moe_router_topk": experts.top_k, "moe_ffn_hidden_size": width}
    return sizes


def _norms(model: Model, layer: Layer) -> dict[str, Value]:
    norms = [o for o in layer.operators if isinstance(o, Norm)]
    rms = all(norm.params <= norm.width for norm in norms)
    sizes: dict[str, Value] = {"normalization": "RMSNorm" if rms else "LayerNorm", "norm_epsilon": "$NORM_EPSILON"}
    if any(norm.name in ("q_norm", "k_norm") for norm in norms):
        sizes["qk_layernorm"] = True
    biases = {o.name: o.bias for o in _inside(layer) if isinstance(o, Linear)}
    if not any(biases.get(name, False) for name in ("output", "out", "up", "down")):
        sizes["disable_bias_linear"] = True
        if biases.get("q", False) or biases.get("qkv", False):
            sizes["add_qkv_bias"] = True
    return sizes


def _ends(model: Model) -> dict[str, Value]:
    tables = [o for layer in model.chain for o in layer.operators if isinstance(o, Table)]
    heads = [o for layer in model.chain if layer.kind == "head" for o in layer.operators if isinstance(o, Linear)]
    sizes: dict[str, Value] = {}
    if any(table.split == "none" for table in tables):
        sizes["position_embedding_type"] = "learned_absolute"
    else:
        sizes |= {"position_embedding_type": "rope", "rotary_base": "$ROTARY_BASE"}
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
