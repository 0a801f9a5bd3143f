import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.fake_prices import FakePrices, Rates, cluster, group, model

from hetplan.errors import UsageError
from hetplan.plan.estimate import estimate
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.simulate.records import Conditions
from hetplan.simulate.run import simulate
from hetplan.simulate.trace import chrome_trace
from hetplan.specs.calibration import Overlap
from hetplan.specs.cluster import Cluster

ALONE = Conditions(contention=False, most_copies=99)
RATES = Rates(edge_forward_s=0.3, edge_backward_s=0.7, near_s=0.1, far_s=0.45, reduce_s_per_param=1e-5)


def pipeline(cuts, names="a", *, m=4, copies=1, vpp=1, **stage):
    names = [names] * (len(cuts) - 1) if isinstance(names, str) else names
    stages = tuple(
        Stage(group=name, first_layer=first, end_layer=end, **stage)
        for name, first, end in zip(names, cuts[:-1], cuts[1:], strict=True)
    )
    return Replica(stages=stages, microbatch=1, num_microbatches=m, copies=copies, vpp=vpp)


def toy(rates=RATES, network=None, groups=None, sends_block=0.0):
    groups = groups or (group("a", nodes=4, per_node=4), group("b", nodes=4, per_node=4, speed=0.7))
    machines = cluster(*groups)
    if network is not None:
        machines = Cluster(name="x", groups=groups, networks=(replace(machines.networks[0], **network),))
    return FakePrices(machines, model(6), rates=rates, overlap=Overlap(sends_block=sends_block))


@st.composite
def layouts(draw):
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        vpp = draw(st.integers(1, 2)) if schedule == "interleaved" else 1
        pp = draw(st.integers(1, 3))
        inner = draw(st.lists(st.integers(1, 7), min_size=pp * vpp - 1, max_size=pp * vpp - 1, unique=True))
        cuts = [0, *sorted(inner), 8]
        names = draw(st.lists(st.sampled_from("ab"), min_size=pp, max_size=pp)) * vpp
        m = pp * draw(st.integers(1, 3))
        rows.append(pipeline(cuts, names, m=m, copies=draw(st.integers(1, 2)), vpp=vpp))
    return Layout(replicas=tuple(rows), schedule=schedule, sharding=draw(st.sampled_from(["none", "optimizer"])))


@given(layouts(), st.sampled_from(["stages", "pipelines"]), st.sampled_from([0.0, 0.3, 1.0]))
def test_without_contention_the_step_is_the_estimate_to_the_last_digit(layout, order, sends_block):
    prices = toy(sends_block=sends_block)
    placed = place(layout, prices.cluster, order)
    found, expected = simulate(placed, prices, ALONE), estimate(placed, prices)
    assert found.step_s == found.estimated_s == expected.step_s
    assert found.replica_s == expected.replica_s


@settings(max_examples=60)
@given(layouts(), st.integers(0, 5), st.floats(0, 0.5))
def test_contention_and_jitter_only_delay(layout, seed, jitter):
    prices = toy(network={"nics_per_node": 1})
    found = simulate(layout, prices, Conditions(jitter=jitter, seed=seed))
    assert found.step_s >= estimate(layout, prices).step_s * (1 - 1e-12)
    assert simulate(layout, prices, Conditions(jitter=jitter, seed=seed)) == found


def test_copies_that_share_a_nic_wait_for_each_other():
    rates = Rates(forward_s=0.1, backward_s=0.1, weight_s=0.05, far_s=1.0)
    layout = Layout(replicas=(pipeline([0, 4, 8], m=4, copies=4),))
    prices = toy(rates=rates, network={"nics_per_node": 1})
    found = simulate(layout, prices)
    assert found.step_s > 2 * found.estimated_s
    assert set(found.waited_s) <= {"from node 0 eth", "to node 1 eth", "from node 1 eth", "to node 0 eth"}
    wide = toy(rates=rates, network={"nics_per_node": 4})
    assert simulate(layout, wide).step_s == simulate(layout, wide).estimated_s


def test_a_shared_line_carries_one_transfer_at_a_time():
    rates = Rates(forward_s=0.1, backward_s=0.1, weight_s=0.05, far_s=1.0)
    layout = Layout(replicas=(pipeline([0, 4, 8], ["a", "b"], m=1, copies=2, tp=4),))
    prices = toy(rates=rates, network={"shared": True})
    found = simulate(layout, prices)
    busy = sorted((i.start_s, i.end_s) for lane in found.lanes if lane.receiver is not None for i in lane.intervals)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(busy))
    assert found.waited_s["line eth"] > 0


def test_work_inside_a_node_shares_nothing():
    rates = Rates(forward_s=0.1, backward_s=0.1, near_s=1.0, far_s=50.0)
    layout = Layout(replicas=(pipeline([0, 4, 8], m=2, copies=2),))
    prices = toy(rates=rates, network={"nics_per_node": 1})
    placed = place(layout, prices.cluster, "pipelines")
    assert simulate(placed, prices).step_s == estimate(placed, prices).step_s < 50


def test_lanes_never_overlap_and_cover_the_work():
    layout = Layout(replicas=(pipeline([0, 3, 8], m=5),))
    found = simulate(layout, toy())
    own = [lane for lane in found.lanes if lane.receiver is None]
    assert [len(lane.intervals) for lane in own] == [10, 10]
    for lane in found.lanes:
        for before, after in zip(lane.intervals, lane.intervals[1:], strict=False):
            assert before.end_s <= after.start_s


def test_large_layouts_are_simulated_in_part_and_say_so():
    layout = Layout(replicas=(pipeline([0, 8], m=4, copies=16),))
    found = simulate(layout, toy(), Conditions(most_copies=3))
    assert found.copies == ((3, 16),)
    assert found.notes == ("3 of 16 copies of replica shape 0 are simulated",)
    assert len(found.lanes) == 3
    tight = simulate(layout, toy(), Conditions(most_actions=1))
    assert tight.copies == ((1, 16),)
    assert tight.step_s == found.step_s


def test_conditions_without_sense_are_refused():
    with pytest.raises(UsageError):
        Conditions(jitter=-1.0)
    with pytest.raises(UsageError):
        Conditions(most_copies=0)


def test_a_trace_is_what_trace_viewers_read():
    layout = Layout(replicas=(pipeline([0, 3, 8], m=2, copies=2),))
    found = simulate(layout, toy())
    document = json.loads(json.dumps(chrome_trace(found)))
    events = document["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    work = [event for event in events if event["ph"] == "X" and event["pid"] > 0]
    assert {event["cat"] for event in work} == {"forward", "backward", "transfer"}
    assert len([event for event in work if event["cat"] == "forward"]) == 2 * 2 * 2
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(
        found.step_s * 1e6
    )
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"replica shape 0, copy 1", "rank 0", "rank 0 sends to 1", "synchronisation and optimizer"} <= names
    assert any(event["name"].startswith("reduce layers") for event in events)
