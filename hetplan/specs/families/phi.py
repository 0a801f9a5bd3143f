"""Microsoft's decoders: Phi 1 to 2, Phi 3 to 4, and Phi-3.5-MoE."""

from __future__ import annotations

from hetplan.specs.families.blocks import Language, MoeShape
from hetplan.specs.families.body import Defaults, dropout, read_body
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.families.dense import Traits, dense
from hetplan.specs.families.gpt import PlainTraits, plain
from hetplan.specs.families.moe import require_top_k, sparse
from hetplan.specs.families.windows import same_window


def phi(config: Config) -> Language:
    """Phi 1, 1.5 and 2: one norm for attention and MLP, a head with a bias."""
    defaults = Defaults(vocab=51200, hidden=2048, ffn=8192, layers=24, heads=32, positions=2048)
    body = read_body(config, defaults)
    traits = PlainTraits(
        num_norms=1,
        qk_norm=config.flag("qk_layernorm", default=False),
        dropout=dropout(config, "resid_pdrop", "embd_pdrop", "attention_dropout"),
    )
    return plain(body, traits, head_bias=True)


def phi3(config: Config) -> Language:
    """Phi-3, 3.5 and 4."""
    defaults = Defaults(vocab=32064, hidden=3072, ffn=8192, layers=32, heads=32, positions=4096)
    body = read_body(config, defaults)
    traits = Traits(dropout=dropout(config, "resid_pdrop", "embd_pdrop", "attention_dropout"))
    return dense(body, traits, same_window(config, body.layers))


def phimoe(config: Config) -> Language:
    """Phi-3.5-MoE: Mixtral's layout with layer norms."""
    defaults = Defaults(vocab=32064, hidden=4096, ffn=6400, layers=32, heads=32, kv_heads=8, positions=131072)
    body = read_body(config, defaults)
    shape = MoeShape(
        experts=config.size("num_local_experts", "num_experts", default=16, limit=MAX_LAYERS),
        top_k=config.size("num_experts_per_tok", default=2, limit=MAX_LAYERS),
        ffn=body.ffn,
    )
    require_top_k(config, shape)
    bias = config.flag("attention_bias", default=False)
    traits = Traits(
        qkv_bias=bias,
        out_bias=bias,
        layer_norms=True,
        head_bias=config.flag("lm_head_bias", default=False),
        dropout=dropout(config, "attention_dropout"),
    )
    return sparse(body, traits, same_window(config, body.layers), shape, (True,) * body.layers)
