"""A survey becomes a calibration that prices as was measured, and a machine nothing is known of becomes plannable."""

from __future__ import annotations

from dataclasses import replace

import pytest
from survey_samples import (
    FRACTION,
    LATENCY_S,
    MEMORY,
    PEAK,
    RATE,
    RING_RATE,
    layer,
    link,
    links,
    report,
    timed,
    two_ranks_of_one_host,
)

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.costs.records import Holders, StageOption
from hetplan.profiling.express import Known, calibration_of
from hetplan.profiling.here import cluster_text
from hetplan.profiling.network_figures import Networks, sharing_notes
from hetplan.profiling.records import Survey
from hetplan.profiling.story import document, spread_note, story
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.read_calibration import calibration_from_text, calibration_text
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.workload import Workload

UNKNOWN = Known(devices={}, networks=Networks(), provenance={"date": "2026-01-02"})
MODEL = find_model("gpt2")


def three_layers() -> tuple:
    return (layer("embedding", 1, 1e-4), layer("decoder", 1, 4e-3), layer("head", 1, 5e-3))


def test_an_unknown_device_is_defined_by_its_best_figures() -> None:
    survey = two_ranks_of_one_host()
    calibration, devices = calibration_of(survey, None, UNKNOWN)
    device, constants = devices["Chip"], calibration.devices["Chip"]
    best = max(figure.flop / figure.timing.seconds for figure in survey.ranks[0].figures.gemms)
    assert device.peak_flop_per_s["fp32"] == pytest.approx(best, rel=0.01)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(MEMORY, rel=0.01)
    assert device.memory_bytes == pytest.approx(4 * 2**30, rel=0.01), "two ranks share the host's memory"
    assert constants.gemm_peak_fraction * device.peak_flop_per_s["fp32"] == pytest.approx(PEAK * FRACTION, rel=0.01)
    assert constants.origin == "measured"


def test_a_known_device_keeps_its_datasheet_and_gets_fractions_of_it() -> None:
    device = replace(find_device("T4"), name="Chip")
    known = replace(UNKNOWN, devices={"Chip": device})
    calibration, devices = calibration_of(two_ranks_of_one_host(), None, known)
    assert devices["Chip"] is device
    nominal = device.peak_flop_per_s["fp32"]
    assert calibration.devices["Chip"].gemm_peak_fraction * nominal == pytest.approx(PEAK * FRACTION, rel=0.02)
    assert calibration.devices["Chip"].memory_fraction * device.memory_bandwidth_bytes_per_s == pytest.approx(20e9)


def test_cluster_file_and_calibration_price_what_was_measured() -> None:
    survey = two_ranks_of_one_host(three_layers())
    calibration, devices = calibration_of(survey, MODEL, UNKNOWN)
    cluster = cluster_from_text(cluster_text(survey, devices, "here"), "here.yaml", find_device)
    read = calibration_from_text(calibration_text(calibration), "calibration.yaml")
    prices = price(cluster, MODEL, Workload(seq_len=128, global_batch=2, precision="fp32"), read)
    costs = prices.layers(StageOption(group="cpu", samples=1))
    assert costs.forward_total_s[0] == pytest.approx(1e-4)
    assert costs.forward_total_s[1:-1] == pytest.approx([4e-3] * 12)
    assert costs.backward_total_s[-1] == pytest.approx(1e-2)
    ring = [Holders(group="cpu", num_ranks=2, ranks_per_node=2, tp=1)]
    assert prices.sync(1e7, ring, "none").reduce_s == pytest.approx(4e7 / RING_RATE, rel=0.02)
    option = StageOption(group="cpu", samples=1)
    sent = prices.boundary_s(option, option, 3, same_node=True)
    assert sent == pytest.approx(LATENCY_S + prices.boundary_bytes(3) / RATE, rel=0.02)


def test_origins_say_measured() -> None:
    survey = two_ranks_of_one_host(three_layers())
    calibration, devices = calibration_of(survey, MODEL, UNKNOWN)
    cluster = cluster_from_text(cluster_text(survey, devices, "here"), "here.yaml", find_device)
    prices = price(cluster, MODEL, Workload(seq_len=128, global_batch=2, precision="fp32"), calibration)
    assert prices.origins() == {"Chip": "measured"}


def two_hosts() -> Survey:
    return Survey(ranks=(report("a0", "Fast"), report("b0", "Slow")), links=links((0, 1)))


def test_hosts_without_a_cluster_file_are_joined_by_what_was_measured() -> None:
    survey = two_hosts()
    calibration, devices = calibration_of(survey, None, UNKNOWN)
    cluster = cluster_from_text(cluster_text(survey, devices, "two"), "two.yaml", find_device)
    assert {group.nodes for group in cluster.groups} == {("a0",), ("b0",)}
    prices = price(cluster, MODEL, Workload(seq_len=128, global_batch=2, precision="fp32"), calibration)
    link_found = prices.link(*(group.name for group in cluster.groups))
    assert link_found is not None
    assert link_found.bandwidth_bytes_per_s == pytest.approx(RATE, rel=0.01)
    assert link_found.latency_s == pytest.approx(LATENCY_S, rel=0.01)


def test_networks_of_a_cluster_file_get_fractions_of_their_nominal_rate() -> None:
    text = """
hetplan: cluster/v1
name: lab
groups:
  fast: {device: T4, nodes: a0, devices_per_node: 1}
  slow: {device: T4, nodes: b0, devices_per_node: 1}
networks:
  lan: {joins: [fast, slow], kind: ethernet, bandwidth: 64 Gbit/s, latency: 9 us}
"""
    cluster = cluster_from_text(text, "lab.yaml", find_device)
    networks = Networks(cluster=cluster, group_of={"a0": "fast", "b0": "slow"})
    calibration, _ = calibration_of(two_hosts(), None, replace(UNKNOWN, networks=networks))
    lan = calibration.networks["lan"]
    assert lan.bandwidth_fraction == pytest.approx(0.5, rel=0.01)
    assert lan.latency_s == pytest.approx(LATENCY_S, rel=0.01)
    assert lan.collective_fraction == pytest.approx(RING_RATE / RATE, rel=0.01)


def test_a_link_shared_by_two_transfers_is_told() -> None:
    size = 1 << 24
    figures = (*links((0, 1)), link("send", (0, 1), size, together=2), link("send", (2, 3), size, together=2))
    ranks = tuple(report(host, "Chip") for host in ("a", "b", "a", "b"))
    (note,) = sharing_notes(Survey(ranks=ranks, links=figures))
    assert note.startswith(("a to b: 1.9", "a to b: 2.0"))


def test_figures_that_did_not_keep_still_are_named() -> None:
    survey = two_ranks_of_one_host()
    loud = replace(survey.ranks[1].figures, launch=timed(2e-6, spread=0.4))
    survey = replace(survey, ranks=(survey.ranks[0], replace(survey.ranks[1], figures=loud)))
    assert "1 above 10%: rank 1 launch" in spread_note(survey)
    assert "none above" in spread_note(two_ranks_of_one_host())


def test_story_and_document_hold_every_figure() -> None:
    survey = two_ranks_of_one_host(three_layers())
    calibration, devices = calibration_of(survey, MODEL, UNKNOWN)
    text = story(survey, calibration, devices)
    assert "all-reduce" in text
    assert "1-12" in text
    figures = document(survey, calibration_text(calibration))["figures"]
    alone = survey.ranks[0].figures
    each = len(alone.gemms) + len(alone.attentions) + len(alone.traffic) + 1 + 2 * len(alone.layers)
    assert len(figures) == 2 * each + len(survey.links)


def test_a_search_keeps_to_what_was_measured() -> None:
    survey = two_ranks_of_one_host(three_layers())
    calibration, devices = calibration_of(survey, MODEL, UNKNOWN)
    cluster = cluster_from_text(cluster_text(survey, devices, "here"), "here.yaml", find_device)
    prices = price(cluster, MODEL, Workload(seq_len=128, global_batch=8, precision="fp32"), calibration)
    (replica,) = search(prices, SearchRequest()).best.layout.replicas
    assert (replica.microbatch, replica.num_samples) == (1, 8)
