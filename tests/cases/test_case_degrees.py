"""Users' questions about degrees that do not divide a model: heads, key/value heads, modules of their own."""

from pathlib import Path

import pytest
from case_setups import cluster, group, prices_of

from hetplan.catalog.models import find_model, find_model_config
from hetplan.cli.main import run
from hetplan.plan.check import check, degree_errors, layers_tp, valid_tp
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.specs.model import Attention
from hetplan.specs.read_model import model_from_text


def model_of(text):
    return model_from_text(f"hetplan: model/v1\nname: case\n{text}", Path("case.yaml"), find_model_config)


def vision_language():
    """InternVL2-76B's widths: a vision tower of 25 heads and width 3200 before a Llama-3-70B."""
    return model_of(
        "style: llama\nmodules:\n"
        "  - {name: vision, hidden: 3200, ffn: 12800, layers: 45, heads: 25, tokens: 1024}\n"
        "  - {name: language, hidden: 8192, ffn: 28672, layers: 80, heads: 64, kv_heads: 8, vocab: 128256}\n"
        "edges:\n  - {from: vision, to: language}\n"
    )


def test_a_vision_tower_of_25_heads_allows_1_5_25():
    """https://github.com/NVIDIA/Megatron-LM/issues/1230: degrees are divisors module by module."""
    model = vision_language()
    vision, language = model.modules
    assert layers_tp(vision.layers) == (1, 5, 25)
    assert layers_tp(language.layers) == (1, 2, 4, 8)
    assert valid_tp(model) == (1,)
    assert any("25 " in error for error in degree_errors(model, tp=8))


def test_28_heads_with_4_key_value_heads_allow_1_2_4():
    """https://github.com/THU-KEG/AdaptThink/issues/1: 28 heads of DeepSeek-R1-Distill-Qwen-7B, tp 8."""
    model = find_model("qwen2.5-7b")
    attention = next(o for layer in model.chain for o in layer.operators if isinstance(o, Attention))
    assert (attention.num_heads, attention.num_kv_heads) == (28, 4)
    assert [tp for tp in range(1, 29) if attention.num_heads % tp == 0] == [1, 2, 4, 7, 14, 28]
    assert valid_tp(model) == (1, 2, 4)
    (error,) = degree_errors(model, tp=8)
    assert "tp 8" in error and "(valid: 1, 2, 4)" in error


def test_52_heads_allow_tp_4_twice_on_eight_devices():
    """https://github.com/deepspeedai/DeepSpeed/issues/3634: Llama-30B on 8 GPUs."""
    model = find_model("llama-30b")
    assert [tp for tp in valid_tp(model) if tp <= 8] == [1, 2, 4]
    prices = prices_of(cluster(group("a100", "A100-SXM4-80GB", 1, 8)), model, batch=8)
    refused = grid_layout(prices, Grid(tp=8))
    assert any("52 attention heads" in v.message or "52 key/value heads" in v.message for v in check(refused, prices))
    assert grid_layout(prices, Grid(tp=4, dp=2)).num_devices == 8


def test_two_key_value_heads_are_named_when_tp_exceeds_them():
    """https://github.com/pytorch/torchtitan/pull/2577: n_kv_heads 2 with tp 4 crashed at a reshape."""
    model = model_of(
        "style: llama\nmodules:\n  - {hidden: 2048, ffn: 5504, layers: 4, heads: 16, kv_heads: 2, vocab: 32000}\n"
    )
    assert valid_tp(model) == (1, 2)
    (error,) = degree_errors(model, tp=4)
    assert "2 key/value heads" in error


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [("qwen2.5-7b", 8, "4 key/value heads"), ("llama-30b", 8, "52 "), ("qwen2.5-0.5b", 4, "2 key/value heads")],
)
def test_the_command_line_names_the_heads_before_anything_runs(model, tp, words, tmp_path, monkeypatch, capsys):
    """https://github.com/pytorch/torchtitan/pull/2577: an error at plan time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "hetplan: cluster/v1\nname: c\ngroups:\n  g: {device: A100-SXM4-80GB, nodes: 1, devices_per_node: 8}\n"
    )
    for command in (
        ["estimate", "c.yaml", model, "--tp", str(tp), "--global-batch", "8", "--seq-len", "1024"],
        ["search", "c.yaml", model, "--tp", str(tp), "--global-batch", "8", "--seq-len", "1024", "-q"],
    ):
        code = run(command)
        err = capsys.readouterr().err
        assert code in (2, 3) and words in err and "valid:" in err
