from __future__ import annotations

import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from costs_samples import A100, H100, L4, V100, cluster, exact, gpt, group, network, one_layer
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.costs.prices import price
from hetplan.costs.records import LayerCosts, StageOption
from hetplan.specs.calibration import Calibration, DeviceConstants, NetworkConstants
from hetplan.specs.model import Activation, Attention, Experts, Layer, Linear, Model, Module
from hetplan.specs.workload import RECOMPUTES, Workload

WORK = Workload(seq_len=2048, global_batch=3072, precision="fp16")
IB = network("ib", "a", "v", gbit=200, nics_per_node=8)
PLACES = cluster(group("a", nodes=4), group("v", V100, nodes=4), networks=(IB,))

options = st.builds(
    StageOption,
    group=st.sampled_from(["a", "v"]),
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    cp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    samples=st.integers(1, 8),
    recompute=st.sampled_from(RECOMPUTES),
)


def mixed_model():
    """A vision layer, dense and mixture layers, a window, embedding and head."""
    language = gpt(2, 512, 8, vocab=1000)
    experts = Experts(
        name="experts",
        num_experts=4,
        top_k=2,
        router=Linear(name="router", inputs=512, outputs=4, split="none"),
        linears=(
            Linear(name="up", inputs=512, outputs=256),
            Linear(name="down", inputs=256, outputs=512, split="row"),
        ),
        activation=Activation(name="gelu", width=256),
    )
    window = Attention(name="w", num_heads=8, num_kv_heads=2, qk_head_dim=64, value_head_dim=64, window=100)
    routed = Layer(kind="decoder", name="routed", width=512, operators=(window, experts))
    seen = replace(language.chain[1], kind="encoder", tokens_per_sample=576)
    return Model(
        name="mixed", modules=(Module(name="m", layers=(seen, *language.chain[:2], routed, language.chain[-1])),)
    )


@settings(max_examples=50, deadline=None)
@given(asked=st.lists(options, min_size=1, max_size=6), sequence_parallel=st.booleans())
def test_a_table_row_is_what_the_option_alone_costs(asked, sequence_parallel):
    prices = price(PLACES, mixed_model(), replace(WORK, sequence_parallel=sequence_parallel))
    table = prices.table(asked)
    for row, option in enumerate(asked):
        alone = prices.layers(option)
        for field in fields(LayerCosts):
            values = getattr(table, field.name)
            assert values.shape == (len(asked), 5)
            assert np.isfinite(values).all()
            assert (values >= 0).all()
            np.testing.assert_allclose(values[row], getattr(alone, field.name), rtol=1e-12)
        assert (alone.backward_s >= alone.weight_gradient_s + alone.recompute_s).all()


def test_options_are_priced_together_not_one_by_one():
    few = [StageOption(group="a", tp=tp, samples=samples) for tp in (1, 2) for samples in range(1, 11)]
    many = [StageOption(group=name, tp=tp, samples=s) for name in "av" for tp in (1, 2, 4, 8) for s in range(1, 51)]
    prices = price(PLACES, gpt(96, 12288, 96), WORK)
    prices.table(many)

    def calls(asked) -> int:
        """How many functions run."""
        count = 0

        def called(_frame, event, _argument):
            nonlocal count
            count += event == "call"

        sys.setprofile(called)
        try:
            prices.table(asked)
        finally:
            sys.setprofile(None)
        return count

    assert calls(many) - calls(few) < 20 * (len(many) - len(few))


def trillion(**work):
    """The 1T-parameter GPT on DGX-A100 nodes of Narayanan 2021 (arXiv:2104.04473), table 1."""
    places = cluster(group("a", nodes=384), networks=(network("ib", "a", gbit=200, nics_per_node=8),))
    plain = {"seq_len": 2048, "global_batch": 3072, "precision": "fp16"}
    return price(places, gpt(128, 25600, 160), Workload(**(plain | work)))


def test_model_flop_is_the_published_formula_without_recomputation():
    # 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)) counts forward twice and full score matrices; causal ones are half.
    s, layers, h, vocab = 2048, 128, 25600, 51200
    expected = 72 * s * layers * h**2 * (1 + s / (12 * h) + vocab / (12 * layers * h))
    assert trillion().model_flop() == pytest.approx(expected, rel=1e-4)


def test_only_experts_a_token_visits_count_as_model_flop():
    up = Linear(name="up", inputs=64, outputs=32)
    router = Linear(name="router", inputs=64, outputs=8, split="none")
    gelu = Activation(name="gelu", width=32)
    experts = Experts(name="e", num_experts=8, top_k=2, router=router, linears=(up,), activation=gelu)
    flop = price(PLACES, one_layer(experts), WORK).model_flop()
    assert flop == 6 * 2048 * (64 * 8 + 2 * 64 * 32)


def test_layers_of_the_published_1t_run_reach_the_throughput_its_bubble_and_edges_leave_room_for():
    # 163 TFLOP/s a GPU with (p - 1) / m = 63 / 512 of the time idle and the edge stages' extra work: about 190 inside.
    prices = trillion(attention="materialised", sequence_parallel=False)
    costs = prices.layers(StageOption(group="a", tp=8, samples=1, recompute="full"))
    seconds = costs.forward_total_s[1] + costs.backward_total_s[1]
    hardware_flop = 96 * 2048 * 25600**2 * (1 + 2048 / (6 * 25600))
    assert hardware_flop / 8 / seconds == pytest.approx(190e12, rel=0.12)
    arithmetic = costs.forward_s[1] + costs.backward_s[1]
    assert 0.55 < hardware_flop / 8 / arithmetic / 312e12 < 0.70


@pytest.mark.parametrize(
    ("card", "low", "high"), [(A100, 0.45, 0.70), (H100, 0.36, 0.60), (V100, 0.40, 0.70), (L4, 0.30, 0.70)]
)
def test_a_large_layer_lands_amid_published_fractions_of_peak(card, low, high):
    model = gpt(1, 8192, 64, dropout=False)
    prices = price(cluster(group("a", card)), model, WORK)
    costs = prices.layers(StageOption(group="a", samples=2))
    flop = 2 * 72 * 2048 * 8192**2 * (1 + 2048 / (12 * 8192))
    fraction = flop / (costs.forward_s[1] + costs.backward_s[1]) / card.peak_flop_per_s["fp16"]
    assert low < fraction < high


def test_the_optimizer_moves_states_weights_and_gradients():
    prices = price(PLACES, gpt(1, 512, 8), replace(WORK, gradient_precision="fp32"), exact())
    assert prices.optimizer_s("a", 1e9) == pytest.approx(1e9 * (2 * 4 + 2 * 12 + 2) / 2039e9)


def test_power_grows_from_idle_to_the_limit():
    prices = price(cluster(group("a"), group("low", power_w=200.0)), gpt(1, 512, 8), WORK)
    assert prices.power_w("a", 0.0) == pytest.approx(0.25 * 400)
    assert prices.power_w("a", 0.5) == pytest.approx(0.625 * 400)
    assert prices.power_w("a", 1.0) == 400
    assert prices.power_w("low", 1.0) == 200


def test_a_groups_price_beats_the_catalogs():
    named = replace(A100, usd_per_hour=1.8)
    places = cluster(group("a", named, usd_per_device_hour=3.6), group("b", named), group("c"))
    prices = price(places, gpt(1, 512, 8), WORK)
    assert [prices.usd_per_s(name) for name in "abc"] == [0.001, pytest.approx(0.0005), None]


def test_origins_say_what_was_measured():
    known = Calibration(
        devices={"A100": DeviceConstants(origin="measured")}, networks={"ib": NetworkConstants(origin="fitted")}
    )
    assert price(PLACES, gpt(1, 512, 8), WORK, known).origins() == {
        "A100": "measured",
        "V100": "assumed",
        "ib": "fitted",
    }


def test_capacity_and_peak_are_the_groups():
    prices = price(cluster(group("a", usable_memory_bytes=7.0)), gpt(1, 512, 8), WORK)
    assert prices.capacity_bytes("a") == 7.0
    assert prices.peak_flop_per_s("a") == 312e12
