"""The plan layer over the real cost model."""

import math
from dataclasses import replace

import pytest
from plan.fake_prices import cluster, group, model

from hetplan.costs.prices import price
from hetplan.costs.records import Holders, ShardDegrees
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import Limits
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.plan.stages import option_of, whole_params
from hetplan.simulate.records import Conditions
from hetplan.simulate.run import simulate
from hetplan.specs.cluster import Cluster
from hetplan.specs.workload import Workload

LLAMA = {"num_heads": 16, "num_kv_heads": 8, "width": 1024, "vocab": 32000}


def real(groups=None, batch=32, num_decoders=8, precision="bf16", **changes):
    groups = groups or (group("a"), group("b", speed=0.5))
    shape = model(num_decoders, **{**LLAMA, **changes})
    return price(cluster(*groups), shape, Workload(seq_len=1024, global_batch=batch, precision=precision))


@pytest.mark.parametrize("sharding", ["none", "optimizer", "gradients", "full"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_parts_sum_up_and_simulation_agrees(sharding, recompute):
    prices = real()
    layout = grid_layout(prices, Grid(tp=2, pp=2, dp=8, sharding=sharding, recompute=recompute))
    found = estimate(layout, prices)
    assert found.parts.total_s == pytest.approx(found.step_s, rel=1e-12)
    assert 0 < found.mfu < 1
    assert simulate(layout, prices, Conditions(contention=False)).step_s == found.step_s
    assert check(layout, prices) == ()


def test_sharding_takes_memory_and_recomputing_takes_time():
    prices = real()
    grid = Grid(tp=2, pp=2, dp=8)
    plain = estimate(grid_layout(prices, grid), prices)
    shared = estimate(grid_layout(prices, replace(grid, sharding="optimizer")), prices)
    again = estimate(grid_layout(prices, replace(grid, recompute="full")), prices)
    assert shared.stages[0].memory.optimizer_bytes == pytest.approx(plain.stages[0].memory.optimizer_bytes / 8)
    assert again.stages[0].memory.activations_bytes < plain.stages[0].memory.activations_bytes
    assert again.parts.compute_s > plain.parts.compute_s


def test_a_memory_shortfall_is_refused():
    prices = real(groups=(group("a", usable_memory_bytes=2.0**31),))
    layout = grid_layout(prices, Grid(pp=2, dp=2))
    assert {violation.rule for violation in check(layout, prices)} == {"memory"}


def test_virtual_stages_hold_more_and_wait_less():
    prices = real(groups=(group("a"),), num_decoders=16, vocab=1000)
    plain = grid_layout(prices, Grid(tp=2, pp=4, dp=1))
    dealt = grid_layout(prices, Grid(tp=2, pp=4, dp=1, vpp=2))
    assert check(dealt, prices, Limits(schedules=("interleaved",))) == ()
    before, after = estimate(plain, prices), estimate(dealt, prices)
    assert after.parts.bubble_s < before.parts.bubble_s
    assert after.stages[0].memory.activations_bytes > before.stages[0].memory.activations_bytes


def test_rings_that_share_a_node_share_its_nics():
    prices = real()
    alone = Holders(group="a", num_ranks=2, ranks_per_node=1, tp=1)
    crowded = replace(alone, rings_per_node=4)
    one, four = (prices.sync(1e9, (holders,), "none").reduce_s for holders in (alone, crowded))
    assert four == pytest.approx(4 * one, rel=1e-3)


def test_experts_are_counted_apart():
    prices = real(experts=8)
    dense_l, expert_l = whole_params(prices)
    assert expert_l[1] == 8 * 2 * 1024 * 4096
    grid = Grid(tp=2, ep=4, dp=8)
    layout = grid_layout(prices, grid)
    assert check(layout, prices) == ()
    whole = grid_layout(prices, replace(grid, ep=1))
    assert estimate(layout, prices).stages[0].memory.weights_bytes < (
        estimate(whole, prices).stages[0].memory.weights_bytes
    )
    assert dense_l[0] == 32000 * 1024


def test_memory_of_one_stage_is_the_cost_models():
    prices = real()
    stage = Stage(group="a", first_layer=0, end_layer=10, tp=2)
    layout = Layout(replicas=(Replica(stages=(stage,), microbatch=1, num_microbatches=32),))
    found = estimate(layout, prices).stages[0]
    option = option_of(stage, layout.replicas[0])
    assert found.memory == prices.memory(option, (0, 10), 1, "none", ShardDegrees())
    assert found.in_flight == 1


@pytest.mark.parametrize("domain_nodes", [1, 2])
def test_rows_on_nodes_that_nothing_joins_would_never_end_a_step(domain_nodes):
    places = replace(group("a", nodes=2), domain_nodes=domain_nodes)
    alone = price(
        Cluster(name="x", groups=(places,), networks=()),
        model(8, **LLAMA),
        Workload(seq_len=1024, global_batch=16, precision="bf16"),
    )

    def layout(*firsts):
        return Layout(
            replicas=tuple(
                Replica(
                    stages=(Stage(group="a", first_layer=0, end_layer=10, devices=((first, first + 1),)),),
                    microbatch=1,
                    num_microbatches=8,
                )
                for first in firsts
            )
        )

    near, far = layout(0, 1), layout(0, places.devices_per_node)
    for found in (near, far):
        rules = [violation.rule for violation in check(found, alone)]
        assert rules == ([] if math.isfinite(estimate(found, alone).step_s) else ["a step ends"])
    assert math.isfinite(estimate(near, alone).step_s)
    assert math.isfinite(estimate(far, alone).step_s) == (domain_nodes == 2)
