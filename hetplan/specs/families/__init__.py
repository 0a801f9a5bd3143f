"""Families of models: one function each, from its published configuration to the operator form.

`FAMILIES` maps a configuration's `model_type` to a function of (configuration, model name). A new family is one
function and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetplan.specs.families import audio, deepseek, dense, eleuther, glm, gpt, gpt_oss, llama4, moe, multimodal, phi
from hetplan.specs.families.blocks import Language, language_module
from hetplan.specs.families.config import Config
from hetplan.specs.model import Model

Family = Callable[[Config, str], Model]


def _language_only(read: Callable[[Config], Language]) -> Family:
    """Return a family whose models are one module."""

    def build(config: Config, name: str) -> Model:
        language = read(config)
        return Model(name=name, modules=(language_module(language),), max_seq_len=language.max_seq_len)

    return build


FAMILIES: Mapping[str, Family] = {
    "bloom": _language_only(gpt.bloom),
    "deepseek_v2": _language_only(deepseek.deepseek_v2),
    "deepseek_v3": _language_only(deepseek.deepseek_v3),
    "falcon": _language_only(gpt.falcon),
    "gemma": _language_only(dense.gemma),
    "gemma2": _language_only(dense.gemma2),
    "gemma3": multimodal.gemma3,
    "gemma3_text": _language_only(dense.gemma3_text),
    "glm4": _language_only(glm.glm4),
    "glm4_moe": _language_only(glm.glm4_moe),
    "gpt2": _language_only(gpt.gpt2),
    "gpt_neo": _language_only(eleuther.gpt_neo),
    "gpt_neox": _language_only(eleuther.gpt_neox),
    "gpt_oss": _language_only(gpt_oss.gpt_oss),
    "gptj": _language_only(eleuther.gptj),
    "granite": _language_only(dense.granite),
    "kimi_k2": _language_only(deepseek.deepseek_v3),
    "llama": _language_only(dense.llama),
    "llama4": multimodal.llama4,
    "llama4_text": _language_only(llama4.llama4_text),
    "llava": multimodal.llava,
    "llava_next": multimodal.llava_next,
    "llava_onevision": multimodal.llava_onevision,
    "mistral": _language_only(dense.mistral),
    "mixtral": _language_only(moe.mixtral),
    "olmo2": _language_only(dense.olmo2),
    "opt": _language_only(gpt.opt),
    "phi": _language_only(phi.phi),
    "phi3": _language_only(phi.phi3),
    "phimoe": _language_only(phi.phimoe),
    "qwen2": _language_only(dense.qwen2),
    "qwen2_5_vl": multimodal.qwen2_5_vl,
    "qwen2_audio": audio.qwen2_audio,
    "qwen2_moe": _language_only(moe.qwen2_moe),
    "qwen2_vl": multimodal.qwen2_vl,
    "qwen3": _language_only(dense.qwen3),
    "qwen3_moe": _language_only(moe.qwen3_moe),
    "qwen3_vl": multimodal.qwen3_vl,
    "qwen3_vl_moe": multimodal.qwen3_vl_moe,
    "smollm3": _language_only(dense.smollm3),
    "starcoder2": _language_only(gpt.starcoder2),
}
"""What `model_type` may say."""
