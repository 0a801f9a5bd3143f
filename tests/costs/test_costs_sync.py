from __future__ import annotations

from dataclasses import replace

import pytest
from costs_samples import A100, H100, L4, V100, cluster, exact, gpt, group, network

from hetplan.costs.prices import price
from hetplan.costs.records import Holders, StageOption
from hetplan.specs.workload import Workload

EXACT = exact(A100, H100, V100, L4)
IB = network("ib", "i", gbit=200, nics_per_node=4)
ROCE = network("roce", "r", gbit=200, kind="roce", nics_per_node=4)
ETH = network("eth", "i", "r", gbit=25, kind="ethernet")
PLACES = cluster(group("i", nodes=4), group("r", nodes=4), networks=(IB, ROCE, ETH))
WORK = Workload(seq_len=2048, global_batch=8, precision="fp16")
PARAMS = 1e9
BYTES = 2 * PARAMS


def held(name, ranks, per_node, tp=1):
    return Holders(group=name, num_ranks=ranks, ranks_per_node=per_node, tp=tp)


def sync(*holders, sharding="none", places=PLACES, work=WORK, **fields):
    return price(places, gpt(2, 1024, 16), work, EXACT).sync(PARAMS, holders, sharding, **fields)


def test_one_holder_has_nothing_to_synchronise():
    cost = sync(held("i", 1, 1))
    assert (cost.reduce_s, cost.gather_s, cost.shared_lines) == (0.0, 0.0, ())
    assert sync(held("i", 1, 1), sharding="full").gather_s == 0.0


def test_ranks_of_one_node_use_its_fast_links():
    assert sync(held("i", 8, 8)).reduce_s == pytest.approx(2 * 7 / 8 * BYTES / 300e9)


def test_ranks_of_several_nodes_use_all_their_nics():
    assert sync(held("i", 32, 8)).reduce_s == pytest.approx(2 * 31 / 32 * BYTES / 100e9)


def test_tp_slices_share_the_nics_so_that_the_whole_layer_takes_as_long():
    assert sync(held("i", 4, 1, tp=8)).reduce_s == pytest.approx(2 * 3 / 4 * BYTES / 8 / (100e9 / 8))


def test_one_device_a_node_drives_one_nic():
    assert sync(held("i", 4, 1)).reduce_s == pytest.approx(2 * 3 / 4 * BYTES / 25e9)


def test_sharding_reduces_by_half_a_ring_and_gathers_weights_by_the_other():
    work = replace(WORK, gradient_precision="fp32")
    whole = sync(held("i", 8, 8), work=work)
    halves = sync(held("i", 8, 8), sharding="optimizer", work=work)
    assert halves.reduce_s == pytest.approx(whole.reduce_s / 2)
    assert halves.gather_s == pytest.approx(halves.reduce_s / 2)
    assert whole.gather_s == 0.0


def test_a_ring_over_two_fabrics_falls_to_the_ethernet_figure_entirely():
    both = sync(held("i", 16, 8), held("r", 16, 8)).reduce_s
    alone = sync(held("i", 16, 8)).reduce_s
    assert both == pytest.approx(2 * 31 / 32 * BYTES / (25e9 / 8))
    assert both > 30 * alone


def test_where_tp_differs_the_holder_with_the_larger_slice_decides():
    wide = cluster(group("i", nodes=4), group("r", nodes=4), networks=(network("eth", "i", "r", gbit=25),))
    mixed = sync(held("i", 1, 1, tp=8), held("r", 1, 1, tp=2), places=wide).reduce_s
    equal = sync(held("i", 1, 1, tp=8), held("r", 1, 1, tp=8), places=wide).reduce_s
    assert mixed == pytest.approx(equal)  # one NIC carries all slices of a node either way
    rich = cluster(
        group("i", nodes=4), group("r", nodes=4), networks=(network("eth", "i", "r", gbit=25, nics_per_node=8),)
    )
    mixed = sync(held("i", 1, 1, tp=8), held("r", 1, 1, tp=2), places=rich).reduce_s
    assert mixed == pytest.approx(2 / 2 * BYTES / 2 / (25e9 / 8))


def test_holders_on_one_host_meet_on_pcie():
    box = cluster(group("big", H100, nodes=("box",), per_node=2), group("small", L4, nodes=("box",), per_node=2))
    cost = sync(held("big", 2, 2), held("small", 2, 2), places=box)
    assert cost.reduce_s == pytest.approx(2 * 3 / 4 * BYTES / 31e9)


def test_holders_that_share_several_hosts_cross_between_cards_on_pcie_and_between_hosts_on_the_network():
    hosts = ("h0", "h1")
    big, small = group("i", H100, nodes=hosts, per_node=2), group("r", L4, nodes=hosts, per_node=2)
    fabric = network("ib", "i", gbit=400, nics_per_node=2)
    cost = sync(held("i", 4, 2), held("r", 2, 2), places=cluster(big, small, networks=(fabric,)))
    assert cost.reduce_s == pytest.approx(2 * 5 / 6 * BYTES / 31e9)


def test_three_groups_are_tied_by_the_fastest_tree():
    fast = network("ib", "x", "y", gbit=200, nics_per_node=4)
    middle = network("roce", "y", "z", gbit=100, nics_per_node=4)
    slow = network("eth", "x", "z", gbit=1)
    places = cluster(*(group(name, nodes=2) for name in "xyz"), networks=(fast, middle, slow))
    cost = sync(*(held(name, 8, 8) for name in "xyz"), places=places)
    assert cost.reduce_s == pytest.approx(2 * 23 / 24 * BYTES / 50e9)


def test_a_shared_line_is_named_and_divided_among_slices():
    wan = network("wan", "i", "r", gbit=8, kind="ethernet", shared=True, nics_per_node=4)
    places = cluster(group("i", nodes=4), group("r", nodes=4), networks=(IB, ROCE, wan))
    whole = sync(held("i", 1, 1), held("r", 1, 1), places=places)
    cut = sync(held("i", 1, 1, tp=8), held("r", 1, 1, tp=8), places=places)
    assert whole.shared_lines == cut.shared_lines == ("wan",)
    assert whole.reduce_s == pytest.approx(BYTES / 1e9)
    assert cut.reduce_s == pytest.approx(whole.reduce_s)
    assert sync(held("i", 16, 8), places=places).shared_lines == ()


def test_expert_rings_share_a_node_with_those_of_the_other_experts():
    dense = sync(held("i", 4, 1))
    expert = sync(held("i", 4, 1), expert=True)
    assert expert.reduce_s == pytest.approx(2 * 3 / 4 * BYTES / (100e9 / 8))
    assert expert.reduce_s == pytest.approx(2 * dense.reduce_s)


def test_more_ranks_never_synchronise_faster():
    times = [sync(held("i", n, min(n, 8))).reduce_s for n in (1, 2, 4, 8, 16, 32)]
    assert times == sorted(times)


def test_gathers_move_each_layer_once():
    prices = price(PLACES, gpt(2, 1024, 16), WORK, EXACT)
    option = StageOption(group="i", tp=2, samples=1)
    gather, scatter = prices.gathers_s(option, [held("i", 4, 4, tp=2)])
    params = prices.layers(option).params
    assert gather == pytest.approx(3 / 4 * params * 2 / 300e9)
    assert scatter == pytest.approx(gather)
    alone, _ = prices.gathers_s(option, [held("i", 1, 1, tp=2)])
    assert not alone.any()


def stage(name, **fields):
    return StageOption(**({"group": name, "samples": 2} | fields))


def boundary_s(sender, receiver, *, same_node=False, places=PLACES, work=WORK):
    return price(places, gpt(2, 1024, 16), work, EXACT).boundary_s(sender, receiver, 1, same_node=same_node)


TENSOR = 2 * 2048 * 1024 * 2


def test_a_small_mesh_sends_over_one_nic_and_a_node_over_all():
    one = stage("i")
    node = stage("i", tp=8)
    assert boundary_s(one, one) == pytest.approx(TENSOR / 25e9)
    assert boundary_s(stage("i", tp=4), stage("i", tp=4)) == pytest.approx(TENSOR / 50e9)
    assert boundary_s(node, node) == pytest.approx(TENSOR / 100e9)
    assert boundary_s(node, one) == boundary_s(one, node) == pytest.approx(TENSOR / 25e9)


def test_dp_ranks_of_a_stage_send_their_samples_side_by_side():
    pair = stage("i", tp=8, dp=2)
    assert boundary_s(pair, pair) == pytest.approx(2 * TENSOR / 200e9)


def test_different_fabrics_pass_activations_over_ethernet():
    assert boundary_s(stage("i", tp=8), stage("r", tp=8)) == pytest.approx(TENSOR / (25e9 / 8))


def test_neighbours_on_one_node_use_as_many_pairs_as_the_smaller_mesh_has():
    assert boundary_s(stage("i", tp=4), stage("i", tp=2), same_node=True) == pytest.approx(TENSOR / 2 / 300e9)


def test_without_sequence_parallelism_the_receivers_gather_slices():
    work = replace(WORK, sequence_parallel=False)
    node = stage("i", tp=8)
    assert boundary_s(node, node, work=work) == pytest.approx(TENSOR / 100e9 + 7 / 8 * TENSOR / 300e9)
