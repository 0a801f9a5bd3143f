"""Users' questions about which layers a pipeline stage holds: hand-set counts, layout strings, edges that weigh."""

import json
from itertools import pairwise

import numpy as np
import pytest
from case_setups import cluster, decoders, gpt, group, prices_of

from hetplan.catalog.models import find_model
from hetplan.cli.main import run
from hetplan.costs.flops import forward_flop
from hetplan.costs.records import ShardDegrees, StageOption
from hetplan.errors import UsageError
from hetplan.plan.check import check, show_layers
from hetplan.plan.cuts import balanced_cut
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import Limits
from hetplan.plan.megatron_layout import (
    accounted_counts,
    by_rank,
    cut_of_layout,
    decoder_counts,
    flag_counts,
    generated_layout,
    layout_of_cut,
    layout_text,
    parse_layout,
)
from hetplan.plan.module_names import less_layers, module_names
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.workload import Workload


def boxes(nodes):
    return cluster(group("a100", "A100-SXM4-80GB", nodes, 8))


def counts(weights, num_stages):
    cut = balanced_cut([np.array(weights, dtype=float)] * num_stages)
    return [end - first for first, end in pairwise(cut)]


def test_the_last_stages_count_must_be_all_layers_where_there_is_one_stage():
    """https://github.com/NVIDIA/Megatron-LM/issues/1778: a model of 20 layers silently became one of 1."""
    with pytest.raises(UsageError, match=r"last \(1\) != num_layers \(20\) at pp 1"):
        flag_counts(20, 1, last=1)
    assert flag_counts(20, 1, last=20) == (20,)


def test_pinned_counts_come_back_from_the_search_unchanged():
    """https://github.com/NVIDIA/Megatron-LM/issues/857: 11 layers on stage 0, chosen by hand."""
    model = gpt(layers=46, width=512, heads=8, vocab=1024)
    pinned = (11, 12, 12, 11)
    prices = prices_of(boxes(1), model, seq_len=512, batch=8)
    found = search(prices, SearchRequest(limits=Limits(pinned_layers=pinned), compare=False)).best
    assert all(tuple(decoders(model, replica)) == pinned for replica in found.layout.replicas)


def test_counts_pinned_on_the_command_line_are_in_the_plan(tmp_path, monkeypatch, capsys):
    """https://github.com/NVIDIA/Megatron-LM/issues/857, through `hetplan search --pin`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "hetplan: cluster/v1\nname: c\ngroups:\n  a100: {device: A100-SXM4-80GB, nodes: 1, devices_per_node: 4}\n"
    )
    words = ["search", "c.yaml", "gpt2", "--pin", "5,4,2,1", "--global-batch", "8", "--seq-len", "512"]
    assert run([*words, "--no-compare", "--json", "-q"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    for replica in plan["layout"]["replicas"]:
        assert [stage["layers"] for stage in replica["stages"]] == ["0-5", "6-9", "10-11", "12-13"]


def test_46_layers_on_4_stages_balance_as_the_hand_table_does():
    """https://github.com/modelscope/ms-swift/issues/5737: GLM-4.5-Air at pp 4; NVIDIA ships 11, 12, 12, 11."""
    model = find_model("glm-4.5-air")
    num_decoders = sum(layer.kind == "decoder" for layer in model.chain)
    assert num_decoders == 46
    with pytest.raises(UsageError, match="46"):
        accounted_counts(46, 4, embedding=False, loss=False)
    assert accounted_counts(46, 4, embedding=True, loss=True) == (11, 12, 12, 11)
    prices = prices_of(boxes(8), model, batch=16)
    layout = grid_layout(prices, Grid(tp=8, pp=4, dp=2, ep=2, micro_batch=2, recompute="full"))
    held = decoders(model, layout.replicas[0])
    assert sum(held) == 46 and max(held) == 12


def test_four_microbatches_on_four_equal_stages_idle_three_sevenths():
    """https://github.com/modelscope/ms-swift/issues/5737: GBS 16 / (MBS 2 x DP 2) = 4 microbatches."""
    model = gpt(layers=46, width=4096, heads=32, vocab=64)
    prices = prices_of(boxes(8), model, batch=16)
    layout = grid_layout(prices, Grid(tp=8, pp=4, dp=2, micro_batch=2, layers_per_stage=(12, 11, 12, 11)))
    assert layout.replicas[0].num_microbatches == 4
    found = estimate(layout, prices)
    stage_s = [stage.busy_s for stage in found.stages]
    ideal_s = sum(stage_s) / len(stage_s)
    idle = 1 - ideal_s / found.replica_s[0]
    assert idle == pytest.approx(3 / 7, abs=0.03)


def test_42_layers_on_16_stages_leave_no_stage_empty():
    """https://github.com/deepspeedai/DeepSpeed/issues/5078: two ranks got no layer and crashed."""
    held = counts([1.0] * 42, 16)
    assert min(held) == 2 and max(held) == 3 and held.count(3) == 10 and held.count(2) == 6
    model = gpt(layers=42, width=1024, heads=16, vocab=1024)
    prices = prices_of(boxes(8), model, batch=16)
    layout = grid_layout(prices, Grid(tp=4, pp=16))
    assert min(decoders(model, layout.replicas[0])) >= 1
    assert max(decoders(model, layout.replicas[0])) == 3


def test_an_empty_last_part_is_never_chosen_where_it_saves_nothing():
    """https://github.com/deepspeedai/DeepSpeed/pull/4312: 5 items on 4 parts came out as 2, 2, 1, 0."""
    assert counts([1] * 5, 4) == [2, 1, 1, 1]


def test_an_embedding_as_heavy_as_two_layers_gets_a_stage_of_its_own():
    """https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/186: a vocabulary of 250k words."""
    assert counts([2, 1, 1, 1, 1, 2], 4) == [1, 2, 2, 1]


def test_what_the_embedding_weighs_is_computed_from_its_sizes():
    """https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/186."""
    model = gpt(layers=4, width=1024, heads=16, vocab=250_000)
    prices = prices_of(boxes(1), model, batch=8)
    use = prices.memory(StageOption(group="a100", samples=1), (0, 1), 1, "none", ShardDegrees())
    assert use.weights_bytes == 250_000 * 1024 * 2


def test_the_head_counts_in_time_and_memory():
    """https://github.com/deepspeedai/DeepSpeed/issues/2974: 2 V h FLOPs a token, and the logits' bytes."""
    vocab, width, seq = 128_256, 4096, 2048
    model = gpt(layers=8, width=width, heads=32, vocab=vocab)
    head = model.chain[-1]
    assert forward_flop(head, Workload(seq_len=seq, global_batch=1)) == 2 * vocab * width * seq
    prices = prices_of(boxes(1), model, seq_len=seq, batch=8)
    layout = grid_layout(prices, Grid(pp=4, dp=2, layers_per_stage=(2, 2, 2, 2)))
    stages = estimate(layout, prices).stages
    assert stages[3].memory.logits_bytes >= 4 * vocab * seq
    assert stages[2].memory.logits_bytes == 0
    assert stages[3].forward_s > 1.5 * stages[2].forward_s


def test_the_heads_weight_shifts_layers_away_from_the_last_stage():
    """https://github.com/deepspeedai/DeepSpeed/issues/2974."""
    model = gpt(layers=16, width=4096, heads=32, vocab=250_000)
    layout = grid_layout(prices_of(boxes(1), model, batch=8), Grid(pp=4))
    held = decoders(model, layout.replicas[0])
    assert held[3] < held[1] and held[3] == min(held)


def test_module_names_are_a_partition_of_the_model():
    """https://github.com/pytorch/torchtitan/issues/2093: which names go on which stage."""
    model = find_model("llama-3.1-8b")
    layout = grid_layout(prices_of(boxes(1), model, batch=8), Grid(tp=2, pp=4, micro_batch=1))
    replica = layout.replicas[0]
    cut = (*(stage.first_layer for stage in replica.stages), replica.stages[-1].end_layer)
    names = module_names(model, cut)
    assert len(names) == 4
    flat = [name for stage in names for name in stage]
    assert flat == ["tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "output"]
    assert [sum(name.startswith("layers.") for name in stage) for stage in names] == decoders(model, replica)


def test_less_layers_say_what_the_ends_lack():
    """https://github.com/pytorch/torchtitan/issues/2093: first_stage_less_layers, last_stage_less_layers."""
    assert less_layers((7, 8, 8, 6)) == (1, 2)
    assert less_layers((7, 8, 9, 6)) is None


def test_the_heaviest_stage_is_reported_not_the_mean():
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5077: 9,952 parameters, not 6,792, on layout 1, 2, 2, 3."""
    model = gpt(layers=8, width=16, heads=4, vocab=32)
    prices = prices_of(boxes(1), model, seq_len=8, batch=8)
    layout = grid_layout(prices, Grid(pp=4, dp=2, layers_per_stage=(1, 2, 2, 3)))
    held = [stage.memory.weights_bytes / 2 for stage in estimate(layout, prices).stages]
    assert held == [3136 + 512, 2 * 3136, 2 * 3136, 9952]
    assert max(held) == 9952


def test_a_layout_of_other_degrees_is_refused():
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5800: a saved layout of 2 stages resumed under pp 4."""
    saved = parse_layout("Et*4|t*4L")
    assert decoder_counts(saved, 2) == (4, 4)
    with pytest.raises(UsageError, match="2 stages, pp 4 x vpp 1 makes 4"):
        decoder_counts(saved, 4)


def test_a_plan_whose_stages_are_not_pp_times_vpp_is_refused():
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5800, as a plan's own counts."""
    model = gpt(layers=8, width=64, heads=4, vocab=64)
    prices = prices_of(boxes(1), model, seq_len=64, batch=8)
    with pytest.raises(UsageError, match="2 stages"):
        grid_layout(prices, Grid(pp=4, layers_per_stage=(4, 4)))


@pytest.mark.parametrize(
    ("pp", "vpp", "expected"),
    [
        (4, 1, [16, 16, 16, 13]),
        (8, 1, [8, 8, 8, 8, 8, 8, 8, 5]),
        (4, 2, [8, 8, 8, 8, 8, 8, 8, 5]),
        (16, 1, [4] * 15 + [1]),
        (8, 2, [4] * 15 + [1]),
        (4, 4, [4] * 15 + [1]),
    ],
)
def test_layouts_of_61_layers_and_mtp_are_those_kept_by_hand(pp, vpp, expected):
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/1478: DeepSeek-V3's table of (pp, vpp)."""
    stages = generated_layout(61, 1, pp, vpp)
    assert [stage.num_decoders for stage in stages] == expected
    assert stages[-1].num_mtp == 1 and stages[-1].has_loss and stages[0].has_embedding


@pytest.mark.parametrize("pp", range(1, 33))
@pytest.mark.parametrize("vpp", [1, 2])
def test_a_layout_exists_for_every_pair_of_degrees(pp, vpp):
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/1478: any other pair raised ValueError."""
    if pp * vpp > 62:
        with pytest.raises(UsageError, match="cannot fill"):
            generated_layout(61, 1, pp, vpp)
        return
    stages = generated_layout(61, 1, pp, vpp)
    assert len(stages) == pp * vpp and sum(stage.num_decoders for stage in stages) == 61
    assert parse_layout(layout_text(stages)) == stages
    model = find_model("deepseek-v3")
    assert layout_of_cut(model, cut_of_layout(model, stages)) == stages


VECTORS = [
    ("Et*3|(tt|)*29,m|L", [3] + [2] * 29 + [0, 0], [30], 31),
    ("Et|(tt|)*30mL", [1] + [2] * 30 + [0], [31], 31),
    ("Et*4|(tttt|)*14tmL", [4] * 15 + [1], [15], 15),
    ("Et*4|(t*4|)*14tmL", [4] * 15 + [1], [15], 15),
    ("Et|(tt|)*30L", [1] + [2] * 30 + [0], [], 31),
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", [2] * 35 + [3] + [2] * 3 + [1], [], 39),
    ("Et*4|(t*7|)*5t*8|tmL", [4, 7, 7, 7, 7, 7, 8, 1], [7], 7),
    ("Et*15|t*15|t*16|t*15L", [15, 15, 16, 15], [], 3),
    ("E|t*3|(t|)*3tt|m|L", [0, 3, 1, 1, 1, 2, 0, 0], [6], 7),
    ("E|t*3|(t|)*5mL", [0, 3, 1, 1, 1, 1, 1, 0], [7], 7),
    ("Et*2|(tt|)*5t|tmL", [2, 2, 2, 2, 2, 2, 1, 1], [7], 7),
    ("Et*7|t*7mL", [7, 7], [1], 1),
    ("Et*3|(tt|)*6L", [3, 2, 2, 2, 2, 2, 2, 0], [], 7),
    (
        "Etttttt|tttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttt|tttt|tttt|tttt|ttttmL",
        [6, 4, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4],
        [12],
        12,
    ),
    (
        "Et|t||tttt|tttt|tttt|tttt||tttt|tttt|tttt|tttt||tttt|tttt|tttt|tttt||tttt|tttt|tttt|tttt||tttt|tttt|ttttmL",
        [1, 1, 0, 4, 4, 4, 4, 0, 4, 4, 4, 4, 0, 4, 4, 4, 4, 0, 4, 4, 4, 4, 0, 4, 4, 4],
        [25],
        25,
    ),
]
"""Layout strings of Megatron-LM's docs and Megatron-Bridge's recipes, with what Megatron-LM's parser makes of them."""


@pytest.mark.parametrize(("text", "held", "mtp", "loss"), VECTORS, ids=[text[:24] for text, *_ in VECTORS])
def test_layout_strings_mean_what_megatrons_parser_says(text, held, mtp, loss):
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/1478; Megatron-LM docs, pipeline parallel layout."""
    stages = parse_layout(text)
    assert [stage.num_decoders for stage in stages] == held
    assert [i for i, stage in enumerate(stages) if stage.num_mtp] == mtp
    assert [i for i, stage in enumerate(stages) if stage.has_loss] == [loss]
    assert parse_layout(layout_text(stages)) == stages


@pytest.mark.parametrize("text", ["Ex|tL", "E(t|L", "Et)|L", "*3t", "tE|L", "EtL*999999", "Lt|E"])
def test_what_is_no_layout_string_is_refused(text):
    with pytest.raises(UsageError, match="layout"):
        parse_layout(text)


def test_last_13_of_61_means_13_on_the_last_stage():
    """https://github.com/radixark/miles/pull/1102: docs read the flag as extra layers; truth is 16, 16, 16, 13."""
    assert flag_counts(61, 4, last=13) == (16, 16, 16, 13)
    assert flag_counts(61, 4, first=13) == (13, 16, 16, 16)
    with pytest.raises(UsageError, match="16 each and 13"):
        flag_counts(61, 4, last=12)


def test_a_layout_shows_the_counts_of_every_stage():
    """https://github.com/radixark/miles/pull/1102: a plan prints what a set of flags comes to."""
    model = find_model("deepseek-r1")
    prices = prices_of(cluster(group("h200", "H200-SXM-141GB", 32, 8)), model, batch=32)
    layout = grid_layout(prices, Grid(tp=8, pp=4, dp=8, layers_per_stage=flag_counts(61, 4, last=13)))
    assert show_layers(layout, prices)[0].startswith("E+16, 16, 16, 13")
    assert not [v for v in check(layout, prices) if v.rule == "layers exactly once"]


def test_virtual_stages_add_up_by_rank():
    stages = generated_layout(61, 1, 4, 2)
    assert by_rank(decoder_counts(stages, 4, 2), 4) == (16, 16, 16, 13)
