"""Small clusters and plans to emit, made of catalog devices."""

from dataclasses import replace

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.emit.emit import emit
from hetplan.emit.records import Job
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.cluster import Cluster, Group, Network
from hetplan.specs.workload import Workload

GIB = 2.0**30


def group(name, device, nodes, per_node, **changes):
    found = find_device(device)
    names = tuple(nodes) if not isinstance(nodes, int) else tuple(f"{name}-{k + 1}" for k in range(nodes))
    fields = {"usable_memory_bytes": found.usable_memory_bytes, "site": "main", **changes}
    return Group(name=name, device=found, nodes=names, devices_per_node=per_node, **fields)


def network(name, joins, kind="ethernet", *, gbit=25.0, nics=1):
    return Network(
        name=name,
        joins=tuple(joins),
        kind=kind,
        bandwidth_bytes_per_s=gbit * 1e9 / 8,
        latency_s=1e-5,
        nics_per_node=nics,
    )


def cluster(*groups, networks=None):
    ethernet = (network("eth", [each.name for each in groups]),)
    return Cluster(name="sample", groups=groups, networks=ethernet if networks is None else tuple(networks))


def stage(name, first, end, **changes):
    return Stage(group=name, first_layer=first, end_layer=end, **changes)


def replica(*stages, microbatch=1, num_microbatches=4, **changes):
    return Replica(stages=tuple(stages), microbatch=microbatch, num_microbatches=num_microbatches, **changes)


def layout(*replicas, **changes):
    return Layout(replicas=tuple(replicas), **changes)


def job(where, plan, model="llama-3.2-1b", **workload):
    """A plan of llama-3.2-1b (18 layers of the chain) unless another model is named."""
    fields = {"seq_len": 4096, "global_batch": plan.num_samples, "precision": "bf16", **workload}
    placed = place(plan, where)
    return Job(
        layout=placed,
        cluster=where,
        model=find_model(model),
        workload=Workload(**fields),
        plan_text="hetplan: plan/v1\n",
        plan_sha256="ab" * 32,
        peak_bytes={(r, s): 10 * GIB for r, row in enumerate(placed.replicas) for s in range(row.pp)},
    )


def files(work, engine="hetplan", launcher="torchrun"):
    return emit(work, engine, launcher)[0]


def notes(work, engine="hetplan", launcher="torchrun"):
    return emit(work, engine, launcher)[1]


def pair():
    """Two groups of one node with 8 cards each: an A100 stage and a V100 stage."""
    return cluster(group("a100", "A100-SXM4-80GB", 1, 8), group("v100", "V100-SXM2-32GB", 1, 8))


def two_stages(**changes):
    """The pair's plan: 11 layers and the embedding on the A100s, 5 and the head on the V100s; tp 2, 4 copies."""
    return layout(replica(stage("a100", 0, 12, tp=2), stage("v100", 12, 18, tp=2), copies=4), **changes)


def data_parallel(*groups, **changes):
    """The whole model on every device of some groups."""
    rows = [replica(stage(each.name, 0, 18), copies=each.num_devices) for each in groups]
    return layout(*rows, **changes)


def with_precision(work, word):
    return replace(work, workload=replace(work.workload, precision=word))
