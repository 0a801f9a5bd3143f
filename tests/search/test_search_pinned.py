"""Pinned layers stay where the user put them, and the rest of the plan is still the best there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.catalog import load_cluster, load_model
from hetplan.costs.prices import Prices, price
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import Limits
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.workload import Workload

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def prices() -> Prices:
    cluster, _ = load_cluster(ROOT / "cluster_specs/two-generation-lab.yaml")
    model, _ = load_model("llama-3.1-8b")
    return price(cluster, model, Workload(seq_len=4096, global_batch=64, precision="fp16"))


@pytest.mark.parametrize("pinned", [(11, 7, 7, 7), (7, 7, 7, 11), (10, 8, 7, 7), (12, 12, 4, 4)])
def test_a_pinned_search_is_no_slower_than_grids_with_the_same_pin(prices: Prices, pinned: tuple[int, ...]) -> None:
    limits = Limits(pinned_layers=pinned, exclude=frozenset({"v100"}))
    result = search(prices, SearchRequest(limits=limits, compare=False))
    decoder = [layer.kind == "decoder" for layer in prices.model.chain]
    for row in result.best.layout.replicas:
        assert tuple(sum(decoder[stage.first_layer : stage.end_layer]) for stage in row.stages) == pinned
    for tp, dp in ((1, 4), (2, 2), (4, 1)):
        grid = Grid(tp=tp, pp=4, dp=dp, micro_batch=1, layers_per_stage=pinned, groups=("a100",))
        layout = grid_layout(prices, grid)
        if not check(layout, prices, limits):
            assert result.best.estimate.step_s <= estimate(layout, prices).step_s * 1.0101
            assert result.proof.bound <= estimate(layout, prices).step_s * (1 + 1e-9)
