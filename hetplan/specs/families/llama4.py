"""The language models of Llama 4 (Scout, Maverick)."""

from __future__ import annotations

from dataclasses import replace

from hetplan.specs.families.blocks import Language, MoeShape
from hetplan.specs.families.body import Body, Defaults, dropout, read_body
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.families.dense import Traits
from hetplan.specs.families.moe import require_top_k, sparse
from hetplan.specs.families.windows import Windows


def llama4_text(config: Config) -> Language:
    """One routed and one shared expert a token, dense layers between; three chunked layers to a full one."""
    defaults = Defaults(
        vocab=202048, hidden=5120, ffn=8192, layers=48, heads=40, kv_heads=8, head_dim=128, positions=131072
    )
    body = read_body(config, defaults)
    shape = MoeShape(
        experts=config.size("num_local_experts", default=16, limit=MAX_LAYERS),
        top_k=config.size("num_experts_per_tok", default=1, limit=MAX_LAYERS),
        ffn=body.ffn,
        shared_ffn=body.ffn,
    )
    require_top_k(config, shape)
    bias = config.flag("attention_bias", default=False)
    traits = Traits(qkv_bias=bias, out_bias=bias, dropout=dropout(config, "attention_dropout"))
    dense_body = replace(body, ffn=config.size("intermediate_size_mlp", default=16384))
    return sparse(dense_body, traits, _windows(config, body), shape, _routed(config, body))


def _routed(config: Config, body: Body) -> tuple[bool, ...]:
    step = config.size("interleave_moe_layer_step", default=1, limit=MAX_LAYERS)
    named = config.indices("moe_layers", default=tuple(range(step - 1, body.layers, step)))
    return tuple(index in set(named) for index in range(body.layers))


def _windows(config: Config, body: Body) -> Windows:
    """Layers with rotary positions attend within chunks of `attention_chunk_size`, priced as a window of it."""
    chunk = config.optional_size("attention_chunk_size", default=8192)
    interval = config.size("no_rope_layer_interval", default=4, limit=MAX_LAYERS)
    rotary = config.indices("no_rope_layers") or tuple(int((index + 1) % interval != 0) for index in range(body.layers))
    if len(rotary) != body.layers:
        raise config.error(f"has {len(rotary)} entries for {body.layers} layers", "no_rope_layers")
    return tuple(chunk if turns else None for turns in rotary)
