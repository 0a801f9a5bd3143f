"""DeepSeek-V2 and V3 (and R1): latent attention, dense layers first, shared experts, multi-token prediction.

Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1): queries go through rank `q_lora_rank`
(or straight, where that is null), keys and values share rank `kv_lora_rank`; `qk_rope_head_dim` features a token
carry the position and are shared by all heads. Multi-token prediction (arXiv:2412.19437, section 2.2): two norms, a
`2 h -> h` projection and one more block, with the embedding and the head of the main model.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.specs.families.blocks import Language, MoeShape, gated_mlp, moe, repeat, rms_norm, token_table
from hetplan.specs.families.body import Body, Defaults, dropout, read_body
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.families.moe import require_top_k
from hetplan.specs.model import Attention, Layer, Linear, Loss, Operator


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Sizes of multi-head latent attention."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool


def deepseek_v2(config: Config) -> Language:
    """DeepSeek-V2, V2.5 and V2-Lite."""
    defaults = Defaults(vocab=102400, hidden=4096, ffn=11008, layers=32, heads=32, positions=2048)
    body = read_body(config, defaults, whole_heads=True, own_head_dim=False, grouped=False)
    bias = config.flag("mlp_bias", default=False)
    shape = _experts(config, MoeShape(experts=64, top_k=1, ffn=1407, shared_ffn=2, shared_bias=bias), top_k=None)
    return _language(config, body, shape, mlp_bias=bias, dense_layers=0)


def deepseek_v3(config: Config) -> Language:
    """DeepSeek-V3, V3.1 and R1."""
    defaults = Defaults(vocab=129280, hidden=7168, ffn=18432, layers=61, heads=128, positions=4096)
    body = read_body(config, defaults, own_head_dim=False, grouped=False)
    shape = _experts(config, MoeShape(experts=256, top_k=8, ffn=2048, shared_ffn=1), top_k=8)
    return _language(config, body, shape, mlp_bias=False, dense_layers=3)


def latent_attention(hidden: int, shape: LatentShape) -> tuple[Operator, ...]:
    """Return the projections, norms and attention of MLA."""
    qk_dim = shape.nope_dim + shape.rope_dim
    queries: tuple[Operator, ...]
    if shape.q_rank is None:
        queries = (Linear(name="q", inputs=hidden, outputs=shape.heads * qk_dim),)
    else:
        queries = (
            Linear(name="q_down", inputs=hidden, outputs=shape.q_rank, bias=shape.bias, split="none"),
            rms_norm("q_norm", shape.q_rank),
            Linear(name="q_up", inputs=shape.q_rank, outputs=shape.heads * qk_dim),
        )
    kv_down = Linear(
        name="kv_down",
        inputs=hidden,
        outputs=shape.kv_rank + shape.rope_dim,
        bias=shape.bias,
        split="none",
        reads_new_input=False,
    )
    return (
        *queries,
        kv_down,
        rms_norm("kv_norm", shape.kv_rank),
        Linear(name="kv_up", inputs=shape.kv_rank, outputs=shape.heads * (shape.nope_dim + shape.value_dim)),
        Attention(
            name="attention",
            num_heads=shape.heads,
            num_kv_heads=shape.heads,
            qk_head_dim=qk_dim,
            value_head_dim=shape.value_dim,
        ),
        Linear(name="output", inputs=shape.heads * shape.value_dim, outputs=hidden, bias=shape.bias, split="row"),
    )


def mtp_layer(block: Layer, vocab: int) -> Layer:
    """Return one multi-token prediction layer around `block`, left out of the published parameter count."""
    hidden = block.width
    return Layer(
        kind="mtp",
        name="mtp",
        width=hidden,
        operators=(
            rms_norm("embedding_norm", hidden),
            rms_norm("hidden_norm", hidden),
            Linear(name="join", inputs=2 * hidden, outputs=hidden, split="none"),
            *block.operators,
            rms_norm("final_norm", hidden),
            Linear(name="logits", inputs=hidden, outputs=vocab, split="vocab", tied=True),
            Loss(name="loss", vocab=vocab),
        ),
        dropout=block.dropout,
        counted=False,
    )


def num_mtp_layers(config: Config) -> int:
    """Return how many multi-token prediction layers are stated; none where the field is missing."""
    return config.count("num_nextn_predict_layers", "num_mtp_layers")


def _experts(config: Config, defaults: MoeShape, *, top_k: int | None) -> MoeShape:
    """Return the experts as stated; `defaults.shared_ffn` counts shared experts."""
    ffn = config.size("moe_intermediate_size", default=defaults.ffn)
    shared = config.count("n_shared_experts", default=0 if "n_shared_experts" in config.values else defaults.shared_ffn)
    return MoeShape(
        experts=config.size("n_routed_experts", "num_experts", "num_local_experts", default=defaults.experts),
        top_k=config.size("num_experts_per_tok", default=top_k, limit=MAX_LAYERS),
        ffn=ffn,
        shared_ffn=shared * ffn,
        shared_bias=defaults.shared_bias,
    )


def _latent_shape(config: Config, heads: int) -> LatentShape:
    return LatentShape(
        heads=heads,
        q_rank=config.optional_size("q_lora_rank", default=1536),
        kv_rank=config.size("kv_lora_rank", default=512),
        nope_dim=config.size("qk_nope_head_dim", default=128),
        rope_dim=config.size("qk_rope_head_dim", default=64),
        value_dim=config.size("v_head_dim", default=128),
        bias=config.flag("attention_bias", default=False),
    )


def _language(config: Config, body: Body, shape: MoeShape, *, mlp_bias: bool, dense_layers: int) -> Language:
    if config.count("moe_layer_freq", default=1) != 1:
        raise config.error("only 1 (experts in every layer after the dense ones) is supported", "moe_layer_freq")
    require_top_k(config, shape)
    dense_layers = config.count("first_k_dense_replace", default=dense_layers)
    latent = latent_attention(body.hidden, _latent_shape(config, body.heads))
    drops = dropout(config, "attention_dropout")

    def block(routed: bool) -> Layer:  # noqa: FBT001 - the key `repeat` passes on
        mlp = moe(body.hidden, shape) if routed else gated_mlp(body.hidden, body.ffn, bias=mlp_bias)
        return Layer(
            kind="decoder",
            name="decoder.experts" if routed else "decoder.dense",
            width=body.hidden,
            operators=(rms_norm("attention_norm", body.hidden), *latent, rms_norm("mlp_norm", body.hidden), *mlp),
            dropout=drops,
        )

    blocks = repeat(tuple(index >= dense_layers for index in range(body.layers)), block)
    return Language(
        width=body.hidden,
        vocab=body.vocab,
        embedding=(token_table(body.vocab, body.hidden),),
        blocks=blocks,
        head=(rms_norm("final_norm", body.hidden),),
        tied=body.tied,
        dropout=drops,
        max_seq_len=body.positions,
        extra=(mtp_layer(block(True), body.vocab),) * num_mtp_layers(config),
    )
