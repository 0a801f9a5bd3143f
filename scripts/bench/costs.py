"""How many stage options a second the cost model prices, for a chain of 96 equal decoder layers, embedding and head.

python scripts/bench/costs.py
"""

from __future__ import annotations

import itertools
import time

from hetplan.costs.prices import price
from hetplan.costs.records import ShardDegrees, StageOption
from hetplan.specs.cluster import Cluster, Device, Group, Network
from hetplan.specs.model import Activation, Attention, Layer, Linear, Loss, Model, Module, Norm, Table
from hetplan.specs.workload import RECOMPUTES, Workload


def main() -> None:
    """Price every option of a grid and print the rates."""
    options = [
        StageOption(group=group, tp=tp, cp=cp, samples=samples, recompute=recompute)
        for group, tp, cp, samples, recompute in itertools.product(
            ("a", "b", "c"), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64), RECOMPUTES
        )
    ]
    prices = price(_cluster(), _gpt(), Workload(seq_len=2048, global_batch=4096, precision="fp16"))
    prices.table(options)
    rounds = 10
    start = time.perf_counter()
    for _ in range(rounds):
        prices.table(options)
    elapsed = time.perf_counter() - start
    print(f"table: {rounds * len(options) / elapsed:,.0f} options/s ({len(options)} options, 98 layers)")
    some = options[:200]
    start = time.perf_counter()
    for option in some:
        prices.layers(option)
    print(f"layers, one by one: {len(some) / (time.perf_counter() - start):,.0f} options/s")
    start = time.perf_counter()
    for option in some:
        prices.memory_matrices(option, "optimizer", ShardDegrees(dense=8))
    print(f"memory matrices: {len(some) / (time.perf_counter() - start):,.0f} options/s")


def _cluster() -> Cluster:
    groups = tuple(
        Group(
            name=name,
            device=_device(name, tera * 1e12),
            nodes=tuple(f"{name}{i}" for i in range(128)),
            devices_per_node=8,
            site="main",
            usable_memory_bytes=80 * 2**30,
        )
        for name, tera in (("a", 989.0), ("b", 312.0), ("c", 125.0))
    )
    network = Network(
        name="ib", joins=("a", "b", "c"), kind="infiniband", bandwidth_bytes_per_s=25e9, latency_s=5e-6, nics_per_node=8
    )
    return Cluster(name="bench", groups=groups, networks=(network,))


def _device(name: str, peak: float) -> Device:
    return Device(
        name=name,
        vendor="any",
        memory_bytes=80 * 2**30,
        usable_memory_bytes=80 * 2**30,
        memory_bandwidth_bytes_per_s=2e12,
        peak_flop_per_s={"fp16": peak},
        link_bandwidth_bytes_per_s=300e9,
        pair_bandwidth_bytes_per_s=300e9,
        pcie_bandwidth_bytes_per_s=31e9,
        tdp_w=400,
        features=frozenset() if name == "c" else frozenset({"flash_attention"}),
    )


def _gpt(width: int = 12288, vocab: int = 51200) -> Model:
    decoder = Layer(
        kind="decoder",
        name="decoder",
        width=width,
        dropout=True,
        operators=(
            Norm(name="norm1", width=width, params=2 * width),
            Linear(name="qkv", inputs=width, outputs=3 * width, bias=True),
            Attention(name="attention", num_heads=96, num_kv_heads=96, qk_head_dim=128, value_head_dim=128),
            Linear(name="out", inputs=width, outputs=width, bias=True, split="row"),
            Norm(name="norm2", width=width, params=2 * width),
            Linear(name="up", inputs=width, outputs=4 * width, bias=True),
            Activation(name="gelu", width=4 * width),
            Linear(name="down", inputs=4 * width, outputs=width, bias=True, split="row"),
        ),
    )
    table = Table(name="tokens", rows=vocab, width=width)
    head = (Norm(name="norm", width=width, params=2 * width), Linear(name="head", inputs=width, outputs=vocab))
    layers = (
        Layer(kind="embedding", name="embedding", width=width, operators=(table,)),
        *[decoder] * 96,
        Layer(kind="head", name="head", width=width, operators=(*head, Loss(name="loss", vocab=vocab))),
    )
    return Model(name="gpt", modules=(Module(name="lm", layers=layers),))


if __name__ == "__main__":
    main()
