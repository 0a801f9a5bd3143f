"""Clusters and models that users' cases speak of, made of catalog devices and published sizes."""

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.specs.cluster import Cluster, Group, Network
from hetplan.specs.model import Activation, Attention, Layer, Linear, Loss, Model, Module, Norm, Table
from hetplan.specs.workload import Workload

GIB = 2.0**30
MIB = 2.0**20


def group(name, device, nodes, per_node, **changes):
    found = find_device(device) if isinstance(device, str) else device
    names = tuple(nodes) if not isinstance(nodes, int) else tuple(f"{name}-{k}" for k in range(nodes))
    fields = {"usable_memory_bytes": found.usable_memory_bytes, "site": "main", **changes}
    return Group(name=name, device=found, nodes=names, devices_per_node=per_node, **fields)


def network(name, joins, kind="ethernet", *, gbit=100.0, **changes):
    fields = {"latency_s": 10e-6, "bandwidth_bytes_per_s": gbit * 1e9 / 8, **changes}
    return Network(name=name, joins=tuple(joins), kind=kind, **fields)


def cluster(*groups, networks=None):
    joined = (network("net", [g.name for g in groups], "infiniband", gbit=200.0, nics_per_node=4),)
    return Cluster(name="case", groups=groups, networks=joined if networks is None else tuple(networks))


def prices_of(where, model, *, seq_len=4096, batch=16, precision="bf16", **fields):
    found = find_model(model) if isinstance(model, str) else model
    return price(where, found, Workload(seq_len=seq_len, global_batch=batch, precision=precision, **fields))


def gpt(*, layers, width, heads, vocab, ffn=None, tied=False, biases=False, seq=2048):
    """A GPT of stated sizes; layer norms have weight and bias, linears have biases only where asked."""
    inner = ffn or 4 * width
    decoder = Layer(
        kind="decoder",
        name="decoder",
        width=width,
        operators=(
            Norm(name="norm1", width=width, params=2 * width),
            Linear(name="qkv", inputs=width, outputs=3 * width, bias=biases),
            Attention(
                name="attention",
                num_heads=heads,
                num_kv_heads=heads,
                qk_head_dim=width // heads,
                value_head_dim=width // heads,
            ),
            Linear(name="out", inputs=width, outputs=width, split="row", bias=biases),
            Norm(name="norm2", width=width, params=2 * width),
            Linear(name="up", inputs=width, outputs=inner, bias=biases),
            Activation(name="gelu", width=inner),
            Linear(name="down", inputs=inner, outputs=width, split="row", bias=biases),
        ),
    )
    tokens = Table(name="tokens", rows=vocab, width=width)
    norm = Norm(name="norm", width=width, params=2 * width)
    logits = Linear(name="logits", inputs=width, outputs=vocab, split="vocab", tied=tied)
    embedding = Layer(kind="embedding", name="embedding", width=width, operators=(tokens,))
    head = Layer(kind="head", name="head", width=vocab, operators=(norm, logits, Loss(name="loss", vocab=vocab)))
    chain = (embedding, *[decoder] * layers, head)
    return Model(name=f"gpt-{layers}x{width}", modules=(Module(name="text", layers=chain),), max_seq_len=seq)


def decoders(model, replica):
    """Decoder layers of each virtual stage."""
    kinds = [layer.kind for layer in model.chain]
    return [kinds[stage.first_layer : stage.end_layer].count("decoder") for stage in replica.stages]
