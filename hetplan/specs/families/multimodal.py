"""Vision-language models as a graph: vision tower -> projector -> language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hetplan.specs.families.blocks import Language, language_module, repeat, rms_norm
from hetplan.specs.families.config import Config
from hetplan.specs.families.dense import gemma, gemma2, gemma3_text, llama, mistral, qwen2, qwen2_vl_text, qwen3
from hetplan.specs.families.llama4 import llama4_text
from hetplan.specs.families.moe import qwen3_vl_moe_text
from hetplan.specs.families.phi import phi, phi3
from hetplan.specs.families.vision import (
    Tower,
    clip_tower,
    llama4_tower,
    pixtral_tower,
    qwen2_5_vl_tower,
    qwen2_vl_tower,
    qwen3_vl_tower,
    siglip_tower,
)
from hetplan.specs.model import Activation, Attention, Layer, Linear, Model, Module, Parameters
from hetplan.units import show

T = TypeVar("T")

TOWERS: Mapping[str, Callable[[Config], Tower]] = {
    "clip_vision_model": clip_tower,
    "pixtral": pixtral_tower,
    "siglip_vision_model": siglip_tower,
}
LANGUAGES: Mapping[str, Callable[[Config], Language]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma": gemma,
    "gemma2": gemma2,
    "phi": phi,
    "phi3": phi3,
}
LLAVA_TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
"""The tower LLaVA's class builds where `vision_config` is missing."""


ONEVISION_TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "vision_use_head": False,
}
"""The tower LLaVA-OneVision's class builds where `vision_config` is missing."""
ASSUMED_TILES = 5
"""Pieces an image is cut into where a family cuts it: an overview and two by two tiles (assumed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LlavaTraits:
    """How a relative of LLaVA differs from it."""

    tower: Mapping[str, Any]
    text: str = "llama"
    """Language family where `text_config` does not say."""
    select: str = "default"
    tiles: int = 1
    text_ties: bool = True
    """A head that `text_config` ties is tied, whatever stands beside it."""


def llava(config: Config, name: str) -> Model:
    """LLaVA 1.5 and its relatives with a CLIP, SigLIP or Pixtral tower."""
    return _llava(config, name, _LlavaTraits(tower=LLAVA_TOWER))


def llava_next(config: Config, name: str) -> Model:
    """LLaVA-NeXT (1.6): the image is cut into tiles, rows of them end with a learned token."""
    return _llava(config, name, _LlavaTraits(tower=LLAVA_TOWER, tiles=ASSUMED_TILES, text_ties=False))


def llava_onevision(config: Config, name: str) -> Model:
    """LLaVA-OneVision: as LLaVA-NeXT, by default with a SigLIP tower and Qwen2."""
    traits = _LlavaTraits(tower=ONEVISION_TOWER, text="qwen2", tiles=ASSUMED_TILES, select="full")
    return _llava(config, name, traits)


def _llava(config: Config, name: str, traits: _LlavaTraits) -> Model:
    tiles = traits.tiles
    vision = config.section("vision_config") or config.inside("vision_config", traits.tower)
    words = config.section("text_config") or config.inside("text_config", {})
    tower = _pick(vision, TOWERS, default=traits.tower["model_type"])(vision)
    language = _pick(words, LANGUAGES, default=traits.text)(words)
    full = config.text("vision_feature_select_strategy", default=traits.select) == "full"
    tokens = (tower.module.layers[-1].tokens_per_sample or tower.tokens) if full else tower.tokens
    features = config.values.get("vision_feature_layer", -2)
    num_features = len(features) if isinstance(features, list | tuple) else 1
    bias = config.flag("multimodal_projector_bias", default=True)
    newline = (Parameters(name="image_newline", params=language.width),) if tiles > 1 else ()
    projector = Layer(
        kind="projector",
        name="projector",
        width=language.width,
        operators=(
            Linear(name="up", inputs=tower.width * num_features, outputs=language.width, bias=bias),
            Activation(name="activation", width=language.width),
            Linear(name="down", inputs=language.width, outputs=language.width, bias=bias, split="row"),
            *newline,
        ),
        tokens_per_sample=tokens * tiles,
    )
    if tiles > 1:
        config.defaulted[vision.where("image_size")] = f"assumed: {tiles} tiles of it a sample"
    tied = config.flag("tie_word_embeddings", default=False) or (traits.text_ties and language.tied)
    vision_module = _tiled(tower.module, tiles)
    return _graph(name, vision_module, Module(name="projector", layers=(projector,)), replace(language, tied=tied))


def _tiled(module: Module, tiles: int) -> Module:
    """Return `module` working on `tiles` images a sample, each of which attends to itself alone."""
    if tiles == 1:
        return module

    def layer_of(layer: Layer) -> Layer:
        tokens = layer.tokens_per_sample or 1
        operators = tuple(
            replace(part, window=min(part.window or tokens, tokens)) if isinstance(part, Attention) else part
            for part in layer.operators
        )
        return replace(layer, operators=operators, tokens_per_sample=tokens * tiles)

    return replace(module, layers=repeat(module.layers, layer_of))


def llama4(config: Config, name: str) -> Model:
    """Llama 4: an adapter joins patches by `pixel_shuffle_ratio`, a projection follows."""
    vision = config.section("vision_config") or config.inside("vision_config", {})
    text = config.section("text_config") or config.inside("text_config", {})
    tower = llama4_tower(vision)
    language = llama4_text(text)
    middle = vision.size("projector_input_dim", default=4096)
    out = vision.size("projector_output_dim", default=4096)
    inputs = vision.size("intermediate_size", default=5632)
    features = vision.size("vision_output_dim", default=7680)
    joined = max(1, inputs // tower.width)
    projector = Layer(
        kind="projector",
        name="projector",
        width=language.width,
        operators=(
            Linear(name="adapter_up", inputs=inputs, outputs=middle),
            Activation(name="activation", width=middle),
            Linear(name="adapter_down", inputs=out, outputs=out, split="row"),
            Linear(name="projection", inputs=features, outputs=language.width, split="none"),
        ),
        tokens_per_sample=max(1, tower.tokens // joined),
    )
    return _graph(name, tower.module, Module(name="projector", layers=(projector,)), language)


def gemma3(config: Config, name: str) -> Model:
    """Gemma 3 with its SigLIP tower; the projector pools patches to `mm_tokens_per_image` tokens."""
    vision = config.section("vision_config") or config.inside("vision_config", {})
    text = config.section("text_config") or config.inside("text_config", {})
    tower = _pick(vision, {"siglip_vision_model": siglip_tower}, default="siglip_vision_model")(vision)
    language = _pick(text, {"gemma3_text": gemma3_text}, default="gemma3_text")(text)
    projector = Layer(
        kind="projector",
        name="projector",
        width=language.width,
        operators=(
            rms_norm("input_norm", tower.width),
            Linear(name="projection", inputs=tower.width, outputs=language.width, split="none"),
        ),
        tokens_per_sample=config.size("mm_tokens_per_image", default=256),
    )
    tied = config.flag("tie_word_embeddings", default=True)
    return _graph(name, tower.module, Module(name="projector", layers=(projector,)), replace(language, tied=tied))


def qwen2_vl(config: Config, name: str) -> Model:
    """Qwen2-VL."""
    return _qwen_vl(config, name, qwen2_vl_tower, "hidden_size")


def qwen2_5_vl(config: Config, name: str) -> Model:
    """Qwen2.5-VL."""
    return _qwen_vl(config, name, qwen2_5_vl_tower, "out_hidden_size")


def qwen3_vl(config: Config, name: str) -> Model:
    """Qwen3-VL with a dense language model."""
    return _qwen3_vl(config, name, qwen3)


def qwen3_vl_moe(config: Config, name: str) -> Model:
    """Qwen3-VL with routed experts."""
    return _qwen3_vl(config, name, qwen3_vl_moe_text)


def _qwen3_vl(config: Config, name: str, read_text: Callable[[Config], Language]) -> Model:
    vision = config.section("vision_config") or config.inside("vision_config", {})
    text = config.section("text_config") or config.inside("text_config", {})
    tower, projector = qwen3_vl_tower(vision)
    language = read_text(text)
    _require_width(vision, "out_hidden_size", projector, language)
    tied = config.flag("tie_word_embeddings", default=False)
    return _graph(name, tower.module, projector, replace(language, tied=tied))


def _qwen_vl(config: Config, name: str, read_tower: Callable[[Config], tuple[Tower, Module]], output_key: str) -> Model:
    """Build the graph; the language fields stand in `text_config`, in older files beside it."""
    vision = config.section("vision_config") or config.inside("vision_config", {})
    text = config.section("text_config")
    tower, projector = read_tower(vision)
    language = qwen2_vl_text(config if text is None else text)
    tied = config.flag("tie_word_embeddings", default=False) or language.tied
    _require_width(vision, output_key, projector, language)
    return _graph(name, tower.module, projector, replace(language, tied=tied))


def _require_width(vision: Config, key: str, projector: Module, language: Language) -> None:
    """Raise SpecError unless the projector writes as many features as the language model reads."""
    width = projector.layers[-1].width
    if width != language.width:
        raise vision.error(f"{width} is not the hidden_size {language.width} of the language model", key)


def _graph(name: str, vision: Module, projector: Module, language: Language) -> Model:
    return Model(
        name=name,
        modules=(vision, projector, language_module(replace(language, head_bias=False))),
        edges=((vision.name, projector.name), (projector.name, "language")),
        max_seq_len=language.max_seq_len,
    )


def _pick(config: Config, known: Mapping[str, T], *, default: str) -> T:
    """Return what the `model_type` inside a graph names.

    Raises: SpecError for one that is not known there.
    """
    kind = config.text("model_type", default=default)
    if kind not in known:
        raise config.error(f"unknown model_type {show(kind)} here; known: {', '.join(sorted(known))}", "model_type")
    return known[kind]
