from pathlib import Path

import pytest

from hetplan.catalog import load_cluster, load_model
from hetplan.specs.model import model_params

ROOT = Path(__file__).parents[2]
REGIONS = {"A100-SXM4-80GB": 24, "L40S": 24, "L4": 16}
# Devices of each kind, by shipped cluster.
CLUSTERS = {
    "a100-l40s-l4-regions-case1-data-centre": REGIONS,
    "a100-l40s-l4-regions-case2-zones": REGIONS,
    "a100-l40s-l4-regions-case3-regions": REGIONS,
    "a100-l40s-l4-regions-case4-continents": REGIONS,
    "a100-l40s-l4-regions-case5-mixed": REGIONS,
    "a800-4090-3090": {"A800-SXM4-80GB": 3, "RTX-4090": 3, "RTX-3090-unbridged": 2},
    "eight-cities": {"V100-SXM2-16GB": 64},
    "gb200-nvl72": {"GB200": 144},
    "h100-a100": {"H100-SXM5-80GB": 64, "A100-SXM4-80GB": 64},
    "hundred-thousand": {"H100-SXM5-80GB": 40960, "A100-SXM4-80GB": 40960, "V100-SXM2-32GB": 20480},
    "ib-roce": {"A100-SXM4-80GB": 32},
    "ib-roce-8-nodes": {"A100-SXM4-80GB": 64},
    "mixed-workstation": {"RTX-4090": 2, "RTX-3090-unbridged": 2, "RTX-A6000": 1},
    "ten-thousand-islands": {"H100-SXM5-80GB": 4096, "A100-SXM4-80GB": 4096, "V100-SXM2-32GB": 2048},
    "ten-thousand": {"H100-SXM5-80GB": 4096, "A100-SXM4-80GB": 4096, "V100-SXM2-32GB": 2048},
    "two-generation-lab": {"A100-SXM4-80GB": 16, "V100-SXM2-32GB": 32},
    "two-vendors": {"A800-SXM4-80GB": 640, "MI250X-GCD": 128},
    "university": {"A100-SXM4-80GB": 120, "L40S": 64, "H100-SXM5-80GB": 64, "H100-NVL": 64},
}
# Parameters and layers of the chain, embedding and head counted, by shipped model.
MODELS = {
    "deepseek-v3": (None, 64),
    "gpt-1t": (1_008_038_758_400, 130),
    "gpt-3.6b": (3_562_168_320, 32),
    "gpt-by-sizes": (1_317_654_528, 26),
    "gpt3-175b": (174_615_846_912, 98),
    "llama-2-13b": (13_015_864_320, 42),
    "small-gpt": (2 * 256 * 256 + 8 * (12 * 256**2 + 13 * 256) + 2 * 256, 10),
    "llama-3.1-70b": (70_553_706_496, 82),
    "llama-3.1-8b": (8_030_261_248, 34),
    "llama-3.1-8b-8-layers": (2_795_573_248, 10),
    "mixtral-8x7b": (46_702_792_704, 34),
    "qwen2.5-vl-7b": (8_292_166_656, 64),
    "tinyllama-1.1b": (1_100_048_384, 24),
    "vision-language-by-sizes": (None, 66),
    "vlm-frozen-encoder": (7_063_427_072, 60),
}


def load(name):
    return load_cluster(ROOT / "cluster_specs" / f"{name}.yaml")[0]


def network(cluster, name):
    return next(network for network in cluster.networks if network.name == name)


def test_every_shipped_file_is_known_here():
    assert {path.stem for path in (ROOT / "cluster_specs").glob("*.yaml")} == set(CLUSTERS)
    assert {path.stem for path in (ROOT / "model_specs").glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_shipped_cluster_has_its_devices(name):
    cluster = load(name)
    counts = {}
    for group in cluster.groups:
        counts[group.device.name] = counts.get(group.device.name, 0) + group.num_devices
    assert counts == CLUSTERS[name]


@pytest.mark.parametrize("name", CLUSTERS)
def test_shipped_cluster_opens_with_what_it_is_and_where_its_numbers_come_from(name):
    lines = (ROOT / "cluster_specs" / f"{name}.yaml").read_text().splitlines()
    head = " ".join(line for line in lines[: lines.index("hetplan: cluster/v1")])
    assert head.startswith("# ")
    assert any(word in head for word in ("arXiv:", "https://", "No particular site", "ssumed"))


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_group_of_a_shipped_cluster_is_on_a_network(name):
    cluster = load(name)
    assert {group.name for group in cluster.groups} == {name for net in cluster.networks for name in net.joins}


@pytest.mark.parametrize("name", ["ib-roce", "ib-roce-8-nodes"])
def test_infiniband_and_roce_meet_on_ethernet_only(name):
    cluster = load(name)
    assert [net.kind for net in cluster.networks if set(net.joins) == {"ib", "roce"}] == ["ethernet"]


def test_unlike_cards_of_the_workstation_share_one_host():
    assert {group.nodes for group in load("mixed-workstation").groups} == {("box",)}


def test_eight_cities_has_a_line_for_each_pair_of_cities():
    cluster = load("eight-cities")
    pairs = network(cluster, "wan").pairs
    cities = {group.site for group in cluster.groups}
    assert len(cities) == 8
    assert set(pairs) == {(a, b) for a in cities for b in cities if a != b}
    # DT-FM (arXiv:2206.01288): Oregon to Virginia 67 ms and 0.79 Gbit/s
    assert pairs["virginia", "oregon"].latency_s == pytest.approx(0.067)
    assert pairs["virginia", "oregon"].bandwidth_bytes_per_s == pytest.approx(0.79e9 / 8)


def test_a_rack_of_gb200_is_one_fast_link_domain():
    (group,) = load("gb200-nvl72").groups
    assert group.domain_nodes * group.devices_per_node == 72


def test_network_scenarios_of_the_regions_get_slower():
    def slowest(case):
        joint = [net for net in load(case).networks if {"a100", "l40s", "l4"} <= set(net.joins)]
        links = [link.bandwidth_bytes_per_s for net in joint for link in net.pairs.values()]
        return min([*links, *(net.bandwidth_bytes_per_s for net in joint)])

    cases = [name for name in CLUSTERS if name.startswith("a100-l40s-l4-regions-case") and "mixed" not in name]
    bandwidths = [slowest(case) for case in sorted(cases)]
    assert bandwidths == sorted(bandwidths, reverse=True)
    assert len(set(bandwidths)) == 4


@pytest.mark.parametrize("name", MODELS)
def test_shipped_model_has_its_layers_and_parameters(name):
    model, _ = load_model(ROOT / "model_specs" / f"{name}.yaml")
    params, layers = MODELS[name]
    assert model.name == name
    assert len(model.chain) == layers
    assert params is None or model_params(model) == params


def test_vision_language_models_are_graphs_of_modules():
    model, _ = load_model(ROOT / "model_specs" / "vision-language-by-sizes.yaml")
    assert [module.name for module in model.modules] == ["vision", "language"]
    assert model.edges == (("vision", "language"),)
