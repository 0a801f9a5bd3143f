"""Saved activations against Korthikanti 2022 (arXiv:2205.05198), equations 1 to 6 and figure 1."""

from __future__ import annotations

from dataclasses import replace

import pytest
from costs_samples import GIB, MIB, cluster, exact, gpt, group, one_layer

from hetplan.costs.prices import price
from hetplan.costs.records import ShardDegrees, StageOption
from hetplan.specs.model import Activation, Experts, Linear
from hetplan.specs.workload import Workload


def saved_bytes(*, s, b, h, a, t=1, sequence=False, recompute="none", attention="materialised", dropout=True):
    work = Workload(seq_len=s, global_batch=b, precision="fp16", attention=attention, sequence_parallel=sequence)
    prices = price(cluster(group("a")), gpt(1, h, a, dropout=dropout), work, exact())
    return prices.layers(StageOption(group="a", tp=t, samples=b, recompute=recompute)).saved_bytes[1]


SHAPES = [{"s": 2048, "b": 1, "h": 12288, "a": 96}, {"s": 1024, "b": 4, "h": 1280, "a": 20}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_gpt_layer_keeps_what_the_published_formulas_say(shape, t):
    s, b, h, a = shape["s"], shape["b"], shape["h"], shape["a"]
    sbh, scores = s * b * h, 5 * a * s / h
    assert saved_bytes(**shape, t=t) == pytest.approx(sbh * (10 + 24 / t + scores / t))
    assert saved_bytes(**shape, t=t, sequence=True) == pytest.approx(sbh / t * (34 + scores))
    assert saved_bytes(**shape, t=t, sequence=True, recompute="selective") == pytest.approx(34 * sbh / t)
    assert saved_bytes(**shape, t=t, recompute="selective") == pytest.approx(sbh * (10 + 24 / t))
    assert saved_bytes(**shape, t=t, recompute="full") == pytest.approx(2 * sbh)


def test_one_layer_of_gpt_keeps_34_sbh_and_its_scores():
    assert saved_bytes(s=2048, b=1, h=12288, a=96) == pytest.approx(2048 * 12288 * (34 + 5 * 96 * 2048 / 12288))


def test_activation_memory_of_gpt3_is_that_of_figure_1():
    layers_in_flight = 12 * 8 * (1 + 7 / 24)  # 12 layers a stage, 8 stages, interleaved three-fold
    shape = {"s": 2048, "b": 1, "h": 12288, "a": 96, "t": 8}
    assert saved_bytes(**shape) * layers_in_flight / GIB == pytest.approx(66.84375)
    selective = saved_bytes(**shape, sequence=True, recompute="selective")
    assert selective * layers_in_flight / GIB == pytest.approx(12.3515625)


def test_fused_attention_keeps_a_log_sum_a_head_instead_of_scores():
    shape = {"s": 2048, "b": 2, "h": 1024, "a": 16}
    fused = saved_bytes(**shape, attention="flash")
    assert fused == pytest.approx(2048 * 2 * 1024 * 34 + 4 * 2048 * 2 * 16)


def test_without_dropout_no_masks_are_kept_and_probabilities_once():
    shape = {"s": 2048, "b": 1, "h": 1024, "a": 16}
    assert saved_bytes(**shape, dropout=False) == pytest.approx(2048 * 1024 * (32 + 2 * 16 * 2048 / 1024))


def test_logits_of_four_samples_of_gpt2_take_at_least_786_mib():
    # An out-of-memory report: a 774M GPT-2 on one V100-32 died allocating 786 MiB, 4 x 1024 x 50304 fp32 logits
    # (https://github.com/NVIDIA/Megatron-LM/issues/525).
    work = Workload(seq_len=1024, global_batch=4, precision="fp16")
    prices = price(cluster(group("a")), gpt(2, 1280, 20, vocab=50304), work)
    logits = prices.layers(StageOption(group="a", samples=4)).logits_bytes
    one_copy = 4 * 4 * 1024 * 50304
    assert one_copy / MIB == pytest.approx(786)
    assert logits[-1] >= 2 * one_copy
    assert logits[:-1].max() == 0
    assert prices.layers(StageOption(group="a", samples=4, tp=8)).logits_bytes[-1] == pytest.approx(logits[-1] / 8)


def test_cp_divides_everything_kept_but_the_context_of_scores():
    work = Workload(seq_len=4096, global_batch=1, precision="fp16")
    prices = price(cluster(group("a")), gpt(1, 1024, 16), work, exact())
    whole, half = (prices.layers(StageOption(group="a", samples=1, cp=n)) for n in (1, 2))
    assert half.saved_bytes[1] == pytest.approx(whole.saved_bytes[1] / 2)


def test_recomputation_moves_bytes_from_kept_to_working():
    work = Workload(seq_len=2048, global_batch=1, precision="fp16", attention="materialised")
    prices = price(cluster(group("a")), gpt(1, 1024, 16), work, exact())
    none, selective, full = (
        prices.layers(StageOption(group="a", samples=1, recompute=word)) for word in ("none", "selective", "full")
    )
    assert none.saved_bytes[1] > selective.saved_bytes[1] > full.saved_bytes[1]
    assert selective.working_bytes[1] - none.working_bytes[1] == pytest.approx(
        none.saved_bytes[1] - selective.saved_bytes[1]
    )
    assert full.working_bytes[1] - none.working_bytes[1] == pytest.approx(none.saved_bytes[1])


def test_a_mixture_keeps_every_copy_of_a_routed_token():
    experts = Experts(
        name="experts",
        num_experts=8,
        top_k=2,
        router=Linear(name="router", inputs=1024, outputs=8, split="none"),
        linears=(
            Linear(name="up", inputs=1024, outputs=4096),
            Linear(name="down", inputs=4096, outputs=1024, split="row"),
        ),
        activation=Activation(name="gelu", width=4096),
    )
    work = Workload(seq_len=1024, global_batch=1, precision="fp16")
    prices = price(cluster(group("a")), one_layer(experts), work)
    kept = prices.layers(StageOption(group="a", samples=1)).saved_bytes[0]
    routed = 1024 * 2 * 2 * (1024 + 4096 + 4096 + 1024)  # input, gelu's input, down's input, output to be weighted
    router = 1024 * (2 * 1024 + 4 * 8)
    assert kept == pytest.approx(routed + router)
    more = one_layer(replace(experts, top_k=4))
    assert price(cluster(group("a")), more, work).layers(StageOption(group="a", samples=1)).saved_bytes[0] == (
        pytest.approx(2 * routed + router)
    )


def peak(recompute="none", *, b=2, t=1, attention="materialised", dropout=True):
    work = Workload(seq_len=2048, global_batch=b, precision="fp16", attention=attention)
    prices = price(cluster(group("a")), gpt(4, 1024, 16, vocab=1024, dropout=dropout), work, exact())
    option = StageOption(group="a", tp=t, samples=b, recompute=recompute)
    return prices.memory(option, (1, 5), 1, "none", ShardDegrees())


def test_gradients_of_the_scores_pass_through_a_materialised_layer():
    one = 2 * 16 * 2048**2 * 2  # bytes of a fp16 matrix of scores: heads x tokens x tokens x samples
    assert peak().scores_bytes == pytest.approx(one)
    assert peak(dropout=False).scores_bytes == pytest.approx(2 * one)
    assert peak(t=2).scores_bytes == pytest.approx(one / 2)
    assert peak(attention="flash").scores_bytes == 0


def test_recomputed_scores_are_held_beside_their_gradients():
    one = 2 * 16 * 2048**2 * 2
    kept = 5 / 2 * one  # probabilities, dropped probabilities (2 bytes each) and the mask (1)
    for recompute in ("selective", "full"):
        assert peak(recompute).scores_bytes == pytest.approx(one + kept)
    assert peak().activations_bytes - peak("selective").activations_bytes == pytest.approx(4 * kept)
