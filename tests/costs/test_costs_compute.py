from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from costs_samples import A100, H100, V100, cluster, exact, gpt, group, network, one_layer

from hetplan.costs.prices import price
from hetplan.costs.records import StageOption
from hetplan.errors import CalibrationError
from hetplan.specs.calibration import Calibration
from hetplan.specs.model import Activation, Attention, Experts, Linear, Loss, Norm, Parameters, Table
from hetplan.specs.workload import Workload

WORK = Workload(seq_len=1024, global_batch=8, precision="fp16")
ONE = StageOption(group="a", samples=1)


def layer_of(*operators, option=ONE, work=WORK, card=A100, calibration=None, **fields):
    places = cluster(group("a", card, nodes=4), networks=(network("ib", "a", gbit=200, nics_per_node=8),))
    prices = price(places, one_layer(*operators, **fields), work, calibration or exact(card))
    return prices.layers(option)


def test_a_large_gemm_takes_its_flop_over_the_peak_and_three_times_that_with_backward():
    costs = layer_of(Linear(name="w", inputs=8192, outputs=8192))
    one_way = 2 * 1024 * 8192 * 8192 / 312e12
    assert costs.forward_s[0] == pytest.approx(one_way)
    assert costs.backward_s[0] == pytest.approx(2 * one_way)
    assert costs.weight_gradient_s[0] == pytest.approx(one_way)


def test_a_thin_gemm_takes_its_bytes_over_the_memory_bandwidth():
    costs = layer_of(Linear(name="w", inputs=8192, outputs=8), work=replace(WORK, seq_len=8))
    moved = 2 * (8 * 8192 + 8 * 8 + 8192 * 8)
    assert costs.forward_s[0] == pytest.approx(moved / 2039e9)


def test_efficiency_halves_at_the_stated_size_and_falls_with_misalignment():
    flop = 2 * 1024 * 1024 * 1024
    even = layer_of(Linear(name="w", inputs=1024, outputs=1024), calibration=exact(A100, gemm_half_flop=float(flop)))
    assert even.forward_s[0] == pytest.approx(2 * flop / 312e12)
    slow = exact(A100, misaligned_penalty=0.1)
    for outputs, speed in ((8192, 1.0), (8200, 0.9), (8201, 0.8)):
        costs = layer_of(Linear(name="w", inputs=8192, outputs=outputs), calibration=slow)
        assert costs.forward_s[0] == pytest.approx(2 * 1024 * 8192 * outputs / 312e12 / speed)


@pytest.mark.parametrize("split", ["column", "row", "vocab", "none"])
def test_tp_divides_the_work_of_cut_linears_and_sequence_parallelism_that_of_the_rest(split):
    whole = layer_of(Linear(name="w", inputs=8192, outputs=8192, split=split), Parameters(name="p", params=7))
    option = replace(ONE, tp=4)
    cut = layer_of(
        Linear(name="w", inputs=8192, outputs=8192, split=split), Parameters(name="p", params=7), option=option
    )
    residual = 3 * 1024 * 1024 * 2 / 2039e9 if split == "row" else 0.0
    assert cut.forward_s[0] - residual / 4 == pytest.approx((whole.forward_s[0] - residual) / 4)
    alone = replace(WORK, sequence_parallel=False)
    copied = layer_of(Linear(name="w", inputs=8192, outputs=8192, split=split), option=option, work=alone)
    if split == "none":
        assert copied.forward_s[0] == pytest.approx(whole.forward_s[0])


def test_cp_divides_tokens():
    operators = (Linear(name="w", inputs=8192, outputs=8192), Norm(name="n", width=8192, params=8192))
    whole = layer_of(*operators, work=replace(WORK, seq_len=8192))
    cut = layer_of(*operators, work=replace(WORK, seq_len=8192), option=replace(ONE, cp=2))
    assert cut.forward_s[0] == pytest.approx(whole.forward_s[0] / 2)


def heads(*, causal=True, window=None, kv_heads=16):
    return Attention(
        name="attention",
        num_heads=16,
        num_kv_heads=kv_heads,
        qk_head_dim=128,
        value_head_dim=128,
        causal=causal,
        window=window,
    )


def test_fused_attention_halves_causal_work_and_caps_windows():
    work = replace(WORK, seq_len=4096)
    full = layer_of(heads(causal=False), work=work).forward_s[0]
    assert full == pytest.approx(4 * 4096 * 4096 * 16 * 128 / 312e12)
    assert layer_of(heads(), work=work).forward_s[0] == pytest.approx(full / 2, rel=1e-3)
    narrow = layer_of(heads(window=512), work=work).forward_s[0]
    assert narrow == pytest.approx(full * 512 / 4096, rel=0.07)
    assert narrow < full * 512 / 4096


def test_fused_attention_costs_two_and_a_half_times_as_much_backward_and_nothing_to_recompute_selectively():
    plain = layer_of(heads())
    selective = layer_of(heads(), option=replace(ONE, recompute="selective"))
    assert plain.backward_s[0] == pytest.approx(2.5 * plain.forward_s[0])
    assert selective.backward_s[0] == plain.backward_s[0]


def test_a_device_without_fused_attention_materialises_scores_and_repeats_them_selectively():
    plain = layer_of(heads(), card=V100)
    selective = layer_of(heads(), card=V100, option=replace(ONE, recompute="selective"))
    fused = layer_of(heads(), card=V100, work=replace(WORK, attention="flash"))
    scores = 1024 * 1024 * 16
    products = 4 * scores * 128 / 125e12
    assert plain.forward_s[0] == pytest.approx(products + 4 * 2 * scores / 900e9)
    assert selective.recompute_s[0] == pytest.approx(plain.forward_s[0])
    assert fused.forward_s[0] < products


def test_full_recomputation_repeats_the_layer_and_its_communication():
    option = StageOption(group="a", tp=2, samples=1)
    model = gpt(1, 2048, 16)
    places = cluster(group("a"))
    prices = price(places, model, WORK, exact())
    plain, again = prices.layers(option), prices.layers(replace(option, recompute="full"))
    assert again.backward_s[1] == pytest.approx(plain.backward_s[1] + plain.forward_s[1])
    assert again.recompute_s[1] == pytest.approx(plain.forward_s[1])
    assert again.tp_backward_s[1] == pytest.approx(plain.tp_backward_s[1] + plain.tp_forward_s[1])
    for edge in (0, 2):
        assert again.backward_s[edge] == plain.backward_s[edge]
        assert again.saved_bytes[edge] == plain.saved_bytes[edge]


def test_elementwise_operators_cost_their_traffic():
    moved = 1024 * 4096 * 2
    norm = layer_of(Norm(name="n", width=4096, params=4096))
    assert (norm.forward_s[0], norm.backward_s[0]) == pytest.approx((2 * moved / 2039e9, 3 * moved / 2039e9))
    gated = layer_of(Activation(name="g", width=4096, gated=True))
    assert (gated.forward_s[0], gated.backward_s[0]) == pytest.approx((3 * moved / 2039e9, 5 * moved / 2039e9))
    table = layer_of(Table(name="t", rows=100, width=4096))
    assert table.forward_s[0] == pytest.approx(2 * moved / 2039e9)
    loss = layer_of(Loss(name="loss", vocab=32000))
    assert loss.forward_s[0] == pytest.approx(1024 * 32000 * (2 + 16) / 2039e9)


def mixture(num_experts=8, top_k=2):
    return Experts(
        name="experts",
        num_experts=num_experts,
        top_k=top_k,
        router=Linear(name="router", inputs=4096, outputs=num_experts, split="none"),
        linears=(
            Linear(name="up", inputs=4096, outputs=16384),
            Linear(name="down", inputs=16384, outputs=4096, split="row"),
        ),
        activation=Activation(name="gelu", width=16384),
    )


def test_experts_compute_top_k_copies_of_each_token_wherever_they_live():
    work = replace(WORK, seq_len=4096)
    two = layer_of(mixture(), work=work, width=4096)
    four = layer_of(mixture(top_k=4), work=work, width=4096)
    spread = layer_of(mixture(), work=work, width=4096, option=replace(ONE, dp=4, ep=4))
    products = 2 * 2 * 4096 * 2 * 4096 * 16384 / 312e12
    assert two.forward_s[0] == pytest.approx(products, rel=0.25)
    assert four.forward_s[0] - two.forward_s[0] == pytest.approx(products, rel=0.25)
    assert spread.forward_s[0] == pytest.approx(two.forward_s[0])
    assert spread.expert_params[0] == two.expert_params[0] / 4 == 8 * 2 * 4096 * 16384 / 4
    assert spread.params[0] == two.params[0] == 4096 * 8
    assert spread.ep_forward_s[0] > 0
    assert two.ep_forward_s[0] == 0


def test_fp8_speeds_up_gemms_inside_layers_but_not_the_head():
    places = cluster(group("a", H100))
    model = gpt(1, 8192, 64)
    slow = price(places, model, replace(WORK, precision="bf16"), exact(H100)).layers(ONE)
    fast = price(places, model, replace(WORK, precision="fp8"), exact(H100)).layers(ONE)
    assert 1.3 < slow.forward_s[1] / fast.forward_s[1] < 2.0
    assert fast.forward_s[2] == slow.forward_s[2]


def test_a_precision_the_device_lacks_is_named_when_its_group_is_asked_about():
    places = cluster(group("a"), group("old", V100))
    prices = price(places, gpt(1, 512, 8), replace(WORK, precision="bf16"))
    prices.layers(ONE)
    for ask in (
        lambda: prices.layers(StageOption(group="old", samples=1)),
        lambda: prices.peak_flop_per_s("old"),
        lambda: prices.optimizer_s("old", 1.0),
    ):
        with pytest.raises(CalibrationError, match=r"'V100' \(group 'old'\) has no bf16 peak; it has fp16, fp32"):
            ask()


def test_a_slower_group_takes_longer_in_proportion():
    model = gpt(2, 1024, 16)
    fast = price(cluster(group("a")), model, WORK, exact()).layers(ONE)
    slow = price(cluster(group("a", speed=0.8)), model, WORK, exact()).layers(ONE)
    assert np.allclose(slow.forward_s, fast.forward_s / 0.8)
    assert np.allclose(slow.backward_s, fast.backward_s / 0.8)


def test_uncalibrated_chips_with_more_peak_per_watt_or_a_power_limit_hold_less_of_their_peak():
    model = gpt(1, 8192, 64)

    def fraction(card, **fields):
        costs = price(cluster(group("a", card, **fields)), model, WORK, Calibration()).layers(ONE)
        return 24 * 1024 * 8192 * 8192 / card.peak_flop_per_s["fp16"] / costs.forward_s[1]

    assert fraction(A100) > fraction(H100) > 0.4
    assert fraction(A100) > fraction(A100, power_w=250.0) > 0.5


@pytest.mark.parametrize("field", ["forward_s", "backward_s", "saved_bytes", "logits_bytes"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_more_samples_cost_more_and_more_tp_less(field, recompute):
    prices = price(cluster(group("a"), networks=()), gpt(2, 2048, 16), WORK, exact())
    by_samples = [
        getattr(prices.layers(StageOption(group="a", samples=n, recompute=recompute)), field).sum() for n in (1, 2, 4)
    ]
    by_tp = [
        getattr(prices.layers(StageOption(group="a", tp=n, samples=4, recompute=recompute)), field).sum()
        for n in (1, 2, 4, 8)
    ]
    assert by_samples == sorted(by_samples)
    assert by_samples[0] < by_samples[2]
    assert by_tp == sorted(by_tp, reverse=True)
    assert by_tp[0] > by_tp[3]
