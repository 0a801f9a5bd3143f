"""The exact search: budgets, incumbents, prices, recomputation that only the whole layout decides."""

import math
from dataclasses import replace

import brute
import numpy as np
import pytest
import tiny

from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.limits import Limits
from hetplan.search.exhaustive import exhaustive
from hetplan.search.records import SearchRequest
from hetplan.specs.cluster import Cluster, Group, Network
from hetplan.specs.workload import Workload

ENOUGH = 10**9


def lab(*counts, memory_gib=80.0, bandwidth=1e10, usd=1.0, speed=1.0):
    groups = tuple(
        Group(
            name=f"g{kind}",
            device=tiny.device(f"D{kind}", 300e12 / (kind + 1)),
            nodes=(f"n{kind}",),
            devices_per_node=count,
            site="main",
            usable_memory_bytes=memory_gib * tiny.GIB,
            usd_per_device_hour=usd,
            speed=speed,
        )
        for kind, count in enumerate(counts)
    )
    network = Network(
        name="eth",
        joins=tuple(group.name for group in groups),
        kind="ethernet",
        bandwidth_bytes_per_s=bandwidth,
        latency_s=1e-5,
    )
    return Cluster(name="lab", groups=groups, networks=(network,))


def prices_of(cluster, num_decoders=2, *, batch=4, width=2048, seq_len=2048):
    model = tiny.llama_like(num_decoders, width=width)
    return price(cluster, model, Workload(seq_len=seq_len, global_batch=batch))


def best_by_brute(prices, limits):
    return min((found.step_s for _, found in brute.every_layout(prices, limits)), default=math.inf)


def value(answer):
    return answer.candidates[0].estimate.step_s if answer.candidates else math.inf


@pytest.mark.parametrize("memory_gib", np.linspace(7.0, 8.8, 10).tolist())
def test_recomputation_is_chosen_by_how_many_replicas_really_share(memory_gib):
    prices = prices_of(lab(4, memory_gib=memory_gib, speed=0.05), batch=2, seq_len=8192)
    limits = Limits(tp=(1,), pp=(1,), microbatch=(1,), sharding=("full",), recompute=("none", "full"))
    answer = exhaustive(prices, SearchRequest(limits=limits), None, ENOUGH)
    assert value(answer) == pytest.approx(best_by_brute(prices, limits), rel=1e-9)


@pytest.mark.parametrize(("decoders", "memory_gib"), [(4, 4.7), (4, 5.7), (4, 6.1), (3, 5.3), (3, 5.5), (3, 6.0)])
def test_virtual_stages_of_a_rank_give_way_one_by_one(decoders, memory_gib):
    prices = prices_of(lab(2, memory_gib=memory_gib), decoders, batch=2, seq_len=4096)
    limits = Limits(
        tp=(1,), pp=(2,), microbatch=(1,), sharding=("none",), schedules=("interleaved",), recompute=("none", "full")
    )
    answer = exhaustive(prices, SearchRequest(limits=limits), None, ENOUGH)
    assert value(answer) == pytest.approx(best_by_brute(prices, limits), rel=1e-9)


def test_a_spent_budget_still_bounds_the_optimum():
    prices = prices_of(lab(2, 2), 4, batch=6)
    request = SearchRequest(limits=Limits(sharding=("none",)))
    optimum = value(exhaustive(prices, request, None, ENOUGH))
    finished = []
    for budget in (0, 100, 10_000, 20_000, 40_000, 80_000, 160_000, 10**7):
        answer = exhaustive(prices, request, None, budget)
        finished.append(answer.complete)
        assert answer.bound <= optimum * (1 + 1e-12)
        assert value(answer) >= optimum * (1 - 1e-12)
    assert finished[0] is False
    assert finished[-1] is True


def test_a_large_instance_is_noticed_before_anything_is_priced():
    cluster = lab(4096, 4096, 2048)
    answer = exhaustive(prices_of(cluster, 94), SearchRequest(), None, 10**6)
    assert not answer.complete
    assert answer.num_priced == 0
    assert answer.candidates == ()


def test_an_incumbent_that_is_best_comes_back():
    prices = prices_of(lab(2, 1))
    best = exhaustive(prices, SearchRequest(), None, ENOUGH).candidates[0]
    again = exhaustive(prices, SearchRequest(), best, ENOUGH)
    assert again.complete
    assert again.candidates[0] == best
    spent = exhaustive(prices, SearchRequest(), best, 0)
    assert spent.candidates == (best,)
    assert not spent.complete


def test_a_poor_incumbent_is_beaten():
    prices = prices_of(lab(2, 1))
    answer = exhaustive(prices, SearchRequest(), None, ENOUGH)
    only_slow = Limits(exclude=frozenset({"g0"}))
    poor = exhaustive(prices, SearchRequest(limits=only_slow), None, ENOUGH).candidates[0]
    again = exhaustive(prices, SearchRequest(), poor, ENOUGH)
    assert value(again) == value(answer) < poor.estimate.step_s


def test_candidates_are_distinct_valid_and_in_order():
    prices = prices_of(lab(2, 2), batch=6)
    request = SearchRequest(top=3)
    answer = exhaustive(prices, request, None, ENOUGH)
    values = [candidate.estimate.step_s for candidate in answer.candidates]
    assert values == sorted(values)
    assert len(values) <= 4
    assert len({candidate.layout for candidate in answer.candidates}) == len(values)
    assert not any(check(candidate.layout, prices, request.limits) for candidate in answer.candidates)


def test_the_same_request_gets_the_same_answer():
    prices = prices_of(lab(2, 2), batch=6)
    assert exhaustive(prices, SearchRequest(), None, ENOUGH) == exhaustive(prices, SearchRequest(), None, ENOUGH)


def test_cost_leaves_out_groups_without_a_price():
    cluster = lab(1, 1)
    free = replace(cluster.groups[0], usd_per_device_hour=None)
    prices = prices_of(replace(cluster, groups=(free, cluster.groups[1])))
    best = exhaustive(prices, SearchRequest(objective="cost"), None, ENOUGH).candidates[0]
    assert {stage.group for replica in best.layout.replicas for stage in replica.stages} == {"g1"}
    unpriced = prices_of(lab(1, 1, usd=None))
    assert exhaustive(unpriced, SearchRequest(objective="cost"), None, ENOUGH).candidates == ()


def test_an_impossible_request_says_so():
    prices = prices_of(lab(2, memory_gib=1.0))
    answer = exhaustive(prices, SearchRequest(), None, ENOUGH)
    assert answer.complete
    assert answer.candidates == ()
    assert answer.bound == math.inf


def test_pinned_layers_are_kept():
    prices = prices_of(lab(2, 1), 4)
    limits = Limits(pinned_layers=(1, 3), microbatch=(1, 2))
    best = exhaustive(prices, SearchRequest(limits=limits), None, ENOUGH).candidates[0]
    cuts = {tuple(stage.end_layer for stage in replica.stages) for replica in best.layout.replicas}
    assert cuts == {(2, 6)}
