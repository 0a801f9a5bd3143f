from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.fake_prices import FakePrices, Rates, cluster, group, model

from hetplan.errors import UsageError
from hetplan.plan.check import check, show_layers
from hetplan.plan.cuts import balanced_cut, pinned_cut
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import Limits
from hetplan.specs.workload import Workload


def toy(groups=None, num_decoders=6, batch=16, rates=None, **changes):
    groups = groups or (group("a"), group("b", speed=0.5))
    workload = Workload(seq_len=128, global_batch=batch)
    return FakePrices(cluster(*groups), model(num_decoders, **changes), workload, rates)


def sizes(weights, parts):
    cut = balanced_cut([np.asarray(weights, dtype=float)] * parts)
    return [end - first for first, end in pairwise(cut)]


def test_no_stage_stays_empty_where_that_costs_nothing():
    assert sizes([1] * 5, 4) == [2, 1, 1, 1]
    assert sorted(sizes([1] * 42, 16)) == [2] * 6 + [3] * 10


def test_heavy_embedding_and_head_get_stages_of_their_own():
    assert sizes([2, 1, 1, 1, 1, 2], 4) == [1, 2, 2, 1]


def test_light_edges_take_layers_off_the_outer_stages():
    prices = toy(
        num_decoders=46,
        groups=(group("a", nodes=4),),
        rates=Rates(edge_forward_s=0.6, edge_backward_s=1.2),
    )
    layout = grid_layout(prices, Grid(pp=4, tp=4))
    assert show_layers(layout, prices) == ("E+11, 12, 12, 11+L",)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9), st.integers(1, 5))
def test_balanced_cuts_are_the_best_there_are(weights, parts):
    if parts > len(weights):
        with pytest.raises(UsageError, match="need as many layers"):
            sizes(weights, parts)
        return

    def value(cut):
        spans = [sum(weights[a:b]) for a, b in pairwise(cut)]
        return max(spans), sum(span * span for span in spans)

    every = [(0, *inner, len(weights)) for inner in combinations(range(1, len(weights)), parts - 1)]
    found = balanced_cut([np.asarray(weights, dtype=float)] * parts)
    assert value(found) == min(map(value, every))


def test_unequal_stages_get_layers_in_proportion():
    prices = toy(num_decoders=9, batch=8)
    layout = grid_layout(prices, Grid(pp=2, tp=8, cp=1, dp=2))
    assert [stage.group for stage in layout.replicas[0].stages] == ["a", "b"]
    assert show_layers(layout, prices) == ("E+6, 3+L",)


def test_pinned_counts_come_back_unchanged():
    chain = model(6)
    assert pinned_cut(chain, (2, 3, 1)) == (0, 3, 6, 8)
    assert pinned_cut(chain, (0, 6, 0)) == (0, 1, 7, 8)
    with pytest.raises(UsageError, match="make 5; toy has 6"):
        pinned_cut(chain, (2, 3))
    with pytest.raises(UsageError, match="leave stage 1 without any layer"):
        pinned_cut(chain, (2, 0, 4))
    with pytest.raises(UsageError, match="make 1; toy has 6"):
        pinned_cut(chain, (1,))


def test_a_grid_over_one_group_is_one_row_in_megatron_order():
    layout = grid_layout(toy(groups=(group("a"),)), Grid(tp=2, pp=2, micro_batch=2))
    (row,) = layout.replicas
    assert (row.copies, row.num_microbatches, row.microbatch) == (4, 2, 2)
    assert [stage.devices for stage in row.stages] == [((0, 8),), ((8, 16),)]


def test_copies_on_unlike_groups_make_rows():
    prices = toy()
    layout = grid_layout(prices, Grid(tp=8, dp=4))
    assert [(row.copies, row.stages[0].group) for row in layout.replicas] == [(2, "a"), (2, "b")]
    assert check(layout, prices, Limits(tp=(8,))) != ()
    assert estimate(layout, prices).step_s > 0


def test_every_grid_that_is_built_keeps_the_rules():
    prices = toy(groups=(group("a", nodes=3, per_node=6), group("b", speed=0.5)))
    for grid in (Grid(tp=4, pp=2, dp=2), Grid(tp=2, pp=3, dp=4), Grid(tp=1, pp=2, dp=8, recompute="full")):
        assert check(grid_layout(prices, grid), prices) == ()


def test_experts_put_data_parallel_ranks_inside_the_stage():
    prices = toy(groups=(group("a"),), experts=4)
    layout = grid_layout(prices, Grid(tp=2, ep=4, micro_batch=1))
    (row,) = layout.replicas
    assert (row.copies, row.stages[0].dp, row.microbatch, row.num_microbatches) == (2, 4, 4, 2)
    assert check(layout, prices) == ()
    assert grid_layout(prices, Grid(tp=1, cp=4, ep=4, dp=4)).replicas[0].stages[0].dp == 1


def test_virtual_stages_are_dealt_out_in_turn():
    prices = toy(groups=(group("a"),))
    layout = grid_layout(prices, Grid(tp=4, pp=2, vpp=2, layers_per_stage=(1, 2, 2, 1)))
    (row,) = layout.replicas
    assert layout.schedule == "interleaved"
    assert row.pp == 2
    assert row.stages[0].devices == row.stages[2].devices
    assert check(layout, prices, Limits(schedules=("interleaved",))) == ()


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (Grid(tp=0), "tp must be at least 1"),
        (Grid(tp=8, dp=5), "needs 40 devices; the cluster gives 4 meshes of 8"),
        (Grid(tp=8, pp=5), "does not fit: the devices give 4 meshes of 8"),
        (Grid(dp=3), "no multiple of micro batch 1 x dp 3 = 3"),
        (Grid(ep=2, dp=3), "positive multiple of 2, not 3"),
        (Grid(groups=("c",)), "no group 'c'"),
        (Grid(pp=2, tp=8, layers_per_stage=(6,)), "names 1 stages; pp 2 x vpp 1 makes 2"),
        (Grid(pp=2, tp=8, vpp=2, schedule="1f1b"), "needs schedule interleaved"),
        (Grid(pp=4, tp=8, vpp=2, micro_batch=8), "multiple of pp 4 microbatches, not 2"),
    ],
)
def test_what_does_not_fit_is_said(grid, words):
    with pytest.raises(UsageError, match=words):
        grid_layout(toy(), grid)
