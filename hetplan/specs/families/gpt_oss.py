"""OpenAI's open-weight mixtures: gpt-oss 20B and 120B."""

from __future__ import annotations

from hetplan.specs.families.blocks import Language, MoeShape
from hetplan.specs.families.body import Defaults, dropout, read_body
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.families.dense import Traits
from hetplan.specs.families.moe import require_top_k, sparse
from hetplan.specs.families.windows import patterned_windows


def gpt_oss(config: Config) -> Language:
    """Biases everywhere, an attention sink a head, every second layer over a window."""
    defaults = Defaults(
        vocab=201088, hidden=2880, ffn=2880, layers=36, heads=64, kv_heads=8, head_dim=64, positions=131072
    )
    body = read_body(config, defaults)
    shape = MoeShape(
        experts=config.size("num_local_experts", "num_experts", default=128, limit=MAX_LAYERS),
        top_k=config.size("num_experts_per_tok", "experts_per_token", default=4, limit=MAX_LAYERS),
        ffn=body.ffn,
        bias=True,
        router_bias=True,
    )
    require_top_k(config, shape)
    bias = config.flag("attention_bias", default=True)
    traits = Traits(qkv_bias=bias, out_bias=bias, sinks=True, dropout=dropout(config, "attention_dropout"))
    windows = patterned_windows(config, body.layers, default=128, every=2)
    return sparse(body, traits, windows, shape, (True,) * body.layers)
