"""The parts decoder layers are made of, in the order their operators run.

`h` features enter every part. Parameters: a product `inputs * outputs (+ outputs)`, an RMS norm `h`, a layer norm
`2 h`, a gated MLP `3 h f`, a plain one `2 h f`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetplan.specs.model import Activation, Attention, Experts, Layer, Linear, Loss, Module, Norm, Operator, Table

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention with its four projections."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    q_norm_params: int = 0
    """Parameters of the query norm; 0: neither queries nor keys have one."""
    k_norm_params: int = 0
    causal: bool = True
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Routed experts, each a gated MLP of `ffn` features, and what every token runs beside them."""

    experts: int
    top_k: int
    ffn: int
    bias: bool = False
    router_bias: bool = False
    shared_ffn: int = 0
    shared_bias: bool = False
    shared_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """A language model before it is laid out as a chain."""

    width: int
    vocab: int
    embedding: tuple[Operator, ...]
    blocks: tuple[Layer, ...]
    head: tuple[Operator, ...]
    """What runs between the last block and the logits."""
    head_width: int | None = None
    """Features that reach the logits; None: `width`."""
    head_bias: bool = False
    tied: bool = False
    dropout: bool = False
    max_seq_len: int | None = None
    extra: tuple[Layer, ...] = ()
    """Multi-token prediction layers."""


def rms_norm(name: str, width: int) -> Norm:
    """Return a norm with a scale (Zhang 2019, arXiv:1910.07467)."""
    return Norm(name=name, width=width, params=width)


def layer_norm(name: str, width: int) -> Norm:
    """Return a norm with a scale and a shift (Ba 2016, arXiv:1607.06450)."""
    return Norm(name=name, width=width, params=2 * width)


def attention(hidden: int, shape: AttentionShape) -> tuple[Operator, ...]:
    """Return q, k, v, their norms, attention and the output projection."""
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = tuple(
        Linear(name=name, inputs=hidden, outputs=width, bias=shape.qkv_bias, reads_new_input=name == "q")
        for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width))
    )
    norms: tuple[Operator, ...] = ()
    if shape.q_norm_params:
        norms = (
            Norm(name="q_norm", width=q_width, params=shape.q_norm_params, sharded=True),
            Norm(name="k_norm", width=kv_width, params=shape.k_norm_params, sharded=True),
        )
    scores = Attention(
        name="attention",
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        qk_head_dim=shape.head_dim,
        value_head_dim=shape.head_dim,
        causal=shape.causal,
        window=shape.window,
    )
    output = Linear(name="output", inputs=q_width, outputs=hidden, bias=shape.out_bias, split="row")
    return (*projections, *norms, scores, output)


def gated_mlp(
    hidden: int, ffn: int, *, bias: bool = False, prefix: str = "", reads_new_input: bool = True
) -> tuple[Operator, ...]:
    """Return gate, up, the gated activation and down (Shazeer 2020, arXiv:2002.05202)."""
    return (
        Linear(name=f"{prefix}gate", inputs=hidden, outputs=ffn, bias=bias, reads_new_input=reads_new_input),
        Linear(name=f"{prefix}up", inputs=hidden, outputs=ffn, bias=bias, reads_new_input=False),
        Activation(name=f"{prefix}activation", width=ffn, gated=True),
        Linear(name=f"{prefix}down", inputs=ffn, outputs=hidden, bias=bias, split="row"),
    )


def plain_mlp(hidden: int, ffn: int, *, bias: bool = True, reads_new_input: bool = True) -> tuple[Operator, ...]:
    """Return up, an activation and down."""
    return (
        Linear(name="up", inputs=hidden, outputs=ffn, bias=bias, reads_new_input=reads_new_input),
        Activation(name="activation", width=ffn),
        Linear(name="down", inputs=ffn, outputs=hidden, bias=bias, split="row"),
    )


def moe(hidden: int, shape: MoeShape) -> tuple[Operator, ...]:
    """Return the routed experts and, beside them, the shared ones as plain linears."""
    router = Linear(name="router", inputs=hidden, outputs=shape.experts, bias=shape.router_bias, split="none")
    gate, up, down = (part for part in gated_mlp(hidden, shape.ffn, bias=shape.bias) if isinstance(part, Linear))
    routed = Experts(
        name="experts",
        num_experts=shape.experts,
        top_k=shape.top_k,
        router=router,
        linears=(gate, up, down),
        activation=Activation(name="activation", width=shape.ffn, gated=True),
    )
    if not shape.shared_ffn:
        return (routed,)
    shared = gated_mlp(hidden, shape.shared_ffn, bias=shape.shared_bias, prefix="shared_", reads_new_input=False)
    if not shape.shared_gate:
        return (routed, *shared)
    gate_linear = Linear(name="shared_router", inputs=hidden, outputs=1, split="none", reads_new_input=False)
    return (routed, gate_linear, *shared)


def repeat(keys: Sequence[K], build: Callable[[K], Layer]) -> tuple[Layer, ...]:
    """Return a layer for each key, the same object for equal keys."""
    made = {key: build(key) for key in dict.fromkeys(keys)}
    return tuple(made[key] for key in keys)


def language_module(language: Language, name: str = "language") -> Module:
    """Return the chain embedding, blocks, multi-token prediction, head."""
    embedding = Layer(
        kind="embedding",
        name="embedding",
        width=language.width,
        operators=language.embedding,
        dropout=language.dropout,
    )
    head_width = language.width if language.head_width is None else language.head_width
    logits = Linear(
        name="logits",
        inputs=head_width,
        outputs=language.vocab,
        bias=language.head_bias,
        split="vocab",
        tied=language.tied,
    )
    head = Layer(
        kind="head",
        name="head",
        width=language.width,
        operators=(*language.head, logits, Loss(name="loss", vocab=language.vocab)),
    )
    return Module(name=name, layers=(embedding, *language.blocks, *language.extra, head))


def token_table(vocab: int, width: int) -> Table:
    """Return the token embedding."""
    return Table(name="tokens", rows=vocab, width=width)
