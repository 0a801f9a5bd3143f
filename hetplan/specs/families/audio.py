"""Audio-language models as a graph: Whisper's encoder -> projector -> language model.

Whisper (Radford 2022, arXiv:2212.04356) reads mel bins, two frames for each token: a convolution over three frames,
then one that halves them; fixed positions, pre-norm blocks whose keys have no bias. Qwen2-Audio (arXiv:2407.10759)
averages pairs of its outputs before the projection, so thirty seconds are 3,000 frames, 1,500 encoder tokens and 750
at the language model.
"""

from __future__ import annotations

from dataclasses import replace

from hetplan.specs.families.blocks import AttentionShape, attention, language_module, layer_norm, plain_mlp
from hetplan.specs.families.body import dropout, require_multiple
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.families.dense import qwen2
from hetplan.specs.model import Activation, Layer, Linear, Model, Module, Operator, Table

KERNEL = 3
"""Frames a convolution reads."""
POOLED = 2
"""Encoder tokens that become one at the language model."""


def qwen2_audio(config: Config, name: str) -> Model:
    """Qwen2-Audio."""
    audio = config.section("audio_config") or config.inside("audio_config", {})
    text = config.section("text_config") or config.inside("text_config", {})
    tower = whisper_tower(audio)
    language = replace(qwen2(text), tied=config.flag("tie_word_embeddings", default=False))
    last = tower.layers[-1]
    tokens = last.tokens_per_sample or 1
    projector = Layer(
        kind="projector",
        name="projector",
        width=language.width,
        operators=(Linear(name="projection", inputs=last.width, outputs=language.width, bias=True, split="none"),),
        tokens_per_sample=max(1, tokens // POOLED),
    )
    return Model(
        name=name,
        modules=(tower, Module(name="projector", layers=(projector,)), language_module(language)),
        edges=((tower.name, "projector"), ("projector", "language")),
        max_seq_len=language.max_seq_len,
    )


def whisper_tower(config: Config) -> Module:
    """Return Whisper's encoder for its longest input."""
    hidden = config.size("d_model", "hidden_size", default=1280)
    heads = config.size("encoder_attention_heads", default=20, limit=MAX_LAYERS)
    require_multiple(config, config.key_of("d_model", "hidden_size"), hidden, "encoder_attention_heads", heads)
    bins = config.size("num_mel_bins", default=128)
    tokens = config.size("max_source_positions", default=1500)
    drops = dropout(config, "dropout")
    block = Layer(
        kind="encoder",
        name="encoder",
        width=hidden,
        operators=_block(hidden, heads, config.size("encoder_ffn_dim", default=5120)),
        tokens_per_sample=tokens,
        dropout=drops,
    )
    count = config.size("encoder_layers", default=32, limit=MAX_LAYERS)
    last = replace(block, name="encoder.last", operators=(*block.operators, layer_norm("output_norm", hidden)))
    config.defaulted[config.where("max_source_positions")] = f"assumed: one clip of {tokens} encoder tokens a sample"
    return Module(name="audio", layers=(*_convolutions(bins, hidden, tokens), *(block,) * (count - 1), last))


def _block(hidden: int, heads: int, ffn: int) -> tuple[Operator, ...]:
    shape = AttentionShape(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True, causal=False
    )
    operators = tuple(
        replace(one, bias=False) if isinstance(one, Linear) and one.name == "k" else one
        for one in attention(hidden, shape)
    )
    return (layer_norm("attention_norm", hidden), *operators, layer_norm("mlp_norm", hidden), *plain_mlp(hidden, ffn))


def _convolutions(bins: int, hidden: int, tokens: int) -> tuple[Layer, Layer]:
    """Return the two convolutions as products over the frames each output reads."""
    first: tuple[Operator, ...] = (
        Linear(name="convolution", inputs=KERNEL * bins, outputs=hidden, bias=True, split="none"),
        Activation(name="activation", width=hidden),
    )
    second: tuple[Operator, ...] = (
        Linear(name="convolution", inputs=KERNEL * hidden, outputs=hidden, bias=True, split="none"),
        Activation(name="activation", width=hidden),
        Table(name="positions", rows=tokens, width=hidden, split="none"),
    )
    return (
        Layer(kind="embedding", name="frames", width=hidden, operators=first, tokens_per_sample=2 * tokens),
        Layer(kind="embedding", name="half_frames", width=hidden, operators=second, tokens_per_sample=tokens),
    )
