"""Parameter counts equal the published ones to the last digit."""

import json
from pathlib import Path

import pytest

from hetplan.catalog.models import find_model, find_model_config, model_names
from hetplan.specs.importers.hugging_face import model_from_config
from hetplan.specs.model import layer_params, model_params

VARIANTS = json.loads((Path(__file__).parent / "family_variants.json").read_text())["cases"]

# Repository on huggingface.co, the catalog's name, and the parameters transformers 5.24.0 builds from its config.json
# (tied weights once, multi-token prediction left out), which are those of the published checkpoint.
PUBLISHED = [
    ("EleutherAI/gpt-neox-20b", "gpt-neox-20b", 20_554_567_680),
    ("Qwen/Qwen2-0.5B", "qwen2-0.5b", 494_032_768),
    ("Qwen/Qwen2-7B", "qwen2-7b", 7_615_616_512),
    ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b", 494_032_768),
    ("Qwen/Qwen2.5-72B", "qwen2.5-72b", 72_706_203_648),
    ("Qwen/Qwen2.5-7B", "qwen2.5-7b", 7_615_616_512),
    ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b", 8_292_166_656),
    ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b", 235_093_634_560),
    ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b", 30_532_122_624),
    ("Qwen/Qwen3-32B", "qwen3-32b", 32_762_123_264),
    ("deepseek-ai/DeepSeek-R1", "deepseek-r1", 671_026_404_352),
    ("deepseek-ai/DeepSeek-V3", "deepseek-v3", 671_026_404_352),
    ("google/gemma-2-27b", "gemma-2-27b", 27_227_128_320),
    ("google/gemma-2-9b", "gemma-2-9b", 9_241_705_984),
    ("google/gemma-3-1b-it", "gemma-3-1b", 999_885_952),
    ("google/gemma-3-4b-it (text_config)", "gemma-3-4b", 3_880_099_328),
    ("llava-hf/llava-1.5-7b-hf", "llava-1.5-7b", 7_063_427_072),
    ("meta-llama/Llama-2-13b-hf", "llama-2-13b", 13_015_864_320),
    ("meta-llama/Llama-2-70b-hf", "llama-2-70b", 68_976_648_192),
    ("meta-llama/Llama-2-7b-hf", "llama-2-7b", 6_738_415_616),
    ("meta-llama/Llama-3.1-405B", "llama-3.1-405b", 405_853_388_800),
    ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b", 70_553_706_496),
    ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b", 8_030_261_248),
    ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini", 3_821_079_552),
    ("microsoft/Phi-3.5-mini-instruct", "phi-3.5-mini", 3_821_079_552),
    ("mistralai/Mistral-7B-v0.1", "mistral-7b", 7_241_732_096),
    ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b", 46_702_792_704),
    ("openai-community/gpt2", "gpt2", 124_439_808),
    ("openai-community/gpt2-medium", "gpt2-medium", 354_823_168),
    ("openai-community/gpt2-large", "gpt2-large", 774_030_080),
    ("openai-community/gpt2-xl", "gpt2-xl", 1_557_611_200),
    ("meta-llama/Llama-3.2-1B", "llama-3.2-1b", 1_235_814_400),
    ("meta-llama/Llama-3.2-3B", "llama-3.2-3b", 3_212_749_824),
    ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b", 140_620_634_112),
    ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-v2-lite", 15_706_484_224),
    ("zai-org/GLM-4.5-Air", "glm-4.5-air", 106_852_245_504),
    ("openai/gpt-oss-20b", "gpt-oss-20b", 20_914_757_184),
    ("google/gemma-2-2b", "gemma-2-2b", 2_614_341_888),
    ("google/gemma-7b", "gemma-7b", 8_537_680_896),
    ("microsoft/phi-2", "phi-2", 2_779_683_840),
    ("Qwen/Qwen2.5-1.5B", "qwen2.5-1.5b", 1_543_714_304),
    ("Qwen/Qwen2.5-3B", "qwen2.5-3b", 3_085_938_688),
    ("Qwen/Qwen3-4B", "qwen3-4b", 4_022_468_096),
    ("Qwen/Qwen3-14B", "qwen3-14b", 14_768_307_200),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b", 1_100_048_384),
    ("openai/gpt-oss-120b", "gpt-oss-120b", 116_829_156_672),
]

# Narayanan 2021, arXiv:2104.04473, Table 1: billions of parameters as printed.
MEGATRON = [
    ("gpt-1.7b", 1.7),
    ("gpt-3.6b", 3.6),
    ("gpt-7.5b", 7.5),
    ("gpt-18b", 18.4),
    ("gpt-39b", 39.1),
    ("gpt-76b", 76.1),
    ("gpt-145b", 145.6),
    ("gpt-310b", 310.1),
    ("gpt-530b", 529.6),
    ("gpt-1t", 1008.0),
]


@pytest.mark.parametrize(("name", "params"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED])
def test_catalog_model_has_the_published_number_of_parameters(name, params):
    assert model_params(find_model(name)) == params


@pytest.mark.parametrize(("name", "billions"), MEGATRON)
def test_megatron_model_has_the_printed_number_of_parameters(name, billions):
    assert round(model_params(find_model(name)) / 1e9, 1) == billions


@pytest.mark.parametrize("name", [name for name, _ in MEGATRON] + ["gpt3-175b"])
def test_gpt_follows_the_formula_of_the_megatron_paper(name):
    """P = 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)) (equation 2), plus the final norm's 2 h."""
    config = find_model_config(name)
    l, h, v, s = (config[key] for key in ("n_layer", "n_embd", "vocab_size", "n_positions"))  # noqa: E741
    assert model_params(find_model(name)) == 12 * l * h * h + 13 * l * h + (v + s) * h + 2 * h


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: f"{case['config']['model_type']}-{case['params']}")
def test_configuration_counts_as_transformers_does(case):
    assert model_params(model_from_config(case["config"], "variant")) == case["params"]


def test_every_family_has_variants():
    from hetplan.specs.families import FAMILIES

    assert {case["config"]["model_type"] for case in VARIANTS} == set(FAMILIES)


def test_multi_token_prediction_is_held_but_not_counted():
    """DeepSeek-AI 2024, arXiv:2412.19437, section 2.2: the module of V3 holds 11.5 B of its own."""
    model = find_model("deepseek-v3")
    (mtp,) = [layer for layer in model.chain if layer.kind == "mtp"]
    assert not mtp.counted
    assert layer_params(mtp) == pytest.approx(11.5e9, rel=0.01)
    assert sum(layer_params(layer) for layer in model.chain) == model_params(model) + layer_params(mtp)


def test_every_catalog_model_states_its_source():
    for name in model_names():
        model = find_model(name)
        assert model.name == name
        assert model.sources["source"], name
