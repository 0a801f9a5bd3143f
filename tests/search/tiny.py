"""Random instances small enough to try every layout: clusters, models, batches and limits for hypothesis."""

from dataclasses import replace

from hypothesis import strategies as st

from hetplan.costs.prices import price
from hetplan.plan.limits import Limits
from hetplan.specs.cluster import Cluster, Device, Group, Network
from hetplan.specs.model import Activation, Attention, Experts, Layer, Linear, Loss, Model, Module, Norm, Table
from hetplan.specs.workload import Workload

GIB = 2.0**30


def device(name, peak, *, watts=300.0, links=3e11):
    return Device(
        name=name,
        vendor="NVIDIA",
        memory_bytes=80 * GIB,
        usable_memory_bytes=80 * GIB,
        memory_bandwidth_bytes_per_s=peak / 150,
        peak_flop_per_s=dict.fromkeys(("bf16", "fp16", "fp32"), peak),
        link_bandwidth_bytes_per_s=links,
        pair_bandwidth_bytes_per_s=links,
        pcie_bandwidth_bytes_per_s=2e10,
        tdp_w=watts,
        features=frozenset({"bf16"}),
    )


def llama_like(num_decoders, *, width=4096, heads=4, vocab=32000, tied=False):
    decoder = Layer(
        kind="decoder",
        name="decoder",
        width=width,
        operators=(
            Norm(name="norm1", width=width, params=width),
            Linear(name="qkv", inputs=width, outputs=3 * width),
            Attention(
                name="attention",
                num_heads=heads,
                num_kv_heads=heads,
                qk_head_dim=width // heads,
                value_head_dim=width // heads,
            ),
            Linear(name="out", inputs=width, outputs=width, split="row"),
            Norm(name="norm2", width=width, params=width),
            Linear(name="up", inputs=width, outputs=4 * width),
            Activation(name="gelu", width=4 * width),
            Linear(name="down", inputs=4 * width, outputs=width, split="row"),
        ),
    )
    tokens = Table(name="tokens", rows=vocab, width=width)
    logits = Linear(name="logits", inputs=width, outputs=vocab, tied=tied)
    embedding = Layer(kind="embedding", name="embedding", width=width, operators=(tokens,))
    head = Layer(kind="head", name="head", width=vocab, operators=(logits, Loss(name="loss", vocab=vocab)))
    chain = (embedding, *[decoder] * num_decoders, head)
    return Model(name="toy", modules=(Module(name="text", layers=chain),), max_seq_len=1 << 20)


def mixture(num_decoders, *, num_experts, width=2048):
    """Return a chain whose decoder layers route tokens to experts."""
    dense = llama_like(num_decoders, width=width)
    experts = Experts(
        name="experts",
        num_experts=num_experts,
        top_k=2,
        router=Linear(name="router", inputs=width, outputs=num_experts, split="none"),
        linears=(
            Linear(name="up", inputs=width, outputs=2 * width),
            Linear(name="down", inputs=2 * width, outputs=width, split="row"),
        ),
        activation=Activation(name="silu", width=2 * width),
    )
    chain = dense.modules[0].layers
    decoder = replace(chain[1], operators=(*chain[1].operators[:5], experts))
    chain = tuple(decoder if layer.kind == "decoder" else layer for layer in chain)
    return replace(dense, modules=(Module(name="text", layers=chain),))


def groups(draw, num_devices, num_types):
    """Return groups of unlike devices, a few devices each; some share one host, some lack a device."""
    left, found = num_devices, []
    one_host = draw(st.sampled_from([False, False, False, True]))
    for kind in range(num_types):
        count = left if kind == num_types - 1 else draw(st.integers(1, left - (num_types - 1 - kind)))
        left -= count
        per_node = count if one_host else draw(st.sampled_from([n for n in (1, 2, 3, 4) if count % n == 0]))
        names = ("host",) if one_host else tuple(f"g{kind}-{i}" for i in range(count // per_node))
        peak = draw(st.sampled_from([60e12, 125e12, 312e12]))
        found.append(
            Group(
                name=f"g{kind}",
                device=device(f"D{kind}", peak, links=draw(st.sampled_from([0.0, 3e11]))),
                nodes=names,
                devices_per_node=per_node,
                site=f"s{kind}",
                usable_memory_bytes=draw(st.sampled_from([6, 10, 16, 24, 80])) * GIB,
                usd_per_device_hour=draw(st.sampled_from([0.5, 1.0, 3.0, None])),
                domain_nodes=draw(st.sampled_from([1, 1, 1, 2])),
                left_out=draw(st.sampled_from([frozenset(), frozenset(), frozenset({(0, 0)})])),
            )
        )
    return tuple(found)


def cluster(draw, num_devices, num_types):
    found = groups(draw, num_devices, num_types)
    names = tuple(group.name for group in found)
    joins = [names] if draw(st.booleans()) else [names[:2], names[-2:]]
    networks = tuple(
        Network(
            name=f"net{number}",
            joins=joined,
            kind="ethernet",
            bandwidth_bytes_per_s=draw(st.sampled_from([1e8, 3e9, 1e11])),
            latency_s=draw(st.sampled_from([1e-6, 1e-3])),
            shared=draw(st.booleans()),
        )
        for number, joined in enumerate(joins if draw(st.sampled_from([True] * 5 + [False])) else [names[:1]])
    )
    return Cluster(name="tiny", groups=found, networks=networks)


LIMITS = (
    {},
    {"max_shapes": 1},
    {"uniform_degrees": True},
    {"uniform_cuts": True, "uniform_microbatches": True},
    {"uniform_degrees": True, "uniform_cuts": True, "uniform_microbatches": True},
    {"min_decoder_layers": 1},
    {"equal_cuts": True},
)
RECOMPUTES = (("none",), ("full",), ("none", "full"), ("selective", "full"), ("none", "selective", "full"))
SHARDINGS = (("none",), ("optimizer",), ("gradients",), ("full",), ("none", "full"))
SCHEDULES = (("1f1b",), ("1f1b",), ("gpipe",), ("zero-bubble",), ("interleaved",), ("1f1b", "gpipe"))


@st.composite
def limits(draw, with_experts):
    return Limits(
        tp=draw(st.sampled_from([(1,), (1, 2), None])),
        cp=draw(st.sampled_from([(1,), (1,), (1, 2)])),
        ep=draw(st.sampled_from([None, (1, 2)])) if with_experts else (1,),
        pp=draw(st.sampled_from([None, None, (1, 2), (2,)])),
        stage_dp=draw(st.sampled_from([(1,), (1,), (1, 2)])),
        microbatch=draw(st.sampled_from([(1,), (2,), (1, 2), None])),
        recompute=draw(st.sampled_from(RECOMPUTES)),
        sharding=draw(st.sampled_from(SHARDINGS)),
        schedules=draw(st.sampled_from(SCHEDULES)),
        exclude=draw(st.sampled_from([frozenset()] * 5 + [frozenset({"g0"})])),
        **draw(st.sampled_from(LIMITS)),
    )


@st.composite
def instances(draw, max_devices=6, max_layers=6):
    """A cost model and limits; most are small enough to try every layout."""
    num_devices = draw(st.integers(1, max_devices))
    num_types = draw(st.integers(1, min(3, num_devices)))
    num_experts = draw(st.sampled_from([0, 0, 0, 4]))
    num_decoders = draw(st.integers(1, max_layers - 2))
    if num_experts:
        model = mixture(num_decoders, num_experts=num_experts)
    else:
        model = llama_like(num_decoders, tied=draw(st.booleans()))
    workload = Workload(
        seq_len=draw(st.sampled_from([512, 2048, 4096])),
        global_batch=draw(st.integers(1, 6)),
    )
    return price(cluster(draw, num_devices, num_types), model, workload), draw(limits(bool(num_experts)))


@st.composite
def busy_instances(draw):
    """Instances whose best plan mostly has several replicas: short chains, roomy devices, larger batches."""
    num_devices = draw(st.integers(2, 5))
    num_types = draw(st.integers(1, min(2, num_devices)))
    model = llama_like(draw(st.integers(1, 2)), width=1024, tied=draw(st.booleans()))
    found = cluster(draw, num_devices, num_types)
    roomy = tuple(
        replace(
            group,
            usable_memory_bytes=draw(st.sampled_from([4, 80])) * GIB,
            speed=draw(st.sampled_from([0.01, 0.03, 1.0])),
        )
        for group in found.groups
    )
    space = Limits(
        tp=(1,),
        pp=draw(st.sampled_from([(1,), (2,), (1, 2)])),
        microbatch=(1,),
        recompute=draw(st.sampled_from([("none",), ("full",), ("none", "full")])),
        sharding=draw(st.sampled_from(SHARDINGS)),
        schedules=draw(st.sampled_from(SCHEDULES)),
    )
    workload = Workload(seq_len=draw(st.sampled_from([512, 4096])), global_batch=draw(st.integers(2, 8)))
    return price(replace(found, groups=roomy), model, workload), space


def shrink_limits(limits, step):
    """Return tighter limits, tighter with every step: fewer words to choose from, then shorter pipelines."""
    changes = [
        {"recompute": limits.recompute[-2:]},
        {"sharding": limits.sharding[-1:]},
        {"schedules": limits.schedules[-1:]},
        {"tp": (1,)},
        {"microbatch": limits.microbatch[-1:] if limits.microbatch else (1, 2)},
        {"stage_dp": (1,), "cp": (1,), "ep": (1,)},
        {"recompute": limits.recompute[-1:]},
        {"microbatch": (2,)},
        {"pp": (2,)},
        {"pp": (1,)},
    ]
    for change in changes[:step]:
        limits = replace(limits, **change)
    return limits, step >= len(changes)
