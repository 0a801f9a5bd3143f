"""Decoders with RMS norms, rotary positions and a gated MLP: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma 1 to 3."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.specs.families.blocks import (
    AttentionShape,
    Language,
    attention,
    gated_mlp,
    repeat,
    rms_norm,
    token_table,
)
from hetplan.specs.families.body import Body, Defaults, dropout, read_body
from hetplan.specs.families.config import Config
from hetplan.specs.families.windows import Windows, late_windows, patterned_windows, same_window
from hetplan.specs.model import Layer, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a family's block differs from Llama's."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """A norm of one head's width on queries and one on keys."""
    sandwich: bool = False
    """A norm behind attention and MLP too (Gemma 2)."""
    dropout: bool = False


def llama(config: Config) -> Language:
    """Llama 1 to 3 and the many models that share its class."""
    defaults = Defaults(vocab=32000, hidden=4096, ffn=11008, layers=32, heads=32, positions=2048)
    body = read_body(config, defaults, whole_heads=True)
    bias = config.flag("attention_bias", default=False)
    traits = Traits(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        dropout=dropout(config, "attention_dropout"),
    )
    return dense(body, traits, (None,) * body.layers)


def mistral(config: Config) -> Language:
    """Mistral 7B and Nemo."""
    defaults = Defaults(vocab=32000, hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, positions=131072)
    body = read_body(config, defaults)
    traits = Traits(dropout=dropout(config, "attention_dropout"))
    return dense(body, traits, same_window(config, body.layers, default=4096))


def qwen2(config: Config) -> Language:
    """Qwen 1.5, 2 and 2.5; the q, k and v biases are fixed whatever `attention_bias` says."""
    defaults = Defaults(vocab=151936, hidden=4096, ffn=22016, layers=32, heads=32, kv_heads=32, positions=32768)
    body = read_body(config, defaults)
    traits = Traits(qkv_bias=True, dropout=dropout(config, "attention_dropout"))
    return dense(body, traits, late_windows(config, body.layers))


def qwen2_vl_text(config: Config) -> Language:
    """The language part of Qwen2-VL and Qwen2.5-VL; the head width is always hidden over heads."""
    defaults = Defaults(vocab=152064, hidden=8192, ffn=29568, layers=80, heads=64, kv_heads=8, positions=32768)
    body = read_body(config, defaults, whole_heads=True, own_head_dim=False)
    traits = Traits(qkv_bias=True, dropout=dropout(config, "attention_dropout"))
    return dense(body, traits, late_windows(config, body.layers, first=80))


def qwen3(config: Config) -> Language:
    """Qwen3 dense; also the language part of Qwen3-VL."""
    defaults = Defaults(
        vocab=151936, hidden=4096, ffn=22016, layers=32, heads=32, kv_heads=32, head_dim=128, positions=32768
    )
    body = read_body(config, defaults)
    bias = config.flag("attention_bias", default=False)
    traits = Traits(qkv_bias=bias, out_bias=bias, qk_norm=True, dropout=dropout(config, "attention_dropout"))
    return dense(body, traits, late_windows(config, body.layers))


def phi3(config: Config) -> Language:
    """Phi-3, 3.5 and 4."""
    defaults = Defaults(vocab=32064, hidden=3072, ffn=8192, layers=32, heads=32, positions=4096)
    body = read_body(config, defaults)
    traits = Traits(dropout=dropout(config, "resid_pdrop", "embd_pdrop", "attention_dropout"))
    return dense(body, traits, same_window(config, body.layers))


def gemma(config: Config) -> Language:
    """Gemma 1."""
    defaults = Defaults(
        vocab=256000,
        hidden=3072,
        ffn=24576,
        layers=28,
        heads=16,
        kv_heads=16,
        head_dim=256,
        positions=8192,
        tied=True,
    )
    body = read_body(config, defaults, whole_heads=True)
    return dense(body, _gemma_traits(config), (None,) * body.layers)


def gemma2(config: Config) -> Language:
    """Gemma 2: norms on both sides, every second layer over a window."""
    defaults = Defaults(
        vocab=256000, hidden=2304, ffn=9216, layers=26, heads=8, kv_heads=4, head_dim=256, positions=8192, tied=True
    )
    body = read_body(config, defaults, whole_heads=True)
    windows = patterned_windows(config, body.layers, default=4096, every=2)
    return dense(body, _gemma_traits(config, sandwich=True), windows)


def gemma3_text(config: Config) -> Language:
    """Gemma 3: as Gemma 2, with query and key norms and five windowed layers to a full one."""
    defaults = Defaults(
        vocab=262208, hidden=2304, ffn=9216, layers=26, heads=8, kv_heads=4, head_dim=256, positions=131072, tied=True
    )
    body = read_body(config, defaults, whole_heads=True)
    every = config.optional_size("sliding_window_pattern", default=6) or 6
    windows = patterned_windows(config, body.layers, default=4096, every=every)
    return dense(body, _gemma_traits(config, sandwich=True, qk_norm=True), windows)


def dense(body: Body, traits: Traits, windows: Windows) -> Language:
    """Return a decoder of equal blocks but for their attention windows."""
    return Language(
        width=body.hidden,
        vocab=body.vocab,
        embedding=(token_table(body.vocab, body.hidden),),
        blocks=repeat(windows, lambda window: dense_block(body, traits, window)),
        head=(rms_norm("final_norm", body.hidden),),
        tied=body.tied,
        dropout=traits.dropout,
        max_seq_len=body.positions,
    )


def dense_block(body: Body, traits: Traits, window: int | None) -> Layer:
    """Return one block with a gated MLP."""
    return block(body, traits, window, gated_mlp(body.hidden, body.ffn, bias=traits.mlp_bias))


def block(body: Body, traits: Traits, window: int | None, mlp: tuple[Operator, ...], *, name: str = "decoder") -> Layer:
    """Return one block around the operators of its MLP or experts."""
    shape = AttentionShape(
        heads=body.heads,
        kv_heads=body.kv_heads,
        head_dim=body.head_dim,
        qkv_bias=traits.qkv_bias,
        out_bias=traits.out_bias,
        qk_norm_params=body.head_dim if traits.qk_norm else 0,
        window=window,
    )
    behind_attention = (rms_norm("attention_output_norm", body.hidden),) if traits.sandwich else ()
    behind_mlp = (rms_norm("mlp_output_norm", body.hidden),) if traits.sandwich else ()
    return Layer(
        kind="decoder",
        name=name if window is None else f"{name}.window",
        width=body.hidden,
        operators=(
            rms_norm("attention_norm", body.hidden),
            *attention(body.hidden, shape),
            *behind_attention,
            rms_norm("mlp_norm", body.hidden),
            *mlp,
            *behind_mlp,
        ),
        dropout=traits.dropout,
    )


def _gemma_traits(config: Config, *, sandwich: bool = False, qk_norm: bool = False) -> Traits:
    bias = config.flag("attention_bias", default=False)
    return Traits(
        qkv_bias=bias,
        out_bias=bias,
        sandwich=sandwich,
        qk_norm=qk_norm,
        dropout=dropout(config, "attention_dropout"),
    )
