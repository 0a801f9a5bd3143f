from __future__ import annotations

import math
from dataclasses import replace

import pytest
from costs_samples import A100, H100, L4, V100, cluster, exact, gpt, group, network

from hetplan.costs.collectives import exchange_inside, ring_inside
from hetplan.costs.links import SOCKETS_FRACTION, crossing_bytes_per_s, inside_link, link_between
from hetplan.costs.prices import price
from hetplan.costs.records import Holders, StageOption
from hetplan.errors import CalibrationError
from hetplan.specs.calibration import NetworkConstants
from hetplan.specs.cluster import PairLink
from hetplan.specs.workload import Workload

EXACT = exact(A100, H100, V100, L4)
IB = network("ib", "i", gbit=200, nics_per_node=4)
ROCE = network("roce", "r", gbit=200, kind="roce", nics_per_node=4)
ETH = network("eth", "i", "r", gbit=25, kind="ethernet", latency_s=30e-6)
TWO_KINDS = cluster(group("i", nodes=2), group("r", nodes=2), networks=(IB, ROCE, ETH))
WORK = Workload(seq_len=2048, global_batch=8, precision="fp16")


def test_groups_on_different_rdma_fabrics_meet_on_their_common_ethernet():
    inside = link_between(TWO_KINDS, "i", "i", EXACT)
    across = link_between(TWO_KINDS, "i", "r", EXACT)
    assert (inside.network, inside.bandwidth_bytes_per_s) == ("ib", 100e9)
    assert (across.network, across.bandwidth_bytes_per_s) == ("eth", 25e9 / 8)


def test_groups_no_network_joins_are_infinitely_far_apart():
    apart = cluster(group("i", nodes=2), group("r", nodes=2), networks=(IB, ROCE))
    assert link_between(apart, "i", "r") is None
    prices = price(apart, gpt(2, 1024, 16), WORK)
    one = StageOption(group="i", samples=1)
    assert prices.boundary_s(one, replace(one, group="r"), 0, same_node=False) == math.inf
    holders = [Holders(group=name, num_ranks=8, ranks_per_node=8, tp=1) for name in "ir"]
    assert prices.sync(1e6, holders, "none").reduce_s == math.inf
    assert prices.gathers_s(one, holders)[0].max() == math.inf


def test_the_network_that_offers_a_node_most_is_chosen_oversubscription_counted():
    narrow = replace(ETH, oversubscription=4.0, nics_per_node=8)
    wide = network("ib", "i", "r", gbit=100)
    joined = cluster(group("i", nodes=2), group("r", nodes=2), networks=(narrow, wide))
    assert link_between(joined, "i", "r", EXACT).network == "ib"


def test_calibration_sets_a_networks_fraction_and_latency():
    measured = replace(EXACT, networks={"ib": NetworkConstants(bandwidth_fraction=0.5, latency_s=7e-6)})
    link = link_between(TWO_KINDS, "i", "i", measured)
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (50e9, 7e-6)


@pytest.mark.parametrize(
    ("pairs", "rate"),
    [
        ({("x", "y"): 2.0}, 2.0),
        ({("east", "west"): 3.0}, 3.0),
        ({("x-0", "y-0"): 4.0, ("x-1", "y-0"): 1.0}, 1.0),
        ({("x", "y"): 2.0, ("east", "west"): 3.0}, 2.0),
        ({("x", "z"): 2.0}, 25e9 / 8),
    ],
)
def test_pairs_override_a_network_by_group_then_node_then_site(pairs, rate):
    links = {pair: PairLink(latency_s=0.01, bandwidth_bytes_per_s=value) for pair, value in pairs.items()}
    both = links | {(b, a): link for (a, b), link in links.items()}
    wan = network("wan", "x", "y", gbit=25, kind="ethernet", pairs=both)
    far = cluster(group("x", nodes=2, site="east"), group("y", nodes=2, site="west"), networks=(wan,))
    for first, second in (("x", "y"), ("y", "x")):
        assert link_between(far, first, second, EXACT).bandwidth_bytes_per_s == rate


def test_a_switch_gives_every_pair_everything_and_wires_only_the_peers():
    assert inside_link(group("a"), 2, EXACT).bandwidth_bytes_per_s == 300e9
    assert inside_link(group("a"), 8, EXACT).bandwidth_bytes_per_s == 300e9
    wired = [inside_link(group("v", V100), n, EXACT).bandwidth_bytes_per_s for n in (2, 3, 4, 8)]
    assert wired == [50e9, 100e9, 150e9, 150e9]


def test_without_fast_links_devices_meet_on_the_slower_of_card_and_host_pcie():
    plain = group("l", L4)
    assert inside_link(plain, 4, EXACT).bandwidth_bytes_per_s == 31e9
    bridged = replace(A100, link_bandwidth_bytes_per_s=0.0)
    assert inside_link(group("b", bridged), 2, EXACT).bandwidth_bytes_per_s == 300e9
    assert inside_link(group("b", bridged), 4, EXACT).bandwidth_bytes_per_s == 31e9
    box = cluster(group("big", H100, nodes=("box",), per_node=2), group("small", L4, nodes=("box",), per_node=2))
    assert link_between(box, "big", "small", EXACT).bandwidth_bytes_per_s == 31e9


def test_a_device_without_any_link_is_named():
    bare = replace(L4, pcie_bandwidth_bytes_per_s=0.0)
    prices = price(cluster(group("l", bare)), gpt(1, 1024, 16), WORK)
    with pytest.raises(CalibrationError, match=r"'L4' \(group 'l'\) states neither fast links"):
        prices.layers(StageOption(group="l", tp=2, samples=1))


@pytest.mark.parametrize(
    ("rings", "ranks", "rate"),
    [(1, 8, 100e9), (8, 1, 12.5e9), (1, 1, 25e9), (4, 2, 25e9), (2, 4, 50e9)],
)
def test_streams_share_nics_and_drive_at_most_the_nics_of_their_devices(rings, ranks, rate):
    link = link_between(TWO_KINDS, "i", "i", EXACT)
    assert crossing_bytes_per_s(link, TWO_KINDS.group("i"), rings=rings, ranks=ranks) == rate


def test_a_ring_moves_its_share_past_the_slowest_link():
    inside = ring_inside(TWO_KINDS, TWO_KINDS.group("i"), EXACT, num_ranks=8, stride=1)
    across = ring_inside(TWO_KINDS, TWO_KINDS.group("i"), EXACT, num_ranks=16, stride=1)
    strided = ring_inside(TWO_KINDS, TWO_KINDS.group("i"), EXACT, num_ranks=2, stride=8)
    assert inside.moved * inside.s_per_byte == pytest.approx(7 / 8 / 300e9)
    assert across.s_per_byte == pytest.approx(1 / 100e9)
    assert strided.s_per_byte == pytest.approx(1 / 12.5e9)


def test_a_fast_link_domain_larger_than_a_node_keeps_rings_inside_and_pools_its_nics():
    rack = group("a", nodes=4, per_node=4, domain_nodes=2)
    places = cluster(rack, networks=(network("ib", "a", gbit=200, nics_per_node=4),))
    assert ring_inside(places, rack, EXACT, num_ranks=8, stride=1).s_per_byte == pytest.approx(1 / 300e9)
    outside = ring_inside(places, rack, EXACT, num_ranks=16, stride=1)
    assert outside.s_per_byte == pytest.approx(1 / 200e9)


def test_latency_counts_steps_inside_and_between_nodes():
    slow = exact(A100, link_latency_s=1.0)
    slow = replace(slow, networks={"ib": NetworkConstants(bandwidth_fraction=1.0, latency_s=100.0)})
    ring = ring_inside(TWO_KINDS, TWO_KINDS.group("i"), slow, num_ranks=16, stride=1)
    assert ring.pass_latency_s == 7 * 1.0 + 1 * 100.0
    assert ring.tree_latency_s == 3 * 1.0 + 1 * 100.0


def test_an_exchange_sends_most_of_its_bytes_past_the_nics_once_it_leaves_the_node():
    inside = exchange_inside(TWO_KINDS, TWO_KINDS.group("i"), EXACT, num_ranks=8, stride=1)
    across = exchange_inside(TWO_KINDS, TWO_KINDS.group("i"), EXACT, num_ranks=16, stride=1)
    assert inside.moved * inside.s_per_byte == pytest.approx(7 / 8 / 300e9)
    assert across.moved * across.s_per_byte == pytest.approx(8 / 16 / (100e9 / 8))


def test_sequence_parallelism_moves_the_same_bytes_as_all_reduces():
    places, model = cluster(group("a")), gpt(1, 8192, 64)
    option = StageOption(group="a", tp=8, samples=1)
    split = price(places, model, WORK, exact()).layers(option)
    whole = price(places, model, replace(WORK, sequence_parallel=False), exact()).layers(option)
    half_s = 7 / 8 * 2048 * 8192 * 2 / 300e9
    assert split.tp_forward_s[1] == pytest.approx(4 * half_s)
    assert split.tp_backward_s[1] == pytest.approx(4 * half_s)
    assert whole.tp_forward_s[1] == pytest.approx(4 * half_s)
    assert whole.tp_backward_s[1] == pytest.approx(4 * half_s)


def test_hidden_tensor_parallel_communication_is_not_counted():
    places, model = cluster(group("a")), gpt(1, 8192, 64)
    option = StageOption(group="a", tp=8, samples=1)
    plain = exact()
    half = replace(plain, overlap=replace(plain.overlap, tp_fraction=0.5))
    a, b = (price(places, model, WORK, known).layers(option) for known in (plain, half))
    assert b.tp_forward_s[1] == pytest.approx(a.tp_forward_s[1] / 2)


def test_tp_across_nodes_runs_at_network_speed():
    prices = price(TWO_KINDS, gpt(1, 8192, 64), WORK, EXACT)
    inside, across = (prices.layers(StageOption(group="i", tp=n, samples=1)).tp_forward_s[1] for n in (8, 16))
    assert across == pytest.approx(inside * 3 * (15 / 16) / (7 / 8))


def test_ring_attention_hides_behind_compute_until_the_link_is_too_slow():
    long = Workload(seq_len=262144, global_batch=1, precision="fp16")
    short = Workload(seq_len=2048, global_batch=1, precision="fp16")
    option = StageOption(group="i", cp=16, samples=1)
    model = gpt(1, 8192, 64)
    assert price(TWO_KINDS, model, long, EXACT).layers(option).cp_forward_s[1] == 0
    exposed = price(TWO_KINDS, model, short, EXACT).layers(option)
    send = 2048 / 16 * 2 * 8192 * 2 / 100e9
    compute = 2 * 2048 * 2048 / 2 * 2 * 8192 / 312e12 / 16 / 16
    assert exposed.cp_forward_s[1] == pytest.approx(15 * (send - compute), rel=1e-2)


def pcie_rate(ranks: int, stride: int, card=L4) -> float:
    machine = group("a", card)
    ring = ring_inside(cluster(machine), machine, exact(card), num_ranks=ranks, stride=stride)
    return 1 / ring.s_per_byte


def test_interleaved_rings_share_a_hosts_pcie_and_sockets_slow_them_down():
    assert pcie_rate(4, 1) == pytest.approx(31e9)
    assert pcie_rate(2, 2) == pytest.approx(31e9 / 2)
    assert pcie_rate(8, 1) == pytest.approx(31e9 * SOCKETS_FRACTION)
    assert pcie_rate(2, 4) == pytest.approx(31e9 / 4 * SOCKETS_FRACTION)


def test_rings_over_fast_links_share_nothing():
    assert pcie_rate(4, 2, A100) == pytest.approx(pcie_rate(4, 1, A100)) == pytest.approx(300e9)


def test_a_bridge_joins_neighbours_only():
    bridged = replace(L4, name="bridged", pair_bandwidth_bytes_per_s=300e9)
    assert pcie_rate(2, 1, bridged) == pytest.approx(300e9)
    assert pcie_rate(2, 2, bridged) == pytest.approx(31e9 / 2)
