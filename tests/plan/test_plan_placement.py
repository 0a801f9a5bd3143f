from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plan.fake_prices import cluster, group

from hetplan.errors import UsageError
from hetplan.plan.placement import (
    NodeShare,
    cluster_places,
    device_ranges,
    mesh_devices,
    node_shares,
    place,
    same_domain,
)
from hetplan.plan.records import Layout, Replica, Stage


def row(sizes, copies=1, names="a", **stage):
    names = [names] * len(sizes) if isinstance(names, str) else names
    stages = tuple(
        Stage(group=name, first_layer=i, end_layer=i + 1, tp=size, **stage)
        for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    )
    return Replica(stages=stages, microbatch=1, num_microbatches=1, copies=copies)


def domains(layout, machines):
    places = cluster_places(machines)
    return [[places[s.group].domain_d[mesh_devices(s, r.copies)] for s in r.stages] for r in layout.replicas]


def test_stage_order_keeps_copies_together_and_pipeline_order_keeps_stages_together():
    machines = cluster(group("a", nodes=2, per_node=4))
    layout = Layout(replicas=(row([1, 1, 1, 1], copies=2),))
    near = domains(place(layout, machines, "pipelines"), machines)
    assert all(same_domain(near[0][s], near[0][s + 1]).all() for s in range(3))
    apart = domains(place(layout, machines, "stages"), machines)
    assert all((stage == stage[0]).all() for stage in apart[0])


def test_a_tp_group_is_never_split_where_a_node_has_room():
    machines = cluster(group("a", nodes=3, per_node=6))
    layout = Layout(replicas=(row([2], copies=3), row([4], copies=3)))
    for order in ("stages", "pipelines"):
        found = domains(place(layout, machines, order), machines)
        assert all((mesh == mesh[:, :1]).all() for stages in found for mesh in stages)


def test_devices_left_out_are_skipped():
    machines = cluster(group("a", nodes=2, per_node=4, left_out=frozenset({(0, 1), (1, 0), (1, 1)})))
    assert cluster_places(machines)["a"].node_d.tolist() == [0, 0, 0, 1, 1]
    found = place(Layout(replicas=(row([2], copies=2),)), machines)
    assert found.replicas[0].stages[0].devices == ((0, 2), (3, 5))


def test_a_domain_may_span_nodes_and_two_groups_may_share_a_host():
    wide = cluster_places(cluster(group("a", nodes=4, per_node=2, domain_nodes=2)))["a"]
    assert len(np.unique(wide.domain_d)) == 2
    assert len(np.unique(wide.node_d)) == 4
    box = cluster(group("a", nodes=1, per_node=2), group("b", nodes=1, per_node=2))
    shared = cluster(box.groups[0], group("b", per_node=2, nodes=1))
    assert cluster_places(shared)["a"].domain_d[0] != cluster_places(shared)["b"].domain_d[0]
    one_host = cluster(box.groups[0], replace(box.groups[1], nodes=box.groups[0].nodes))
    places = cluster_places(one_host)
    assert places["a"].domain_d[0] == places["b"].domain_d[0]


def test_a_mesh_larger_than_a_node_takes_whole_tp_groups():
    machines = cluster(group("a", nodes=4, per_node=4))
    found = place(Layout(replicas=(row([4], copies=2, dp=2),)), machines)
    assert found.replicas[0].stages[0].devices == ((0, 16),)


def test_too_few_devices_are_refused():
    with pytest.raises(UsageError, match="group a is too small for this layout: 1 devices are missing"):
        place(Layout(replicas=(row([1], copies=17),)), cluster(group("a")))
    with pytest.raises(UsageError, match="no group 'b'"):
        place(Layout(replicas=(row([1], names="b"),)), cluster(group("a")))


def test_a_placed_layout_comes_back_as_it_is():
    machines = cluster(group("a"))
    placed = place(Layout(replicas=(row([2, 2], copies=2),)), machines)
    assert place(placed, machines, "pipelines") is placed


@given(
    st.lists(st.tuples(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3), st.integers(1, 4)), max_size=3),
    st.sampled_from(["stages", "pipelines"]),
    st.integers(3, 9),
)
def test_every_device_is_used_at_most_once(rows, order, per_node):
    machines = cluster(group("a", nodes=16, per_node=per_node), group("b", nodes=16, per_node=per_node))
    layout = Layout(replicas=tuple(row(s, copies=c, names=["a", "b", "a"][: len(s)]) for s, c in rows))
    assume(layout.num_devices <= 16 * per_node)
    used = {"a": [], "b": []}
    for replica in place(layout, machines, order).replicas:
        for stage in replica.stages:
            devices = mesh_devices(stage, replica.copies)
            assert devices.shape == (replica.copies, stage.mesh_size)
            assert device_ranges(devices) == stage.devices
            used[stage.group].extend(devices.ravel().tolist())
    for indices in used.values():
        assert len(set(indices)) == len(indices)
        assert all(0 <= i < 16 * per_node for i in indices)


def test_stages_on_one_node_share_its_nics():
    machines = cluster(group("a", nodes=2, per_node=4))
    layout = Layout(replicas=(row([1, 2], copies=2), row([1], copies=1)))

    def shares(order):
        placed = place(layout, machines, order)
        nodes = {
            (r, q): cluster_places(machines)[stage.group].node_d[mesh_devices(stage, replica.copies)]
            for r, replica in enumerate(placed.replicas)
            for q, stage in enumerate(replica.stages)
        }
        return node_shares(placed, nodes)

    near = shares("stages")
    assert near[0, 1] == NodeShare(ranks_per_node=2, rings_per_node=2)
    assert near[0, 0] == NodeShare(ranks_per_node=2, rings_per_node=1)
    mixed = shares("pipelines")
    assert mixed[0, 0] == NodeShare(ranks_per_node=1, rings_per_node=3)
    assert mixed[0, 1] == NodeShare(ranks_per_node=1, rings_per_node=3)
