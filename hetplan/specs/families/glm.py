"""Zhipu's decoders: GLM-4 and GLM-4.5."""

from __future__ import annotations

from dataclasses import replace

from hetplan.specs.families.blocks import Language, MoeShape
from hetplan.specs.families.body import Defaults, dropout, read_body
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.families.deepseek import mtp_layer, num_mtp_layers
from hetplan.specs.families.dense import Traits, dense
from hetplan.specs.families.moe import require_top_k, sparse


def glm4(config: Config) -> Language:
    """GLM-4-0414: norms on both sides of attention and MLP."""
    defaults = Defaults(
        vocab=151552, hidden=4096, ffn=13696, layers=40, heads=32, kv_heads=2, head_dim=128, positions=131072
    )
    body = read_body(config, defaults)
    bias = config.flag("attention_bias", default=True)
    traits = Traits(qkv_bias=bias, sandwich=True, dropout=dropout(config, "attention_dropout"))
    return dense(body, traits, (None,) * body.layers)


def glm4_moe(config: Config) -> Language:
    """GLM-4.5 and 4.6: dense layers first, a shared expert, multi-token prediction."""
    defaults = Defaults(vocab=151552, hidden=4096, ffn=10944, layers=46, heads=96, kv_heads=8, positions=131072)
    body = read_body(config, defaults)
    ffn = config.size("moe_intermediate_size", default=1408)
    shape = MoeShape(
        experts=config.size("n_routed_experts", "num_local_experts", default=128, limit=MAX_LAYERS),
        top_k=config.size("num_experts_per_tok", default=8, limit=MAX_LAYERS),
        ffn=ffn,
        shared_ffn=ffn * config.count("n_shared_experts", default=1),
    )
    require_top_k(config, shape)
    traits = Traits(
        qkv_bias=config.flag("attention_bias", default=False),
        qk_norm=config.flag("use_qk_norm", default=False),
        dropout=dropout(config, "attention_dropout"),
    )
    num_dense = config.count("first_k_dense_replace", default=1)
    routed = tuple(index >= num_dense for index in range(body.layers))
    language = sparse(body, traits, (None,) * body.layers, shape, routed)
    num_mtp = num_mtp_layers(config)
    if not num_mtp:
        return language
    block = sparse(replace(body, layers=1), traits, (None,), shape, (True,)).blocks[0]
    return replace(language, extra=(mtp_layer(block, body.vocab),) * num_mtp)
