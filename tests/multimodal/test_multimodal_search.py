"""The search over modules against brute force, simulation and published layouts."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from modular_jobs import cluster_of, data_of, job, model_of

from hetplan.catalog.devices import find_device
from hetplan.costs.modules import ModulePrices
from hetplan.errors import InfeasibleError
from hetplan.plan.module_time import Draws, estimate_modules
from hetplan.plan.modules import ModuleLayout, Placement, check_modules, units_of
from hetplan.search.modules import ModuleRequest, search_modules
from hetplan.specs.read_cluster import cluster_from_text

TWO = """
name: two
style: gpt
modules:
  - {name: image, hidden: 1024, layers: 4, heads: 16, tokens: 256}
  - {name: language, hidden: 2048, layers: 6, heads: 16, vocab: 1024}
"""
SKEWED = """
sources:
  - weight: 3
    text: {lognormal: {median: 300, sigma: 0.8, most: 4096}}
    image: {count: {histogram: {values: [0, 1, 4], weights: [4, 4, 2]}}, tokens: {lognormal: {median: 300, sigma: 0.6}}}
  - weight: 1
    text: {constant: 512}
"""


def every_layout(prices: ModulePrices, batch: int, devices: int) -> list[ModuleLayout]:
    """All layouts of two units over tp, pp and dp of both and the number of microbatches, by plain loops."""
    units = units_of(prices.prices.model)
    grids = [(tp, pp, dp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for dp in range(1, 17) if tp * pp * dp <= devices]
    found = []
    for count in range(1, batch + 1):
        if batch % count:
            continue
        for first, second in itertools.product(grids, repeat=2):
            image = Placement(modules=units[0], group="g", tp=first[0], pp=first[1], dp=first[2])
            language = Placement(modules=units[1], group="g", tp=second[0], pp=second[1], dp=second[2])
            apart = dataclasses.replace(image, first_rank=language.num_ranks)
            layouts = [(apart, language)] if apart.end_rank <= devices else []
            if image.num_ranks == language.num_ranks and image.pp == 1:
                layouts.append((image, language))
            found += [ModuleLayout(placements=pair, num_microbatches=count, samples=batch // count) for pair in layouts]
    return found


@pytest.mark.parametrize(("batch", "seed"), [(8, 0), (12, 1), (16, 2)])
def test_the_plan_is_the_best_of_all(batch: int, seed: int) -> None:
    cluster = cluster_of(1) if batch == 12 else cluster_of(2)
    devices = 8 if batch == 12 else 16
    model = model_of(TWO)
    prices, draws = job(cluster, model, data_of(SKEWED), batch=batch, draws=4, seed=seed)
    request = ModuleRequest(global_batch=batch, pp=(1, 2, 4), recompute=("none",), effort=100_000)
    found = search_modules(prices, draws, request)
    assert found.proved
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    layouts = [one for one in every_layout(prices, batch, devices) if not check_modules(one, model, cluster)]
    estimates = [estimate_modules(one, prices, draws) for one in layouts[:: 1 if len(layouts) < 4000 else 3]]
    best = min(one.step_s for one in estimates if one.fits)
    assert found.estimate.step_s <= best * (1 + 1e-9)
    assert estimate_modules(found.layout, prices, draws).step_s == found.estimate.step_s
    if len(layouts) < 4000:
        assert found.estimate.step_s == pytest.approx(best, rel=1e-9)


def test_the_faster_plan_may_need_more_microbatches() -> None:
    data = data_of("sources: [{text: {constant: 700}, image: {tokens: {constant: 300}}}]")
    prices, draws = job(cluster_of(2), model_of(TWO), data, batch=16, draws=2)
    free = ModuleRequest(global_batch=16, arrangement=("disjoint",), recompute=("none",), pp=(2, 4))
    by_count = {
        count: search_modules(prices, draws, dataclasses.replace(free, microbatches=(count,))).estimate.step_s
        for count in (1, 2, 4, 8, 16)
    }
    best = min(by_count, key=lambda count: by_count[count])
    assert search_modules(prices, draws, free).layout.num_microbatches == best > 1
    assert by_count[1] > 1.1 * by_count[best]


def test_the_prediction_is_the_mean_of_ten_thousand_draws() -> None:
    model, data = model_of(TWO), data_of(SKEWED)
    prices, draws = job(cluster_of(2), model, data, batch=16, draws=256, seed=3)
    found = search_modules(prices, draws, ModuleRequest(global_batch=16, recompute=("none",)))
    _, many = job(cluster_of(2), model, data, batch=16, draws=10_000, seed=99)
    simulated = estimate_modules(found.layout, prices, many)
    assert found.estimate.step_s == pytest.approx(simulated.step_s, rel=0.03)
    assert found.estimate.spread_s == pytest.approx(simulated.spread_s, rel=0.25)
    average = Draws(
        features_dbf={
            name: np.broadcast_to(values.mean(axis=(0, 1)), (1, *values.shape[1:]))
            for name, values in many.features_dbf.items()
        }
    )
    assert estimate_modules(found.layout, prices, average).step_s < 0.9 * simulated.step_s


THREE = """
name: three
style: gpt
modules:
  - {name: image, hidden: 4096, layers: 4, heads: 32, tokens: 256}
  - {name: language, hidden: 4096, layers: 24, heads: 32, vocab: 64}
  - {name: generator, hidden: 4096, layers: 8, heads: 32, tokens: 256}
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_devices_follow_the_work_of_three_modules(tp: int) -> None:
    data = data_of("sources: [{text: {constant: 1}, image: {tokens: {constant: 256}}}]\nreads: {generator: image}")
    prices, draws = job(cluster_of(9), model_of(THREE), data, batch=960, draws=2)
    request = ModuleRequest(
        global_batch=960, tp=(tp,), pp=(1, 2, 3, 4, 6, 8), recompute=("none",), arrangement=("disjoint",)
    )
    found = search_modules(prices, draws, request)
    assert found.proved
    ranks = [placement.num_ranks for placement in found.layout.placements]
    for have, want in zip(ranks, (8, 48, 16), strict=True):
        assert abs(have - want) <= tp


def test_nothing_fits_is_said_with_its_reasons() -> None:
    big = TWO.replace("hidden: 2048, layers: 6", "hidden: 16384, layers: 96")
    prices, draws = job(cluster_of(1), model_of(big), data_of(SKEWED), batch=4, draws=2)
    with pytest.raises(InfeasibleError, match="memory"):
        search_modules(prices, draws, ModuleRequest(global_batch=4, effort=50))


MIXED = """hetplan: cluster/v1
name: mixed
groups:
  fast: {device: H100-SXM5-80GB, nodes: 1, devices_per_node: 4}
  weak: {device: A100-SXM4-80GB, nodes: 1, devices_per_node: 8}
networks:
  eth: {joins: [fast, weak], kind: ethernet, bandwidth: 100 Gbit/s, latency: 30 us}
"""


@pytest.mark.parametrize(("layers", "image_on", "language_on"), [(24, "weak", "fast"), (6, "fast", "weak")])
def test_weak_devices_take_the_lighter_module(layers: int, image_on: str, language_on: str) -> None:
    cluster = cluster_from_text(MIXED, "mixed.yaml", find_device)
    text = TWO.replace("hidden: 1024, layers: 4", "hidden: 2048, layers: 24")
    model = model_of(text.replace("layers: 6", f"layers: {layers}"))
    prices, draws = job(cluster, model, data_of(SKEWED), batch=64, draws=8)
    request = ModuleRequest(global_batch=64, recompute=("none",))
    found = search_modules(prices, draws, request)
    groups = {placement.modules[0]: placement.group for placement in found.layout.placements}
    assert groups == {"image": image_on, "language": language_on}
    alone = search_modules(prices, draws, dataclasses.replace(request, exclude=frozenset({"weak"})))
    assert found.estimate.step_s < 0.96 * alone.estimate.step_s
