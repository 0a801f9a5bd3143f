from __future__ import annotations

import pytest
from cluster_samples import DEVICES, FULL, GIB, find_device

from hetplan.errors import SpecError
from hetplan.specs.cluster import Cluster, Host
from hetplan.specs.read_cluster import cluster_from_text, read_cluster

SMALL = """\
hetplan: cluster/v1
name: lab
groups:
  a: {device: A100-SXM4-80GB, nodes: 2, devices_per_node: 8}
  b: {device: V100-SXM2-32GB, nodes: 2, devices_per_node: 8}
networks:
  eth: {joins: [a, b], kind: ethernet, bandwidth: 25 Gbit/s, latency: 30 us}
"""


def read(text: str) -> Cluster:
    return cluster_from_text(text, "lab.yaml", find_device)


def refused(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        read(text)
    assert str(caught.value).isprintable()
    return str(caught.value)


def changed(*changes: tuple[str, str], text: str = FULL) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_every_key_of_a_group():
    group = read(FULL).group("a100")
    assert group.device is DEVICES["A100-SXM4-80GB"]
    assert group.nodes == ("a100-01", "a100-02")
    assert (group.devices_per_node, group.site, group.speed, group.domain_nodes) == (8, "east", 0.9, 2)
    assert group.usable_memory_bytes == 76 * GIB
    assert (group.usd_per_device_hour, group.power_w) == (1.89, 300.0)
    assert group.left_out == {(0, 3)} | {(1, slot) for slot in range(8)}
    assert group.num_devices == 7
    assert group.host == Host(
        memory_bytes=1024 * GIB, cores=64, nvme_bandwidth_bytes_per_s=6e9, pcie_bandwidth_bytes_per_s=25e9
    )


def test_defaults_of_a_group():
    group = read(FULL).group("v100")
    assert group.nodes == ("v100-1", "v100-2", "v100-3", "v100-4")
    assert (group.site, group.speed, group.power_w, group.domain_nodes) == ("main", 1.0, None, 1)
    assert group.usable_memory_bytes == 30 * GIB
    assert group.usd_per_device_hour == 2.0
    assert group.host == Host()
    assert group.left_out == frozenset()
    assert read(FULL).num_devices == 7 + 32 + 2 + 1


def test_every_key_of_a_network():
    ib, eth = read(FULL).networks
    assert (ib.name, ib.joins, ib.kind) == ("ib", ("a100",), "infiniband")
    assert ib.bandwidth_bytes_per_s == 25e9
    assert ib.latency_s == pytest.approx(3e-6)
    assert (ib.nics_per_node, ib.oversubscription, ib.shared, ib.usd_per_byte) == (4, 2.0, False, 0.0)
    assert eth.shared
    assert eth.usd_per_byte == pytest.approx(2e-11)


def test_a_device_like_another_changes_what_is_written():
    device = read(FULL).group("mine").device
    assert device.name == "MyCard"
    assert device.memory_bytes == 40 * GIB
    assert device.usable_memory_bytes == pytest.approx(39 * GIB), "78 of 80 GiB usable, so 39 of 40"
    assert device.usd_per_hour == 1.5
    assert device.peak_flop_per_s == DEVICES["A100-SXM4-80GB"].peak_flop_per_s


def test_a_new_device_needs_no_catalog():
    device = read(FULL).group("new").device
    assert device.peak_flop_per_s == {"bf16": 181e12, "fp16": 181e12}
    assert device.memory_bytes == device.usable_memory_bytes == 48 * GIB
    assert device.link_bandwidth_bytes_per_s == device.pair_bandwidth_bytes_per_s == 0
    assert device.features == {"bf16", "flash_attention"}
    assert device.sources["memory"] == "cluster file"


def test_a_definition_may_override_the_catalog_by_name():
    text = changed(("  MyCard: {", "  A100-SXM4-80GB: {memory_bandwidth: 1 TB/s}\n  MyCard: {"))
    cluster = read(text)
    assert cluster.group("a100").device.memory_bandwidth_bytes_per_s == 1e12
    assert cluster.group("mine").device.memory_bandwidth_bytes_per_s == 1e12


def test_one_peak_may_be_overridden():
    text = changed(("price: 1.5 USD/h", "peak: {bf16: 100 TFLOP/s}"))
    assert read(text).group("mine").device.peak_flop_per_s == {"bf16": 100e12, "fp16": 312e12, "fp32": 19.5e12}


def test_links_may_be_taken_away():
    device = read(changed(("price: 1.5 USD/h", "link_bandwidth: 0 GB/s"))).group("mine").device
    assert device.link_bandwidth_bytes_per_s == device.pair_bandwidth_bytes_per_s == 0
    bridged = (
        read(changed(("price: 1.5 USD/h", "link_bandwidth: 0 GB/s, pair_bandwidth: 50 GB/s"))).group("mine").device
    )
    assert bridged.pair_bandwidth_bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("name: lab", "nam: lab", "lab.yaml:1:1: key 'name' is missing; is it 'nam'?"),
        ("name: lab", "name: lab\nextra: 1", "lab.yaml:3:1: unknown key 'extra'"),
        ("networks:", "network:", "networks"),
        ("V100-SXM2-32GB", "V100-SMX2-32GB", "groups.v100.device: unknown device 'V100-SMX2-32GB'"),
        ("device: MyCard", "device: MyCrd", "unknown device 'MyCrd'; did you mean 'MyCard'?"),
        ("nodes: 4", "nodes: 0", "groups.v100.nodes: must be at least 1"),
        ("nodes: 4", "nodes: -3", "must be at least 1"),
        ("nodes: 4", "nodes: 1" + "0" * 30, "must be at most"),
        ("nodes: 4", "nodes: 1e30", "groups.v100.nodes"),
        ("nodes: 4", "nodes: 4.0", "groups.v100.nodes"),
        ("nodes: 4", "nodes: 'v[1-99999999]'", "stands for 99,999,999 names"),
        ("nodes: 4", "nodes: 1500000", "more than 10,000,000 devices"),
        (
            "nodes: 4",
            "nodes: 'v[1-2'",
            "groups.v100.nodes: expected a count or a hostlist: hostlist 'v[1-2' is malformed",
        ),
        ("nodes: 4, devices_per_node: 8", "nodes: 4, devices_per_node: 0", "must be at least 1"),
        ("nodes: 4, devices_per_node: 8", "nodes: 4", "key 'devices_per_node' is missing"),
        ("usable_memory: 76 GiB", "usable_memory: 90 GiB", "90 GiB is more than the device's memory"),
        ("usable_memory: 76 GiB", "usable_memory: 76", "'76' without a unit"),
        ("usable_memory: 76 GiB", "usable_memory: 0 GiB", "above zero"),
        ("speed: 0.9", "speed: 0", "at least 0.01"),
        ("speed: 0.9", "speed: .nan", "not finite"),
        ("price: 1.89 USD/h", "price: 1.89", "without a unit"),
        ("price: 1.89 USD/h", "price: -1 USD/h", "cannot be negative"),
        ("domain_nodes: 2", "domain_nodes: 3", "at most 2"),
        ("a100-01:3", "a100-1:3", "groups.a100.leave_out[0]: the group has no node 'a100-1'; did you mean 'a100-01'?"),
        ("a100-01:3", "a100-01:8", "slot '8' is not one of 0 to 7"),
        ("a100-01:3", "a100-01:-1", "slot '-1' is not one of 0 to 7"),
        ("a100-01:3", "a100-01:", "slot '' is not one of 0 to 7"),
        ("a100-01:3", "a100-01", "every device of the group is left out"),
        ("cores: 64", "core: 64", "groups.a100.host: unknown key 'core'; did you mean 'cores'?"),
        ("joins: [a100]", "joins: [a10]", "networks.ib.joins[0]: unknown group 'a10'; did you mean 'a100'?"),
        ("joins: [a100]", "joins: []", "at least one group"),
        ("joins: [a100]", "joins: [a100, a100]", "networks.ib.joins[1]: group 'a100' is listed twice"),
        ("infiniband", "infinband", "did you mean 'infiniband'?"),
        ("bandwidth: 200 Gbit/s", "bandwidth: 0 Gbit/s", "above zero"),
        ("latency: 3 us", "latency: 3 GB", "the unit 'GB'"),
        ("oversubscription: 2.0", "oversubscription: 0.5", "at least 1"),
        ("shared: true", "shared: yes", "expected true or false, found 'yes'"),
        ("price: 0.02 USD/GB", "price: 0.02 USD/h", "the unit 'USD/h'"),
        ("price: 0.02 USD/GB", "pairs: p.csv", "only be read next to a cluster file"),
        ("{like: A100-SXM4-80GB,", "{like: A100,", "devices.MyCard.like: unknown device 'A100'"),
        ("{like: A100-SXM4-80GB,", "{", "key 'peak' is missing"),
        ("  v100: {device: V100-SXM2-32GB,", "  v100: {", "lab.yaml:24:9: groups.v100: key 'device' is missing"),
        ("    memory_bandwidth: 864 GB/s\n", "", "devices.NewCard: key 'memory_bandwidth' is missing"),
        ("    tdp: 350 W\n", "", "devices.NewCard: key 'tdp' is missing"),
        ("{bf16: 181 TFLOP/s, fp16: 181 TFLOP/s}", "{}", "expected a peak for at least one of"),
        ("{bf16: 181 TFLOP/s, fp16: 181 TFLOP/s}", "{bf15: 181 TFLOP/s}", "unknown key 'bf15'; did you mean 'bf16'?"),
        ("    tdp: 350 W", "    tdp: 350 W\n    features: [fp8]", "feature 'fp8' needs a peak for fp8"),
        ("    tdp: 350 W", "    tdp: 350 W\n    features: [fp9]", "'fp9' is not one of"),
        ("    tdp: 350 W", "    tdp: 350 W\n    usable_memory: 50 GiB", "50 GiB is more than the 48 GiB"),
        ("price: 1.5 USD/h", "link_bandwidth: 100 GB/s, pair_bandwidth: 200 GB/s", "more than all links together"),
        (
            "nodes: mine-1, devices_per_node: 1",
            "nodes: mine-1, devices_per_node: 1, site: west",
            "is at site 'main' in",
        ),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(old, new, problem):
    assert problem in refused(changed((old, new)))


def test_a_group_name_must_be_able_to_name_nodes():
    assert "is not a group name" in refused(changed(("  b: {", "  'b c': {"), text=SMALL))
    assert "is not a group name" in refused(changed(("  b: {", "  'b[1]': {"), text=SMALL))
    assert "is not a group name" in refused(changed(("  b: {", f"  {'b' * 65}: {{"), text=SMALL))


def test_a_cluster_without_groups_is_refused():
    assert "at least one group" in refused("hetplan: cluster/v1\nname: x\ngroups: {}\n")
    assert "key 'groups' is missing" in refused("hetplan: cluster/v1\nname: x\n")


def test_two_groups_no_network_joins_are_refused():
    message = refused(changed(("joins: [a, b]", "joins: [a]"), ("kind: eth", "kind: eth"), text=SMALL))
    assert message.startswith("lab.yaml:5:6: groups.b: nodes 'b-1' and 'b-2' are joined by no network")
    apart = SMALL.replace("joins: [a, b]", "joins: [a]") + SMALL.splitlines()[-1].replace("eth:", "ib:").replace(
        "[a, b]", "[b]"
    )
    assert "lab.yaml:5:6: groups.b: groups 'a' and 'b' are joined by no network" in refused(apart)
    single = changed(("joins: [a, b]", "joins: [a]"), text=SMALL).replace("32GB, nodes: 2", "32GB, nodes: 1")
    assert "groups 'a' and 'b' are joined by no network" in refused(single)


def test_groups_that_share_a_network_with_a_third_only_are_refused():
    text = changed(
        ("joins: [a, b]", "joins: [a, c]"),
        ("networks:\n", "  c: {device: V100-SXM2-32GB, nodes: 2, devices_per_node: 8}\nnetworks:\n"),
        text=SMALL,
    )
    both = text + "  ib: {joins: [b, c], kind: infiniband, bandwidth: 100 Gbit/s, latency: 3 us}\n"
    assert "groups 'a' and 'b' are joined by no network" in refused(both)


def test_networks_of_one_kind_each_may_meet_on_a_third():
    text = SMALL + (
        "  ib: {joins: [a], kind: infiniband, bandwidth: 200 Gbit/s, latency: 3 us}\n"
        "  roce: {joins: [b], kind: roce, bandwidth: 200 Gbit/s, latency: 5 us}\n"
    )
    assert len(read(text).networks) == 3


ONE_BOX = """\
hetplan: cluster/v1
name: box
groups:
  big: {device: A100-SXM4-80GB, nodes: box, devices_per_node: 2}
  old: {device: V100-SXM2-32GB, nodes: box, devices_per_node: 2}
"""


def test_unlike_cards_in_one_box_need_no_network():
    cluster = read(ONE_BOX)
    assert [group.nodes for group in cluster.groups] == [("box",), ("box",)]
    assert cluster.networks == ()


def test_unlike_cards_in_two_boxes_need_a_network():
    assert "groups 'big' and 'old' are joined by no network" in refused(
        changed(("32GB, nodes: box", "32GB, nodes: box2"), text=ONE_BOX)
    )


def test_a_third_group_must_reach_both_cards_of_a_box():
    text = ONE_BOX + (
        "  far: {device: V100-SXM2-32GB, nodes: 1, devices_per_node: 2}\n"
        "networks:\n  eth: {joins: [big, far], kind: ethernet, bandwidth: 10 Gbit/s, latency: 30 us}\n"
    )
    assert "groups 'far' and 'old' are joined by no network" in refused(text)
    read(text.replace("[big, far]", "[big, far, old]"))


def test_one_fast_link_domain_needs_no_network():
    text = ONE_BOX.split("  old")[0].replace("nodes: box", "nodes: 18, domain_nodes: 18")
    assert read(text).group("big").domain_nodes == 18
    assert "are joined by no network" in refused(text.replace("domain_nodes: 18", "domain_nodes: 9"))


def test_groups_on_one_host_agree_about_it():
    hosts = [("devices_per_node: 2}\n  old", "devices_per_node: 2, host: {cores: 8}}\n  old")]
    assert read(changed(*hosts, text=ONE_BOX)).group("big").host.cores == 8
    hosts.append(("nodes: box, devices_per_node: 2}\n", "nodes: box, devices_per_node: 2, host: {cores: 9}}\n"))
    assert "another host in group 'big'" in refused(changed(*hosts, text=ONE_BOX))


PAIRS = "from,to,latency,bandwidth\na,b,12 ms,1.5 Gbit/s\n"


def with_pairs(tmp_path, table: str | bytes | None) -> Cluster:
    path = tmp_path / "lab.yaml"
    path.write_text(SMALL.replace("latency: 30 us}", "latency: 30 us, pairs: pairs.csv}"))
    if table is not None:
        (tmp_path / "pairs.csv").write_bytes(table.encode() if isinstance(table, str) else table)
    return read_cluster(path, find_device)


def test_a_pair_holds_both_ways(tmp_path):
    pairs = with_pairs(tmp_path, PAIRS + "\nmain , a-1 , 1 us , 1 GB/s\n").networks[0].pairs
    assert set(pairs) == {("a", "b"), ("b", "a"), ("main", "a-1"), ("a-1", "main")}
    assert pairs["b", "a"] == pairs["a", "b"]
    assert pairs["a", "b"].latency_s == pytest.approx(12e-3)
    assert pairs["a", "b"].bandwidth_bytes_per_s == pytest.approx(1.5e9 / 8)


def test_columns_may_stand_in_any_order(tmp_path):
    pairs = with_pairs(tmp_path, "bandwidth,to,from,latency\r\n1 GB/s,b,a,1 ms\r\n").networks[0].pairs
    assert pairs["a", "b"].bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (None, "networks.eth.pairs: "),
        ("", "pairs.csv:1:1: the table is empty"),
        ("from,to\n", "pairs.csv:1:1: expected the header 'from,to,latency,bandwidth'"),
        (PAIRS + "a,c,1 ms,1 GB/s\n", "pairs.csv:3:3: 'c' is no group, site or node this network joins"),
        (PAIRS + "a,a,1,1 GB/s\n", "pairs.csv:3:5: latency: expected a time such as '5 us', found '1' without a unit"),
        (PAIRS + "a,a,1 ms,0 GB/s\n", "pairs.csv:3:10: bandwidth must be above zero"),
        (PAIRS + "a,a,1 ms,nan GB/s\n", "not a finite number"),
        (PAIRS + "a,a,1 ms\n", "pairs.csv:3:1: expected 4 cells, found 3"),
        (PAIRS + "b,a,1 ms,1 GB/s\n", "'b' and 'a' are already given at line 2"),
        (PAIRS + 'a,"a\n', "not valid CSV"),
        (PAIRS.encode() + b"a,\xff,1 ms,1 GB/s\n", "pairs.csv:3:1: the table is not UTF-8 text"),
        (PAIRS + "a," + "x" * 200_000 + ",1 ms,1 GB/s\n", "pairs.csv:3:1: not valid CSV"),
    ],
)
def test_a_bad_table_is_refused_at_its_row(tmp_path, table, problem):
    with pytest.raises(SpecError) as caught:
        with_pairs(tmp_path, table)
    assert problem in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_large_cluster_reads_whole():
    names = ",".join(f"node{i}x" for i in range(12_800))
    text = SMALL.replace("80GB, nodes: 2", f"80GB, nodes: '{names}'")
    assert read(text).num_devices == 12_800 * 8 + 16


def test_many_groups_are_checked_quickly():
    groups = "".join(f"  g{i}: {{device: V100-SXM2-32GB, nodes: 1, devices_per_node: 8}}\n" for i in range(2000))
    networks = "".join(
        f"  n{i}: {{joins: [g{i}], kind: roce, bandwidth: 100 Gbit/s, latency: 5 us}}\n" for i in range(2000)
    )
    joins = ", ".join(f"g{i}" for i in range(2000))
    every = f"  eth: {{joins: [{joins}], kind: ethernet, bandwidth: 1 GB/s, latency: 1 ms}}\n"
    head = "hetplan: cluster/v1\nname: many\ngroups:\n"
    assert len(read(head + groups + "networks:\n" + networks + every).groups) == 2000
    assert "are joined by no network" in refused(head + groups + "networks:\n" + networks)
