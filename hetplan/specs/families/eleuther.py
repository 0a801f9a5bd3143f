"""EleutherAI's decoders: GPT-Neo, GPT-J, GPT-NeoX and Pythia."""

from __future__ import annotations

from hetplan.specs.families.blocks import Language
from hetplan.specs.families.body import Body, Defaults, dropout, read_body, require_multiple
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.families.gpt import PlainTraits, plain, position_table


def gpt_neox(config: Config) -> Language:
    """GPT-NeoX and Pythia; `use_parallel_residual` changes the order of work, not its amount."""
    defaults = Defaults(vocab=50432, hidden=6144, ffn=24576, layers=44, heads=64, positions=2048)
    body = read_body(config, defaults, whole_heads=True, own_head_dim=False, grouped=False)
    bias = config.flag("attention_bias", default=True)
    drops = dropout(config, "hidden_dropout", "attention_dropout")
    return plain(body, PlainTraits(qkv_bias=bias, out_bias=bias, dropout=drops))


def gptj(config: Config) -> Language:
    """GPT-J: one norm for attention and MLP, attention without biases, a head with one."""
    hidden = config.size("n_embd", "hidden_size", default=4096)
    heads = config.size("n_head", "num_attention_heads", default=16, limit=MAX_LAYERS)
    require_multiple(config, config.key_of("n_embd", "hidden_size"), hidden, "n_head", heads)
    body = Body(
        vocab=config.size("vocab_size", default=50400),
        hidden=hidden,
        ffn=config.optional_size("n_inner") or 4 * hidden,
        layers=config.size("n_layer", "num_hidden_layers", default=28, limit=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        positions=config.optional_size("n_positions", "max_position_embeddings", default=2048),
        tied=config.flag("tie_word_embeddings", default=False),
    )
    drops = dropout(config, "resid_pdrop", "embd_pdrop", "attn_pdrop")
    return plain(body, PlainTraits(qkv_bias=False, out_bias=False, num_norms=1, dropout=drops), head_bias=True)


def gpt_neo(config: Config) -> Language:
    """GPT-Neo; its local layers (`attention_types`) are priced as full ones, an upper bound."""
    hidden = config.size("hidden_size", default=2048)
    heads = config.size("num_heads", "num_attention_heads", default=16, limit=MAX_LAYERS)
    require_multiple(config, "hidden_size", hidden, "num_heads", heads)
    positions = config.size("max_position_embeddings", default=2048)
    body = Body(
        vocab=config.size("vocab_size", default=50257),
        hidden=hidden,
        ffn=config.optional_size("intermediate_size") or 4 * hidden,
        layers=config.size("num_layers", "num_hidden_layers", default=24, limit=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        positions=positions,
        tied=config.flag("tie_word_embeddings", default=True),
    )
    drops = dropout(config, "resid_dropout", "embed_dropout", "attention_dropout")
    return plain(body, PlainTraits(qkv_bias=False, dropout=drops), embedding=(position_table(positions, hidden),))
