"""GPT-3.6B on two InfiniBand and two RoCE nodes that meet on Ethernet (the setting of Holmes, arXiv:2312.03549)."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hetplan.catalog.load import load_cluster
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.workload import Workload

CLUSTER = load_cluster(Path(__file__).parents[2] / "cluster_specs" / "ib-roce.yaml")[0]
MODEL = find_model("gpt-3.6b")
WORKLOAD = Workload(seq_len=2048, global_batch=1536)


@pytest.fixture(scope="module")
def answer():
    return search(price(CLUSTER, MODEL, WORKLOAD), SearchRequest(compare=False))


def test_every_gradient_ring_stays_inside_one_kind_of_network(answer):
    replicas = answer.best.layout.replicas
    for layer in range(len(MODEL.chain)):
        holders = {s.group for row in replicas for s in row.stages if s.first_layer <= layer < s.end_layer}
        assert len(holders) == 1


def test_one_boundary_of_each_pipeline_is_on_ethernet(answer):
    for row in answer.best.layout.replicas:
        assert sum(one.group != other.group for one, other in pairwise(row.stages)) == 1


def ring_across(cluster):
    """Return the estimate of plain data parallelism over both halves, as one ring of 32 ranks."""
    prices = price(cluster, MODEL, WORKLOAD)
    layers = len(MODEL.chain)
    rows = tuple(
        Replica(
            stages=(Stage(group=group.name, first_layer=0, end_layer=layers, recompute="full"),),
            microbatch=2,
            num_microbatches=24,
            copies=16,
        )
        for group in cluster.groups
    )
    layout = place(Layout(replicas=rows, sharding="optimizer"), cluster)
    assert check(layout, prices) == ()
    return estimate(layout, prices)


def test_one_ring_across_all_nodes_runs_at_the_pace_of_ethernet(answer):
    ethernet = next(network for network in CLUSTER.networks if network.kind == "ethernet")
    everywhere = replace(CLUSTER, networks=(ethernet,))
    mixed, plain = ring_across(CLUSTER), ring_across(everywhere)
    assert mixed.step_s == pytest.approx(plain.step_s, rel=0.03)
    assert mixed.parts.dp_s == pytest.approx(plain.parts.dp_s, rel=0.05)
    assert mixed.step_s > 1.1 * answer.best.estimate.step_s
