"""Vision-language models as a graph: vision tower -> projector -> language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from hetplan.specs.families.blocks import Language, language_module, rms_norm
from hetplan.specs.families.config import Config
from hetplan.specs.families.dense import gemma, gemma2, gemma3_text, llama, mistral, qwen2, qwen2_vl_text, qwen3
from hetplan.specs.families.moe import qwen3_vl_moe_text
from hetplan.specs.families.phi import phi, phi3
from hetplan.specs.families.vision import (
    Tower,
    clip_tower,
    qwen2_5_vl_tower,
    qwen2_vl_tower,
    qwen3_vl_tower,
    siglip_tower,
)
from hetplan.specs.model import Activation, Layer, Linear, Model, Module
from hetplan.units import show

T = TypeVar("T")

TOWERS: Mapping[str, Callable[[Config], Tower]] = {
    "clip_vision_model": clip_tower,
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


def llava(config: Config, name: str) -> Model:
    """LLaVA 1.5 and its relatives with a CLIP or SigLIP tower and a Llama, Mistral or Qwen language model."""
    vision = config.section("vision_config") or config.inside("vision_config", LLAVA_TOWER)
    text = config.section("text_config") or config.inside("text_config", {})
    tower = _pick(vision, TOWERS, default="clip_vision_model")(vision)
    language = _pick(text, LANGUAGES, default="llama")(text)
    full = config.text("vision_feature_select_strategy", default="default") == "full"
    layers = tower.module.layers
    tokens = (layers[-1].tokens_per_sample or tower.tokens) if full else tower.tokens
    features = config.values.get("vision_feature_layer", -2)
    num_features = len(features) if isinstance(features, list | tuple) else 1
    bias = config.flag("multimodal_projector_bias", default=True)
    projector = Layer(
        kind="projector",
        name="projector",
        width=language.width,
        operators=(
            Linear(name="up", inputs=tower.width * num_features, outputs=language.width, bias=bias),
            Activation(name="activation", width=language.width),
            Linear(name="down", inputs=language.width, outputs=language.width, bias=bias, split="row"),
        ),
        tokens_per_sample=tokens,
    )
    tied = config.flag("tie_word_embeddings", default=False) or language.tied
    return _graph(name, tower.module, Module(name="projector", layers=(projector,)), replace(language, tied=tied))


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
