"""A cost model made of simple tables, so that tests of plans can compute every expected number by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import LayerCosts, MemoryUse, SyncCost
from hetplan.specs.calibration import Calibration, Overlap
from hetplan.specs.cluster import Cluster, Device, Group, Network
from hetplan.specs.model import Activation, Attention, Experts, Layer, Linear, Loss, Model, Module, Norm, Table
from hetplan.specs.workload import Workload

GIB = 2.0**30


def device(name="Fast", vendor="NVIDIA", precisions=("bf16", "fp16", "fp32")):
    return Device(
        name=name,
        vendor=vendor,
        memory_bytes=80 * GIB,
        usable_memory_bytes=78 * GIB,
        memory_bandwidth_bytes_per_s=2e12,
        peak_flop_per_s=dict.fromkeys(precisions, 100000000000000.0),
        link_bandwidth_bytes_per_s=3e11,
        pair_bandwidth_bytes_per_s=3e11,
        pcie_bandwidth_bytes_per_s=3e10,
        tdp_w=400.0,
        features=frozenset({"bf16", "flash_attention"}),
    )


def group(name, nodes=2, per_node=8, **changes):
    plain = Group(
        name=name,
        device=changes.pop("device", device(name.upper())),
        nodes=tuple(f"{name}-{i + 1}" for i in range(nodes)),
        devices_per_node=per_node,
        site="main",
        usable_memory_bytes=78 * GIB,
        usd_per_device_hour=3.6,
    )
    return replace(plain, **changes)


def cluster(*groups, joins=None):
    names = tuple(g.name for g in groups)
    network = Network(name="eth", joins=joins or names, kind="ethernet", bandwidth_bytes_per_s=1.25e9, latency_s=3e-5)
    return Cluster(name="test", groups=groups, networks=(network,))


def decoder(num_heads=8, num_kv_heads=4, width=64, experts=0):
    feed_forward = (
        (
            Experts(
                name="experts",
                num_experts=experts,
                top_k=2,
                router=Linear(name="router", inputs=width, outputs=experts, split="none"),
                linears=(
                    Linear(name="up", inputs=width, outputs=4 * width),
                    Linear(name="down", inputs=4 * width, outputs=width, split="row"),
                ),
                activation=Activation(name="silu", width=4 * width),
            ),
        )
        if experts
        else (
            Linear(name="up", inputs=width, outputs=4 * width),
            Activation(name="silu", width=4 * width),
            Linear(name="down", inputs=4 * width, outputs=width, split="row"),
        )
    )
    return Layer(
        kind="decoder",
        name="decoder",
        width=width,
        operators=(
            Norm(name="norm", width=width, params=width),
            Attention(
                name="attention",
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                qk_head_dim=width // num_heads,
                value_head_dim=width // num_heads,
            ),
            *feed_forward,
        ),
    )


def model(num_decoders=6, *, tied=False, vocab=1000, width=64, **changes):
    layer = decoder(width=width, **changes)
    embedding = Layer(
        kind="embedding", name="embedding", width=width, operators=(Table(name="tokens", rows=vocab, width=width),)
    )
    head = Layer(
        kind="head",
        name="head",
        width=vocab,
        operators=(
            Linear(name="logits", inputs=width, outputs=vocab, split="column", tied=tied),
            Loss(name="loss", vocab=vocab),
        ),
    )
    chain = (embedding, *([layer] * num_decoders), head)
    return Model(name="toy", modules=(Module(name="text", layers=chain),))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the fake costs: per layer seconds of one sample at tp 1 on a group of speed 1."""

    forward_s: float = 1.0
    backward_s: float = 2.0
    weight_s: float = 1.0
    edge_forward_s: float = 0.0
    edge_backward_s: float = 0.0
    tp_s: float = 0.0
    near_s: float = 0.0
    far_s: float = 0.0
    """A boundary inside a node; between nodes."""
    reduce_s_per_param: float = 0.0
    gather_s_per_param: float = 0.0
    layer_gather_s: float = 0.0
    layer_reduce_s: float = 0.0
    optimizer_s_per_param: float = 0.0
    norm_s: float = 0.0
    saved_bytes: float = 1 * GIB
    weight_bytes_per_param: float = 2.0
    capacity_bytes: dict[str, float] = field(default_factory=dict)
    shared_lines: tuple[str, ...] = ()


class FakePrices(Prices):
    """Linear in layers and samples; everything hand-checkable."""

    def __init__(self, cluster, model, workload=None, rates=None, overlap=None):
        super().__init__(
            cluster,
            model,
            workload or Workload(seq_len=128, global_batch=8),
            Calibration(overlap=overlap or Overlap()),
        )
        self.rates = rates or Rates()

    def layers(self, option):
        kinds = [layer.kind for layer in self.model.chain]
        edge = np.array([kind in ("embedding", "head") for kind in kinds])
        scale = option.samples / option.tp / option.cp / self.cluster.group(option.group).speed
        again = 1.0 if option.recompute == "full" else 0.0
        r = self.rates
        forward = np.where(edge, r.edge_forward_s, r.forward_s) * scale
        backward = np.where(edge, r.edge_backward_s, r.backward_s) * scale + again * forward
        zero = np.zeros(len(kinds))
        tp = np.where(edge, 0.0, r.tp_s) * option.samples if option.tp > 1 else zero
        dense, expert = self._params()
        return LayerCosts(
            forward_s=forward,
            backward_s=backward,
            weight_gradient_s=np.where(edge, 0.0, r.weight_s) * scale,
            recompute_s=again * forward,
            tp_forward_s=tp,
            tp_backward_s=tp,
            cp_forward_s=zero,
            cp_backward_s=zero,
            ep_forward_s=zero,
            ep_backward_s=zero,
            params=dense / option.tp,
            expert_params=expert / option.tp / option.ep,
            saved_bytes=np.where(edge, 0.0, r.saved_bytes) * option.samples / option.tp * (0.25 if again else 1.0),
            working_bytes=zero,
            logits_bytes=zero,
        )

    def _params(self):
        from hetplan.plan.stages import whole_params

        return whole_params(self)

    def table(self, options):
        raise NotImplementedError

    def memory(self, option, span, in_flight, sharding, degrees):
        costs = self.layers(option)
        layers = slice(*span)
        dense, expert = float(costs.params[layers].sum()), float(costs.expert_params[layers].sum())
        shared = dense / degrees.dense + expert / degrees.expert
        whole = dense + expert
        per_param = self.rates.weight_bytes_per_param
        return MemoryUse(
            weights_bytes=per_param * (shared if sharding == "full" else whole),
            gradients_bytes=per_param * (shared if sharding in ("full", "gradients") else whole),
            optimizer_bytes=6 * per_param * (whole if sharding == "none" else shared),
            activations_bytes=in_flight * float(costs.saved_bytes[layers].sum()),
            logits_bytes=0.0,
            buffers_bytes=0.0,
            reserve_bytes=1 * GIB,
        )

    def capacity_bytes(self, group):
        return self.rates.capacity_bytes.get(group, 78 * GIB)

    def boundary_s(self, sender, receiver, layer, *, same_node):
        return self.rates.near_s if same_node else self.rates.far_s

    def boundary_bytes(self, layer):
        return 1000.0

    def sync(self, params, holders, sharding, *, expert=False):
        if sum(h.num_ranks for h in holders) == 1:
            return SyncCost(reduce_s=0.0, gather_s=0.0)
        per_rank = params / min(h.tp for h in holders)
        return SyncCost(
            reduce_s=per_rank * self.rates.reduce_s_per_param,
            gather_s=0.0 if sharding == "none" else per_rank * self.rates.gather_s_per_param,
            shared_lines=self.rates.shared_lines,
        )

    def gathers_s(self, option, holders):
        count = len(self.model.chain)
        alone = sum(h.num_ranks for h in holders) == 1
        return (
            np.full(count, 0.0 if alone else self.rates.layer_gather_s),
            np.full(count, 0.0 if alone else self.rates.layer_reduce_s),
        )

    def norm_s(self, holders):
        return self.rates.norm_s if sum(h.num_ranks for h in holders) > 1 else 0.0

    def optimizer_s(self, group, params):
        return params * self.rates.optimizer_s_per_param

    def model_flop(self):
        return 1e12

    def peak_flop_per_s(self, group):
        return self.cluster.group(group).device.peak_flop_per_s["bf16"]

    def usd_per_s(self, group):
        usd = self.cluster.group(group).usd_per_device_hour
        return None if usd is None else usd / 3600

    def power_w(self, group, utilization):
        return 100.0 + 300.0 * utilization

    def origins(self):
        return {"FAST": "assumed"}
