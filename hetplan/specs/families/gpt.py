"""Decoders with layer norms and a plain MLP: GPT-2 (and GPT-3), BLOOM, OPT, Falcon, StarCoder2."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.specs.families.blocks import (
    AttentionShape,
    Language,
    attention,
    layer_norm,
    plain_mlp,
    token_table,
)
from hetplan.specs.families.body import Body, Defaults, dropout, read_body, require_multiple
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.model import Layer, Linear, Norm, Operator, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTraits:
    """How a family's block differs from GPT-2's."""

    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    num_norms: int = 2
    """1: attention and MLP read the same normalised input."""
    affine: bool = True
    """False: norms hold no parameters."""
    qk_norm: bool = False
    dropout: bool = False


def gpt2(config: Config) -> Language:
    """GPT-2, and GPT-3 written as one: learned positions, tied head."""
    hidden = config.size("n_embd", "hidden_size", default=768)
    heads = config.size("n_head", "num_attention_heads", default=12, limit=MAX_LAYERS)
    require_multiple(config, config.key_of("n_embd", "hidden_size"), hidden, "n_head", heads)
    if config.flag("add_cross_attention", default=False):
        raise config.error("cross-attention is not supported", "add_cross_attention")
    positions = config.size("n_positions", "max_position_embeddings", default=1024)
    body = Body(
        vocab=config.size("vocab_size", default=50257),
        hidden=hidden,
        ffn=config.optional_size("n_inner") or 4 * hidden,
        layers=config.size("n_layer", "num_hidden_layers", default=12, limit=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        positions=positions,
        tied=config.flag("tie_word_embeddings", default=True),
    )
    traits = PlainTraits(dropout=dropout(config, "resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1))
    return plain(body, traits, embedding=(position_table(positions, hidden),))


def bloom(config: Config) -> Language:
    """BLOOM: linear position biases, a norm behind the embedding, tied head."""
    hidden = config.size("n_embed", "hidden_size", default=64)
    heads = config.size("n_head", "num_attention_heads", default=8, limit=MAX_LAYERS)
    require_multiple(config, config.key_of("n_embed", "hidden_size"), hidden, "n_head", heads)
    body = Body(
        vocab=config.size("vocab_size", default=250880),
        hidden=hidden,
        ffn=4 * hidden,
        layers=config.size("n_layer", "num_hidden_layers", default=2, limit=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        positions=config.optional_size("seq_length"),
        tied=config.flag("tie_word_embeddings", default=True),
    )
    traits = PlainTraits(dropout=dropout(config, "hidden_dropout", "attention_dropout"))
    return plain(body, traits, embedding=(layer_norm("embedding_norm", hidden),))


def opt(config: Config) -> Language:
    """OPT: learned positions (two more rows than stated), optionally a narrower embedding."""
    hidden = config.size("hidden_size", default=768)
    heads = config.size("num_attention_heads", default=12, limit=MAX_LAYERS)
    require_multiple(config, "hidden_size", hidden, "num_attention_heads", heads)
    narrow = config.optional_size("word_embed_proj_dim") or hidden
    positions = config.size("max_position_embeddings", default=2048)
    bias = config.flag("enable_bias", default=True)
    affine = config.flag("layer_norm_elementwise_affine", default=True)
    body = Body(
        vocab=config.size("vocab_size", default=50272),
        hidden=hidden,
        ffn=config.size("ffn_dim", default=3072),
        layers=config.size("num_hidden_layers", default=12, limit=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        positions=positions,
        tied=config.flag("tie_word_embeddings", default=True),
    )
    drops = config.probability("dropout", default=0.1) > 0 or dropout(config, "attention_dropout")
    traits = PlainTraits(qkv_bias=bias, out_bias=bias, mlp_bias=bias, affine=affine, dropout=drops)
    blocks = (plain_block(body, traits),) * body.layers
    final = config.flag("do_layer_norm_before", default=True) and not config.flag(
        "_remove_final_layer_norm", default=False
    )
    norm: tuple[Operator, ...] = (_norm("final_norm", hidden, affine=affine),) if final else ()
    widen: tuple[Operator, ...] = ()
    narrow_down: tuple[Operator, ...] = ()
    if narrow != hidden:
        widen = (Linear(name="project_in", inputs=narrow, outputs=hidden, split="none"),)
        narrow_down = (Linear(name="project_out", inputs=hidden, outputs=narrow, split="none"),)
    return Language(
        width=hidden,
        vocab=body.vocab,
        embedding=(token_table(body.vocab, narrow), *widen, position_table(positions + 2, hidden)),
        blocks=blocks,
        head=(*norm, *narrow_down),
        head_width=narrow,
        tied=body.tied,
        dropout=drops,
        max_seq_len=positions,
    )


def falcon(config: Config) -> Language:
    """Falcon 7B, 40B and 180B: one key/value head, or some with `new_decoder_architecture`."""
    hidden = config.size("n_embed", "hidden_size", default=4544)
    heads = config.size("num_attention_heads", "n_head", default=71, limit=MAX_LAYERS)
    require_multiple(config, config.key_of("n_embed", "hidden_size"), hidden, "num_attention_heads", heads)
    new = config.flag("new_decoder_architecture", default=False)
    multi_query = config.flag("multi_query", default=True)
    kv_heads = config.optional_size("num_kv_heads", limit=MAX_LAYERS) or heads
    if not new:
        kv_heads = 1 if multi_query else heads
    if heads % kv_heads:
        raise config.error(f"num_attention_heads {heads} is not a multiple of {kv_heads}", "num_kv_heads")
    bias = config.flag("bias", default=False)
    body = Body(
        vocab=config.size("vocab_size", default=65024),
        hidden=hidden,
        ffn=config.optional_size("ffn_hidden_size") or 4 * hidden,
        layers=config.size("num_hidden_layers", "n_layer", default=32, limit=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        positions=config.optional_size("max_position_embeddings", default=2048),
        tied=config.flag("tie_word_embeddings", default=True),
    )
    traits = PlainTraits(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        num_norms=_falcon_norms(config, new=new),
        dropout=dropout(config, "hidden_dropout", "attention_dropout"),
    )
    return plain(body, traits)


def starcoder2(config: Config) -> Language:
    """StarCoder2: grouped queries and rotary positions around a plain MLP."""
    defaults = Defaults(vocab=49152, hidden=3072, ffn=12288, layers=30, heads=24, kv_heads=2, positions=4096, tied=True)
    body = read_body(config, defaults)
    bias = config.flag("use_bias", default=True)
    drops = dropout(config, "attention_dropout", "residual_dropout", "embedding_dropout")
    return plain(body, PlainTraits(qkv_bias=bias, out_bias=bias, mlp_bias=bias, dropout=drops))


def _falcon_norms(config: Config, *, new: bool) -> int:
    if not config.flag("parallel_attn", default=True):
        return 2
    return config.count("num_ln_in_parallel_attn", default=2 if new else 1)


def plain(
    body: Body, traits: PlainTraits, *, embedding: tuple[Operator, ...] = (), head_bias: bool = False
) -> Language:
    """Return a decoder of equal blocks; `embedding` follows the token table."""
    return Language(
        width=body.hidden,
        vocab=body.vocab,
        embedding=(token_table(body.vocab, body.hidden), *embedding),
        blocks=(plain_block(body, traits),) * body.layers,
        head=(layer_norm("final_norm", body.hidden),),
        head_bias=head_bias,
        tied=body.tied,
        dropout=traits.dropout,
        max_seq_len=body.positions,
    )


def plain_block(body: Body, traits: PlainTraits) -> Layer:
    """Return one block with a plain MLP."""
    head_norm = 2 * (body.hidden // body.heads) if traits.qk_norm else 0
    shape = AttentionShape(
        heads=body.heads,
        kv_heads=body.kv_heads,
        head_dim=body.head_dim,
        qkv_bias=traits.qkv_bias,
        out_bias=traits.out_bias,
        q_norm_params=head_norm,
        k_norm_params=head_norm,
    )
    second = (_norm("mlp_norm", body.hidden, affine=traits.affine),) if traits.num_norms == 2 else ()
    return Layer(
        kind="decoder",
        name="decoder",
        width=body.hidden,
        operators=(
            _norm("attention_norm", body.hidden, affine=traits.affine),
            *attention(body.hidden, shape),
            *second,
            *plain_mlp(body.hidden, body.ffn, bias=traits.mlp_bias, reads_new_input=bool(second)),
        ),
        dropout=traits.dropout,
    )


def _norm(name: str, width: int, *, affine: bool) -> Norm:
    return layer_norm(name, width) if affine else Norm(name=name, width=width, params=0)


def position_table(rows: int, width: int) -> Table:
    """Return a table of learned positions."""
    return Table(name="positions", rows=rows, width=width, split="none")
