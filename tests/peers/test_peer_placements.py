"""Placements by traffic alone: published networks, and small ones against trying every placement."""

import itertools

import numpy as np
import peer_paths  # noqa: F401 - makes the benches importable
import peers_dtfm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.errors import InfeasibleError
from hetplan.search.geo import search_volumes
from hetplan.search.geo_network import Pairs, classes_of
from hetplan.specs.model import Volumes

TASK = {"gradient_bytes": 0.65e9, "activation_bytes": 0.47125e9}
BEST = {0: 3.4398, 2: 16.0868571, 3: 34.8020845, 4: 49.2184236}


def pairs_of_classes(classes, delay_ms, bandwidth_gbps):
    at = np.ix_(classes, classes)
    delay, rate = np.array(delay_ms, dtype=float)[at] * 1e-3, np.array(bandwidth_gbps, dtype=float)[at] * 1e9 / 8
    return Pairs(names=tuple(f"n-{i + 1}" for i in range(len(classes))), delay_s=delay, bytes_per_s=rate)


@pytest.mark.parametrize(("number", "best_s"), sorted(BEST.items()))
def test_published_networks_are_solved_to_proved_optima(number, best_s):
    network = peers_dtfm.networks()[number]
    classes = peers_dtfm.devices_of(network, 1)
    pairs = pairs_of_classes(classes, network["delay_ms"], network["bandwidth_gbps"])
    found = search_volumes(pairs, Volumes(stages=8, replicas=8, **TASK), effort=30.0)
    assert found.status == "optimal"
    assert found.gap == 0.0
    assert found.value_s == pytest.approx(best_s, rel=1e-6)
    again = peers_dtfm.objective_s(network, classes, [list(chain) for chain in found.pipelines], (650000000, 471250000))
    assert again == pytest.approx(found.value_s, rel=1e-12)
    assert found.value_s <= network["genetic_search_s"] * (1 + 1e-3)


def test_four_times_the_devices_are_solved_as_well():
    network = peers_dtfm.networks()[3]
    pairs = pairs_of_classes(peers_dtfm.devices_of(network, 4), network["delay_ms"], network["bandwidth_gbps"])
    found = search_volumes(pairs, Volumes(stages=8, replicas=32, **TASK), effort=10.0)
    assert found.status == "optimal"
    assert len({name for chain in found.pipelines for name in chain}) == 256


def test_equal_devices_are_one_class_however_they_are_ordered():
    delay = [[5, 60, 5], [60, 5, 60], [5, 60, 5]]
    rate = [[2, 1, 2], [1, 2, 1], [2, 1, 2]]
    assert classes_of(pairs_of_classes([0, 1, 2, 0, 1], delay, rate)) == ((0, 2, 3), (1, 4))


def test_too_few_devices_are_refused():
    pairs = pairs_of_classes([0, 0], [[1]], [[1]])
    with pytest.raises(InfeasibleError, match="need 4 devices"):
        search_volumes(pairs, Volumes(stages=2, replicas=2, **TASK), effort=1.0)


@st.composite
def small_networks(draw):
    num = draw(st.integers(2, 3))
    delay = np.zeros((num, num))
    rate = np.zeros((num, num))
    for a in range(num):
        for b in range(a, num):
            delay[a, b] = delay[b, a] = draw(st.sampled_from([1.0, 10.0, 50.0, 200.0]))
            rate[a, b] = rate[b, a] = draw(st.sampled_from([0.3, 1.0, 2.0, 10.0]))
    devices = draw(st.lists(st.integers(0, num - 1), min_size=6, max_size=7))
    return devices, delay, rate


@settings(max_examples=25, deadline=None)
@given(small_networks())
def test_small_networks_are_solved_as_well_as_by_trying_every_placement(network):
    devices, delay, rate = network
    pairs = pairs_of_classes(devices, delay, rate)
    found = search_volumes(pairs, Volumes(stages=3, replicas=2, **TASK), effort=20.0)
    assert found.status == "optimal"
    assert found.value_s == pytest.approx(cheapest_placement_s(pairs, 3, 2), rel=1e-6)


def cheapest_placement_s(pairs, stages, replicas):
    exchange = 2 * (pairs.delay_s + TASK["gradient_bytes"] / (replicas * pairs.bytes_per_s))
    transfer = pairs.delay_s + TASK["activation_bytes"] / pairs.bytes_per_s
    best = np.inf
    for chosen in itertools.permutations(range(len(pairs.names)), stages * replicas):
        groups = [chosen[s * replicas : (s + 1) * replicas] for s in range(stages)]
        slowest = max(sum(exchange[i, j] for j in group if j != i) for group in groups for i in group)
        path = sum(max(transfer[i, j] for i, j in zip(a, b, strict=True)) for a, b in itertools.pairwise(groups))
        best = min(best, slowest + 2 * path)
    return best
