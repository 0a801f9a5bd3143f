"""Decoders with RMS norms, rotary positions and a gated MLP: Llama, Mistral, Qwen, Gemma, Granite, OLMo 2, SmolLM3."""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.specs.families.blocks import (
    AttentionShape,
    Language,
    attention,
    gated_mlp,
    layer_norm,
    repeat,
    rms_norm,
    token_table,
)
from hetplan.specs.families.body import Body, Defaults, dropout, read_body
from hetplan.specs.families.config import Config
from hetplan.specs.families.windows import Windows, late_windows, patterned_windows, same_window
from hetplan.specs.model import Layer, Operator, Parameters


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
    pre_norm: bool = True
    """False: no norm before attention and MLP (OLMo 2)."""
    whole_qk_norm: bool = False
    """The query and key norms are as wide as all heads (OLMo 2)."""
    layer_norms: bool = False
    """Layer norms in place of RMS norms."""
    sinks: bool = False
    """A learned logit a head that takes no value (gpt-oss)."""
    head_bias: bool = False
    dropout: bool = False


def llama(config: Config) -> Language:
    """Llama 1 to 3 and the many models that share its class."""
    defaults = Defaults(vocab=32000, hidden=4096, ffn=11008, layers=32, heads=32, positions=2048)
    return _llama_like(config, defaults, whole_heads=True)


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


def granite(config: Config) -> Language:
    """IBM Granite 3: Llama with scaled residuals."""
    defaults = Defaults(vocab=32000, hidden=4096, ffn=11008, layers=32, heads=32, positions=2048)
    return _llama_like(config, defaults)


def smollm3(config: Config) -> Language:
    """SmolLM3: Llama, some of whose layers have no positions."""
    defaults = Defaults(
        vocab=128256, hidden=2048, ffn=11008, layers=36, heads=16, kv_heads=4, positions=32768, tied=True
    )
    if config.flag("use_sliding_window", default=False):
        raise config.error("windows are not supported for this family", "use_sliding_window")
    return _llama_like(config, defaults)


def olmo2(config: Config) -> Language:
    """OLMo 2: norms behind attention and MLP only, query and key norms over all heads."""
    defaults = Defaults(vocab=50304, hidden=4096, ffn=11008, layers=32, heads=32, positions=2048)
    body = read_body(config, defaults, whole_heads=True)
    bias = config.flag("attention_bias", default=False)
    traits = Traits(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        whole_qk_norm=True,
        sandwich=True,
        pre_norm=False,
        dropout=dropout(config, "attention_dropout"),
    )
    return dense(body, traits, (None,) * body.layers)


def dense(body: Body, traits: Traits, windows: Windows) -> Language:
    """Return a decoder of equal blocks but for their attention windows."""
    mlp = gated_mlp(body.hidden, body.ffn, bias=traits.mlp_bias)
    return decoder(body, traits, repeat(windows, lambda window: block(body, traits, window, mlp)))


def decoder(body: Body, traits: Traits, blocks: tuple[Layer, ...]) -> Language:
    """Return the language model around `blocks`."""
    norm = layer_norm if traits.layer_norms else rms_norm
    return Language(
        width=body.hidden,
        vocab=body.vocab,
        embedding=(token_table(body.vocab, body.hidden),),
        blocks=blocks,
        head=(norm("final_norm", body.hidden),),
        head_bias=traits.head_bias,
        tied=body.tied,
        dropout=traits.dropout,
        max_seq_len=body.positions,
    )


def block(body: Body, traits: Traits, window: int | None, mlp: tuple[Operator, ...], *, name: str = "decoder") -> Layer:
    """Return one block around the operators of its MLP or experts."""
    shape = _attention_shape(body, traits, window)
    norm = layer_norm if traits.layer_norms else rms_norm

    def norms(name: str, *, there: bool) -> tuple[Operator, ...]:
        return (norm(name, body.hidden),) if there else ()

    return Layer(
        kind="decoder",
        name=name if window is None else f"{name}.window",
        width=body.hidden,
        operators=(
            *norms("attention_norm", there=traits.pre_norm),
            *attention(body.hidden, shape),
            *((Parameters(name="sinks", params=body.heads),) if traits.sinks else ()),
            *norms("attention_output_norm", there=traits.sandwich),
            *norms("mlp_norm", there=traits.pre_norm),
            *mlp,
            *norms("mlp_output_norm", there=traits.sandwich),
        ),
        dropout=traits.dropout,
    )


def _attention_shape(body: Body, traits: Traits, window: int | None) -> AttentionShape:
    q_norm = k_norm = body.head_dim if traits.qk_norm else 0
    if traits.whole_qk_norm:
        q_norm, k_norm = q_norm * body.heads, k_norm * body.kv_heads
    return AttentionShape(
        heads=body.heads,
        kv_heads=body.kv_heads,
        head_dim=body.head_dim,
        qkv_bias=traits.qkv_bias,
        out_bias=traits.out_bias,
        q_norm_params=q_norm,
        k_norm_params=k_norm,
        window=window,
    )


def _llama_like(config: Config, defaults: Defaults, *, whole_heads: bool = False) -> Language:
    body = read_body(config, defaults, whole_heads=whole_heads)
    bias = config.flag("attention_bias", default=False)
    traits = Traits(
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", default=False),
        dropout=dropout(config, "attention_dropout"),
    )
    return dense(body, traits, (None,) * body.layers)


def _gemma_traits(config: Config, *, sandwich: bool = False, qk_norm: bool = False) -> Traits:
    bias = config.flag("attention_bias", default=False)
    return Traits(
        qkv_bias=bias,
        out_bias=bias,
        sandwich=sandwich,
        qk_norm=qk_norm,
        dropout=dropout(config, "attention_dropout"),
    )
