"""DT-FM's networks (Yuan 2022, NeurIPS, arXiv:2206.01288; github.com/DS3Lab/DT-FM, MIT): placements of 8 x 8 devices.

Its objective in seconds: the slowest exchange of a stage, `max over members i of sum over peers j of
2 (delay + gradient / (replicas x bandwidth))`, and twice the open path over all stages, each hop the slowest pair of
the best matching, `delay + activation / bandwidth`. It is worked out here from the pipelines hetplan returns, device by
device.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers_run import DATA, Run, hetplan

NETWORKS = DATA / "dtfm_networks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One network."""

    name: str
    devices: int
    genetic_s: float | None
    """What the genetic search reaches."""
    value_s: float
    """The objective, from the pipelines."""
    stated_s: float
    bound_s: float
    status: str
    run: Run


def networks() -> list[dict[str, Any]]:
    """Return the networks: devices by class, delay and bandwidth between classes."""
    found: list[dict[str, Any]] = json.loads(NETWORKS.read_text(encoding="utf-8"))["networks"]
    return found


def devices_of(network: dict[str, Any], times: int) -> list[int]:
    """Return the class of each device, with `times` as many devices a class."""
    return [number for number, count in enumerate(network["devices"]) for _ in range(count * times)]


def run_network(network: dict[str, Any], folder: Path, times: int, replicas: int, effort: float) -> Result:
    """Search one network, given as a table of all pairs of nodes."""
    task = json.loads(NETWORKS.read_text(encoding="utf-8"))["task"]
    classes = devices_of(network, times)
    slug = f"{network['name']}-{len(classes)}"
    rows = [
        f"n-{i + 1},n-{j + 1},{network['delay_ms'][a][b]} ms,{network['bandwidth_gbps'][a][b]} Gbit/s"
        for i, a in enumerate(classes)
        for j, b in enumerate(classes[:i])
    ]
    (folder / f"{slug}.csv").write_text("\n".join(["from,to,latency,bandwidth", *rows]) + "\n", encoding="utf-8")
    cluster, model = folder / f"{slug}.yaml", folder / f"{slug}.model.yaml"
    cluster.write_text(
        f"hetplan: cluster/v1\nname: {slug}\ngroups:\n"
        f"  n: {{device: A100-SXM4-80GB, nodes: {len(classes)}, devices_per_node: 1}}\nnetworks:\n"
        f"  wan: {{joins: [n], kind: ethernet, bandwidth: 1 Gbit/s, latency: 1 s, pairs: {slug}.csv}}\n",
        encoding="utf-8",
    )
    gradient, activation = int(task["gradient_bytes"]), int(task["activation_bytes"])
    stages = len(classes) // replicas
    model.write_text(
        f"hetplan: model/v1\nname: gpt3-xl\nvolumes: {{stages: {stages}, replicas: {replicas},"
        f" gradient: {gradient} B, activation: {activation} B}}\n",
        encoding="utf-8",
    )
    run = hetplan("search", cluster, model, "--json", "--effort", effort)
    answer = json.loads(run.stdout)
    return Result(
        name=network["name"],
        devices=len(classes),
        genetic_s=network["genetic_search_s"] if times == 1 else None,
        value_s=objective_s(network, classes, answer["pipelines"], (gradient, activation)),
        stated_s=answer["value"],
        bound_s=answer["bound"],
        status=answer["status"],
        run=run,
    )


def objective_s(
    network: dict[str, Any], classes: list[int], pipelines: list[list[str]], volumes: tuple[int, int]
) -> float:
    """Return DT-FM's objective of pipelines of devices, matched as they stand."""
    gradient, activation = volumes
    places = [[int(name.removeprefix("n-")) - 1 for name in chain] for chain in pipelines]
    if len({place for chain in places for place in chain}) != sum(map(len, places)):
        raise ValueError("a device stands in two places")

    def pair(i: int, j: int) -> tuple[float, float]:
        a, b = classes[i], classes[j]
        return network["delay_ms"][a][b] * 1e-3, network["bandwidth_gbps"][a][b] * 1e9 / 8

    exchange = 0.0
    for stage in zip(*places, strict=True):
        for i in stage:
            spent = 0.0
            for j in stage:
                if i != j:
                    delay, rate = pair(i, j)
                    spent += 2 * (delay + gradient / (len(stage) * rate))
            exchange = max(exchange, spent)
    path = 0.0
    for before, after in zip(list(zip(*places, strict=True)), list(zip(*places, strict=True))[1:], strict=False):
        links = [pair(i, j) for i, j in zip(before, after, strict=True)]
        path += max(delay + activation / rate for delay, rate in links)
    return exchange + 2 * path
