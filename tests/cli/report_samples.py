"""Small records to print: a two-stage replica on two groups, with made-up but consistent figures."""

from __future__ import annotations

from dataclasses import replace

from hetplan.costs.records import MemoryUse
from hetplan.plan.records import Estimate, Layout, Proof, Replica, Stage, StageEstimate, TimeParts
from hetplan.report.layouts import Setting
from hetplan.search.records import Alternative, Candidate, SearchResult
from hetplan.specs.cluster import Cluster, Device, Group, Network
from hetplan.specs.model import Layer, Model, Module
from hetplan.specs.workload import Workload

GIB = 2.0**30

DEVICE = Device(
    name="Card",
    vendor="Maker",
    memory_bytes=80 * GIB,
    usable_memory_bytes=79 * GIB,
    memory_bandwidth_bytes_per_s=2e12,
    peak_flop_per_s={"bf16": 312e12},
    link_bandwidth_bytes_per_s=300e9,
    pair_bandwidth_bytes_per_s=300e9,
    pcie_bandwidth_bytes_per_s=31e9,
    tdp_w=400.0,
    features=frozenset({"bf16"}),
)


def group(name: str, num_nodes: int, left_out: frozenset[tuple[int, int]] = frozenset()) -> Group:
    return Group(
        name=name,
        device=DEVICE,
        nodes=tuple(f"{name}-{i:02d}" for i in range(1, num_nodes + 1)),
        devices_per_node=8,
        site="main",
        usable_memory_bytes=79 * GIB,
        left_out=left_out,
    )


CLUSTER = Cluster(
    name="lab",
    groups=(group("fast", 2), group("slow", 4)),
    networks=(Network(name="eth", joins=("fast", "slow"), kind="ethernet", bandwidth_bytes_per_s=3e9, latency_s=3e-5),),
)
CHAIN = (
    Layer(kind="embedding", name="embedding", width=64, operators=()),
    *(Layer(kind="decoder", name="decoder", width=64, operators=()) for _ in range(32)),
    Layer(kind="head", name="head", width=64, operators=()),
)
MODEL = Model(name="toy", modules=(Module(name="text", layers=CHAIN),))

SETTING = Setting(cluster=CLUSTER, model=MODEL, workload=Workload(seq_len=8192, global_batch=256))

LAYOUT = Layout(
    replicas=(
        Replica(
            stages=(
                Stage(group="fast", first_layer=0, end_layer=22, tp=8, devices=((0, 16),)),
                Stage(group="slow", first_layer=22, end_layer=34, tp=4, recompute="full", devices=((0, 8),)),
            ),
            microbatch=2,
            num_microbatches=64,
            copies=2,
        ),
    ),
    sharding="optimizer",
)


def memory(total_gib: float) -> MemoryUse:
    part = total_gib * GIB / 7
    return MemoryUse(
        weights_bytes=part,
        gradients_bytes=part,
        optimizer_bytes=part,
        activations_bytes=part,
        logits_bytes=part,
        buffers_bytes=part,
        reserve_bytes=part,
    )


def stage(index: int, group_name: str, total_gib: float) -> StageEstimate:
    return StageEstimate(
        replica=0,
        stage=index,
        group=group_name,
        forward_s=0.010,
        backward_s=0.020,
        busy_s=1.92,
        in_flight=2 - index,
        memory=memory(total_gib),
        capacity_bytes=79 * GIB,
    )


ESTIMATE = Estimate(
    step_s=2.0,
    parts=TimeParts(compute_s=1.5, tp_s=0.2, cp_s=0.0, ep_s=0.0, pp_s=0.05, bubble_s=0.15, dp_s=0.08, optimizer_s=0.02),
    replica_s=(1.9,),
    dp_overlapped_s=0.3,
    tokens_per_s=1.31e6,
    mfu=0.412,
    usd_per_step=0.0123,
    joules_per_step=12_345.0,
    stages=(stage(0, "fast", 60.0), stage(1, "slow", 30.0)),
    origins={"Card": "datasheet", "eth": "assumed"},
)
SLOWER = replace(ESTIMATE, step_s=2.2, parts=replace(ESTIMATE.parts, bubble_s=0.30, tp_s=0.25))
BEST = Candidate(layout=LAYOUT, estimate=ESTIMATE)
PROOF = Proof(objective="time", value=2.0, bound=1.99, status="feasible", effort=1.5)
RESULT = SearchResult(
    best=BEST,
    proof=PROOF,
    runners_up=(Candidate(layout=replace(LAYOUT, sharding="none"), estimate=SLOWER),),
    alternatives=(
        Alternative(name="best uniform", candidate=Candidate(layout=LAYOUT, estimate=SLOWER)),
        Alternative(name="only slow", candidate=None, reason="12.5 GiB short on stage 0"),
    ),
    hetero_efficiency=0.97,
    dropped={"memory": 12, "tp beyond a node": 30},
    space="1f1b, tp within a node",
    search_s=0.8,
)
