"""The trillion-parameter GPT of Narayanan et al. 2021 (arXiv:2104.04473) on 384 DGX A100, and its bubble formulas."""

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import Limits
from hetplan.plan.timing import Durations, pipeline_finish
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.cluster import Cluster, Group, Network
from hetplan.specs.workload import Workload

BATCH, SEQ_LEN, LAYERS, WIDTH, VOCAB = 3072, 2048, 128, 25600, 51200
PUBLISHED_FLOP_PER_S = 163e12
"""Achieved FLOP/s of one GPU, table 1, last row."""


@pytest.fixture(scope="module")
def prices():
    device = find_device("A100-SXM4-80GB")
    group = Group(
        name="dgx",
        device=device,
        nodes=tuple(f"dgx-{k}" for k in range(384)),
        devices_per_node=8,
        site="selene",
        usable_memory_bytes=device.usable_memory_bytes,
    )
    # Eight 200 Gbit/s HDR InfiniBand ports a node (section 5).
    hdr = Network(
        name="hdr",
        joins=("dgx",),
        kind="infiniband",
        bandwidth_bytes_per_s=25e9,
        latency_s=3e-6,
        nics_per_node=8,
    )
    cluster = Cluster(name="selene", groups=(group,), networks=(hdr,))
    workload = Workload(seq_len=SEQ_LEN, global_batch=BATCH, precision="fp16")
    return price(cluster, find_model("gpt-1t"), workload)


def published_layout(prices):
    return grid_layout(prices, Grid(tp=8, pp=64, dp=6, micro_batch=1, recompute="full"))


def hardware_flop():
    """FLOPs of one step with full recomputation, equation 3 of the paper."""
    return 96 * BATCH * SEQ_LEN * LAYERS * WIDTH**2 * (1 + SEQ_LEN / (6 * WIDTH) + VOCAB / (16 * LAYERS * WIDTH))


def test_published_layout_runs_at_about_the_published_rate(prices):
    layout = published_layout(prices)
    assert check(layout, prices) == ()
    rate = hardware_flop() / estimate(layout, prices).step_s / 3072
    assert rate == pytest.approx(PUBLISHED_FLOP_PER_S, rel=0.15)


@pytest.mark.slow
def test_search_is_at_least_as_fast_as_the_published_layout(prices):
    limits = Limits(tp=(8,), microbatch=(1,))
    result = search(prices, SearchRequest(limits=limits, compare=False))
    assert check(result.best.layout, prices, limits) == ()
    assert result.best.estimate.step_s <= estimate(published_layout(prices), prices).step_s
    assert result.proof.bound <= result.proof.value


def bubble(schedule, p, m, v):
    """Return idle over ideal time of a pipeline of equal stages without transfers."""
    forward_s, backward_s = 1.0, 2.0
    durations = Durations(
        forward_s=(forward_s / v,) * (p * v),
        backward_s=(backward_s / v,) * (p * v),
        weight_s=(0.0,) * (p * v),
        p2p_s=(0.0,) * (p * v - 1),
    )
    ideal_s = m * (forward_s + backward_s)
    return (pipeline_finish(schedule, p, m, v, durations).pipeline_s - ideal_s) / ideal_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (4, 8), (8, 8), (64, 512), (7, 3)])
def test_bubble_is_that_of_the_paper(schedule, p, m):
    assert bubble(schedule, p, m, 1) == pytest.approx((p - 1) / m, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (4, 8, 2), (4, 8, 4), (8, 32, 3)])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(p, m, v):
    assert bubble("interleaved", p, m, v) == pytest.approx((p - 1) / (v * m), rel=1e-9)
