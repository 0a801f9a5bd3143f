"""Plans of layouts of one's own for a small cluster of CPU cores, written as files."""

from __future__ import annotations

from pathlib import Path

from hetplan.cli.inputs import WorkloadWords, load_job, plan_of
from hetplan.plan.estimate import estimate
from hetplan.plan.placement import place
from hetplan.plan.records import Layout
from hetplan.plan.text import plan_text

CLUSTER = """hetplan: cluster/v1
name: cores
devices:
  Core: {memory: 8 GiB, usable_memory: 7 GiB, memory_bandwidth: 100 GB/s, peak: {fp32: 1 TFLOP/s, bf16: 1 TFLOP/s},
    link_bandwidth: 2 GB/s, pair_bandwidth: 2 GB/s, pcie_bandwidth: 2 GB/s, tdp: 30 W, features: [bf16], vendor: CPU}
groups:
  a: {device: Core, nodes: 1, devices_per_node: 8}
networks:
  lo: {joins: [a], kind: ethernet, bandwidth: 10 Gbit/s, latency: 50 us}
"""
MODEL = """hetplan: model/v1
name: small
config: {model_type: gpt2, n_embd: 32, n_head: 4, n_layer: 8, n_positions: 64, vocab_size: 256}
"""


def write_plan(folder: Path, name: str, layout: Layout, *, seq_len: int = 32, precision: str = "fp32") -> Path:
    """Write cluster, model and the plan of a layout; return the plan's path."""
    cluster, model = folder / "cluster.yaml", folder / "model.yaml"
    if not cluster.exists():
        cluster.write_text(CLUSTER)
    if not model.exists():
        model.write_text(MODEL)
    words = WorkloadWords(seq_len=seq_len, global_batch=layout.num_samples, precision=precision)
    job = load_job(str(cluster), str(model), words, None)
    placed = place(layout, job.cluster)
    path = folder / name
    path.write_text(plan_text(plan_of(job, placed, estimate(placed, job.prices), None)))
    return path
