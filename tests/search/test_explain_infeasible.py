"""Diagnoses of requests that nothing satisfies: the constraint, the shortfall, the changes and the nodes that help."""

from dataclasses import replace

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.errors import InfeasibleError
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import Limits
from hetplan.search.grown import with_nodes
from hetplan.search.infeasible import diagnose, diagnosis_text, explain_infeasible
from hetplan.search.infeasible_fixes import smallest
from hetplan.search.lightest import fits, lightest
from hetplan.search.problem import build_problem
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.cluster import Cluster, Group
from hetplan.specs.workload import Workload

GIB = 2.0**30


def one_box(device="RTX-3090", per_node=4, *, nodes=1):
    found = find_device(device)
    group = Group(
        name="box",
        device=found,
        nodes=("box-0",),
        devices_per_node=per_node,
        site="main",
        usable_memory_bytes=found.usable_memory_bytes,
    )
    cluster = Cluster(name="one", groups=(group,), networks=())
    return cluster if nodes == 1 else with_nodes(cluster, "box", nodes)


def diagnosis_of(cluster, model="llama-3.1-8b", *, limits=None, batch=16, precision="bf16", seq_len=2048):
    workload = Workload(seq_len=seq_len, global_batch=batch, precision=precision)
    prices = price(cluster, find_model(model), workload)
    limits = limits or Limits()
    return prices, diagnose(build_problem(prices, limits), SearchRequest(limits=limits))


def test_memory_names_stage_shortfall_and_largest_component():
    prices, found = diagnosis_of(one_box())
    assert found.constraint == "memory"
    worst = next(s for s in estimate(found.near.layout, prices).stages if (s.replica, s.stage) == (0, found.stage))
    assert found.shortfall_bytes == pytest.approx(worst.memory.total_bytes - worst.capacity_bytes)
    assert found.shortfall_bytes > 0
    assert found.component == "optimizer"
    assert found.component_bytes == pytest.approx(worst.memory.optimizer_bytes)
    first, *advice = diagnosis_text(found).split("\n")
    assert f"{found.shortfall_bytes / GIB:.2f} GiB" in first and "stage" in first and "group box" in first
    assert advice and all(line.startswith("  ") for line in advice)


def test_the_nearest_layout_overflows_no_more_than_any_grid():
    prices, found = diagnosis_of(one_box())
    for tp in (1, 2, 4):
        for sharding in ("none", "optimizer", "full"):
            layout = grid_layout(prices, Grid(tp=tp, pp=1, recompute="full", sharding=sharding))
            worst = max(s.memory.total_bytes - s.capacity_bytes for s in estimate(layout, prices).stages)
            assert found.shortfall_bytes <= worst + 1


def test_the_nodes_needed_fit_and_one_fewer_does_not():
    _, found = diagnosis_of(one_box())
    (need,) = found.devices_needed
    for nodes, verdict in ((need.nodes, True), (need.nodes - 1, False)):
        cluster = with_nodes(one_box(), "box", nodes)
        prices = price(cluster, find_model("llama-3.1-8b"), Workload(seq_len=2048, global_batch=16))
        assert (fits(build_problem(prices, Limits())) is not None) == verdict
        if verdict:
            assert not check(search(prices, SearchRequest(compare=False)).best.layout, prices)
    assert need.devices == need.nodes * 4


def test_search_carries_the_diagnosis_in_its_error():
    prices = price(one_box(), find_model("llama-3.1-8b"), Workload(seq_len=2048, global_batch=16))
    with pytest.raises(InfeasibleError, match=r"GiB more than.*most is optimizer"):
        search(prices, SearchRequest(compare=False))


def test_recompute_is_offered_where_it_alone_fits():
    limits = Limits(recompute=("none",))
    cluster = one_box("A100-SXM4-40GB", 8)
    _, found = diagnosis_of(cluster, seq_len=65536, limits=limits)
    assert found.constraint == "memory"
    fix = next(fix for fix in found.fixes if "full recompute" in fix.words)
    assert fix.step_s is not None and fix.step_s > 0


def test_a_change_that_is_not_enough_is_said_to_be_not_enough():
    _, found = diagnosis_of(one_box(), limits=Limits(recompute=("none",)))
    assert all(fix.step_s is None for fix in found.fixes if "full recompute" in fix.words)
    assert "Not enough alone: allow full recompute" in diagnosis_text(found)


def test_offloading_and_adapters_are_remarks_with_their_verdict():
    _, found = diagnosis_of(one_box())
    assert any("host memory" in remark and "would fit" in remark for remark in found.remarks)
    _, hopeless = diagnosis_of(one_box(per_node=1), "llama-3.1-70b")
    assert all("still lack" in remark for remark in hopeless.remarks)


@pytest.mark.parametrize(
    ("limits", "constraint", "words"),
    [
        (Limits(tp=(3,)), "divisibility", "tp 3 does not divide"),
        (Limits(microbatch=(3,)), "batch", "global batch of 16"),
        (Limits(pp=(5,), equal_cuts=True), "divisibility", "5 equal stages"),
        (Limits(pp=(60,)), "layers", "60 stages"),
        (Limits(pp=(16,)), "devices", "16 stages"),
        (Limits(tp=(8,)), "devices", "tp 8"),
        (Limits(pinned_layers=(16, 17)), "pinned layers", "16, 17"),
        (Limits(cp=(3,)), "sequence", "cp 3"),
        (Limits(pp=(4,), min_decoder_layers=9), "layers", "at least 9 decoder layers"),
    ],
)
def test_the_constraint_is_named(limits, constraint, words):
    _, found = diagnosis_of(one_box("A100-SXM4-80GB", 4), limits=limits)
    assert found.constraint == constraint
    assert words in found.sentence


def test_precision_no_device_has_is_named_and_one_that_works_is_offered():
    _, found = diagnosis_of(one_box("V100-SXM2-32GB", 8), precision="bf16")
    assert found.constraint == "precision"
    assert "V100-SXM2-32GB" in found.sentence and "bf16" in found.sentence
    assert any("fp16" in fix.words and fix.step_s is not None for fix in found.fixes)


def test_money_needs_prices_and_a_budget_the_fastest_plan():
    box = one_box("A100-SXM4-80GB", 4)
    unpriced = replace(box.groups[0], device=replace(box.groups[0].device, usd_per_hour=None))
    box = replace(box, groups=(unpriced,))
    prices = price(box, find_model("llama-3.2-1b"), Workload(seq_len=2048, global_batch=16))
    problem = build_problem(prices, Limits())
    assert diagnose(problem, SearchRequest(objective="cost")).constraint == "price"
    priced = replace(prices.cluster.groups[0], usd_per_device_hour=2.0)
    cluster = replace(prices.cluster, groups=(priced,))
    other = price(cluster, prices.model, prices.workload)
    request = SearchRequest(objective="cost-within-time", time_budget_s=1e-6)
    found = diagnose(build_problem(other, Limits()), request)
    assert found.constraint == "time budget"
    assert "1 us" in found.sentence


def test_a_first_line_stands_alone():
    prices, _ = diagnosis_of(one_box())
    text = explain_infeasible(build_problem(prices, Limits()), SearchRequest(), {"memory": 3})
    first = text.split("\n")[0]
    assert first.startswith("llama-3.1-8b does not fit") and not first.endswith(":")


def test_pinned_layers_are_kept_by_the_nearest_layout():
    limits = Limits(pinned_layers=(10, 8, 8, 6))
    prices = price(one_box(), find_model("llama-3.1-8b"), Workload(seq_len=2048, global_batch=16))
    near = lightest(build_problem(prices, limits))
    kinds = [layer.kind for layer in prices.model.chain]
    held = [kinds[s.first_layer : s.end_layer].count("decoder") for s in near.layout.replicas[0].stages]
    assert held == [10, 8, 8, 6]


@pytest.mark.parametrize("threshold", [1, 2, 3, 17, 100])
def test_the_smallest_number_is_the_threshold(threshold):
    assert smallest(lambda count: count >= threshold, 0) == threshold


def test_no_number_is_none():
    assert smallest(lambda _: False, 0, most=64) is None
