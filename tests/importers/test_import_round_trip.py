"""A plan emitted for a trainer and imported again is the same layout, layer for layer and device for device."""

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.emit.emit import emit
from hetplan.emit.records import Job
from hetplan.plan.imported import imported_grid, uneven_layout
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.importers.facts import SourceText
from hetplan.specs.importers.layout_settings import read_settings
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.workload import Workload

CLUSTER = """\
hetplan: cluster/v1
name: x
groups:
  a: {device: A100-SXM4-80GB, nodes: 2, devices_per_node: 8}
  l: {device: L40S, nodes: 1, devices_per_node: 8}
networks:
  eth: {joins: [a, l], kind: ethernet, bandwidth: 100 Gbit/s, latency: 30 us}
"""
MODEL = "llama-3-8b"
"""32 decoder layers; 34 with embedding and head."""


def prices(batch):
    cluster = cluster_from_text(CLUSTER, "x.yaml", find_device)
    return price(cluster, find_model(MODEL), Workload(seq_len=4096, global_batch=batch, precision="bf16"))


def emitted(costs, layout, engine, name="common.sh"):
    gib = 2.0**30
    job = Job(
        layout=layout,
        cluster=costs.cluster,
        model=costs.model,
        workload=costs.workload,
        plan_text="hetplan: plan/v1\n",
        plan_sha256="ab" * 32,
        peak_bytes={(r, s): 10 * gib for r, row in enumerate(layout.replicas) for s in range(row.pp)},
    )
    return read_settings(SourceText(name=name, text=emit(job, engine)[0][name]))


@pytest.mark.parametrize(
    "grid",
    [
        Grid(tp=4, pp=2, layers_per_stage=(18, 14)),
        Grid(tp=2, pp=4, layers_per_stage=(8, 8, 8, 8), sharding="optimizer", recompute="full"),
        Grid(tp=2, pp=4, layers_per_stage=(9, 9, 9, 5), micro_batch=2),
        Grid(tp=4, pp=2, vpp=2, layers_per_stage=(7, 9, 9, 7), recompute="selective"),
        Grid(tp=8, pp=1, layers_per_stage=(32,)),
    ],
)
def test_megatron(grid):
    costs = prices(32)
    layout = grid_layout(costs, grid)
    assert grid_layout(costs, imported_grid(emitted(costs, layout, "megatron"), 32, None)) == layout


def test_flagscale():
    costs = prices(16)
    stages = (
        Stage(group="a", first_layer=0, end_layer=13, tp=8),
        Stage(group="a", first_layer=13, end_layer=25, tp=8),
        Stage(group="l", first_layer=25, end_layer=34, tp=4, dp=2),
    )
    layout = place(Layout(replicas=(Replica(stages=stages, microbatch=2, num_microbatches=8),)), costs.cluster)
    settings = emitted(costs, layout, "flagscale", "train-hetero.yaml")
    assert uneven_layout(settings, costs, ["a", "l"]) == layout


def test_hexiscale():
    costs = prices(12)
    cut, other = (0, 21, 34), (0, 17, 34)
    big = Replica(
        stages=tuple(Stage(group="a", first_layer=cut[i], end_layer=cut[i + 1], tp=4) for i in range(2)),
        microbatch=2,
        num_microbatches=4,
    )
    small = Replica(
        stages=tuple(
            Stage(group=name, first_layer=other[i], end_layer=other[i + 1], tp=tp)
            for i, (name, tp) in enumerate((("a", 2), ("l", 4)))
        ),
        microbatch=1,
        num_microbatches=4,
    )
    layout = place(Layout(replicas=(big, small)), costs.cluster)
    assert uneven_layout(emitted(costs, layout, "hexiscale"), costs, ["a", "a", "a", "l"]) == layout
