"""Sources that name nodes, and several sources laid over each other."""

import json

import pytest
from import_samples import (
    BLOCKS,
    CATALOG,
    LABELS,
    NVL_YAML,
    NVLINK_STATUS,
    PARTITIONS,
    QUERY,
    QUERY_MIXED,
    SCONTROL,
    SINFO,
    SKYPILOT,
    SLURM_YAML,
    SYSFS,
    TOPO_NICS,
    TREE,
    draft,
    facts,
    loaded,
    node,
    written,
)

from hetplan.errors import SpecError, UsageError
from hetplan.specs.importers.cluster_text import cluster_text
from hetplan.specs.importers.kubernetes import LabelKeys
from hetplan.specs.importers.merge import merge, tagged

L40S = {"nvidia.com/gpu.product": "NVIDIA-L40S", "nvidia.com/gpu.count": "8", "topology.kubernetes.io/zone": "z1"}
MI300X = {
    "amd.com/gpu.device-id": "74a1",
    "amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM",
    "amd.com/gpu.vram": "192G",
}


EIGHT = QUERY + QUERY.split("\n", 1)[1] * 3
TREE_A = "SwitchName=leaf Nodes=a[01-02]\n"


def nodes(*items):
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)}, indent=4)


def test_two_vendors_in_one_kubernetes_cluster():
    """Three nodes, two vendors (skypilot-org/skypilot issue 8311: listing such a cluster failed)."""
    text = written(
        nodes(
            node("l-1", L40S, capacity={"nvidia.com/gpu": "8"}),
            node("l-2", L40S, capacity={"nvidia.com/gpu": "8"}),
            node("m-1", MI300X, capacity={"amd.com/gpu": "8"}),
            node("cpu-1", {}),
        )
    )
    assert 'nodes: "l-[1-2]"' in text
    assert "device: MI300X" in text
    joined = text + "networks:\n  net: {joins: [l40s, mi300x], kind: ethernet, bandwidth: 25 Gbit/s, latency: 30 us}\n"
    cluster = loaded(joined)
    assert [(g.device.vendor, g.nodes, g.devices_per_node, g.site) for g in cluster.groups] == [
        ("NVIDIA", ("l-1", "l-2"), 8, "z1"),
        ("AMD", ("m-1",), 8, "main"),
    ]


def test_unlike_cards_in_one_node():
    """2 x L4 + 2 x A100 in one node (skypilot-org/skypilot pull 8230: one label holds one product)."""
    label = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.count": "4"}
    (alone,) = draft(nodes(node("box", label))).groups
    assert alone.cards.count == 4
    cluster = loaded(written(nodes(node("box", label)), QUERY_MIXED))
    assert [(g.device.name, g.nodes, g.devices_per_node) for g in cluster.groups] == [
        ("L4", ("box",), 2),
        ("A100-SXM4-40GB", ("box",), 2),
    ]
    assert [g.nodes for g in loaded(written(QUERY_MIXED)).groups] == [("node-1",), ("node-1",)]


def test_cordoned_and_unready_nodes_are_left_out():
    unready = node("l-3", L40S)
    unready["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    text = written(nodes(node("l-1", L40S), node("l-2", L40S, spec={"unschedulable": True}), unready))
    assert "leave_out: [l-2, l-3]" in text


def test_labels_of_site_and_domain_can_be_named():
    labels = {**L40S, "rack": "r7", "example.com/dc": "north"}
    keys = LabelKeys(site=("example.com/dc",), domain=("rack",))
    (sheet,) = facts(nodes(node("l-1", labels)), keys=keys).sheets
    assert (sheet.site, sheet.domain) == ("north", "r7")
    (sheet,) = facts(nodes(node("l-1", labels))).sheets
    assert (sheet.site, sheet.domain) == ("z1", None)


def test_parts_of_a_gpu_are_refused():
    with pytest.raises(SpecError, match="MIG"):
        facts(nodes(node("a", {}, capacity={"nvidia.com/mig-1g.5gb": "7"})))


def test_labels_in_prose():
    (group,) = loaded(written(LABELS)).groups
    assert (group.device.name, group.devices_per_node) == ("A100-SXM4-40GB", 1)
    assert group.usable_memory_bytes == 39538 * 2**20
    with pytest.raises(SpecError, match=r"file:9:.*two nodes without a 'Name:' line"):
        facts(LABELS + '      nvidia.com/gpu.product: "L4"\n')


def test_described_nodes_are_told_apart_by_name():
    one = "Name:  {}\nLabels:  nvidia.com/gpu.count={}\n         nvidia.com/gpu.product=NVIDIA-L4\n"
    found = draft(one.format("a", 2) + one.format("b", 2)).groups
    assert [group.nodes for group in found] == [("a", "b")]


def test_a_table_of_labels_has_a_node_a_row():
    row = "{}   Ready   <none>   9d   v1.30.0   nvidia.com/gpu.count=2,nvidia.com/gpu.product=NVIDIA-L4,zone=z\n"
    table = "NAME  STATUS  ROLES  AGE  VERSION  LABELS\n" + row.format("a-1") + row.format("a-2")
    (group,) = draft(table + "c-1   Ready   <none>   9d   v1.30.0   zone=z\n").groups
    assert (group.nodes, group.cards.count) == (("a-1", "a-2"), 2)


def test_kubernetes_lists_as_yaml():
    text = "apiVersion: v1\nkind: List\nitems:\n- kind: Node\n  metadata:\n    name: l-1\n    labels:\n"
    text += "".join(f'      {key}: "{value}"\n' for key, value in L40S.items())
    (group,) = draft(text).groups
    assert (group.nodes, group.cards.count, group.sheet.site) == (("l-1",), 8, "z1")
    with pytest.raises(SpecError, match=r"file:6:1: node 'l-1': nvidia.com: 'eight' is no number of devices"):
        facts(text.replace('"8"', '"eight"'))


def test_a_tree_joins_its_nodes_and_blocks_stay_a_question():
    assert draft(TREE).groups[0].nodes[:2] == ("srv1101", "srv1102")
    assert draft(TREE).fabrics[0] >= {"srv1101", "srv1204"}
    assert "is each of the 2 blocks of 8 nodes one fast-link (NVLink) domain?" in written(BLOCKS)
    assert "domain_nodes" not in written(TREE)


def test_annotated_domains_and_zones_are_taken():
    text = written(NVL_YAML, NVLINK_STATUS, SYSFS)
    (group,) = loaded(text).groups
    assert (len(group.nodes), group.domain_nodes, group.site, group.devices_per_node) == (36, 18, "zone1", 2)
    assert "speaks of one node and was taken for all 36; are they alike?" in text


def test_slurms_own_yaml():
    assert draft(SLURM_YAML).groups[0].nodes == ("n01", "n02", "n03", "n04")
    with pytest.raises(SpecError, match=r"file:6:.*unknown switch 's3'"):
        facts(SLURM_YAML.replace("s[1-2]", "s[1-3]"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TREE.replace("leaf-[1-2]", "leaf-[1-3]"), "file:2:1: unknown switch 'leaf-3'"),
        (
            TREE.replace("SwitchName=leaf-2", "SwitchName=leaf-1"),
            "file:4:1: switch 'leaf-1' is already given",
        ),
        (TREE.replace("Nodes=srv[1201-1204]", "Nodes=srv[1204-1201]"), "file:4:1: range '1204-1201'"),
        (TREE.replace("Switches=", "Swithces="), "file:2:17: 'Swithces=leaf-[1-2]' is not understood"),
        (TREE.replace("Nodes=srv[1201-1204]", "Switches=core"), "hangs under"),
        (SINFO.replace("40 385000 mixed", "40 385000"), "file:4:1: expected 6 words, found 5"),
        (SINFO.replace("gpu:v100:4", "gpu-v100-4"), "file:4:1: 'gpu-v100-4' in GRES"),
        (SCONTROL[: SCONTROL.index("   State=DOWN")], "file:8:1: node 'a02' has no State=: the text is cut"),
        (PARTITIONS.replace("| 11 |", "| many |"), "file:4:1: 'many' is no number of nodes"),
        (PARTITIONS.replace("8 x A100 80 GB | 88", "8 x A100 80 GB 88"), "file:4:1: expected 5 cells, found 4"),
        (SKYPILOT.replace("H100-SXM5-80GB:8", "{L4: 1, A100: 1}"), "lists alternatives"),
    ],
)
def test_damage_is_refused_where_it_stands(text, words):
    with pytest.raises(SpecError) as caught:
        facts(text)
    assert words in str(caught.value)


def test_slurm_nodes():
    text = written(SINFO)
    assert "1 nodes without accelerators were left out (c01, ...)" in text
    assert "leave_out: [a02]" in text
    assert "# QUESTION: which device is 'v100': one of V100-PCIE-16GB, V100-SXM2-16GB, V100-SXM2-32GB" in text
    (group,) = draft(SCONTROL).groups
    assert (group.nodes, group.sheet.cores, dict(group.unusable)) == (("a01", "a02"), 128, {"a02": "DOWN*+DRAIN"})
    assert group.sheet.host_memory_bytes == 1031000 * 2**20


def test_a_partition_table_asks_for_what_its_words_do_not_say():
    text = written(PARTITIONS)
    assert "device: L40S" in text
    assert "device: H100-NVL" in text
    assert "which device is 'A100' of 80 GB: one of A100-PCIE-80GB, A100-SXM4-80GB" in text
    with pytest.raises(SpecError, match=r"groups\.a100\.device: unknown device 'A100'"):
        loaded(text)


def test_skypilot():
    (group,) = draft(SKYPILOT).groups
    assert (group.num_nodes, group.cards.count, group.sheet.site) == (2, 8, "us-east-1")


def test_slurm_names_nodes_and_one_node_completes_them():
    cluster = loaded(written(SCONTROL, EIGHT, SYSFS, TREE_A))
    (group,) = cluster.groups
    assert (group.nodes, group.devices_per_node, group.host.cores) == (("a01", "a02"), 8, 128)
    assert group.usable_memory_bytes == 81920 * 2**20
    assert {network.kind for network in cluster.networks} == {"infiniband", "ethernet"}


def test_a_shortened_name_and_a_full_one_agree():
    (group,) = draft(SCONTROL.replace("nvidia_a100-sxm4-80gb", "a100"), EIGHT).groups
    assert group.cards.product == "NVIDIA A100-SXM4-80GB"


def test_sources_that_disagree_are_named():
    with pytest.raises(UsageError, match=r"file0 and file1 disagree about the accelerators .*2 x .*4 x"):
        draft(QUERY, QUERY + QUERY.split("\n", 1)[1])
    with pytest.raises(UsageError, match="file1: a node with 2 x NVIDIA A100-SXM4-80GB is none of those described"):
        draft(SCONTROL, QUERY)


def test_two_kinds_of_node_are_told_apart_by_a_name_in_front():
    boxes = [tagged(facts(QUERY, "a"), "big"), tagged(facts(LABELS, "b"), "small"), tagged(facts(SYSFS, "c"), "big")]
    groups = merge(boxes, CATALOG).groups
    assert [(g.name, g.cards.count, g.sheet.nics is not None) for g in groups] == [
        ("big", 2, True),
        ("small", 1, False),
    ]
    with pytest.raises(UsageError, match=r"c: nodes of which group\? Write GROUP=FILE; there are l40s, a100, nvl"):
        merge([facts(PARTITIONS, "t"), facts(SYSFS, "c")], CATALOG)


def test_fabrics_are_joined_only_where_a_source_says_so():
    both = (
        SCONTROL.replace("a02", "b02")
        .replace("State=DOWN*+DRAIN", "State=IDLE")
        .replace("   Partitions=a100\n\n", "   Partitions=new\n\n")
    )
    box = tagged(facts(SYSFS, "ports"), "new")
    other = tagged(facts(SYSFS, "ports"), "a100")
    tree = facts("SwitchName=leaf Nodes=a01,b02\n", "tree")
    alone = cluster_text(merge([facts(both, "s"), box, other], CATALOG), CATALOG, "x").text
    assert "ib-a100:" in alone
    assert "which network joins all nodes?" in alone
    together = cluster_text(merge([facts(both, "s"), box, other, tree], CATALOG), CATALOG, "x").text
    assert len(loaded(together).networks) == 2
    assert "which network joins all nodes?" not in together


def test_ports_of_a_table_of_links_are_completed_by_name():
    (group,) = draft(TOPO_NICS, SYSFS).groups
    assert {nic.name for nic in group.sheet.nics} == {"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_bond_0"}
    assert all(nic.bandwidth_bytes_per_s for nic in group.sheet.nics)
