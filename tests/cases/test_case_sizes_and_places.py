"""Users' questions about how many devices, of which kind, where, and where numbers come from."""

import pytest
from case_setups import GIB, cluster, gpt, group, network, prices_of

from hetplan.catalog.devices import device_names, find_device
from hetplan.catalog.models import find_model
from hetplan.errors import UsageError
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import Limits
from hetplan.plan.placement import mesh_devices, place, places_of
from hetplan.plan.segments import segment_group, segment_groups
from hetplan.plan.serving import verdicts
from hetplan.search.explain import explain, why_lost
from hetplan.search.records import SearchRequest
from hetplan.search.sizing import doubling, sizes, smallest_count
from hetplan.search.solve import search
from hetplan.specs.cluster import Cluster


def h100(nodes=1):
    return cluster(
        group("h100", "H100-SXM5-80GB", nodes, 8),
        networks=[network("ib", ["h100"], "infiniband", gbit=400.0, nics_per_node=8)],
    )


def test_70b_needs_sixteen_h100_and_they_recompute():
    """https://github.com/pytorch/torchtitan/issues/770: 70.55B x 16 B are 1051 GiB."""
    model = find_model("llama-3.1-70b")
    prices = prices_of(h100(), model, seq_len=8192, batch=256)
    assert smallest_count(prices, "h100") == 2
    (least,) = sizes(prices, "h100", [2])
    assert least.num_devices == 16 and "none" not in least.recomputes
    without = SearchRequest(limits=Limits(recompute=("none",)))
    assert smallest_count(prices, "h100", without) > 2


def test_a_table_of_counts_gives_throughput_money_and_days():
    """https://github.com/pytorch/torchtitan/issues/770: how many, how fast, for how much."""
    prices = prices_of(h100(), "llama-3.1-70b", seq_len=8192, batch=512)
    table = sizes(prices, "h100", doubling(2, 32))
    assert [size.num_devices for size in table] == [16, 32, 64, 128, 256]
    rates = [size.tokens_per_s for size in table]
    assert rates == sorted(rates)
    assert table[-1].tokens_per_device_s == pytest.approx(rates[-1] / 256)
    days = table[-1].days(15e12)
    assert days == pytest.approx(15e12 / rates[-1] / 86400)
    spent = table[-1].usd(15e12)
    assert spent is None or spent == pytest.approx(days * 24 * 256 * prices.usd_per_s("h100") * 3600, rel=1e-9)


@pytest.mark.parametrize(("precision", "reported"), [("fp8", 829), ("bf16", 597.3)])
def test_256_h100_do_what_torchtitan_reports(precision, reported):
    """https://github.com/pytorch/torchtitan/issues/770 points to its tables: 70B, FSDP 32 x TP 8, 16 samples a rank.

    829 tokens/s a GPU with float8 (benchmarks/llama3_h100_202412_torchtitan.md), 597.3 in bf16
    (benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md).
    """
    prices = prices_of(h100(32), "llama-3.1-70b", seq_len=8192, batch=512, precision=precision)
    layout = grid_layout(prices, Grid(tp=8, dp=32, micro_batch=16, sharding="full", recompute="full"))
    assert not check(layout, prices)
    assert estimate(layout, prices).tokens_per_s / 256 == pytest.approx(reported, rel=0.15)


def test_candidate_clusters_of_one_file_get_a_verdict_and_a_reason():
    """https://github.com/skypilot-org/skypilot/issues/4714: DeepSeek-R1 on 8xH200, 16xH100, 16xA100-80 or 64xL4."""
    where = cluster(
        group("h200", "H200-SXM-141GB", 1, 8),
        group("h100", "H100-SXM5-80GB", 2, 8),
        group("a100", "A100-SXM4-80GB", 2, 8),
        group("l4", "L4", 8, 8),
    )
    found = {verdict.name: verdict for verdict in verdicts(where, find_model("deepseek-r1"))}
    assert {name: verdict.bits for name, verdict in found.items()} == {"h200": 8, "h100": 8, "a100": 16, "l4": 8}
    assert found["h200"].weights_bytes / GIB == pytest.approx(625, abs=0.5)
    assert found["a100"].weights_bytes / GIB == pytest.approx(1250, abs=1)
    assert {name: verdict.fits for name, verdict in found.items()} == {
        "h200": True,
        "h100": True,
        "a100": False,
        "l4": True,
    }
    assert "no room for the key/value cache" in found["a100"].reason
    assert "stages would do" in found["l4"].reason


def test_nodes_are_grouped_by_segment():
    """https://github.com/intelligent-machine-learning/dlrover/pull/1740: (node % dp) // (dp / segments)."""
    assert [segment_group(node, 8, 2) for node in range(16)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert segment_groups(16, 8, 2) == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    for dp, segments in ((6, 4), (8, 3)):
        with pytest.raises(UsageError, match="no multiple"):
            segment_group(0, dp, segments)


def ethernet_boxes(gbit):
    return cluster(
        group("a100", "A100-SXM4-80GB", 2, 4),
        networks=[network("eth", ["a100"], gbit=gbit)],
    )


def test_experts_stay_inside_a_node_where_the_network_is_slow():
    """https://github.com/microsoft/Tutel/issues/187: every added node slowed all of them down."""
    model = find_model("qwen3-30b-a3b")
    prices = prices_of(ethernet_boxes(10.0), model, seq_len=2048, batch=16)
    wide = grid_layout(prices, Grid(tp=1, ep=8, dp=8, micro_batch=1, recompute="full"))
    inside = grid_layout(prices, Grid(tp=1, ep=4, dp=8, micro_batch=1, recompute="full"))
    assert estimate(wide, prices).parts.ep_s > 5 * estimate(inside, prices).parts.ep_s
    found = search(prices, SearchRequest(compare=False)).best
    places = places_of(prices)
    for replica in place(found.layout, prices.cluster).replicas:
        for stage in replica.stages:
            nodes_cd = places[stage.group].node_d[mesh_devices(stage, replica.copies)]
            if stage.ep > 1:
                assert (nodes_cd == nodes_cd[:, :1]).all()


def test_every_number_says_where_it_comes_from():
    """https://github.com/Hsword/Hetu/issues/70: a constant of 48.05 MB a layer that nobody could place."""
    prices = prices_of(h100(), "gpt2", seq_len=1024, batch=8)
    found = estimate(grid_layout(prices, Grid(dp=8)), prices)
    assert set(found.origins) == {"H100-SXM5-80GB", "ib"}
    assert set(found.origins.values()) <= {"measured", "fitted", "datasheet", "assumed"}
    for name in device_names():
        device = find_device(name)
        assert device.sources, name
        assert all(text.strip() for text in device.sources.values()), name


def test_four_stages_with_one_microbatch_idle_three_quarters_and_the_explanation_says_so():
    """https://github.com/EleutherAI/gpt-neox/issues/903: pp 4 tp 2 was five times slower than pp 1 tp 2."""
    model = gpt(layers=44, width=2048, heads=64, vocab=512)
    where = Cluster(
        name="a100",
        groups=(group("a100", "A100-SXM4-40GB", 16, 8),),
        networks=(network("ib", ["a100"], "infiniband", gbit=200.0, nics_per_node=8),),
    )
    prices = prices_of(where, model, seq_len=2048, batch=64, precision="fp16")
    piped = grid_layout(prices, Grid(tp=2, pp=4, dp=16, micro_batch=4, sharding="optimizer"))
    flat = grid_layout(prices, Grid(tp=2, pp=1, dp=64, micro_batch=1, sharding="optimizer"))
    assert piped.replicas[0].num_microbatches == 1
    slow, fast = estimate(piped, prices), estimate(flat, prices)
    assert slow.step_s > 2 * fast.step_s
    sentence = next(b.sentence for b in explain(piped, prices, replan=False).bindings if b.kind == "bubble")
    assert "1 microbatches on 4 stages" in sentence and "75 %" in sentence
    assert "bubble" in why_lost(fast, slow)
    assert not [v for v in check(piped, prices) if v.rule != "memory"]
