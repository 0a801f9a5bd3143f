from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.fake_prices import GIB, FakePrices, Rates, cluster, group, model

from hetplan.errors import UsageError
from hetplan.plan.estimate import estimate
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.calibration import Overlap
from hetplan.specs.model import layer_params


def pipeline(cuts, groups="a", *, m=4, microbatch=1, copies=1, vpp=1, **stage):
    names = [groups] * (len(cuts) - 1) if isinstance(groups, str) else groups
    stages = tuple(
        Stage(group=name, first_layer=first, end_layer=end, **stage)
        for name, first, end in zip(names, cuts[:-1], cuts[1:], strict=True)
    )
    return Replica(stages=stages, microbatch=microbatch, num_microbatches=m, copies=copies, vpp=vpp)


def toy(num_decoders=6, rates=None, groups=None, overlap=None, **changes):
    groups = groups or (group("a"), group("b", speed=0.5))
    return FakePrices(cluster(*groups), model(num_decoders, **changes), rates=rates or Rates(), overlap=overlap)


def test_one_device_works_all_the_time():
    found = estimate(Layout(replicas=(pipeline([0, 8], m=4, microbatch=2),)), toy())
    assert found.step_s == 4 * 2 * 6 * 3.0
    assert found.parts.compute_s == found.step_s
    assert found.parts.bubble_s == found.parts.pp_s == found.parts.dp_s == 0
    assert found.tokens_per_s == 8 * 128 / found.step_s
    assert found.mfu == pytest.approx(1e12 * 8 / (found.step_s * 1e14))
    assert found.usd_per_step == pytest.approx(found.step_s * 3.6 / 3600)
    assert found.joules_per_step == pytest.approx(400.0 * found.step_s)


def test_equal_stages_leave_the_textbook_bubble():
    found = estimate(Layout(replicas=(pipeline([0, 3, 5, 8], m=6),)), toy())
    assert found.step_s == (6 + 2) * 6.0
    assert found.parts.bubble_s == 2 * 6.0
    assert [stage.in_flight for stage in found.stages] == [3, 2, 1]


def test_travel_between_nodes_counts_where_meshes_are_apart():
    rates = Rates(near_s=0.25, far_s=1.0)
    near = estimate(Layout(replicas=(pipeline([0, 4, 8], m=1, tp=4),)), toy(rates=rates))
    far = estimate(Layout(replicas=(pipeline([0, 4, 8], m=1, tp=8),)), toy(rates=rates))
    assert near.step_s == 2 * (9 / 4) + 2 * 0.25
    assert near.parts.pp_s == pytest.approx(0.5)
    assert far.step_s == 2 * (9 / 8) + 2 * 1.0


def test_the_slowest_copy_counts_when_copies_lie_differently():
    rates = Rates(near_s=0.0, far_s=5.0)
    prices = toy(rates=rates)
    row = pipeline([0, 4, 8], m=1, copies=2)
    stages = (replace(row.stages[0], devices=((0, 2),)), replace(row.stages[1], devices=((2, 3), (8, 9))))
    found = estimate(Layout(replicas=(replace(row, stages=stages),)), prices)
    assert found.step_s == 18 + 10


def test_gradients_of_one_row_meet_after_the_last_backward_pass():
    params = sum(layer_params(layer) for layer in model(6).chain)
    rates = Rates(reduce_s_per_param=1.0)
    layout = Layout(replicas=(pipeline([0, 8], m=2, copies=2),))
    exposed = estimate(layout, toy(rates=rates, overlap=Overlap(gradients=0.0)))
    assert exposed.step_s == 36 + params
    assert exposed.parts.dp_s == params
    hidden = estimate(layout, toy(rates=rates, overlap=Overlap(gradients=0.5)))
    assert hidden.step_s == pytest.approx(36 + params - 6)
    assert hidden.dp_overlapped_s == pytest.approx(6)


def test_sync_cannot_end_before_the_lowest_layer_has_sent_its_share():
    rates = Rates(reduce_s_per_param=1e-9)
    found = estimate(
        Layout(replicas=(pipeline([0, 8], m=1, copies=2),)), toy(rates=rates, overlap=Overlap(gradients=1.0))
    )
    assert found.step_s == pytest.approx(18 + 64000 * 1e-9, rel=1e-15)


def test_buckets_of_unlike_cuts_start_at_different_times_and_run_side_by_side():
    whole = [layer_params(layer) for layer in model(6).chain]
    rates = Rates(reduce_s_per_param=1e-3)
    layout = Layout(replicas=(pipeline([0, 4, 8], m=1), pipeline([0, 3, 8], m=1)))
    found = estimate(layout, toy(rates=rates, overlap=Overlap(gradients=0.0)))
    # Layers 4-7 are on both second stages (the later one ends at 14), 0-2 on both first ones (they end at 18); layer 3
    # is on one row's first stage and on the other's second, whose link the upper bucket keeps busy.
    upper = 14 + sum(whole[4:]) * 1e-3
    middle = max(18, upper) + whole[3] * 1e-3
    assert found.step_s == pytest.approx(middle + sum(whole[:3]) * 1e-3, rel=1e-12)


def test_a_shared_line_takes_one_bucket_after_the_other():
    rates = Rates(reduce_s_per_param=1e-3)
    layout = Layout(replicas=(pipeline([0, 4, 8], m=1, copies=2),))
    apart = estimate(layout, toy(rates=rates, overlap=Overlap(gradients=0.0)))
    shared = estimate(layout, toy(rates=replace(rates, shared_lines=("line",)), overlap=Overlap(gradients=0.0)))
    whole = sum(layer_params(layer) for layer in model(6).chain) * 1e-3
    assert shared.step_s == pytest.approx(12 + whole)
    assert apart.step_s < shared.step_s


def test_sharded_states_are_updated_in_parts_and_gathered():
    params = sum(layer_params(layer) for layer in model(6).chain)
    rates = Rates(optimizer_s_per_param=1.0, gather_s_per_param=0.5)
    row = pipeline([0, 8], m=1, copies=4)
    plain = estimate(Layout(replicas=(row,)), toy(rates=rates))
    shared = estimate(Layout(replicas=(row,), sharding="optimizer"), toy(rates=rates))
    assert plain.step_s == 18 + params
    assert shared.step_s == 18 + params / 4 + params / 2
    assert shared.parts.optimizer_s == params / 4
    assert shared.stages[0].memory.optimizer_bytes == plain.stages[0].memory.optimizer_bytes / 4


def test_rows_of_equal_tp_share_states_out_among_all_their_ranks():
    rows = (pipeline([0, 8], m=1, copies=2), pipeline([0, 8], "b", m=1, copies=2), pipeline([0, 8], m=1, tp=2))
    found = estimate(Layout(replicas=rows, sharding="optimizer"), toy())
    assert found.stages[0].memory.optimizer_bytes == found.stages[1].memory.optimizer_bytes
    alone = estimate(Layout(replicas=rows[:1], sharding="optimizer"), toy())
    assert found.stages[0].memory.optimizer_bytes == alone.stages[0].memory.optimizer_bytes / 2
    none = estimate(Layout(replicas=rows), toy())
    assert found.stages[2].memory.optimizer_bytes == none.stages[2].memory.optimizer_bytes


def test_fully_sharded_layers_take_the_longer_of_computing_and_fetching():
    rates = Rates(layer_gather_s=1.5, layer_reduce_s=1.0)
    layout = Layout(replicas=(pipeline([0, 8], m=2, copies=2),), sharding="full")
    beside = estimate(layout, toy(rates=rates))
    # Forward max(1, 1.5), backward max(2, 2.5) a decoder; an edge layer computes nothing: 1.5 and 2.5.
    assert beside.step_s == pytest.approx(2 * 8 * (1.5 + 2.5) + 1.0)
    after = estimate(layout, toy(rates=rates, overlap=Overlap(gathers=False)))
    assert after.step_s == pytest.approx(2 * (6 * 3 + 8 * 4.0) + 1.0)
    assert after.parts.dp_s == pytest.approx(2 * 8 * 4.0 + 1.0)


def test_a_tied_table_on_two_stages_adds_an_all_reduce():
    rates = Rates(reduce_s_per_param=1e-3)
    layout = Layout(replicas=(pipeline([0, 4, 8], m=1),))
    assert estimate(layout, toy(rates=rates)).step_s == 18
    assert estimate(layout, toy(rates=rates, tied=True)).step_s == pytest.approx(18 + 64)
    assert estimate(Layout(replicas=(pipeline([0, 8], m=1),)), toy(rates=rates, tied=True)).step_s == 18


def test_the_norm_over_all_ranks_delays_the_update():
    rates = Rates(norm_s=3.0, optimizer_s_per_param=1e-9)
    slow, quick = pipeline([0, 8], m=4), pipeline([0, 8], "b", m=1)
    found = estimate(Layout(replicas=(slow, quick)), toy(rates=rates))
    assert found.step_s == pytest.approx(max(found.replica_s) + 3 + found.parts.optimizer_s)
    alone = estimate(Layout(replicas=(slow,)), toy(rates=rates))
    assert alone.step_s == pytest.approx(max(alone.replica_s) + alone.parts.optimizer_s)


def test_replicas_wait_for_the_slowest():
    layout = Layout(replicas=(pipeline([0, 8], m=4), pipeline([0, 8], "b", m=1)))
    found = estimate(layout, toy())
    assert found.replica_s == (72, 36)
    assert found.step_s == 72


def test_virtual_stages_share_one_device_and_its_memory():
    layout = Layout(replicas=(pipeline([0, 2, 3, 5, 8], m=4, vpp=2),), schedule="interleaved")
    found = estimate(layout, toy(num_decoders=6))
    assert [stage.stage for stage in found.stages] == [0, 1]
    assert found.stages[0].forward_s == 3.0
    assert found.stages[0].in_flight == 5
    plain = estimate(Layout(replicas=(pipeline([0, 4, 8], m=4),)), toy(num_decoders=6))
    assert found.step_s < plain.step_s
    assert found.stages[0].memory.reserve_bytes == 1 * GIB


def test_unplaced_layouts_cost_what_their_placement_costs():
    prices = toy(rates=Rates(near_s=0.5, far_s=2.0, reduce_s_per_param=1e-5))
    layout = Layout(replicas=(pipeline([0, 4, 8], ["a", "b"], m=3, copies=3, tp=2),))
    assert estimate(layout, prices) == estimate(place(layout, prices.cluster), prices)


def test_a_group_without_price_has_no_price():
    prices = toy(groups=(group("a", usd_per_device_hour=None),))
    assert estimate(Layout(replicas=(pipeline([0, 8]),)), prices).usd_per_step is None


def test_too_many_devices_are_refused():
    with pytest.raises(UsageError, match="group a is too small"):
        estimate(Layout(replicas=(pipeline([0, 8], copies=17),)), toy())


@st.composite
def layouts(draw):
    rows = []
    sharding = draw(st.sampled_from(["none", "optimizer", "gradients", "full"]))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zero-bubble"]))
    for _ in range(draw(st.integers(1, 3))):
        inner = draw(st.lists(st.integers(1, 7), max_size=3, unique=True).map(sorted))
        cuts = [0, *inner, 8]
        names = draw(st.lists(st.sampled_from(["a", "b"]), min_size=len(cuts) - 1, max_size=len(cuts) - 1))
        rows.append(pipeline(cuts, names, m=draw(st.integers(1, 5)), copies=draw(st.integers(1, 2))))
    return Layout(replicas=tuple(rows), sharding=sharding, schedule=schedule)


@given(layouts(), st.floats(0, 1), st.booleans())
def test_parts_sum_to_the_step_and_none_is_negative(layout, overlap, gathers):
    rates = Rates(
        edge_forward_s=0.25,
        edge_backward_s=0.5,
        near_s=0.125,
        far_s=0.5,
        reduce_s_per_param=1e-4,
        gather_s_per_param=1e-4,
        layer_gather_s=1.25,
        layer_reduce_s=0.5,
        optimizer_s_per_param=1e-5,
    )
    groups = (group("a", nodes=4), group("b", nodes=4, speed=0.5))
    prices = toy(rates=rates, groups=groups, overlap=Overlap(gradients=overlap, gathers=gathers), tied=True)
    found = estimate(layout, prices)
    assert found.parts.total_s == pytest.approx(found.step_s, rel=1e-12)
    assert min(getattr(found.parts, name) for name in found.parts.__slots__) >= -1e-9
    assert found.step_s >= max(found.replica_s)
    assert found.step_s >= max(stage.busy_s for stage in found.stages)
