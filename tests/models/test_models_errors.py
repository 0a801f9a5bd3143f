"""A configuration that is no model is refused at the field that is wrong."""

import copy
import json
from pathlib import Path
from random import Random

import pytest

from hetplan.catalog.models import find_model
from hetplan.errors import SpecError, UsageError
from hetplan.specs.families import FAMILIES
from hetplan.specs.importers.hugging_face import model_from_config

VARIANTS = json.loads((Path(__file__).parent / "family_variants.json").read_text())["cases"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def refuse(config):
    with pytest.raises(SpecError) as caught:
        model_from_config(config, "bad")
    return caught.value


def test_unknown_family_is_refused_by_name_with_the_nearest():
    error = refuse({**LLAMA, "model_type": "lama"})
    assert error.path == "model_type"
    assert "'lama'" in str(error) and "did you mean 'llama'" in str(error)
    assert all(family in str(error) for family in FAMILIES)


@pytest.mark.parametrize("model_type", [None, 3, ["llama"], {"a": 1}, "", "LLAMA\n", "x" * 10_000])
def test_family_must_be_a_known_text(model_type):
    error = refuse({**LLAMA, "model_type": model_type})
    assert error.path == "model_type"
    assert len(str(error)) < 1000 and "\n" not in str(error)


def test_family_must_be_stated():
    assert refuse({key: value for key, value in LLAMA.items() if key != "model_type"}).path == "model_type"


@pytest.mark.parametrize("value", [0, -1, 1.5, 8.0, True, "64", None, [], {}, float("nan"), 10**30, 10**9])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_sizes_are_whole_numbers_in_range(key, value):
    error = refuse({**LLAMA, key: value})
    assert error.path == key
    assert len(str(error)) < 200


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"hidden_size": 66}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"attention_dropout": 1.5}, "attention_dropout"),
        ({"attention_dropout": float("nan")}, "attention_dropout"),
        ({"model_type": "gpt2", "n_embd": 66, "n_head": 4}, "n_embd"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "half"]}, "layer_types"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers"),
        ({"model_type": "llava", "vision_config": 3}, "vision_config"),
        ({"model_type": "llava", "vision_config": {"model_type": "vit"}}, "vision_config.model_type"),
        ({"model_type": "llava", "text_config": {"model_type": "t5"}}, "text_config.model_type"),
        ({"model_type": "llava", "text_config": {"hidden_size": -1}}, "text_config.hidden_size"),
        ({"model_type": "qwen2_vl", "vision_config": {"hidden_size": 32}}, "vision_config.hidden_size"),
    ],
)
def test_wrong_fields_are_refused_by_path(changes, path):
    assert refuse({**LLAMA, **changes}).path == path


def test_fields_that_say_nothing_about_shapes_are_ignored():
    model_from_config({**LLAMA, "rope_scaling": {"factor": 8.0}, "bos_token_id": None, "anything": object()}, "fine")


def test_unknown_catalog_name_is_a_usage_error_with_the_nearest():
    with pytest.raises(UsageError, match=r"unknown model 'llama-3\.1-8'.*did you mean 'llama-3\.1-8b'"):
        find_model("llama-3.1-8")
    with pytest.raises(UsageError):
        find_model("../models/gpt2")


WRONG = [None, 0, -1, 3, 10**30, 10**8, 1.5, float("nan"), float("inf"), True, "x", "", [], [1], [None], {}, {"a": 1}]


def mutated(random):
    """Return a configuration of some family with one to three fields removed or replaced by something else."""
    config = copy.deepcopy(random.choice(VARIANTS)["config"])
    inner = [value for value in config.values() if isinstance(value, dict)]
    target = random.choice([config, *inner])
    for key in random.sample(sorted(target), min(len(target), random.randint(1, 3))):
        if random.random() < 0.2:
            del target[key]
        else:
            target[key] = random.choice(WRONG)
    return config


def test_mutated_configurations_are_models_or_refused_in_one_line():
    random = Random(5)
    outcomes = {"model": 0, "refused": 0}
    for _ in range(3000):
        try:
            model_from_config(mutated(random), "mutated")
        except SpecError as error:
            assert "\n" not in str(error) and len(str(error)) < 1200
            outcomes["refused"] += 1
        else:
            outcomes["model"] += 1
    assert min(outcomes.values()) > 100
