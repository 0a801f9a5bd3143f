"""The ordinary search on models of which only a part trains."""

from __future__ import annotations

import warnings

import pytest
from modular_jobs import cluster_of, model_of

from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.search.records import SearchRequest, SearchResult
from hetplan.search.solve import search
from hetplan.specs.calibration import Calibration
from hetplan.specs.workload import Workload

TEXT = """
name: partly-frozen
style: gpt
modules:
  - {name: vision, hidden: 1024, layers: 6, heads: 16, tokens: 256}
  - {name: language, hidden: 1024, layers: 6, heads: 16, vocab: 32000}
"""


def best(train: str, per_node: int) -> SearchResult:
    cluster = cluster_of(1, "A100-SXM4-80GB", per_node)
    prices = price(cluster, model_of(TEXT + train), Workload(seq_len=512, global_batch=8), Calibration())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = search(prices, SearchRequest(compare=False, effort=1.0))
    assert not check(found.best.layout, prices, Limits())
    assert estimate(found.best.layout, prices).step_s == found.best.estimate.step_s
    return found


@pytest.mark.parametrize("per_node", [2, 8])
def test_what_does_not_train_costs_less_and_bounds_hold(per_node: int) -> None:
    full = best("", per_node)
    frozen = best("train: {vision: frozen}\n", per_node)
    adapters = best("train: {vision: frozen, language: lora(16)}\n", per_node)
    assert frozen.best.estimate.step_s < full.best.estimate.step_s
    assert adapters.best.estimate.parts.dp_s <= full.best.estimate.parts.dp_s
    for found in (full, frozen, adapters):
        assert found.proof.bound <= found.proof.value * (1 + 1e-9)
