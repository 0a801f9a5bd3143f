"""Decoders with routed experts: Mixtral, Qwen2-MoE, Qwen3-MoE; and the layout others share."""

from __future__ import annotations

from hetplan.specs.families.blocks import Language, MoeShape, gated_mlp, moe, repeat
from hetplan.specs.families.body import Body, Defaults, dropout, read_body
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.families.dense import Traits, block, decoder
from hetplan.specs.families.windows import Windows, early_windows, same_window


def mixtral(config: Config) -> Language:
    """Mixtral: experts in every layer."""
    defaults = Defaults(vocab=32000, hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, positions=131072)
    body = read_body(config, defaults)
    shape = MoeShape(
        experts=config.size("num_local_experts", "num_experts", default=8, limit=MAX_LAYERS),
        top_k=config.size("num_experts_per_tok", default=2, limit=MAX_LAYERS),
        ffn=body.ffn,
    )
    require_top_k(config, shape)
    traits = Traits(dropout=dropout(config, "attention_dropout"))
    return sparse(body, traits, same_window(config, body.layers), shape, (True,) * body.layers)


def qwen2_moe(config: Config) -> Language:
    """Qwen1.5-MoE and Qwen2-MoE: a gated shared expert beside the routed ones."""
    defaults = Defaults(vocab=151936, hidden=2048, ffn=5632, layers=24, heads=16, kv_heads=16, positions=32768)
    body = read_body(config, defaults)
    shape = MoeShape(
        experts=config.count("num_experts", default=60),
        top_k=config.size("num_experts_per_tok", default=4, limit=MAX_LAYERS),
        ffn=config.size("moe_intermediate_size", default=1408),
        shared_ffn=config.size("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
    )
    traits = Traits(qkv_bias=config.flag("qkv_bias", default=True), dropout=dropout(config, "attention_dropout"))
    return sparse(body, traits, early_windows(config, body.layers), shape, _sparse_layers(config, body, shape))


def qwen3_moe(config: Config) -> Language:
    """Qwen3-MoE."""
    defaults = Defaults(vocab=151936, hidden=2048, ffn=6144, layers=24, heads=32, kv_heads=4, positions=32768)
    return _qwen3(config, defaults, MoeShape(experts=128, top_k=8, ffn=768))


def qwen3_vl_moe_text(config: Config) -> Language:
    """The language part of Qwen3-VL-MoE."""
    defaults = Defaults(
        vocab=151936, hidden=2048, ffn=5632, layers=24, heads=16, kv_heads=16, positions=128000, tied=True
    )
    return _qwen3(config, defaults, MoeShape(experts=60, top_k=4, ffn=1408))


def _qwen3(config: Config, defaults: Defaults, experts: MoeShape) -> Language:
    body = read_body(config, defaults)
    shape = MoeShape(
        experts=config.count("num_experts", "num_local_experts", default=experts.experts),
        top_k=config.size("num_experts_per_tok", default=experts.top_k, limit=MAX_LAYERS),
        ffn=config.size("moe_intermediate_size", default=experts.ffn),
    )
    bias = config.flag("attention_bias", default=False)
    traits = Traits(qkv_bias=bias, out_bias=bias, qk_norm=True, dropout=dropout(config, "attention_dropout"))
    windowed = config.flag("use_sliding_window", default=False)
    windows = same_window(config, body.layers, default=4096) if windowed else (None,) * body.layers
    return sparse(body, traits, windows, shape, _sparse_layers(config, body, shape))


def sparse(body: Body, traits: Traits, windows: Windows, shape: MoeShape, routed: tuple[bool, ...]) -> Language:
    """Return a decoder whose layers hold experts where `routed` says so, else a gated MLP."""
    dense_mlp = gated_mlp(body.hidden, body.ffn, bias=traits.mlp_bias)
    experts = moe(body.hidden, shape) if any(routed) else ()
    blocks = repeat(
        tuple(zip(windows, routed, strict=True)),
        lambda key: block(
            body,
            traits,
            key[0],
            experts if key[1] else dense_mlp,
            name="decoder.experts" if key[1] else "decoder.dense",
        ),
    )
    return decoder(body, traits, blocks)


def require_top_k(config: Config, shape: MoeShape) -> None:
    """Raise SpecError when a token is to run more experts than there are."""
    if shape.top_k > shape.experts:
        raise config.error(f"{shape.top_k} is more than the {shape.experts} experts there are", "num_experts_per_tok")


def _sparse_layers(config: Config, body: Body, shape: MoeShape) -> tuple[bool, ...]:
    """Qwen's rule: every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    step = config.size("decoder_sparse_step", default=1, limit=MAX_LAYERS)
    dense_only = set(config.indices("mlp_only_layers"))
    if shape.experts:
        require_top_k(config, shape)
    return tuple(
        shape.experts > 0 and index not in dense_only and (index + 1) % step == 0 for index in range(body.layers)
    )
