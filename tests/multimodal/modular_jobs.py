"""Small jobs of several modules for these tests."""

from __future__ import annotations

from pathlib import Path

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model_config
from hetplan.costs.modules import ModulePrices
from hetplan.costs.prices import price
from hetplan.costs.samples import draw_samples, module_features
from hetplan.plan.module_time import Assign, Draws
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster
from hetplan.specs.data import Data
from hetplan.specs.model import Model
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.read_data import data_from_text
from hetplan.specs.read_model import model_from_text
from hetplan.specs.workload import Workload


def cluster_of(nodes: int, device: str = "H100-SXM5-80GB", per_node: int = 8) -> Cluster:
    text = f"""hetplan: cluster/v1
name: test
groups:
  g: {{device: {device}, nodes: {nodes}, devices_per_node: {per_node}}}
networks:
  ib: {{joins: [g], kind: infiniband, bandwidth: 400 Gbit/s, latency: 3 us, nics_per_node: {per_node}}}
"""
    return cluster_from_text(text, "cluster.yaml", find_device)


def model_of(text: str) -> Model:
    return model_from_text("hetplan: model/v1\n" + text, Path("model.yaml"), find_model_config)


def data_of(text: str) -> Data:
    return data_from_text("hetplan: data/v1\n" + text, "data.yaml")


def job(
    cluster: Cluster,
    model: Model,
    data: Data,
    *,
    batch: int,
    draws: int = 64,
    seed: int = 0,
    assign: Assign = "arrival",
) -> tuple[ModulePrices, Draws]:
    samples = draw_samples(data, batch * draws, seed)
    features = module_features(model, data, samples)
    mean = {name: values.mean(axis=0) for name, values in features.items()}
    seq_len = max(1, round(float(samples.language_sf[:, 1].mean())))
    prices = price(cluster, model, Workload(seq_len=seq_len, global_batch=batch), Calibration())
    shaped = {name: values.reshape(draws, batch, -1) for name, values in features.items()}
    return ModulePrices(prices, mean), Draws(features_dbf=shaped, assign=assign)
