"""Plans of equal shares: the search against trying every plan of one shape, its bound, and its switches."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model_config
from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.calibration import Calibration, Overlap
from hetplan.specs.layer_table import LayerRow, LayerTable, LinkCurve, LinkEnd, LinkFits
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.read_model import model_from_text
from hetplan.specs.workload import Workload

LIMITS = Limits(recompute=("none",), sharding=("none",), uniform_microbatches=True)
LAYERS = 5
MODEL = """\
hetplan: model/v1
name: small
layers:
  - {kind: embedding, params: 1000000, width: 256, tp: 2}
  - {kind: decoder, repeat: 3, params: 4000000, width: 256, tp: 2}
  - {kind: head, params: 1000000, width: 256, tp: 2}
"""


def prices_of(costs_ms, rate_gbps, counts, batch):
    """Layers of two cards: (embedding, block, head) ms at one sample and tp 1; tp 2 takes 0.6 of it."""
    rows = []
    for card, (first, block, last) in zip("ab", costs_ms, strict=True):
        for tp, samples in itertools.product((1, 2), (1, 2)):
            factor = samples * (0.6 if tp == 2 else 1.0) * 1e-3
            for (low, high), cost in zip(((0, 1), (1, 4), (4, 5)), (first, block, last), strict=True):
                rows.append(
                    LayerRow(
                        device=f"card-{card}",
                        tp=tp,
                        microbatch=samples,
                        first_layer=low,
                        end_layer=high,
                        forward_s=cost * factor / 3,
                        backward_s=cost * factor * 2 / 3,
                        saved_bytes=1e6 * samples,
                    )
                )
    curve = LinkCurve(coefficients=(rate_gbps * 1e9,))
    ends = [LinkEnd(device=f"card-{card}") for card in "ab"]
    calibration = Calibration(
        overlap=Overlap(gradients=0.0, pipeline="lock-step"),
        layers=LayerTable(model="small", num_layers=LAYERS, rows=tuple(rows), reserve_bytes={1: 1e9}),
        links=LinkFits(between=dict.fromkeys(itertools.product(ends, ends), curve)),
    )
    groups = "".join(
        f"  {card}: {{device: card-{card}, nodes: {count // 2}, devices_per_node: 2}}\n"
        for card, count in zip("ab", counts, strict=True)
    )
    devices = "".join(f"  card-{card}: {{like: A100-SXM4-40GB}}\n" for card in "ab")
    cluster = cluster_from_text(
        f"hetplan: cluster/v1\nname: two\ndevices:\n{devices}groups:\n{groups}networks:\n"
        "  net: {joins: [a, b], kind: ethernet, bandwidth: 10 Gbit/s, latency: 1 us}\n",
        "cluster.yaml",
        find_device,
    )
    model = model_from_text(MODEL, Path("small.yaml"), find_model_config)
    return price(cluster, model, Workload(seq_len=256, global_batch=batch, precision="fp32"), calibration)


def every_plan(prices, counts, batch):
    """Every plan of one shape with whole equal shares: any order of cards and degrees, any cut."""
    kinds = [(group, tp) for group in "ab" for tp in (1, 2)]
    for copies, samples in itertools.product((1, 2, 4), (1, 2)):
        if batch % (copies * samples):
            continue
        for depth in range(1, LAYERS + 1):
            for stages in itertools.product(kinds, repeat=depth):
                used = {g: copies * sum(tp for group, tp in stages if group == g) for g in "ab"}
                if any(used[g] > count for g, count in zip("ab", counts, strict=True)):
                    continue
                for cuts in itertools.combinations(range(1, LAYERS), depth - 1):
                    edges = (0, *cuts, LAYERS)
                    yield Layout(
                        replicas=(
                            Replica(
                                stages=tuple(
                                    Stage(group=g, first_layer=edges[i], end_layer=edges[i + 1], tp=tp)
                                    for i, (g, tp) in enumerate(stages)
                                ),
                                microbatch=samples,
                                num_microbatches=batch // copies // samples,
                                copies=copies,
                            ),
                        )
                    )


def least_step_s(prices, counts, batch):
    best = math.inf
    for layout in every_plan(prices, counts, batch):
        placed = place(layout, prices.cluster)
        found = estimate(placed, prices)
        if found.step_s < best and not check(placed, prices, LIMITS):
            best = found.step_s
    return best


costs = st.tuples(st.sampled_from([0.1, 1.0]), st.sampled_from([2.0, 3.0, 5.0, 9.0]), st.sampled_from([0.5, 4.0]))


@settings(max_examples=5, deadline=None)
@given(st.tuples(costs, costs), st.sampled_from([0.5, 5.0, 50.0]), st.sampled_from([(2, 2), (4, 2), (2, 4)]))
def test_the_search_finds_what_trying_every_plan_finds(costs_ms, rate_gbps, counts):
    prices = prices_of(costs_ms, rate_gbps, counts, batch=8)
    result = search(prices, SearchRequest(limits=LIMITS, compare=False, simplicity=0.0))
    best = least_step_s(prices, counts, 8)
    assert result.best.estimate.step_s <= best * 1.03
    assert result.proof.bound <= best * (1 + 1e-9)


def test_switches_hold():
    prices = prices_of(((0.1, 2.0, 0.5), (0.1, 5.0, 0.5)), 5.0, (4, 2), batch=8)
    for limits in (replace(LIMITS, replicas=(1,)), replace(LIMITS, tp=(2,)), replace(LIMITS, pp=(2,))):
        found = search(prices, SearchRequest(limits=limits, compare=False)).best
        assert not check(found.layout, prices, limits)


def test_the_same_search_gives_the_same_plan():
    prices = prices_of(((0.1, 2.0, 0.5), (0.1, 5.0, 0.5)), 5.0, (4, 4), batch=16)
    request = SearchRequest(limits=LIMITS, compare=False)
    assert search(prices, request).best == search(prices, request).best


def test_fewest_devices_keep_the_rate_and_no_fewer_do():
    prices = prices_of(((0.1, 2.0, 0.5), (0.1, 5.0, 0.5)), 50.0, (4, 4), batch=8)
    fastest = search(prices, SearchRequest(limits=LIMITS, compare=False)).best
    within = fastest.estimate.step_s * 2.5
    request = SearchRequest(limits=LIMITS, compare=False, objective="devices", time_budget_s=within)
    found = search(prices, request).best
    assert found.estimate.step_s <= within
    assert found.layout.num_devices < fastest.layout.num_devices
    fewer = [
        layout
        for layout in every_plan(prices, (4, 4), 8)
        if layout.num_devices < found.layout.num_devices
        and estimate(place(layout, prices.cluster), prices).step_s <= within
    ]
    assert not fewer
