"""Users' questions about devices that differ: who gets what, whether mixing pays, what an engine can run."""

from fractions import Fraction

import numpy as np
import pytest
from case_setups import GIB, cluster, decoders, gpt, group, network, prices_of

from hetplan.catalog.devices import find_device
from hetplan.catalog.load import load_cluster
from hetplan.catalog.models import find_model
from hetplan.costs.capacity import best_tp_ratios, tp_ratio_errors, usable_tp_bytes
from hetplan.errors import InfeasibleError, UsageError
from hetplan.plan.check import check
from hetplan.plan.common_features import common_features, lost_features, ring_features
from hetplan.plan.estimate import estimate
from hetplan.plan.flagscale_meshes import (
    Feed,
    checkpoint_format,
    layout_of_meshes,
    mesh_numbers,
    mesh_warnings,
    meshes_of,
    parse_meshes,
)
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import ENGINES, Limits
from hetplan.plan.placement import place
from hetplan.plan.records import Input, Layout, Plan, Replica, Stage
from hetplan.plan.serving import serving_stages
from hetplan.plan.shares import evened_out, loss_weights, proportional_shares, samples_per_s, step_s
from hetplan.plan.text import plan_from_text, plan_text
from hetplan.plan.visible_devices import homogeneous_order, is_homogeneous, visible_devices
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.calibration import Calibration, DeviceConstants
from hetplan.specs.read_workload import resolve_precision
from hetplan.specs.training import parse_rule, with_training

PEOPLE = ("r3080", "r4090a", "r2080", "r4090b")


def two_boxes():
    """Host A: 2 x 3080-10G and 2 x 4090; host B: 2 x 2080-8G and 2 x 4090."""
    return cluster(
        group("r3080", "RTX-3080-10GB", ["host-a"], 2),
        group("r4090a", "RTX-4090", ["host-a"], 2),
        group("r2080", "RTX-2080", ["host-b"], 2),
        group("r4090b", "RTX-4090", ["host-b"], 2),
        networks=[network("eth", PEOPLE, gbit=10.0)],
    )


def test_a_full_7b_with_fp32_gradients_does_not_fit_two_boxes_of_gaming_cards():
    """https://github.com/NVIDIA/Megatron-LM/issues/1757: 6.74B x 16 B are 100 GiB of 132 GB before anything else."""
    prices = prices_of(two_boxes(), "llama-7b", seq_len=2048, batch=64, precision="fp16", gradient_precision="fp32")
    with pytest.raises(InfeasibleError) as error:
        search(prices, SearchRequest(compare=False))
    found = error.value.diagnosis
    assert found.constraint == "memory" and found.shortfall_bytes > 0
    states = sum(
        replica.copies * replica.stages[s.stage].tp * (s.memory.weights_bytes + s.memory.optimizer_bytes)
        for replica in found.near.layout.replicas
        for s in found.near.estimate.stages
    )
    assert states / GIB == pytest.approx(6.738e9 * 14 / GIB, rel=0.01)
    assert any("host memory" in remark for remark in found.remarks)
    assert any("LoRA" in remark and remark.endswith("would fit") for remark in found.remarks)


def test_adapters_of_a_7b_fit_two_boxes_of_gaming_cards():
    """https://github.com/NVIDIA/Megatron-LM/issues/1757: what the diagnosis offers is a plan."""
    full = find_model("llama-7b")
    model = with_training(full, {module.name: parse_rule("lora(16)") for module in full.modules})
    prices = prices_of(two_boxes(), model, seq_len=2048, batch=64, precision="fp16", gradient_precision="fp32")
    found = search(prices, SearchRequest(compare=False)).best
    assert not check(found.layout, prices)
    assert max(stage.memory.optimizer_bytes for stage in found.estimate.stages) < 0.5 * GIB


def test_four_equal_cards_alone_do_not_hold_a_full_7b_and_the_diagnosis_says_so():
    """https://github.com/NVIDIA/Megatron-LM/issues/1757: the four 4090 alone."""
    prices = prices_of(two_boxes(), "llama-7b", seq_len=2048, batch=64, precision="fp16")
    limits = Limits(exclude=frozenset({"r3080", "r2080"}))
    with pytest.raises(InfeasibleError) as error:
        search(prices, SearchRequest(limits=limits, compare=False))
    found = error.value.diagnosis
    assert found.constraint == "memory"
    assert any("r2080, r3080" in fix.words for fix in found.fixes)


def test_on_two_boxes_tensor_parallelism_stays_in_equal_pairs_and_large_cards_take_most_layers():
    """https://github.com/NVIDIA/Megatron-LM/issues/1757: which card gets what."""
    model = find_model("llama-7b")
    prices = prices_of(two_boxes(), model, seq_len=2048, batch=64, precision="fp16")
    found = search(prices, SearchRequest(compare=False)).best
    assert not check(found.layout, prices)
    for replica in found.layout.replicas:
        held = dict.fromkeys(PEOPLE, 0)
        for stage, count in zip(replica.stages, decoders(model, replica), strict=True):
            assert stage.tp <= 2
            held[stage.group] += count
        assert held["r4090a"] + held["r4090b"] > held["r3080"] + held["r2080"]
        assert min(held["r4090a"], held["r4090b"]) > max(held["r3080"], held["r2080"])


def test_an_engine_with_one_grid_refuses_degrees_that_differ_between_stages():
    """https://github.com/NVIDIA/Megatron-LM/issues/922: which launcher can run which plan."""
    prices = prices_of(unlike_pair(), gpt(layers=8, width=512, heads=8, vocab=512), seq_len=128, batch=8)
    stages = (
        Stage(group="fast", first_layer=0, end_layer=5, tp=2),
        Stage(group="slow", first_layer=5, end_layer=10, tp=4),
    )
    layout = Layout(replicas=(Replica(stages=stages, microbatch=1, num_microbatches=8),))
    assert not check(layout, prices, ENGINES["hetplan"])
    assert not check(layout, prices, ENGINES["flagscale"])
    for engine in ("megatron", "deepspeed", "torchtitan"):
        messages = [violation.message for violation in check(layout, prices, ENGINES[engine])]
        assert any("degrees" in message for message in messages), engine


def unlike_pair(fast="A100-SXM4-80GB", slow="A100-SXM4-80GB", *, speed=1.0):
    return cluster(group("fast", fast, 1, 8), group("slow", slow, 1, 8, speed=speed))


@pytest.mark.parametrize(("speed", "best"), [(1.0, (12, 12)), (0.7, (14, 10))])
def test_the_split_of_24_layers_follows_measured_speeds(speed, best):
    """https://github.com/flagos-ai/FlagScale/pull/803: [12, 12] against [10, 14] found without trial runs."""
    model = gpt(layers=24, width=2048, heads=16, vocab=512, seq=2048)
    prices = prices_of(unlike_pair(speed=speed), model, seq_len=2048, batch=64)
    stages = {}
    for split in ((12, 12), (14, 10), (10, 14)):
        grid = Grid(tp=1, pp=2, dp=8, layers_per_stage=split, groups=("fast", "slow"))
        layout = grid_layout(prices, grid)
        assert not check(layout, prices)
        stages[split] = estimate(layout, prices).step_s
    assert min(stages, key=stages.__getitem__) == best
    chosen = grid_layout(prices, Grid(tp=1, pp=2, dp=8, groups=("fast", "slow")))
    assert tuple(decoders(model, chosen.replicas[0])) == best


def test_meshes_of_unlike_tensor_parallelism_are_saved_in_the_plain_format():
    """https://github.com/flagos-ai/FlagScale/issues/319: [2,1,1,2,2, 4,1,1,2,1] crashed."""
    numbers = (2, 1, 1, 2, 2, 4, 1, 1, 2, 1)
    meshes = parse_meshes(numbers)
    assert mesh_numbers(meshes) == numbers and sum(mesh.num_devices for mesh in meshes) == 16
    assert checkpoint_format(meshes) == "torch"
    (warning,) = mesh_warnings(meshes, "torch_dist")
    assert "ckpt_format: torch" in warning
    same = parse_meshes((2, 1, 1, 2, 2, 2, 1, 1, 4, 1))
    assert checkpoint_format(same) == "torch_dist" and not mesh_warnings(same, "torch_dist")


def test_meshes_become_a_valid_plan_and_come_back():
    """https://github.com/flagos-ai/FlagScale/issues/319, as a layout of 16 devices."""
    model = gpt(layers=12, width=1024, heads=16, vocab=1024)
    prices = prices_of(unlike_pair(), model, seq_len=512, batch=16)
    meshes = parse_meshes((2, 1, 1, 2, 2, 4, 1, 1, 2, 1))
    feed = Feed(groups=("fast", "slow"), microbatch=2, num_microbatches=8)
    layout = layout_of_meshes(model, meshes, (5, 3, 4), feed)
    assert not check(layout, prices, ENGINES["flagscale"])
    assert meshes_of(layout) == meshes
    assert estimate(layout, prices).step_s > 0
    with pytest.raises(UsageError, match="2 stages, the meshes have 3"):
        layout_of_meshes(model, meshes, (6, 6), feed)


def test_a_plan_round_trips_tp_4_1_2_1():
    """https://github.com/vllm-project/vllm/issues/27239: another tp on every stage, on 4 + 1 + 2 + 1 devices."""
    names = ("a", "b", "c", "d")
    sizes = (4, 1, 2, 1)
    where = cluster(*(group(name, "A100-SXM4-80GB", 1, size) for name, size in zip(names, sizes, strict=True)))
    model = gpt(layers=6, width=512, heads=8, vocab=512)
    prices = prices_of(where, model, seq_len=128, batch=4)
    stages = tuple(
        Stage(group=name, first_layer=2 * i, end_layer=2 * i + 2, tp=tp)
        for i, (name, tp) in enumerate(zip(names, sizes, strict=True))
    )
    layout = place(Layout(replicas=(Replica(stages=stages, microbatch=1, num_microbatches=4),)), where)
    assert not check(layout, prices)
    plan = Plan(
        layout=layout,
        cluster=Input(name="c.yaml", sha256="0" * 64),
        model=Input(name="m.yaml", sha256="1" * 64),
        calibration=None,
        workload={"seq_len": 128, "global_batch": 4, "precision": "bf16"},
        estimate=estimate(layout, prices),
    )
    again = plan_from_text(plan_text(plan), "plan.yaml")
    assert [stage.tp for stage in again.layout.replicas[0].stages] == [4, 1, 2, 1]
    assert again.layout == layout
    supported = {engine for engine, limits in ENGINES.items() if not check(layout, prices, limits)}
    assert "hetplan" in supported and "flagscale" in supported and "megatron" not in supported


def test_every_tensor_parallel_group_shows_one_kind_of_card():
    """https://github.com/vllm-project/vllm/issues/21061: eight cards of two sizes, tp 4 x pp 2."""
    kinds = ["small", "small", "small", "small", "large", "large", "large", "large"]
    mixed = ["large", "small", "large", "small", "small", "large", "small", "large"]
    for box in (kinds, mixed):
        order = homogeneous_order(box, 4)
        assert sorted(order) == list(range(8)) and is_homogeneous(box, order, 4)
    assert not is_homogeneous(mixed, range(8), 4)
    assert is_homogeneous(kinds, (7, 6, 5, 4, 0, 1, 2, 3), 4)
    with pytest.raises(UsageError, match="3 x small"):
        homogeneous_order(["small"] * 3 + ["large"] * 5, 4)


def test_a_plan_on_a_mixed_box_says_in_which_order_to_show_its_cards():
    """https://github.com/vllm-project/vllm/issues/21061, from a plan: rank order on each host."""
    where = cluster(group("small", "RTX-3090", ["box"], 4), group("large", "RTX-A6000", ["box"], 4), networks=[])
    model = gpt(layers=8, width=512, heads=8, vocab=512)
    prices = prices_of(where, model, seq_len=128, batch=4)
    layout = grid_layout(prices, Grid(tp=4, pp=2, groups=("large", "small")))
    assert not check(layout, prices)
    assert dict(visible_devices(layout, where)) == {"box": "4,5,6,7,0,1,2,3"}
    kinds = ["small"] * 4 + ["large"] * 4
    assert is_homogeneous(kinds, (4, 5, 6, 7, 0, 1, 2, 3), 4)


def test_70b_in_16_bits_goes_on_seven_24_gb_cards_and_one_of_12():
    """https://github.com/vllm-project/vllm/issues/4998: stages need not be equal; tp 8 takes 16.4 GiB each."""
    model = find_model("llama-3-70b")
    stages = serving_stages(model, [24 * GIB] * 7 + [12 * GIB], 16)
    held = [stage.num_decoders for stage in stages]
    assert sum(held) == 80 and held[7] <= 6 and max(held[:7]) <= 13
    assert all(stage.weights_bytes <= 0.9 * stage.capacity_bytes for stage in stages)
    with pytest.raises(InfeasibleError, match="GiB"):
        serving_stages(model, [12 * GIB] * 8, 16)


def test_uneven_tensor_parallel_ratios_use_more_of_unlike_cards():
    """https://github.com/vllm-project/vllm/pull/50735: 32 + 20 + 20 GB use 60 evenly, 64 as 2:1:1, 72 as 8:5:5."""
    cards = [32.0, 20.0, 20.0]
    assert usable_tp_bytes(cards, (1, 1, 1)) == 60
    assert usable_tp_bytes(cards, (2, 1, 1)) == 64
    assert usable_tp_bytes(cards, (8, 5, 5)) == 72
    assert best_tp_ratios(cards) == (8, 5, 5)


def test_widths_must_divide_by_the_sum_of_the_ratios():
    """https://github.com/vllm-project/vllm/pull/50735."""
    model = gpt(layers=2, width=2048, heads=16, vocab=512)
    assert tp_ratio_errors(model, (2, 1, 1)) == ()
    assert any("18" in error for error in tp_ratio_errors(model, (8, 5, 5)))
    assert sum(best_tp_ratios([32.0, 20.0, 20.0], model)) in (4, 8, 16, 32, 64)


def test_larger_shares_for_faster_cards_raise_throughput_at_the_same_step_time():
    """https://github.com/huggingface/pytorch-image-models/pull/580: 2 A6000 + 2 2080 Ti, 2000 then 2500 images/s."""
    a6000, ti = 0.4 / 300, 0.4 / 200  # one fitted speed pair: seconds a sample at which each fills a step of 0.4 s
    seconds = (a6000, a6000, ti, ti)
    even, shaped = (200, 200, 200, 200), (300, 300, 200, 200)
    assert step_s(even, seconds) == pytest.approx(0.4) and step_s(shaped, seconds) == pytest.approx(0.4)
    assert samples_per_s(even, seconds) == pytest.approx(2000)
    assert samples_per_s(shaped, seconds) == pytest.approx(2500)
    assert evened_out(even, seconds) == shaped


def test_shares_follow_speed_not_the_usual_round_numbers():
    """https://github.com/yifding/hetseq/issues/11: A100 and V100 differ by 312 / 125 = 2.5 in peak, not by 2."""
    a100 = find_device("A100-SXM4-40GB").peak_flop_per_s["fp16"]
    v100 = find_device("V100-SXM2-16GB").peak_flop_per_s["fp16"]
    assert a100 / v100 == pytest.approx(2.5, abs=0.01)
    assert proportional_shares(35, (1 / a100, 1 / v100)) == (25, 10)
    assert proportional_shares(24, (1 / a100, 1 / v100)) == (17, 7)


def test_a_compute_bound_mix_gets_batch_shares_of_five_to_two():
    """https://github.com/yifding/hetseq/issues/11, found by the search with equal efficiencies on both cards."""
    equal = DeviceConstants(gemm_half_flop=1e6, layer_overhead_s=1e-9, origin="fitted")
    calibration = Calibration(devices={"A100-SXM4-40GB": equal, "V100-SXM2-16GB": equal})
    where = cluster(
        group("a100", "A100-SXM4-40GB", 1, 1),
        group("v100", "V100-SXM2-16GB", 1, 1),
        networks=[network("net", ["a100", "v100"], "infiniband", gbit=4000.0, latency_s=1e-9)],
    )
    model = gpt(layers=2, width=4096, heads=32, vocab=512)
    prices = prices_of(where, model, seq_len=1024, batch=28, precision="fp16", attention="flash")
    prices = type(prices)(where, model, prices.workload, calibration)
    found = search(prices, SearchRequest(limits=Limits(pp=(1,), microbatch=(1,)), compare=False)).best
    share = {replica.stages[0].group: replica.num_samples for replica in found.layout.replicas}
    assert share["a100"] + share["v100"] == 28
    assert share["a100"] / share["v100"] == pytest.approx(2.5, abs=0.35)
    even = grid_layout(prices, Grid(dp=2))
    assert estimate(even, prices).step_s / found.estimate.step_s >= 1.7


def test_the_mean_over_all_samples_weighs_unlike_shares():
    """https://github.com/pytorch/pytorch/issues/67253: a mean of means is wrong where local batches differ."""
    stage = Stage(group="g", first_layer=0, end_layer=3)
    layout = Layout(
        replicas=(
            Replica(stages=(stage,), microbatch=5, num_microbatches=3),
            Replica(stages=(stage,), microbatch=2, num_microbatches=1, copies=2),
        )
    )
    weights = loss_weights(layout)
    assert weights == (Fraction(15, 19), Fraction(2, 19), Fraction(2, 19)) and sum(weights) == 1
    rng = np.random.default_rng(0)
    samples, targets, point = rng.normal(size=(19, 4)), rng.normal(size=19), rng.normal(size=4)

    def gradient(rows):
        residual = samples[rows] @ point - targets[rows]
        return 2 * samples[rows].T @ residual / len(residual)

    parts = [slice(0, 15), slice(15, 17), slice(17, 19)]
    whole = gradient(slice(0, 19))
    weighted = sum(float(weight) * gradient(rows) for weight, rows in zip(weights, parts, strict=True))
    plain = sum(gradient(rows) for rows in parts) / 3
    assert np.abs(weighted - whole).max() < 1e-6
    assert np.abs(plain - whole).max() > 1e-3


def test_old_cards_lack_fused_attention_and_bf16_and_a_ring_falls_to_what_all_have():
    """https://github.com/swc-17/SparseDrive/issues/44: FlashAttention needs Ampere or newer."""
    v100 = group("v100", "V100-SXM2-32GB", 1, 8)
    a100 = group("a100", "A100-SXM4-80GB", 1, 8)
    h100 = group("h100", "H100-SXM5-80GB", 1, 8)
    assert "flash_attention" not in v100.device.features and "bf16" not in v100.device.features
    assert {"flash_attention", "bf16"} <= a100.device.features and "fp8" not in a100.device.features
    assert {"flash_attention", "bf16", "fp8"} <= h100.device.features
    assert common_features([a100, h100]) == a100.device.features
    assert lost_features([a100, h100, v100])["flash_attention"] == ("v100",)
    where = cluster(v100, a100)
    assert resolve_precision(where, "auto") == "fp16" and resolve_precision(where, "auto", ["v100"]) == "bf16"
    prices = prices_of(where, gpt(layers=2, width=256, heads=4, vocab=256), seq_len=128, batch=16, precision="fp16")
    mixed = grid_layout(prices, Grid(dp=16))
    assert ring_features(mixed, where, 1) == common_features([v100, a100])
    apart = grid_layout(prices, Grid(pp=2, dp=8))
    assert ring_features(apart, where, 0) == v100.device.features
    assert ring_features(apart, where, len(prices.model.chain) - 1) == a100.device.features


def test_bf16_is_refused_on_cards_without_it():
    """https://github.com/swc-17/SparseDrive/issues/44."""
    prices = prices_of(cluster(group("v100", "V100-SXM2-32GB", 1, 8)), "gpt2", seq_len=1024, batch=8)
    with pytest.raises(InfeasibleError) as error:
        search(prices, SearchRequest(compare=False))
    assert error.value.diagnosis.constraint == "precision"
    assert "V100-SXM2-32GB" in str(error.value)


APPLE = """\
hetplan: cluster/v1
name: desk
devices:
  M3-Ultra: {vendor: Apple, memory: 512 GiB, usable_memory: 380 GiB, memory_bandwidth: 819 GB/s,
    peak: {fp16: 57 TFLOP/s, fp32: 28 TFLOP/s}, link_bandwidth: 0 GB/s, pair_bandwidth: 0 GB/s,
    pcie_bandwidth: 8 GB/s, tdp: 270 W, features: []}
groups:
  mac: {device: M3-Ultra, nodes: 2, devices_per_node: 1}
  gpu: {device: RTX-4090, nodes: 1, devices_per_node: 2}
networks:
  lan: {joins: [mac, gpu], kind: ethernet, bandwidth: 10 Gbit/s, latency: 100 us}
"""


def test_two_vendors_are_islands_unless_a_bridge_is_allowed(tmp_path):
    """https://github.com/OpenAgentsInc/openagents/issues/3662: Metal and CUDA in one job."""
    path = tmp_path / "desk.yaml"
    path.write_text(APPLE)
    where, _ = load_cluster(path)
    assert {g.device.vendor for g in where.groups} == {"Apple", "NVIDIA"}
    prices = prices_of(where, gpt(layers=8, width=512, heads=8, vocab=512), seq_len=256, batch=8, precision="fp16")
    mixed = grid_layout(prices, Grid(dp=4))
    assert not check(mixed, prices)
    (refused, *_) = check(mixed, prices, Limits(allow_mixed_vendors=False))
    assert "Apple" in refused.message and "NVIDIA" in refused.message
    found = search(prices, SearchRequest(limits=Limits(allow_mixed_vendors=False), compare=False)).best
    vendors = {where.group(stage.group).device.vendor for replica in found.layout.replicas for stage in replica.stages}
    assert len(vendors) == 1


def test_a_speed_factor_is_a_measured_speed():
    where = unlike_pair(speed=0.5)
    prices = prices_of(where, gpt(layers=4, width=2048, heads=16, vocab=512), batch=16)
    fast = estimate(grid_layout(prices, Grid(dp=8, groups=("fast",))), prices).parts.compute_s
    slow = estimate(grid_layout(prices, Grid(dp=8, groups=("slow",))), prices).parts.compute_s
    assert slow > 1.9 * fast
