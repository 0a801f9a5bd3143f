"""How much the cost model prices in a second of one core, for a chain of 96 equal decoder layers, embedding and head.

    python scripts/bench/costs.py

*layouts, closed form*: whole layouts (tp, pp, microbatch, recompute, group, number of microbatches), layer costs of
every option included: `sum of the stages + (m - 1) x slowest stage` with the stages' passes summed over even cuts.
Seconds are CPU seconds, which a busy machine changes less than wall time.
"""

from __future__ import annotations

import itertools
import time

import numpy as np

from hetplan.costs.prices import Prices, price
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
    start = time.process_time()
    for _ in range(rounds):
        prices.table(options)
    elapsed = time.process_time() - start
    print(f"table: {rounds * len(options) / elapsed:,.0f} options/s ({len(options)} options, 98 layers)")
    some = options[:200]
    start = time.process_time()
    for option in some:
        prices.layers(option)
    print(f"layers, one by one: {len(some) / (time.process_time() - start):,.0f} options/s")
    start = time.process_time()
    for option in some:
        prices.memory_matrices(option, "optimizer", ShardDegrees(dense=8))
    print(f"memory matrices: {len(some) / (time.process_time() - start):,.0f} options/s")
    start = time.process_time()
    count = closed_forms(price(_cluster(), _gpt(), prices.workload), options)
    print(f"layouts, closed form: {count / (time.process_time() - start):,.0f} layouts/s ({count} layouts)")


def closed_forms(prices: Prices, options: list[StageOption]) -> int:
    """Return how many layouts were priced: every option at every depth and number of microbatches."""
    costs = prices.table(options)
    seconds_ol = costs.forward_total_s + costs.backward_total_s
    before_ol = np.concatenate([np.zeros((len(options), 1)), np.cumsum(seconds_ol, axis=1)], axis=1)
    num_microbatches_m = np.array([2.0**k for k in range(11)])
    count = 0
    for pp in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 96):
        cuts = np.linspace(1, seconds_ol.shape[1] - 1, pp + 1).astype(int)
        cuts[0], cuts[-1] = 0, seconds_ol.shape[1]
        stage_s_os = np.diff(before_ol[:, cuts], axis=1)
        step_s_om = stage_s_os.sum(axis=1)[:, None] + (num_microbatches_m - 1) * stage_s_os.max(axis=1)[:, None]
        count += step_s_om.size
    return count


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
