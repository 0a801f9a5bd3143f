"""What tools print of one node: read whole, or refused with the line."""

import pytest
from import_samples import (
    ALL,
    DEVINFO,
    FULL_QUERY,
    IBSTAT,
    NCCL_XML,
    NVLINK_STATUS,
    PCI_XML,
    QUERY,
    SHOWTOPO,
    SYSFS,
    TOPO_FUSED,
    TOPO_NICS,
    TOPO_PARTIAL,
    TOPO_PCIE,
    facts,
    loaded,
    written,
)

from hetplan.errors import HetplanError, SpecError
from hetplan.specs.importers.detect import CLUSTER_FORMATS


@pytest.mark.parametrize("form", ALL)
def test_formats_are_told_from_their_content(form):
    found = [name for name, one in CLUSTER_FORMATS.items() if one.sign.search(ALL[form])]
    assert found[0] == form
    assert facts(ALL[form]) == facts(ALL[form], form=form)


def test_full_nvlink_and_ports():
    (sheet,) = facts(TOPO_NICS).sheets
    assert sheet.cards[0].count == 2
    assert (sheet.wiring.family, sheet.wiring.is_full, sheet.wiring.links_of_pair) == ("nvlink", True, 12)
    assert [nic.name for nic in sheet.nics] == ["mlx5_0", "mlx5_1", "mlx5_bond_0"]
    assert "mlx5_bond_0" in facts(TOPO_NICS).remarks[0]


def test_pairs_joined_by_nvlink_are_named():
    wiring = facts(TOPO_PARTIAL).sheets[0].wiring
    assert not wiring.is_full
    assert "GPU0-GPU1, GPU2-GPU3" in wiring.note


def test_xgmi_of_every_pair():
    wiring = facts(SHOWTOPO).sheets[0].wiring
    assert (wiring.family, wiring.is_full) == ("xgmi", True)


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        (TOPO_FUSED, "file:3:", "GPU1, column NIC0: 'SYSPXB' is no link type"),
        (TOPO_NICS.replace("NIC2\tSYS\tSYS\tSYS\tSYS\t X\n", ""), "file:1:", "no row for NIC2"),
        (TOPO_NICS.replace("NIC2\tSYS\tSYS\tSYS\tSYS\t X", "NIC2\tSYS\tSYS\tSYS\tSYS"), "file:6:", "4 of 5 columns"),
        (TOPO_PARTIAL.replace("GPU1    NV1      X", "GPU1    NV2      X"), "file:3:", "GPU0 reaches GPU1 by NV1"),
        (TOPO_PARTIAL.replace("GPU1    NV1      X      SYS", "GPU1    NV1      SYS    X"), "file:3:", "run together"),
        (SHOWTOPO.replace("GPU1   XGMI         0", "GPU1   XGMI"), "file:10:", "1 of 2 columns"),
        (NVLINK_STATUS.replace("GPU 1:", "GPU 3:"), "file:14:", "GPU 3 where GPU 1 was expected"),
        (QUERY.replace("350.00 W", "350.00 W, 7"), "file:3:", "expected 4 cells, found 5"),
        (QUERY.replace("81920 MiB, 350", "8l920 MiB, 350"), "file:3:", "'l920 MiB'"),
        (FULL_QUERY.replace("Attached GPUs                             : 1", "Attached GPUs : 2"), "file:4:", "cut"),
        (NCCL_XML[:300], "file:", "not valid XML"),
        (NCCL_XML.replace("</nic>", "</nick>"), "file:10:", "mismatched tag"),
        (NCCL_XML.replace('speed="100000"', 'speed="fast"'), "file:9:", "no number of Mbit/s"),
        ("<!DOCTYPE system [<!ENTITY a 'b'>]>\n" + NCCL_XML, "file:1:", "document type"),
        (SYSFS.replace("400 Gb/sec (4X NDR)", "400 Gb", 1), "file:3:", "expected a rate"),
        (SYSFS.replace("mlx5_1/ports/1/state: 4: ACTIVE\n", ""), "file:", "mlx5_1:1 has no state"),
        (IBSTAT.replace("\t\tRate: 200\n", ""), "file:", "no rate"),
        (DEVINFO.replace("\t\t\tlink_layer:\t\tInfiniBand\n", ""), "file:", "no link layer"),
    ],
)
def test_damage_is_refused_with_its_line(text, where, words):
    with pytest.raises(SpecError) as caught:
        facts(text)
    assert str(caught.value).startswith(where)
    assert words in str(caught.value)


def test_mig_is_refused():
    enabled = FULL_QUERY.replace("        Current                           : Disabled", "        Current : Enabled")
    with pytest.raises(SpecError, match=r"file:5:.*MIG is enabled"):
        facts(enabled)


def test_unknown_files_are_refused_by_kind():
    with pytest.raises(SpecError, match=r"none of the kinds of file that describe nodes: .*topo -m"):
        facts("hello\n")


def test_numbers_of_cards():
    cluster = loaded(written(QUERY))
    (group,) = cluster.groups
    assert (group.device.name, group.devices_per_node, group.power_w) == ("A100-SXM4-80GB", 2, 350.0)
    assert group.usable_memory_bytes == 81920 * 2**20
    (group,) = loaded(written(FULL_QUERY)).groups
    assert (group.device.name, group.power_w) == ("H100-SXM5-80GB", 700.0)
    assert group.usable_memory_bytes == 81559 * 2**20


def test_links_the_driver_does_not_see_replace_the_datasheet():
    assert loaded(written(NVLINK_STATUS)).groups[0].device.link_bandwidth_bytes_per_s == 300e9
    half = "\n".join(line for line in NVLINK_STATUS.splitlines() if "Link 1" not in line) + "\n"
    assert loaded(written(half)).groups[0].device.link_bandwidth_bytes_per_s == 9 * 25e9
    without = loaded(written(TOPO_PCIE, QUERY)).groups[0].device
    assert (without.name, without.link_bandwidth_bytes_per_s, without.pair_bandwidth_bytes_per_s) == (
        "A100-SXM4-80GB",
        0.0,
        0.0,
    )


def test_a_full_mesh_of_the_datasheets_links_changes_nothing():
    text = written(TOPO_NICS, QUERY)
    assert "devices:" not in text.splitlines()
    other = written(TOPO_NICS.replace("NV12", "NV4"), QUERY)
    assert "# QUESTION: a pair is joined by 4 NVLinks, the datasheet has 300 GB/s" in other


def test_nccl_topology_names_products_by_pci_id():
    text = written(NCCL_XML)
    (group,) = loaded(text).groups
    assert (group.device.name, group.devices_per_node) == ("A100-PCIE-80GB", 2)
    assert loaded(text).networks[0].bandwidth_bytes_per_s == 12.5e9
    assert "2 fast links point at their own device (first at line 5)" in text


def test_a_pci_tree_alone_counts_devices_and_leaves_the_product_open():
    text = written(PCI_XML)
    assert "devices_per_node: 2" in text
    assert "2 network ports (0103:00:00.0, 0104:00:00.0) of which kind and rate" in text
    with pytest.raises(SpecError, match="unknown device '\\?'"):
        loaded(text)


def test_ports_become_networks_by_kind_and_rate():
    cluster = loaded(written(QUERY, SYSFS))
    assert {(n.name, n.kind, n.bandwidth_bytes_per_s, n.nics_per_node, n.latency_s) for n in cluster.networks} == {
        ("ib", "infiniband", 50e9, 2, 3e-6),
        ("eth", "ethernet", 25e9, 1, 30e-6),
    }
    for text in (IBSTAT, DEVINFO):
        (network,) = loaded(written(QUERY, text)).networks
        assert (network.kind, network.bandwidth_bytes_per_s, network.nics_per_node) == ("infiniband", 25e9, 1)


def test_an_assumed_latency_is_marked():
    text = written(QUERY, SYSFS)
    assert "# QUESTION: latency was not read; this is what the catalog assumes of InfiniBand-NDR" in text
    assert "# QUESTION: do these Ethernet ports run RoCE?" in text
    assert "port mlx5_2 is not active" in text


@pytest.mark.parametrize("form", ALL)
def test_cut_and_changed_files_never_break_the_reader(form):
    text = ALL[form]
    lines = text.splitlines(keepends=True)
    cuts = [text[: len(text) * part // 23] for part in range(23)]
    dropped = ["".join(lines[:i] + lines[i + 1 :]) for i in range(min(len(lines), 25))]
    swapped = [
        text.replace(old, new) for old, new in (("0", "x"), ("1", "-1"), (":", ""), ("=", " "), (" ", ""), ("\n", "\r"))
    ]
    for mutant in [*cuts, *dropped, *swapped, text + "\x00", text * 2]:
        try:
            facts(mutant, form=form)
        except HetplanError as error:
            assert str(error).startswith("file:")
