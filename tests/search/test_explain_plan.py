"""Explanations of plans: parts that sum up, bottlenecks that are the estimate's, gains that are other plans' prices."""

from dataclasses import replace

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.search.explain import explain, why_lost
from hetplan.search.explain_changes import with_microbatches
from hetplan.search.explain_links import gradient_crossings, stage_crossings
from hetplan.search.grown import with_faster_network, with_nodes
from hetplan.search.quick import quick
from hetplan.search.records import SearchRequest
from hetplan.specs.cluster import Cluster, Group, Network
from hetplan.specs.workload import Workload

GIB = 2.0**30


def group(name, device, nodes, per_node, **changes):
    found = find_device(device)
    return Group(
        name=name,
        device=found,
        nodes=tuple(f"{name}-{k}" for k in range(nodes)),
        devices_per_node=per_node,
        site="main",
        usable_memory_bytes=found.usable_memory_bytes,
        **changes,
    )


def lab(*, gbit=400.0):
    groups = (group("a100", "A100-SXM4-80GB", 1, 4), group("v100", "V100-SXM2-32GB", 1, 4))
    network = Network(
        name="eth", joins=("a100", "v100"), kind="ethernet", bandwidth_bytes_per_s=gbit * 1e9 / 8, latency_s=30e-6
    )
    return Cluster(name="lab", groups=groups, networks=(network,))


def prices_of(cluster, *, batch=16):
    return price(cluster, find_model("llama-3.2-1b"), Workload(seq_len=2048, global_batch=batch, precision="fp16"))


@pytest.fixture(scope="module")
def found():
    prices = prices_of(lab())
    layout = grid_layout(prices, Grid(tp=1, pp=2, dp=4, sharding="optimizer"))
    return prices, layout, explain(layout, prices)


def test_time_shares_sum_to_the_step(found):
    prices, layout, explanation = found
    step_s = estimate(layout, prices).step_s
    assert sum(share.seconds for share in explanation.time) == pytest.approx(step_s)
    assert sum(share.fraction for share in explanation.time) == pytest.approx(1.0)


def test_roles_cover_every_device_and_layer_once(found):
    prices, layout, explanation = found
    assert sum(role.num_devices for role in explanation.roles) == layout.num_devices
    layers = sum(layer.kind == "decoder" for layer in prices.model.chain)
    for row in range(len(layout.replicas)):
        assert sum(r.num_decoder_layers for r in explanation.roles if r.replica == row) == layers
    assert explanation.roles[0].has_embedding and not explanation.roles[0].has_head


def test_the_busiest_stage_is_the_estimates(found):
    prices, layout, explanation = found
    busiest = max(stage.busy_s for stage in estimate(layout, prices).stages)
    named = next(binding for binding in explanation.bindings if binding.kind == "stage")
    assert named.seconds == pytest.approx(busiest)


def test_headroom_is_capacity_minus_peak(found):
    prices, layout, explanation = found
    for room, stage in zip(explanation.memory, estimate(layout, prices).stages, strict=True):
        assert room.headroom_bytes == pytest.approx(stage.capacity_bytes - stage.memory.total_bytes)


def test_a_faster_network_is_priced_on_the_same_layout():
    prices = prices_of(lab(gbit=1.0))
    layout = grid_layout(prices, Grid(tp=1, pp=1, dp=8))
    explanation = explain(layout, prices, replan=False)
    change = next(c for c in explanation.what_ifs if "network eth" in c.words)
    faster = prices_of(with_faster_network(lab(gbit=1.0), "eth", 2.0))
    assert change.after_s == pytest.approx(estimate(layout, faster).step_s)
    assert change.after_s < change.before_s
    assert any(binding.kind == "gradients" for binding in explanation.bindings)


def test_no_plan_is_made_where_none_is_wanted():
    prices = prices_of(lab())
    layout = grid_layout(prices, Grid(tp=1, pp=1, dp=8, sharding="full"))
    assert explain(layout, prices, replan=False).gains == ()


def test_one_more_node_is_the_better_of_the_larger_clusters_quick_plan_and_what_there_was(found):
    prices, layout, explanation = found
    gain = next(gain for gain in explanation.gains if gain.group == "a100")
    larger = quick(prices_of(with_nodes(lab(), "a100", 2)), SearchRequest(compare=False))
    assert gain.after_s == pytest.approx(min(larger.estimate.step_s, gain.before_s))
    assert gain.before_s <= estimate(layout, prices).step_s * (1 + 1e-12)
    assert 0 < gain.fraction < 1 and gain.num_devices == 4


def test_a_nearly_full_stage_binds_memory():
    prices = prices_of(lab())
    layout = grid_layout(prices, Grid(tp=1, pp=2, dp=4))
    peak = estimate(layout, prices).stages[0].memory.total_bytes
    groups = tuple(replace(g, usable_memory_bytes=peak * 1.01) for g in lab().groups)
    tight = prices_of(replace(lab(), groups=groups))
    assert not check(layout, tight)
    kinds = [binding.kind for binding in explain(layout, tight, replan=False).bindings]
    assert "memory" in kinds
    assert "memory" not in [binding.kind for binding in explain(layout, prices, replan=False).bindings]


def test_larger_microbatches_keep_the_batch(found):
    _, layout, _ = found
    changed = with_microbatches(layout, 2, 1)
    assert changed.num_samples == layout.num_samples
    assert changed.replicas[0].microbatch == 2 * layout.replicas[0].microbatch


def test_why_lost_names_the_part_that_grew():
    prices = prices_of(lab())
    few = estimate(grid_layout(prices, Grid(tp=1, pp=4, dp=2, micro_batch=8)), prices)
    many = estimate(grid_layout(prices, Grid(tp=1, pp=4, dp=2, micro_batch=1)), prices)
    slower, faster = (few, many) if few.step_s > many.step_s else (many, few)
    text = why_lost(faster, slower)
    assert f"{100 * (slower.step_s / faster.step_s - 1):.1f} % slower" in text
    assert "bubble" in text if slower is few else "compute" in text
    assert why_lost(few, few) == "takes as long"
    assert "faster" in why_lost(slower, faster)


def test_the_slowest_link_of_each_traffic_is_named():
    prices = prices_of(lab(gbit=1.0))
    across = grid_layout(prices, Grid(tp=1, pp=1, dp=8))
    (crossing,) = gradient_crossings(across, prices)
    assert (crossing.network, crossing.first, crossing.second) == ("eth", "a100", "v100")
    assert stage_crossings(across, prices) == ()
    sentence = next(b.sentence for b in explain(across, prices, replan=False).bindings if b.kind == "gradients")
    assert "network eth between a100 and v100" in sentence
    piped = grid_layout(prices, Grid(tp=1, pp=2, dp=4))
    assert gradient_crossings(piped, prices) == ()
    assert [c.network for c in stage_crossings(piped, prices)] == ["eth"]
    sentence = next(b.sentence for b in explain(piped, prices, replan=False).bindings if b.kind == "links")
    assert "network eth between a100 and v100" in sentence
    inside = grid_layout(prices, Grid(tp=1, pp=2, dp=2, groups=("a100",)))
    assert stage_crossings(inside, prices) == () and gradient_crossings(inside, prices) == ()
