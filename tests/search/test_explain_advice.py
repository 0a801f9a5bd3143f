"""Advice beside a layout of degrees, and what to know before a plan runs."""

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.search.explain import explain
from hetplan.search.explain_grid import grid_advice, grid_fixes, grid_needs, grid_step_s
from hetplan.search.explain_support import engines, remarks
from hetplan.search.grown import with_nodes
from hetplan.specs.cluster import Cluster, Group
from hetplan.specs.workload import Workload


def box(device, per_node, *, name="g", node="box"):
    found = find_device(device)
    return Group(
        name=name,
        device=found,
        nodes=(node,),
        devices_per_node=per_node,
        site="main",
        usable_memory_bytes=found.usable_memory_bytes,
    )


def prices_of(*groups, model="llama-3-8b", seq_len=1024, batch=8, precision="bf16"):
    cluster = Cluster(name="c", groups=groups, networks=())
    return price(cluster, find_model(model), Workload(seq_len=seq_len, global_batch=batch, precision=precision))


def test_changes_that_fit_are_told_from_those_that_do_not():
    prices = prices_of(box("RTX-3090", 8))
    grid = Grid(sharding="full")
    fixes = {fix.words: fix.step_s for fix in grid_fixes(prices, grid)}
    full = grid_layout(prices, Grid(sharding="full", recompute="full"))
    assert not check(full, prices)
    assert fixes["recompute full"] == pytest.approx(estimate(full, prices).step_s)
    assert fixes["recompute selective"] is None
    text = grid_advice(prices, grid)
    assert "What fits:" in text and "Not enough alone: recompute selective" in text
    assert "host memory" in text


def test_no_change_is_offered_twice_or_where_it_is_made():
    prices = prices_of(box("RTX-3090", 8))
    words = [fix.words for fix in grid_fixes(prices, Grid(sharding="full", recompute="full", micro_batch=1))]
    assert len(words) == len(set(words))
    assert not any("recompute" in word or "sharding" in word or "microbatch" in word for word in words)


def test_more_nodes_help_only_where_states_are_shared():
    prices = prices_of(box("RTX-3090", 8), seq_len=512)
    assert grid_needs(prices, Grid(sharding="none")) == ()
    tight = prices_of(box("V100-SXM2-16GB", 8), seq_len=128, batch=64, precision="fp16")
    grid = Grid(sharding="full", recompute="full")
    assert grid_step_s(tight, grid) is None
    (need,) = grid_needs(tight, grid)
    assert need.devices == 8 * need.nodes
    for nodes, verdict in ((need.nodes, True), (need.nodes - 1, False)):
        cluster = with_nodes(tight.cluster, "g", nodes)
        sized = price(cluster, tight.model, tight.workload)
        assert (grid_step_s(sized, grid) is not None) == verdict


def test_engines_are_those_whose_profiles_cover_a_plan():
    prices = prices_of(box("A100-SXM4-80GB", 8), model="llama-3.2-1b")
    assert {"hetplan", "megatron", "torchtitan", "deepspeed"} <= set(
        engines(grid_layout(prices, Grid(tp=2, dp=4)), prices)
    )
    selective = grid_layout(prices, Grid(tp=2, dp=4, recompute="selective"))
    assert "hexiscale" not in engines(selective, prices)


def test_unlike_cards_of_one_host_get_an_order_and_missing_features_a_word():
    prices = prices_of(
        box("RTX-3090", 2, name="new"),
        box("RTX-2080-Ti", 2, name="old"),
        model="llama-3.2-1b",
        precision="fp16",
    )
    layout = grid_layout(prices, Grid(tp=2, pp=2, groups=("old", "new")))
    words = remarks(layout, prices)
    assert any("CUDA_VISIBLE_DEVICES=2,3,0,1" in word for word in words)
    assert any("old has no bf16" in word and "fp16" in word for word in words)
    assert any("old has no fused attention" in word for word in words)
    assert explain(layout, prices, replan=False).remarks == words


def test_two_vendors_in_one_job_are_remarked():
    prices = prices_of(
        box("A100-SXM4-80GB", 2, name="a"), box("MI210", 2, name="m"), model="llama-3.2-1b", precision="fp16"
    )
    layout = grid_layout(prices, Grid(dp=4))
    assert any("NCCL and RCCL" in word for word in remarks(layout, prices))
