"""Model files: a catalog name, a path, inline fields, overrides, or plain modules."""

import json

import pytest

from hetplan.catalog.models import find_model, find_model_config
from hetplan.errors import SpecError
from hetplan.specs.model import Attention, model_params
from hetplan.specs.read_model import read_model

TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(text, name="model.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return read_model(path, find_model_config)

    return write


def refuse(write, text, name="model.yaml"):
    with pytest.raises(SpecError) as caught:
        write(text, name)
    return caught.value


def test_catalog_name_with_overrides(write):
    model = write("hetplan: model/v1\nname: small\nconfig: llama-3.1-8b\noverrides: {num_hidden_layers: 8}\n")
    assert model.name == "small"
    assert sum(layer.kind == "decoder" for layer in model.chain) == 8


def test_path_to_a_configuration_beside_the_file(write, tmp_path):
    (tmp_path / "tiny.config.json").write_text(json.dumps(TINY))
    model = write("hetplan: model/v1\nconfig: tiny.config.json\n", "mine.yaml")
    assert (model.name, model.family) == ("mine", "llama")
    assert model_params(model) == model_params(write(json.dumps(TINY), "other.json"))


def test_bare_configuration_is_named_after_its_file_or_folder(write):
    assert write(json.dumps(TINY), "tiny.config.json").name == "tiny"
    assert write(json.dumps(TINY), "Tiny-1B/config.json").name == "Tiny-1B"


def test_published_json_with_exponents_and_nulls_is_read(write):
    text = json.dumps({**TINY, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1e6}, indent=2)
    assert model_params(write(text, "x.json")) > 0


def test_overrides_reach_into_mappings_field_by_field(write):
    model = write("hetplan: model/v1\nconfig: qwen2.5-vl-7b\noverrides: {vision_config: {image_size: 224, depth: 4}}\n")
    assert {layer.tokens_per_sample for layer in model.modules[0].layers} == {16 * 16}
    assert len(model.modules[0].layers) == 5
    assert "vision_config.image_size" not in model.sources


def test_inline_fields_are_located(write):
    text = "hetplan: model/v1\nconfig:\n  model_type: llama\n  hidden_size: 64\n  num_attention_heads: 5\n"
    assert str(refuse(write, text)).split("model.yaml:")[1].startswith("4:16: hidden_size: 64 is not a multiple")


def test_nested_fields_are_located(write):
    config = {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 0}}
    error = refuse(write, json.dumps(config, indent=1), "llava.json")
    assert (error.location.line, error.path) == (5, "text_config.hidden_size")


def test_overridden_field_is_located_in_the_overrides(write):
    error = refuse(write, "hetplan: model/v1\nconfig: gpt2\noverrides:\n  n_layer: 0\n")
    assert (error.location.line, error.location.column, error.path) == (4, 12, "n_layer")


def test_error_of_a_catalog_configuration_points_at_its_name(write):
    error = refuse(write, "hetplan: model/v1\nname: x\nconfig: gpt2-xxl\n")
    assert error.location.line == 3
    assert "did you mean 'gpt2-xl'" in str(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hetplan: model/v1\nname: x\n", "either 'config:' or 'modules:'"),
        ("hetplan: model/v1\nconfig: gpt2\nmodules: []\n", "either 'config:' or 'modules:'"),
        ("hetplan: cluster/v1\nconfig: gpt2\n", "expected 'model/v1'"),
        ("hetplan: model/v1\nconfig: gpt2\noverides: {}\n", "did you mean 'overrides'"),
        ("hetplan: model/v1\nconfig: missing.json\n", "cannot read"),
        ("hetplan: model/v1\nmodules: []\n", "at least one module"),
        ("[1, 2]\n", "mapping"),
        ("hetplan: model/v1\nmodules: [{layers: 2, hidden: 65, heads: 2, vocab: 9}]\n", "not a multiple"),
        ("hetplan: model/v1\nmodules: [{layers: 2, hidden: 64, heads: 2}]\n", "'tokens' is missing"),
        (
            "hetplan: model/v1\nstyle: llama\nmodules: [{layers: 2, hidden: 64, heads: 2, vocab: 9}]\n",
            "'ffn' is missing",
        ),
        ("hetplan: model/v1\nmodules: [{layers: 2, hidden: 64, heads: 2, vocab: 9, voccab: 3}]\n", "did you mean"),
    ],
)
def test_unusable_files_are_refused(write, text, words):
    error = refuse(write, text)
    assert words in str(error)
    assert error.location is not None


def test_path_must_lead_to_a_configuration_not_a_model_file(write, tmp_path):
    (tmp_path / "a.yaml").write_text("hetplan: model/v1\nconfig: gpt2\n")
    assert "not a model file" in str(refuse(write, "hetplan: model/v1\nconfig: a.yaml\n", "b.yaml"))


def test_gpt_given_by_its_sizes_is_the_catalog_one(write):
    model = write(
        "hetplan: model/v1\nname: gpt3\n"
        "modules:\n  - {layers: 96, hidden: 12288, heads: 96, vocab: 51200, seq: 2048, dropout: true}\n"
    )
    assert model.chain == find_model("gpt3-175b").chain
    assert model.max_seq_len == 2048


def test_llama_given_by_its_sizes_is_the_catalog_one(write):
    model = write(
        "hetplan: model/v1\nstyle: llama\n"
        "modules:\n  - {layers: 80, hidden: 8192, heads: 64, kv_heads: 8, ffn: 28672, vocab: 128256, seq: 8192}\n"
    )
    assert model.chain == find_model("llama-3-70b").chain


def test_modules_without_a_vocabulary_are_encoders(write):
    model = write(
        "hetplan: model/v1\nmodules:\n"
        "  - {name: eyes, layers: 3, hidden: 64, heads: 4, tokens: 50}\n"
        "  - {name: ears, layers: 2, hidden: 64, heads: 4, tokens: 70}\n"
        "  - {name: language, style: llama, layers: 2, hidden: 64, heads: 4, ffn: 128, vocab: 100}\n"
        "edges: [{from: eyes, to: language}, {from: ears, to: language}]\n"
    )
    eyes, ears, _ = model.modules
    assert [layer.kind for layer in eyes.layers] == ["encoder"] * 3
    assert {layer.tokens_per_sample for layer in ears.layers} == {70}
    assert not any(part.causal for part in eyes.layers[0].operators if isinstance(part, Attention))
    assert model.edges == (("eyes", "language"), ("ears", "language"))
