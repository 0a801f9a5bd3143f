"""Vision towers as modules: CLIP, SigLIP, and the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Patch embedding is a convolution whose stride is its kernel, so it is a product of `channels * patch**2` inputs a
patch. A tower's layers carry their own tokens a sample: `(image / patch)**2`, plus one where there is a class token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hetplan.specs.families.blocks import AttentionShape, attention, gated_mlp, layer_norm, plain_mlp, repeat, rms_norm
from hetplan.specs.families.body import dropout, require_multiple
from hetplan.specs.families.config import MAX_LAYERS, Config
from hetplan.specs.model import Activation, Layer, Linear, Module, Norm, Operator, Parameters, Table

ASSUMED_IMAGE_SIZE = 448
"""Pixels a side where a tower takes any resolution: one 448 x 448 image a sample (assumed)."""


CLIP_SIZES: Mapping[str, int] = {"hidden": 768, "ffn": 3072, "layers": 12, "heads": 12}
PIXTRAL_SIZES: Mapping[str, int] = {"hidden": 1024, "ffn": 4096, "layers": 24, "heads": 16}
"""Defaults of their transformers classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A vision module and what a projector needs to know of it."""

    module: Module
    width: int
    tokens: int
    """Image tokens a sample, without a class token."""
    patches_a_side: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    hidden: int
    ffn: int
    layers: int
    heads: int
    channels: int
    patch: int
    patches_a_side: int
    dropout: bool


def clip_tower(config: Config) -> Tower:
    """CLIP: a class token, a norm before the first block and one behind the last (Radford 2021, arXiv:2103.00020)."""
    return _clip_like(_read(config, patch=32))


def siglip_tower(config: Config) -> Tower:
    """SigLIP: no class token; its pooling head is counted but the language model does not read it."""
    sizes = _read(config, patch=16)
    tokens = sizes.patches_a_side**2
    inputs = sizes.channels * sizes.patch**2
    embedding = _embedding(
        sizes,
        tokens,
        Linear(name="patches", inputs=inputs, outputs=sizes.hidden, bias=True, split="none"),
        Table(name="positions", rows=tokens, width=sizes.hidden, split="none"),
    )
    behind: tuple[Operator, ...] = (layer_norm("output_norm", sizes.hidden),)
    if config.flag("vision_use_head", default=True):
        behind = (*behind, Parameters(name="pooling_head", params=_pooling_head_params(sizes)))
    return _tower(sizes, embedding, tokens, behind=behind)


def pixtral_tower(config: Config) -> Tower:
    """Pixtral: RMS norms, gated MLPs, no biases; any resolution, taken as `image_size`, its largest."""
    sizes = _read(config, patch=16, image=1024, like=PIXTRAL_SIZES)
    inputs = sizes.channels * sizes.patch**2
    tokens = sizes.patches_a_side**2
    config.defaulted[config.where("image_size")] = f"assumed: one image of {tokens} patches a sample, the largest"
    embedding = _embedding(
        sizes,
        tokens,
        Linear(name="patches", inputs=inputs, outputs=sizes.hidden, split="none"),
        rms_norm("embedding_norm", sizes.hidden),
    )
    block = _block(sizes, rms_norm, gated_mlp(sizes.hidden, sizes.ffn), window=None, bias=False)
    return Tower(
        module=Module(name="vision", layers=(embedding, *(block,) * sizes.layers)),
        width=sizes.hidden,
        tokens=tokens,
        patches_a_side=sizes.patches_a_side,
    )


def llama4_tower(config: Config) -> Tower:
    """Llama 4: CLIP's layout with rotary positions beside learned ones."""
    sizes = _read(config, patch=14, image=448, like={"layers": 34, "heads": 16, "ffn": 5632})
    return _clip_like(sizes)


def qwen2_vl_tower(config: Config) -> tuple[Tower, Module]:
    """Return the tower of Qwen2-VL and its merger into the language model's width."""
    width = config.size("embed_dim", default=1280)
    sizes = _read_qwen(config, width, ffn=width * config.size("mlp_ratio", default=4))
    block = _block(sizes, layer_norm, plain_mlp(sizes.hidden, sizes.ffn), window=None)
    tower = _qwen_tower(config, sizes, (block,) * sizes.layers)
    return tower, _merger(config, tower, config.size("hidden_size", default=3584), norm_params=2 * width)


def qwen2_5_vl_tower(config: Config) -> tuple[Tower, Module]:
    """Return the tower of Qwen2.5-VL (windows in all blocks but a few) and its merger."""
    width = config.size("hidden_size", default=3584)
    sizes = _read_qwen(config, width, ffn=config.size("intermediate_size", default=3420))
    full = set(config.indices("fullatt_block_indexes", default=(7, 15, 23, 31)))
    window = max(1, config.size("window_size", default=112) // sizes.patch) ** 2
    mlp = gated_mlp(sizes.hidden, sizes.ffn, bias=True)
    blocks = repeat(
        tuple(None if index in full else window for index in range(sizes.layers)),
        lambda looks_back: _block(sizes, rms_norm, mlp, window=looks_back),
    )
    tower = _qwen_tower(config, sizes, blocks)
    return tower, _merger(config, tower, config.size("out_hidden_size", default=3584), norm_params=width)


def qwen3_vl_tower(config: Config) -> tuple[Tower, Module]:
    """Return the tower of Qwen3-VL and its mergers: one behind it, one behind each `deepstack_visual_indexes`."""
    width = config.size("hidden_size", default=1152)
    sizes = _read_qwen(config, width, ffn=config.size("intermediate_size", default=4304), patch=16, layers=27)
    rows = config.size("num_position_embeddings", default=2304)
    block = _block(sizes, layer_norm, plain_mlp(sizes.hidden, sizes.ffn), window=None)
    tower = _qwen_tower(
        config,
        sizes,
        (block,) * sizes.layers,
        Table(name="positions", rows=rows, width=width, split="none"),
        bias=True,
    )
    outputs = config.size("out_hidden_size", default=3584)
    merger = _merger(config, tower, outputs, norm_params=2 * width)
    joined = config.size("spatial_merge_size", default=2) ** 2
    deep = _merger(config, tower, outputs, norm_params=2 * width * joined)
    num_deep = len(config.indices("deepstack_visual_indexes", default=(8, 16, 24)))
    return tower, replace(merger, layers=(*deep.layers * num_deep, *merger.layers))


def _read(config: Config, *, patch: int, image: int = 224, like: Mapping[str, int] = CLIP_SIZES) -> _Sizes:
    like = {**CLIP_SIZES, **like}
    hidden = config.size("hidden_size", default=like["hidden"])
    heads = config.size("num_attention_heads", default=like["heads"], limit=MAX_LAYERS)
    require_multiple(config, "hidden_size", hidden, "num_attention_heads", heads)
    patch = config.size("patch_size", default=patch)
    image = config.size("image_size", default=image)
    if image < patch:
        raise config.error(f"{image} is less than patch_size {patch}", "image_size")
    return _Sizes(
        hidden=hidden,
        ffn=config.size("intermediate_size", default=like["ffn"]),
        layers=config.size("num_hidden_layers", default=like["layers"], limit=MAX_LAYERS),
        heads=heads,
        channels=config.size("num_channels", default=3),
        patch=patch,
        patches_a_side=image // patch,
        dropout=dropout(config, "attention_dropout"),
    )


def _read_qwen(config: Config, width: int, *, ffn: int, patch: int = 14, layers: int = 32) -> _Sizes:
    heads = config.size("num_heads", "num_attention_heads", default=16, limit=MAX_LAYERS)
    require_multiple(config, config.key_of("embed_dim", "hidden_size"), width, "num_heads", heads)
    patch = config.size("patch_size", default=patch)
    image = config.optional_size("image_size")
    if image is None:
        image = ASSUMED_IMAGE_SIZE
        config.defaulted[config.where("image_size")] = f"assumed: one {image} x {image} image a sample"
    if image < patch:
        raise config.error(f"{image} is less than patch_size {patch}", "image_size")
    return _Sizes(
        hidden=width,
        ffn=ffn,
        layers=config.size("depth", "num_hidden_layers", default=layers, limit=MAX_LAYERS),
        heads=heads,
        channels=config.size("in_channels", default=3),
        patch=patch,
        patches_a_side=image // patch,
        dropout=False,
    )


def _clip_like(sizes: _Sizes) -> Tower:
    tokens = sizes.patches_a_side**2 + 1
    embedding = _embedding(
        sizes,
        tokens,
        Linear(name="patches", inputs=sizes.channels * sizes.patch**2, outputs=sizes.hidden, split="none"),
        Parameters(name="class_token", params=sizes.hidden),
        Table(name="positions", rows=tokens, width=sizes.hidden, split="none"),
        layer_norm("embedding_norm", sizes.hidden),
    )
    return _tower(sizes, embedding, tokens, behind=(layer_norm("output_norm", sizes.hidden),))


def _pooling_head_params(sizes: _Sizes) -> int:
    """Return a probe, attention with four biased projections, a layer norm and a plain MLP."""
    hidden, ffn = sizes.hidden, sizes.ffn
    return hidden + 4 * (hidden * hidden + hidden) + 2 * hidden + 2 * hidden * ffn + ffn + hidden


def _embedding(sizes: _Sizes, tokens: int, *operators: Operator) -> Layer:
    return Layer(
        kind="embedding",
        name="patch_embedding",
        width=sizes.hidden,
        operators=operators,
        tokens_per_sample=tokens,
        dropout=sizes.dropout,
    )


def _block(
    sizes: _Sizes,
    norm: Callable[[str, int], Norm],
    mlp: tuple[Operator, ...],
    *,
    window: int | None,
    bias: bool = True,
) -> Layer:
    shape = AttentionShape(
        heads=sizes.heads,
        kv_heads=sizes.heads,
        head_dim=sizes.hidden // sizes.heads,
        qkv_bias=bias,
        out_bias=bias,
        causal=False,
        window=window,
    )
    return Layer(
        kind="encoder",
        name="encoder" if window is None else "encoder.window",
        width=sizes.hidden,
        operators=(
            norm("attention_norm", sizes.hidden),
            *attention(sizes.hidden, shape),
            norm("mlp_norm", sizes.hidden),
            *mlp,
        ),
        tokens_per_sample=sizes.patches_a_side**2,
        dropout=sizes.dropout,
    )


def _tower(sizes: _Sizes, embedding: Layer, tokens: int, *, behind: tuple[Operator, ...]) -> Tower:
    block = _block(sizes, layer_norm, plain_mlp(sizes.hidden, sizes.ffn), window=None)
    block = replace(block, tokens_per_sample=tokens)
    last = replace(block, name="encoder.last", operators=(*block.operators, *behind))
    return Tower(
        module=Module(name="vision", layers=(embedding, *(block,) * (sizes.layers - 1), last)),
        width=sizes.hidden,
        tokens=sizes.patches_a_side**2,
        patches_a_side=sizes.patches_a_side,
    )


def _qwen_tower(
    config: Config, sizes: _Sizes, blocks: tuple[Layer, ...], *embedding: Operator, bias: bool = False
) -> Tower:
    frames = config.size("temporal_patch_size", default=2)
    inputs = sizes.channels * frames * sizes.patch**2
    tokens = sizes.patches_a_side**2
    patches = Linear(name="patches", inputs=inputs, outputs=sizes.hidden, bias=bias, split="none")
    first = _embedding(sizes, tokens, patches, *embedding)
    return Tower(
        module=Module(name="vision", layers=(first, *blocks)),
        width=sizes.hidden,
        tokens=tokens,
        patches_a_side=sizes.patches_a_side,
    )


def _merger(config: Config, tower: Tower, outputs: int, *, norm_params: int) -> Module:
    """Return the projector that joins `spatial_merge_size**2` patches into one token."""
    joined = config.size("spatial_merge_size", default=2) ** 2
    width = tower.width * joined
    return Module(
        name="projector",
        layers=(
            Layer(
                kind="projector",
                name="projector",
                width=outputs,
                operators=(
                    Norm(name="input_norm", width=width, params=norm_params),
                    Linear(name="up", inputs=width, outputs=width, bias=True),
                    Activation(name="activation", width=width),
                    Linear(name="down", inputs=width, outputs=outputs, bias=True, split="row"),
                ),
                tokens_per_sample=max(1, tower.tokens // joined),
            ),
        ),
    )
