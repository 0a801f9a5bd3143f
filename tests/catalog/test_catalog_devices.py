import re
from pathlib import Path

import pytest
import yaml

import hetplan.catalog.devices as devices_module
from hetplan.catalog import device_names, find_device
from hetplan.errors import SpecError
from hetplan.specs.read_cluster import cluster_from_text

GIB = 2**30
TERA = 1e12
FOLDER = Path(devices_module.__file__).parent / "devices"
NUMBERS = (
    "memory_bytes",
    "usable_memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "link_bandwidth_bytes_per_s",
    "pair_bandwidth_bytes_per_s",
    "pcie_bandwidth_bytes_per_s",
    "tdp_w",
)
# Name, capacity in GiB, memory bandwidth in GB/s, dense 16-bit peak in TFLOP/s (None: not published), TDP in W.
EXPECTED = [
    ("P100-SXM2-16GB", 16, 732, 21.2, 300),
    ("V100-PCIE-16GB", 16, 900, 112, 250),
    ("V100-SXM2-16GB", 16, 900, 125, 300),
    ("V100-SXM2-32GB", 32, 900, 125, 300),
    ("T4", 16, 320, 65, 70),
    ("RTX-2080-Ti", 11, 616, 56.9, 260),
    ("RTX-3090", 24, 936.2, 71.2, 350),
    ("RTX-4090", 24, 1008, 165.2, 450),
    ("RTX-5090", 32, 1792, 209.5, 575),
    ("A10", 24, 600, 125, 150),
    ("A10G", 24, 600, 70, 300),
    ("A40", 48, 696, 149.7, 300),
    ("RTX-A6000", 48, 768, 154.8, 300),
    ("A100-SXM4-40GB", 40, 1555, 312, 400),
    ("A100-PCIE-40GB", 40, 1555, 312, 250),
    ("A100-SXM4-80GB", 80, 2039, 312, 400),
    ("A100-PCIE-80GB", 80, 1935, 312, 300),
    ("A800-SXM4-80GB", 80, 2039, 312, 400),
    ("A30", 24, 933, 165, 165),
    ("L4", 24, 300, 121, 72),
    ("L40S", 48, 864, 362, 350),
    ("H100-PCIe", 80, 2000, 756, 350),
    ("H100-SXM5-80GB", 80, 3350, 989, 700),
    ("H100-SXM-96GB-HBM2e-500W", 96, 2400, None, 500),
    ("H200-SXM-141GB", 141, 4800, 989, 700),
    ("H20-96GB", 96, 4000, 148, 400),
    ("H800-SXM5-80GB", 80, 3350, 989, 700),
    ("B100-SXM", 192, 8000, 1750, 700),
    ("B200-SXM", 180, 8000, 2250, 1000),
    ("GB200", 186, 8000, 2500, 1200),
    ("GB300", 288, 8000, 2500, 1400),
    ("MI100", 32, 1228.8, 92.3, 300),
    ("MI210", 64, 1638, 181, 300),
    ("MI250X", 128, 3276, 383, 560),
    ("MI300X", 192, 5300, 1307, 750),
    ("MI325X", 256, 6000, 1307, 1000),
    ("MI355X", 288, 8000, 2500, 1400),
    ("Gaudi2", 96, 2460, 432, 600),
    ("Gaudi3", 128, 3700, 1677, 900),
    ("Ascend-910B", 64, 1600, 320, 400),
    ("MLU370-X8", 48, 614.4, 96, 250),
    ("TPU-v4", 32, 1200, 275, 192),
    ("TPU-v5e", 16, 820, 197, 200),
    ("TPU-v5p", 95, 2765, 459, 400),
    ("TPU-v6e", 32, 1640, 918, 350),
    ("Trainium1", 32, 820, 190, 400),
    ("Trainium2", 96, 2900, 667, 500),
    ("RTX-PRO-6000-Server", 96, 1792, 467.8, 600),
]
# Public tables that are wrong, with the value they give: sparse for dense, vector for matrix rate, fp16 accumulation,
# copies of another part's figure, substring matches, wrong units.
CONFLICTS = [
    # lightning-fabric 2.6.6 wheel, utilities/throughput.py
    ("RTX-4090", "bf16", 82.6, 165.2),
    ("RTX-4090", "bf16", 330, 165.2),
    ("RTX-3090", "bf16", 35.6, 71.2),
    ("RTX-A6000", "bf16", 38.7, 154.8),
    ("A40", "bf16", 37.4, 149.7),
    ("H200-SXM-141GB", "bf16", 2000, 989),
    ("H100-NVL", "bf16", 1978.8, 835.5),
    ("A10G", "bf16", 125, 70),
    ("L40S", "bf16", 121, 362),
    # huggingface.js hardware.ts
    ("H100-SXM5-80GB", "fp16", 267.6, 989),
]
CAPACITIES = [
    # cli99/llm-analysis v100-sxm-16gb.json and a10-pcie-28gb.json, SimuMax b200_bf16_ceperm.json
    ("V100-SXM2-16GB", 32, 16),
    ("A10", 28, 24),
    ("B200-SXM", 80, 180),
]


@pytest.mark.parametrize(("name", "memory", "bandwidth", "peak", "tdp"), EXPECTED)
def test_device_has_the_figures_of_its_datasheet(name, memory, bandwidth, peak, tdp):
    device = find_device(name)
    assert device.memory_bytes == memory * GIB
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(bandwidth * 1e9)
    assert device.tdp_w == tdp
    peaks = device.peak_flop_per_s
    assert peaks.get("bf16", peaks.get("fp16")) == (peak and pytest.approx(peak * TERA))


@pytest.mark.parametrize("name", device_names())
def test_every_number_has_a_source(name):
    device = find_device(name)
    expected = {*NUMBERS, *(f"peak_flop_per_s.{precision}" for precision in device.peak_flop_per_s)}
    if device.usd_per_hour is not None:
        expected.add("usd_per_hour")
    assert set(device.sources) == expected


@pytest.mark.parametrize("name", device_names())
def test_every_source_says_where_or_that_it_was_not_read(name):
    for part in (part for source in find_device(name).sources.values() for part in source.split("; ")):
        assert not re.fullmatch(r"[a-z-]+", part), f"{part} is a key nobody explains"
        assert len(part) > 8


@pytest.mark.parametrize("name", device_names())
def test_figures_of_a_device_agree_with_each_other(name):
    device = find_device(name)
    assert 0.85 * device.memory_bytes <= device.usable_memory_bytes <= device.memory_bytes
    link, pair = device.link_bandwidth_bytes_per_s, device.pair_bandwidth_bytes_per_s
    assert link == 0 or 0 < pair <= link
    peaks = device.peak_flop_per_s
    assert all(
        peaks[low] <= peaks[high] for low, high in (("fp32", "fp16"), ("bf16", "fp8")) if {low, high} <= set(peaks)
    )
    assert ("bf16" in device.features) == ("bf16" in peaks) or not peaks
    assert ("fp8" in device.features) == ("fp8" in peaks) or not peaks


def test_no_name_stands_in_two_files():
    names = [name for file in FOLDER.glob("*.yaml") for name in yaml.safe_load(file.read_text())["devices"]]
    assert sorted(names) == sorted(device_names())


@pytest.mark.parametrize(("name", "precision", "wrong", "right"), CONFLICTS)
def test_peaks_are_dense_matrix_rates_with_fp32_accumulation(name, precision, wrong, right):
    peak = find_device(name).peak_flop_per_s[precision] / TERA
    assert peak == pytest.approx(right)
    assert peak != pytest.approx(wrong, rel=0.01)


@pytest.mark.parametrize(("name", "wrong", "right"), CAPACITIES)
def test_capacities_are_those_of_the_part(name, wrong, right):
    assert find_device(name).memory_bytes / GIB == right != wrong


def test_a100_capacity_is_in_gib_not_bytes():
    # calculon systems/a100_80e.json says 80e9 GiB; PyTorch prints a total capacity of 79.15 to 79.25 GiB
    assert 79.1 * GIB < find_device("A100-SXM4-80GB").usable_memory_bytes < 80 * GIB


def test_memory_bandwidth_of_a100_40_is_not_that_of_the_80_gb_card():
    assert find_device("A100-PCIE-40GB").memory_bandwidth_bytes_per_s == 1555e9
    assert find_device("A100-PCIE-80GB").memory_bandwidth_bytes_per_s == 1935e9


def test_h100_memory_is_not_that_of_its_host():
    # the SkyPilot catalog lists 204800 MiB for one provider's H100; the driver reports 81559 MiB
    assert 79 * GIB < find_device("H100-SXM5-80GB").usable_memory_bytes < 81559 * 2**20


def test_bf16_is_half_of_fp16_on_mi100_and_absent_before_ampere():
    mi100 = find_device("MI100").peak_flop_per_s
    assert mi100["bf16"] == pytest.approx(mi100["fp16"] / 2)
    for name in ("P100-SXM2-16GB", "V100-SXM2-32GB", "T4", "RTX-2080-Ti", "Titan-RTX"):
        assert "bf16" not in find_device(name).peak_flop_per_s


def test_a_part_without_published_peak_has_none():
    assert not find_device("H100-SXM-96GB-HBM2e-500W").peak_flop_per_s


def test_mi250x_is_two_devices():
    board, die = find_device("MI250X"), find_device("MI250X-GCD")
    assert 2 * die.memory_bytes == board.memory_bytes
    assert 2 * die.peak_flop_per_s["bf16"] == board.peak_flop_per_s["bf16"]


@pytest.mark.parametrize("name", ["A30", "A40", "A100-PCIE-80GB", "H100-PCIe", "H100-NVL", "RTX-3090", "RTX-A6000"])
def test_bridged_cards_have_a_fast_pair_and_no_further_link(name):
    device = find_device(name)
    assert device.link_bandwidth_bytes_per_s == 0 < device.pair_bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a100-sxm4-80gb", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM5-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("nvidia_h200", "H200-SXM-141GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_device_is_found_by_name_or_alias_in_any_case(written, name):
    assert find_device(written).name == name


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("A100-SMX4-80GB", "unknown device 'A100-SMX4-80GB'; did you mean 'A100-SXM4-80GB'?"),
        ("L40", "unknown device 'L40'; did you mean 'L40S'?"),
        ("zzz", "unknown device 'zzz'"),
        ("", "unknown device ''"),
        (
            "V100",
            "unknown device 'V100'; did you mean 'V100-PCIE-16GB' or 'V100-SXM2-16GB' or 'V100-SXM2-32GB'?",
        ),
    ],
)
def test_unknown_device_is_refused_with_the_nearest_name(written, message):
    with pytest.raises(SpecError) as error:
        find_device(written)
    assert str(error.value) == message


@pytest.mark.parametrize("written", ["NVIDIA L40S-48C", "xA100-SXM4-80GB", "L4S", "H100-SXM5", "A100"])
def test_no_device_is_found_by_a_part_of_its_name(written):
    with pytest.raises(SpecError):
        find_device(written)


def test_a_very_long_name_is_refused_quickly_and_briefly():
    with pytest.raises(SpecError) as error:
        find_device("A100" * 100_000)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", [name for name in device_names() if find_device(name).peak_flop_per_s])
def test_every_device_can_be_changed_in_a_cluster_file(name):
    text = (
        "hetplan: cluster/v1\nname: x\n"
        f"devices:\n  Mine: {{like: {name}, tdp: 123 W}}\n"
        "groups:\n  g: {device: Mine, nodes: 1, devices_per_node: 1}\n"
    )
    device = cluster_from_text(text, "x.yaml", find_device).group("g").device
    assert (device.tdp_w, device.peak_flop_per_s) == (123, find_device(name).peak_flop_per_s)


def test_no_card_offers_all_of_its_memory():
    for name in device_names():
        card = find_device(name)
        assert card.usable_memory_bytes < card.memory_bytes, name
