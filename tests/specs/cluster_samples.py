"""A small catalog and a cluster file that uses every key, for the tests of readers."""

from __future__ import annotations

from hetplan.errors import UsageError
from hetplan.specs.cluster import Device

GIB = 2.0**30


def _device(name: str, memory_gib: float, peaks: dict[str, float]) -> Device:
    return Device(
        name=name,
        vendor="NVIDIA",
        memory_bytes=memory_gib * GIB,
        usable_memory_bytes=(memory_gib - 2) * GIB,
        memory_bandwidth_bytes_per_s=2e12,
        peak_flop_per_s=peaks,
        link_bandwidth_bytes_per_s=300e9,
        pair_bandwidth_bytes_per_s=300e9,
        pcie_bandwidth_bytes_per_s=31e9,
        tdp_w=400.0,
        features=frozenset({"bf16", "flash_attention"}) if "bf16" in peaks else frozenset(),
        usd_per_hour=2.0,
    )


DEVICES = {
    "A100-SXM4-80GB": _device("A100-SXM4-80GB", 80, {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12}),
    "V100-SXM2-32GB": _device("V100-SXM2-32GB", 32, {"fp16": 125e12, "fp32": 15.7e12}),
}


def find_device(name: str) -> Device:
    """The device called `name`."""
    if name not in DEVICES:
        raise UsageError(f"unknown device '{name[:40]}'; did you mean 'A100-SXM4-80GB'?")
    return DEVICES[name]


FULL = """\
hetplan: cluster/v1
name: lab
devices:
  MyCard: {like: A100-SXM4-80GB, memory: 40 GiB, price: 1.5 USD/h}
  NewCard:
    memory: 48 GiB
    memory_bandwidth: 864 GB/s
    peak: {bf16: 181 TFLOP/s, fp16: 181 TFLOP/s}
    pcie_bandwidth: 31 GB/s
    tdp: 350 W
groups:
  a100:
    device: A100-SXM4-80GB
    nodes: 'a100-[01-02]'
    devices_per_node: 8
    site: east
    usable_memory: 76 GiB
    speed: 0.9
    price: 1.89 USD/h
    power_limit: 300 W
    domain_nodes: 2
    leave_out: ['a100-01:3', a100-02]
    host: {memory: 1 TiB, cores: 64, nvme_bandwidth: 6 GB/s, pcie_bandwidth: 25 GB/s}
  v100: {device: V100-SXM2-32GB, nodes: 4, devices_per_node: 8}
  mine: {device: MyCard, nodes: 1, devices_per_node: 2}
  new: {device: NewCard, nodes: mine-1, devices_per_node: 1}
networks:
  ib: {joins: [a100], kind: infiniband, bandwidth: 200 Gbit/s, latency: 3 us, nics_per_node: 4, oversubscription: 2.0}
  eth: {joins: [a100, v100, mine, new], kind: ethernet, bandwidth: 25 Gbit/s, latency: 30 us, shared: true, \
price: 0.02 USD/GB}
"""
