"""Measured collectives: told apart, fitted, and turned into constants."""

import json

import pytest

from hetplan.catalog.devices import find_device
from hetplan.costs.collectives import all_reduce_s, ring_inside
from hetplan.errors import SpecError, UsageError
from hetplan.specs.cluster import Network
from hetplan.specs.importers.facts import SourceText
from hetplan.specs.importers.link_calibration import Nominal, link_calibration
from hetplan.specs.importers.nccl_tests import fit, read_group_bandwidths, read_log
from hetplan.specs.read_calibration import calibration_from_text
from hetplan.specs.read_cluster import cluster_from_text

HEAD = """\
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
# https://github.com/stas00/ml-engineering: all-reduce over 2 p4de nodes of 8 A100, some sizes
P4DE = (
    HEAD
    + """\
        1024           256     float     sum      -1    165.0    0.01    0.01      0    164.8    0.01    0.01      0
     1048576        262144     float     sum      -1    309.4    3.39    6.35      0    307.3    3.41    6.40      0
    67108864      16777216     float     sum      -1   2644.6   25.38   47.58      0   2647.2   25.35   47.53      0
  2147483648     536870912     float     sum      -1    51406   41.78   78.33      0    51406   41.77   78.33      0
"""
)
# https://github.com/PKU-DAIR/Hetu-Galvatron: bandwidths of 2 nodes of 8 devices, GB/s
GROUPS = {
    "allreduce_size_16_consec_1": 44.682,
    "allreduce_size_8_consec_1": 155.658,
    "allreduce_size_8_consec_0": 20.7724,
    "allreduce_size_2_consec_1": 149.666,
    "allreduce_size_2_consec_0": 8.13007,
}
NETWORK = Network(name="net", joins=("a",), kind="efa", bandwidth_bytes_per_s=12.5e9, latency_s=15e-6, nics_per_node=4)
A100 = find_device("A100-SXM4-80GB")


def log(text):
    return read_log(SourceText(name="log.txt", text=text))


def made(collective, num_ranks, start_s, bytes_per_s, hosts=1):
    """A log that lies on a line: `bytes_per_s` is bus bandwidth."""
    factor = (2 if collective == "all_reduce" else 1) * (num_ranks - 1) / num_ranks
    rows = []
    for size in (1 << n for n in range(10, 34, 2)):
        time_us = 1e6 * (start_s + factor * size / bytes_per_s)
        algbw = size / time_us / 1e3
        cells = f"{time_us:.2f} {algbw:.2f} {algbw * factor:.2f} 0"
        rows.append(f"{size} {size // 4} float sum -1 {cells} {cells}\n")
    ranks = "".join(
        f"#  Rank {r:2d} Group  0 Pid {r} on  host{r * hosts // num_ranks} device  {r} [0x07] NVIDIA A100-SXM4-80GB\n"
        for r in range(num_ranks)
    )
    return (
        f"# Collective test starting: {collective}_perf\n" + ranks + HEAD + "".join(rows) + "# Avg bus bandwidth : 1\n"
    )


def test_ranks_and_collective_follow_from_the_two_bandwidths():
    found = log(P4DE)
    assert (found.collective, found.num_ranks, found.hosts) == ("all_reduce", 16, ())


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_line_is_found_again(collective):
    found = log(made(collective, 8, 40e-6, 200e9))
    line = fit(found)
    assert (found.collective, found.num_ranks, found.hosts) == (collective, 8, ("host0",))
    assert line.start_s == pytest.approx(40e-6, rel=0.01)
    assert found.factor(8) / line.s_per_byte == pytest.approx(200e9, rel=0.01)
    assert line.relative_error < 0.01


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("3.39    6.35", "3.396.35", "log.txt:4:1: expected 13 cells, found 12"),
        ("2644.6", "264.46", "log.txt:5:1: 67108864 B in 264.46 us are 253.76 GB/s, the row says 25.38"),
        ("2644.6", "2644.6x", "log.txt:5:1: time '2644.6x' is no number"),
        ("78.33      0    51406", "99.99      0    51406", "which no all_reduce has"),
    ],
)
def test_damaged_rows_are_refused(old, new, words):
    with pytest.raises(SpecError) as caught:
        log(P4DE.replace(old, new))
    assert words in str(caught.value)


def test_a_log_without_rows_is_refused():
    with pytest.raises(SpecError, match="found 0 sizes"):
        log(HEAD)
    with pytest.raises(SpecError, match=r"log\.txt:1:1: 'hello' stands before the header"):
        log("hello\n")


def test_without_the_number_of_nodes_nothing_is_written():
    found = link_calibration([log(P4DE)], Nominal(network=NETWORK))
    assert found.calibration.networks == {}
    assert "on how many nodes did its 16 ranks run" in found.questions[0]
    assert calibration_from_text(found.text, "c.yaml") == found.calibration


def test_a_log_between_nodes_becomes_a_fraction_of_the_nics():
    found = link_calibration([log(P4DE)], Nominal(network=NETWORK, num_nodes=2)).calibration
    constants = found.networks["net"]
    assert 0.6 < constants.bandwidth_fraction < 41.8 / 50
    assert constants.origin == "measured"
    assert (
        calibration_from_text(link_calibration([log(P4DE)], Nominal(network=NETWORK, num_nodes=2)).text, "c") == found
    )


def test_the_cost_model_gives_a_measured_line_back():
    """Inside a node the calibrated cost of an all-reduce is the log's."""
    text = made("all_reduce", 8, 48e-6, 240e9)
    calibration = link_calibration([log(text)], Nominal(device=A100)).calibration
    assert calibration.devices["A100-SXM4-80GB"].link_fraction == pytest.approx(240 / 300, rel=0.01)
    assert calibration.devices["A100-SXM4-80GB"].link_latency_s == pytest.approx(8e-6, rel=0.01)
    cluster = cluster_from_text(
        "hetplan: cluster/v1\nname: x\ngroups:\n  a: {device: A100-SXM4-80GB, nodes: 1, devices_per_node: 8}\n",
        "x",
        find_device,
    )
    ring = ring_inside(cluster, cluster.group("a"), calibration, num_ranks=8, stride=1)
    for size in (2.0**20, 2.0**30):
        assert all_reduce_s(size, ring) == pytest.approx(48e-6 + 1.75 * size / 240e9, rel=0.15)


def test_more_than_a_link_can_carry_is_refused():
    with pytest.raises(UsageError, match=r"2\.\d times the 300 GB/s A100-SXM4-80GB is stated to have"):
        link_calibration([log(made("all_reduce", 8, 48e-6, 700e9))], Nominal(device=A100))


def test_consecutive_groups_measure_a_node_and_strided_ones_the_network():
    name = "allreduce_bandwidth_2nodes_8gpus_per_node.json"
    table = read_group_bandwidths(SourceText(name=name, text=json.dumps(GROUPS, indent=1)))
    found = link_calibration([table], Nominal(device=A100, network=NETWORK))
    assert found.questions == ()
    assert found.calibration.devices["A100-SXM4-80GB"].link_fraction == pytest.approx(155.658 / 300, rel=1e-3)
    assert found.calibration.networks["net"].bandwidth_fraction == pytest.approx(8 * 8.13007 / 50, rel=1e-3)
    assert any("8.13 GB/s each, 65.04 GB/s a node" in story for story in found.calibration.provenance.values())


def test_a_table_of_groups_needs_its_shape():
    table = read_group_bandwidths(SourceText(name="b.json", text=json.dumps(GROUPS)))
    assert "of how many nodes with how many devices" in link_calibration([table], Nominal()).questions[0]
    with pytest.raises(SpecError, match=r"b\.json:2:1: 'allreduce_size_x_consec_1' is not like"):
        read_group_bandwidths(SourceText(name="b.json", text='{\n"allreduce_size_x_consec_1": 1}'))
    with pytest.raises(SpecError, match=r"b\.json:1:\d+: not valid JSON"):
        read_group_bandwidths(SourceText(name="b.json", text='{"allreduce_size_8_consec_1": 1'))
