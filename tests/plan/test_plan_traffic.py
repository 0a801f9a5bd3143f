from dataclasses import replace

import pytest
from plan.fake_prices import FakePrices, cluster, group, model

from hetplan.plan.estimate import estimate
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.model import layer_params

USD = 1e-6
PARAMS = sum(layer_params(layer) for layer in model(6).chain)


def toy(usd_per_byte=USD, **changes):
    groups = tuple(group(name, nodes=2, per_node=4, usd_per_device_hour=0.0) for name in "abc")
    machines = cluster(*groups)
    network = replace(machines.networks[0], usd_per_byte=usd_per_byte)
    return FakePrices(replace(machines, networks=(network,)), model(6), **changes)


def row(names, copies=1, **stage):
    cuts = [0, 8] if len(names) == 1 else [0, 4, 8]
    stages = tuple(
        Stage(group=name, first_layer=cuts[i], end_layer=cuts[i + 1], **stage) for i, name in enumerate(names)
    )
    return Replica(stages=stages, microbatch=2, num_microbatches=3, copies=copies)


def test_a_boundary_between_nodes_is_paid_both_ways():
    found = estimate(Layout(replicas=(row("ab"),)), toy())
    assert found.usd_per_step == pytest.approx(2 * 6 * 1000 * USD)
    assert estimate(Layout(replicas=(row("aa"),)), toy()).usd_per_step == 0
    assert estimate(Layout(replicas=(row("ab"),)), toy(usd_per_byte=0.0)).usd_per_step == 0


def test_a_ring_over_two_groups_crosses_twice():
    found = estimate(Layout(replicas=(row("a"), row("b"))), toy())
    # An all-reduce of two ranks moves the buffer once (2 x 1/2), two bytes a gradient, over two hops.
    assert found.usd_per_step == pytest.approx(PARAMS * 2 * 2 * USD)


def test_a_ring_over_the_nodes_of_a_group_pays_every_hop():
    found = estimate(Layout(replicas=(row("a", copies=2, tp=4),)), toy())
    assert found.usd_per_step == pytest.approx(PARAMS * 2 * 2 * USD)
    near = estimate(Layout(replicas=(row("a", copies=2),)), toy())
    assert near.usd_per_step == 0


def test_sharding_moves_gradients_and_weights():
    rows = (row("a"), row("b"))
    paid = {
        sharding: estimate(Layout(replicas=rows, sharding=sharding), toy()).usd_per_step
        for sharding in ("none", "optimizer", "gradients", "full")
    }
    hop = PARAMS / 2 * 2 * 2 * USD
    assert paid["optimizer"] == pytest.approx(2 * hop)
    assert paid["gradients"] == pytest.approx((3 + 1) * hop)
    assert paid["full"] == pytest.approx(3 * 3 * hop)
