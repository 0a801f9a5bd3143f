"""Small clusters and models for tests of the cost model; device figures are those of public datasheets."""

from __future__ import annotations

from dataclasses import replace

from hetplan.specs.calibration import Calibration, DeviceConstants, NetworkConstants
from hetplan.specs.cluster import Cluster, Device, Group, Network, NetworkKind
from hetplan.specs.model import Activation, Attention, Layer, Linear, Loss, Model, Module, Norm, Table

GIB = 2**30
MIB = 2**20


def device(name: str, *, peaks: dict, memory_gib: float, memory_gb_per_s: float, link: float, pair: float, tdp: float):
    flash = "bf16" in peaks
    return Device(
        name=name,
        vendor="NVIDIA",
        memory_bytes=memory_gib * GIB,
        usable_memory_bytes=memory_gib * GIB,
        memory_bandwidth_bytes_per_s=memory_gb_per_s * 1e9,
        peak_flop_per_s={precision: tera * 1e12 for precision, tera in peaks.items()},
        link_bandwidth_bytes_per_s=link * 1e9,
        pair_bandwidth_bytes_per_s=pair * 1e9,
        pcie_bandwidth_bytes_per_s=31e9,
        tdp_w=tdp,
        features=frozenset({"bf16", "flash_attention"}) if flash else frozenset(),
    )


A100 = device(
    "A100",
    peaks={"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312},
    memory_gib=80,
    memory_gb_per_s=2039,
    link=300,
    pair=300,
    tdp=400,
)
H100 = device(
    "H100",
    peaks={"fp32": 67, "fp16": 989, "bf16": 989, "fp8": 1979},
    memory_gib=80,
    memory_gb_per_s=3350,
    link=450,
    pair=450,
    tdp=700,
)
V100 = device("V100", peaks={"fp32": 15.7, "fp16": 125}, memory_gib=32, memory_gb_per_s=900, link=150, pair=50, tdp=300)
L4 = device(
    "L4", peaks={"fp16": 121, "bf16": 121, "fp8": 242}, memory_gib=24, memory_gb_per_s=300, link=0, pair=0, tdp=72
)


def group(name: str, card: Device = A100, *, nodes: int | tuple[str, ...] = 1, per_node: int = 8, **fields) -> Group:
    names = tuple(f"{name}-{i}" for i in range(nodes)) if isinstance(nodes, int) else nodes
    plain = {"site": "main", "usable_memory_bytes": card.usable_memory_bytes}
    return Group(name=name, device=card, nodes=names, devices_per_node=per_node, **(plain | fields))


def network(name: str, *joins: str, gbit: float, kind: NetworkKind = "infiniband", **fields) -> Network:
    plain = {"latency_s": 5e-6}
    return Network(name=name, joins=joins, kind=kind, bandwidth_bytes_per_s=gbit / 8 * 1e9, **(plain | fields))


def cluster(*groups: Group, networks: tuple[Network, ...] = ()) -> Cluster:
    return Cluster(name="sample", groups=groups, networks=networks)


def exact(*cards: Device, **fields) -> Calibration:
    """Constants under which hand computation is short: every fraction 1, no latency, no overhead."""
    plain = {
        "gemm_peak_fraction": 1.0,
        "gemm_half_flop": 0.0,
        "misaligned_penalty": 0.0,
        "attention_fraction": 1.0,
        "memory_fraction": 1.0,
        "layer_overhead_s": 0.0,
        "link_fraction": 1.0,
        "pcie_fraction": 1.0,
        "link_latency_s": 0.0,
        "memory_overhead_fraction": 0.0,
        "reserve_bytes": 0.0,
        "origin": "measured",
    }
    constants = DeviceConstants(**(plain | fields))
    names = ("ib", "roce", "eth", "wan")
    return Calibration(
        devices={card.name: constants for card in cards or (A100,)},
        networks={name: NetworkConstants(bandwidth_fraction=1.0, latency_s=0.0) for name in names},
    )


def gpt_layer(hidden: int, heads: int, *, ffn: int | None = None, dropout: bool = True) -> Layer:
    inner = ffn or 4 * hidden
    return Layer(
        kind="decoder",
        name="decoder",
        width=hidden,
        dropout=dropout,
        operators=(
            Norm(name="norm1", width=hidden, params=2 * hidden),
            Linear(name="qkv", inputs=hidden, outputs=3 * hidden, bias=True),
            Attention(
                name="attention",
                num_heads=heads,
                num_kv_heads=heads,
                qk_head_dim=hidden // heads,
                value_head_dim=hidden // heads,
            ),
            Linear(name="out", inputs=hidden, outputs=hidden, bias=True, split="row"),
            Norm(name="norm2", width=hidden, params=2 * hidden),
            Linear(name="up", inputs=hidden, outputs=inner, bias=True),
            Activation(name="gelu", width=inner),
            Linear(name="down", inputs=inner, outputs=hidden, bias=True, split="row"),
        ),
    )


def gpt(layers: int, hidden: int, heads: int, *, vocab: int = 51200, positions: int = 2048, dropout: bool = True):
    embedding = Layer(
        kind="embedding",
        name="embedding",
        width=hidden,
        dropout=dropout,
        operators=(
            Table(name="tokens", rows=vocab, width=hidden),
            Table(name="positions", rows=positions, width=hidden, split="none"),
        ),
    )
    head = Layer(
        kind="head",
        name="head",
        width=vocab,
        operators=(
            Norm(name="norm", width=hidden, params=2 * hidden),
            Linear(name="logits", inputs=hidden, outputs=vocab, split="vocab", tied=True),
            Loss(name="loss", vocab=vocab),
        ),
    )
    blocks = (gpt_layer(hidden, heads, dropout=dropout),) * layers
    return Model(name="gpt", modules=(Module(name="lm", layers=(embedding, *blocks, head)),))


def one_layer(*operators, width: int = 1024, **fields) -> Model:
    """A chain of one decoder layer with the given operators."""
    layer = Layer(kind="decoder", name="only", width=width, operators=operators, **fields)
    return Model(name="toy", modules=(Module(name="toy", layers=(layer,)),))


def with_params(params: int, *, layers: int = 1) -> Model:
    """A chain whose layers hold `params` parameters in all, and nothing else."""
    each = one_layer(Norm(name="weights", width=1, params=params // layers), width=1).chain[0]
    return Model(name="weights", modules=(Module(name="weights", layers=(replace(each),) * layers),))
