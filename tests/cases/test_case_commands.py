"""The same cases from the command line: `size`, `fit`, and layers of stages in other tools' words."""

import json

import pytest

from hetplan.cli.main import run

H100 = """\
hetplan: cluster/v1
name: h100
groups:
  h100: {device: H100-SXM5-80GB, nodes: 1, devices_per_node: 8}
networks:
  ib: {joins: [h100], kind: infiniband, bandwidth: 400 Gbit/s, latency: 3 us, nics_per_node: 8}
"""
CANDIDATES = """\
hetplan: cluster/v1
name: candidates
groups:
  h200: {device: H200-SXM-141GB, nodes: 1, devices_per_node: 8}
  h100: {device: H100-SXM5-80GB, nodes: 2, devices_per_node: 8}
  a100: {device: A100-SXM4-80GB, nodes: 2, devices_per_node: 8}
  l4: {device: L4, nodes: 8, devices_per_node: 8}
networks:
  eth: {joins: [h200, h100, a100, l4], kind: ethernet, bandwidth: 100 Gbit/s, latency: 10 us}
"""
SMALL_A100 = """\
hetplan: cluster/v1
name: a100-40
groups:
  g: {device: A100-SXM4-40GB, nodes: 5, devices_per_node: 4, usable_memory: 39.4 GiB}
networks:
  eth: {joins: [g], kind: ethernet, bandwidth: 100 Gbit/s, latency: 10 us}
"""
GAMING = """\
hetplan: cluster/v1
name: gaming
devices:
  RTX-3080-12GB: {like: RTX-3080-10GB, memory: 12 GiB, usable_memory: 12 GiB}
groups:
  large: {device: RTX-3090, nodes: box, devices_per_node: 7, usable_memory: 24 GiB}
  small: {device: RTX-3080-12GB, nodes: box, devices_per_node: 1}
"""


@pytest.fixture
def hetplan(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    files = {"h100": H100, "candidates": CANDIDATES, "a100": SMALL_A100, "gaming": GAMING}
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)

    def call(*words):
        code = run(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_size_counts_the_nodes_a_model_needs(hetplan):
    """https://github.com/pytorch/torchtitan/issues/770."""
    words = ("size", "h100.yaml", "llama-3.1-70b", "--global-batch", "64", "--seq-len", "8192", "--most", "4")
    code, out, _ = hetplan(*words, "--tokens", "15e12", "--json")
    found = json.loads(out)
    assert code == 0 and found["smallest_devices"] == 16
    assert [row["devices"] for row in found["sizes"]] == [16, 32]
    first = found["sizes"][0]
    assert first["days"] == pytest.approx(15e12 / first["tokens_per_s"] / 86400)
    assert hetplan(*words)[1].startswith("llama-3.1-70b needs at least 2 nodes of group h100 (16 devices)")


def test_size_refuses_a_table_below_the_fewest(hetplan):
    words = ("size", "h100.yaml", "llama-3.1-70b", "--global-batch", "64", "--seq-len", "8192", "--most", "1")
    code, _, err = hetplan(*words)
    assert code == 2 and "1 nodes are fewer than the 2" in err


def test_size_wants_to_know_which_group(hetplan):
    code, _, err = hetplan("size", "candidates.yaml", "gpt2", "--global-batch", "64", "--seq-len", "1024")
    assert code == 2 and "--group is needed" in err


def test_fit_gives_a_verdict_for_each_candidate(hetplan):
    """https://github.com/skypilot-org/skypilot/issues/4714."""
    code, out, _ = hetplan("fit", "candidates.yaml", "deepseek-r1", "--json")
    rows = {row["group"]: row for row in json.loads(out)["candidates"]}
    assert code == 0
    assert {name: row["fits"] for name, row in rows.items()} == {"h200": True, "h100": True, "a100": False, "l4": True}
    assert rows["a100"]["bits"] == 16 and "key/value cache" in rows["a100"]["reason"]
    text = hetplan("fit", "candidates.yaml", "deepseek-r1")[1]
    assert "no room for the key/value cache" in text.replace("\n  ", " ")


def test_fit_exits_with_3_where_no_candidate_holds_the_weights(hetplan):
    code, _, err = hetplan("fit", "a100.yaml", "deepseek-r1", "--bits", "16")
    assert code == 3 and "short" in err


def test_fit_cuts_layers_over_stages_and_refuses_four(hetplan):
    """https://github.com/thu-pacman/chitu/issues/39."""
    code, out, _ = hetplan("fit", "a100.yaml", "deepseek-r1", "--bits", "8", "--tp", "4", "--json")
    stages = json.loads(out)["stages"]
    assert code == 0 and len(stages) == 5 and sum(stage["layers"] for stage in stages) == 61
    words = ("fit", "a100.yaml", "deepseek-r1", "--bits", "8", "--tp", "4", "--pp", "4", "--fraction", "1.0")
    code, _, err = hetplan(*words)
    assert code == 3 and "40." in err


def test_fit_gives_a_small_card_fewer_layers(hetplan):
    """https://github.com/vllm-project/vllm/issues/4998."""
    code, out, _ = hetplan("fit", "gaming.yaml", "llama-3-70b", "--bits", "16", "--tp", "1", "--json")
    stages = json.loads(out)["stages"]
    assert code == 0 and sum(stage["layers"] for stage in stages) == 80
    assert [stage["group"] for stage in stages] == ["large"] * 7 + ["small"]
    assert stages[7]["layers"] <= 6 and max(stage["layers"] for stage in stages) <= 13


def test_fit_refuses_more_stages_than_there_are(hetplan):
    code, _, err = hetplan("fit", "a100.yaml", "deepseek-r1", "--tp", "4", "--pp", "6")
    assert code == 3 and "5 tp groups of 4" in err


ESTIMATE = ("estimate", "h100.yaml", "gpt2", "--global-batch", "8", "--seq-len", "512", "--json")


def layers(out):
    replica = json.loads(out)["plan"]["layout"]["replicas"][0]
    spans = [stage["layers"].split("-") for stage in replica["stages"]]
    return [int(span[-1]) - int(span[0]) + 1 for span in spans]


@pytest.mark.parametrize(
    ("degrees", "text", "expected"),
    [
        (("--pp", "4"), "5,4,2,1", [6, 4, 2, 2]),
        (("--pp", "4"), "last=3", [4, 3, 3, 4]),
        (("--pp", "4"), "first=2,last=4", [3, 3, 3, 5]),
        (("--pp", "4"), "Et*5|t*4|tt|tL", [6, 4, 2, 2]),
        (("--pp", "2", "--vpp", "2"), "Et*4|(t*4|)*2L", [5, 4, 4, 1]),
        (("--pp", "2", "--vpp", "2"), "first=4", [3, 4, 2, 5]),
    ],
)
def test_layers_of_stages_in_other_tools_words(hetplan, degrees, text, expected):
    """https://github.com/radixark/miles/pull/1102 and https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/1478."""
    code, out, err = hetplan(*ESTIMATE, *degrees, "--layers-per-stage", text)
    assert code == 0, err
    assert layers(out) == expected


@pytest.mark.parametrize(
    ("degrees", "text", "words"),
    [
        (("--pp", "1"), "last=1", "last (1) != num_layers (12) at pp 1"),
        (("--pp", "4"), "Et*6|t*6L", "2 stages, pp 4 x vpp 1 makes 4"),
        (("--pp", "4"), "Et*6|t*3|t*3|L|", "5 stages"),
        (("--pp", "4"), "middle=3", "first=N or last=N"),
        (("--pp", "4"), "last=4", "evenly"),
        (("--pp", "4"), "5,4,2", "3 stages"),
        (("--pp", "4"), "Et*5|t*4|tx|tL", "'x' is none of"),
        (("--pp", "2", "--vpp", "2"), "first=5", "multiple of vpp 2"),
    ],
)
def test_layers_that_cannot_be_are_refused(hetplan, degrees, text, words):
    """https://github.com/NVIDIA/Megatron-LM/issues/1778, https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5800."""
    code, _, err = hetplan(*ESTIMATE, *degrees, "--layers-per-stage", text)
    assert code == 2 and words in err


def test_search_takes_a_layout_string_as_a_pin(hetplan):
    """https://github.com/NVIDIA/Megatron-LM/issues/857."""
    words = ("search", "h100.yaml", "gpt2", "--global-batch", "8", "--seq-len", "512", "--no-compare", "--json", "-q")
    code, out, err = hetplan(*words, "--pin", "Et*5|t*4|tt|tL")
    assert code == 0, err
    assert layers(out) == [6, 4, 2, 2]


def test_multi_token_prediction_and_loss_may_have_stages_of_their_own(hetplan):
    """Megatron-LM docs, pipeline parallel layout: Et*3|(tt|)*29,m|L of DeepSeek-V3."""
    words = ("estimate", "candidates.yaml", "deepseek-v3", "--groups", "a100", "--global-batch", "8")
    text = "Et*7|(t*6|)*9,m|L"
    degrees = ("--pp", "12", "--seq-len", "512", "--json", "--layers-per-stage", text)
    code, out, _ = hetplan(*words, *degrees)
    assert code == 3  # 16 cards do not hold it; the stages are priced all the same
    assert layers(out) == [8, *[6] * 9, 1, 1]


RATIOS = """\
hetplan: cluster/v1
name: ratios
devices:
  Card-32: {like: RTX-5090, memory: 32 GiB, usable_memory: 32 GiB}
  Card-20: {like: RTX-3090, memory: 20 GiB, usable_memory: 20 GiB}
groups:
  large: {device: Card-32, nodes: box, devices_per_node: 1}
  small: {device: Card-20, nodes: box, devices_per_node: 2}
"""
WIDE = """\
hetplan: model/v1
name: wide
modules:
  - {hidden: 2304, layers: 4, heads: 18, vocab: 32000, seq: 2048}
"""


@pytest.mark.parametrize(("ratios", "usable_gib"), [("1,1,1", 60), ("2,1,1", 64), ("8,5,5", 72), ("best", 72)])
def test_unequal_shares_of_a_tensor_parallel_group(hetplan, tmp_path, ratios, usable_gib):
    """https://github.com/vllm-project/vllm/pull/50735."""
    (tmp_path / "ratios.yaml").write_text(RATIOS)
    (tmp_path / "wide.yaml").write_text(WIDE)
    code, out, err = hetplan("fit", "ratios.yaml", "wide.yaml", "--ratios", ratios, "--json")
    assert code == 0, err
    shares = json.loads(out)["shares"]
    assert shares["asked"]["usable_bytes"] / 2**30 == pytest.approx(usable_gib)
    assert shares["even"]["usable_bytes"] / 2**30 == 60


def test_shares_whose_sum_divides_no_width_are_refused(hetplan, tmp_path):
    """https://github.com/vllm-project/vllm/pull/50735."""
    (tmp_path / "ratios.yaml").write_text(RATIOS)
    code, _, err = hetplan("fit", "ratios.yaml", "gpt2", "--ratios", "8,5,5")
    assert code == 2 and "18, the sum of the ratios" in err
    code, _, err = hetplan("fit", "ratios.yaml", "gpt2", "--ratios", "2,1")
    assert code == 2


def test_shares_say_whether_the_weights_fit_and_what_is_wrong_with_them(hetplan, tmp_path):
    """https://github.com/vllm-project/vllm/pull/50735."""
    (tmp_path / "ratios.yaml").write_text(RATIOS)
    (tmp_path / "wide.yaml").write_text(WIDE)
    code, out, _ = hetplan("fit", "ratios.yaml", "wide.yaml", "--ratios", "best")
    assert code == 0 and "8:5:5" in out and "asked" not in out
    code, _, err = hetplan("fit", "ratios.yaml", "wide.yaml", "--ratios", "2,1")
    assert (code, err) == (2, "error: --ratios: 2 shares for 3 devices (1 of large, 2 of small); give one each\n")
    code, _, err = hetplan("fit", "ratios.yaml", "wide.yaml", "--ratios", "best", "--tp", "2")
    assert code == 2 and err.startswith("error: --tp does not go with --ratios")
    code, out, err = hetplan("fit", "ratios.yaml", "llama-3.1-70b", "--ratios", "2,1,1", "--json")
    assert code == 3 and "do not fit" in err
    shares = json.loads(out)["shares"]
    assert not shares["asked"]["fits"]
