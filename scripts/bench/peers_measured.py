"""Real runs beside hetplan's own estimate from measured layers alone (runs of Strati 2025, Sailor, SOSP).

21 runs on up to 256 GH200 (tensor parallelism 4, one node a stage) and mixed Titan RTX, RTX 3090 and 2080. Layers,
sizes and links are Sailor's tables; every rank sends whole activations over its own link, so fits of one device a node
are taken; pipelines run in lock step. A run counts for time; for memory where its flag says so. The memory a process
holds besides, 4.5 GB, is fitted to these runs.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import peers_sailor
from peers_run import DATA

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model_config
from hetplan.costs.prices import Prices, price
from hetplan.plan.estimate import estimate
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.importers.facts import read_source
from hetplan.specs.importers.layer_times import Settings, layer_calibration, layer_model_text, together
from hetplan.specs.importers.layer_times_csv import read_table
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.read_model import model_from_text
from hetplan.specs.workload import Workload

RUNS = DATA / "sailor_measured.json"
SETTINGS = Settings(
    bytes_per_param=24.0, reserve_bytes={1: 4.5e9}, update="stage", pipeline="lock-step", hidden=0.0, bucket_bytes=5e8
)
ONE_DEVICE = (("send_gpus", "1"), ("recv_gpus", "1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    run: str
    model: str
    batch: int
    measured_s: float
    estimated_s: float
    measured_bytes: float
    estimated_bytes: float
    memory_counts: bool

    @property
    def time_error(self) -> float:
        """Estimate over measurement, less one."""
        return self.estimated_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Estimate over measurement, less one."""
        return self.estimated_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the rows say together."""

    time_error: float
    memory_error: float
    right_pairs: int
    pairs: int


def rows() -> list[Row]:
    """Return all runs with their estimates."""
    tables = (peers_sailor.TIMES, peers_sailor.SIZES, peers_sailor.LINKS)
    profile = together([read_table(read_source(path), ONE_DEVICE) for path in tables])
    found = []
    for run in json.loads(RUNS.read_text(encoding="utf-8"))["runs"]:
        calibration = layer_calibration(profile, SETTINGS, run["model"]).calibration
        text = layer_model_text(profile, Settings(), run["model"], 2048)
        model = model_from_text(text, Path("model.yaml"), find_model_config)
        cluster = cluster_from_text(_cluster_text(run), "cluster.yaml", find_device)
        layout = _layout(run)
        workload = Workload(seq_len=2048, global_batch=layout.num_samples, precision="fp32")
        found.append(_row(run, layout, price(cluster, model, workload, calibration)))
    return found


def _row(run: dict[str, Any], layout: Layout, prices: Prices) -> Row:
    told = estimate(layout, prices)
    return Row(
        run=run["run"],
        model=run["model"],
        batch=run["global_batch"],
        measured_s=run["measured_s"],
        estimated_s=told.step_s,
        measured_bytes=run["peak_bytes"],
        estimated_bytes=max(stage.memory.total_bytes for stage in told.stages),
        memory_counts=run["memory_counts"],
    )


def _cluster_text(run: dict[str, Any]) -> str:
    """Return a cluster that has room for a run and more memory than it needs."""
    needed: Counter[str] = Counter()
    nodes: dict[str, int] = {}
    for _, _, ranks in run["stages"]:
        for device, tp, of_node, count in ranks:
            needed[device] += tp * count
            nodes[device] = of_node
    lines = ["hetplan: cluster/v1", "name: measured", "devices:"]
    lines += [f"  {name}: {{like: A100-SXM4-40GB, memory: 500 GiB, usable_memory: 500 GiB}}" for name in needed]
    lines.append("groups:")
    for name, count in needed.items():
        size = f"nodes: {-(-count // nodes[name])}, devices_per_node: {nodes[name]}"
        lines.append(f"  {name.lower()}: {{device: {name}, {size}, site: {peers_sailor.ZONE}}}")
    joined = ", ".join(name.lower() for name in needed)
    lines += ["networks:", f"  net: {{joins: [{joined}], kind: ethernet, bandwidth: 16 Gbit/s, latency: 50 us}}"]
    return "\n".join(lines) + "\n"


def _layout(run: dict[str, Any]) -> Layout:
    written = [
        [(first, end, device, tp) for device, tp, _, count in ranks for _ in range(count)]
        for first, end, ranks in run["stages"]
    ]
    copies = Counter(tuple(chain) for chain in zip(*written, strict=True))
    share = run["microbatch"] * sum(copies.values())
    return Layout(
        replicas=tuple(
            Replica(
                stages=tuple(
                    Stage(group=device.lower(), first_layer=first, end_layer=end, tp=tp)
                    for first, end, device, tp in chain
                ),
                microbatch=run["microbatch"],
                num_microbatches=max(1, -(-run["global_batch"] // share)),
                copies=count,
            )
            for chain, count in copies.items()
        )
    )


def summary(found: list[Row]) -> Summary:
    """Return mean errors, and how many pairs of one model and batch at one place stand in the right order."""
    memory = [abs(row.memory_error) for row in found if row.memory_counts]
    pairs = [
        (a, b)
        for a, b in combinations(found, 2)
        if (a.model, a.batch, a.run.split("/")[0]) == (b.model, b.batch, b.run.split("/")[0])
    ]
    right = sum((a.measured_s < b.measured_s) == (a.estimated_s < b.estimated_s) for a, b in pairs)
    return Summary(
        time_error=sum(abs(row.time_error) for row in found) / len(found),
        memory_error=sum(memory) / len(memory),
        right_pairs=right,
        pairs=len(pairs),
    )
