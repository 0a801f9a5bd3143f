"""A job of several modules, ready to price: cluster, model, workload and draws from its data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetplan.costs.modules import ModulePrices
from hetplan.costs.prices import Prices
from hetplan.costs.samples import TOKENS, draw_samples, module_features
from hetplan.errors import UsageError
from hetplan.plan.module_time import Assign, Draws
from hetplan.specs.data import Data
from hetplan.specs.model import Layer, Model
from hetplan.specs.workload import Workload

DRAWS = 64
"""Batches drawn by default: the mean of a step then has an eighth of its spread as standard error."""
MOST_SAMPLES = 4_000_000


SAMPLES_OF_A_MEAN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How batches are drawn, and how their samples go to shards."""

    num_draws: int = DRAWS
    seed: int = 0
    assign: Assign = "arrival"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleJob:
    """What a module layout is priced against."""

    prices: ModulePrices
    draws: Draws
    data: Data


def module_job(prices: Prices, data: Data, sampling: Sampling | None = None) -> ModuleJob:
    """Return a job; the workload's sequence length is not used, the data's lengths are.

    Raises:
        UsageError: the data does not say what an encoder reads, or asks for more samples than can be drawn.
    """
    asked = sampling or Sampling()
    batch, num_draws = prices.workload.global_batch, asked.num_draws
    if batch * num_draws > MOST_SAMPLES:
        raise UsageError(f"{num_draws} draws of {batch} samples are more than {MOST_SAMPLES:,}: draw fewer")
    samples = draw_samples(data, batch * num_draws, asked.seed)
    features = module_features(prices.model, data, samples)
    shaped = {name: values.reshape(num_draws, batch, -1) for name, values in features.items()}
    mean = {name: values.mean(axis=0) for name, values in features.items()}
    return ModuleJob(
        prices=ModulePrices(prices, mean), draws=Draws(features_dbf=shaped, assign=asked.assign), data=data
    )


def mean_tokens(data: Data) -> int:
    """Return about how many tokens a sample of the data has at the language model."""
    return max(1, round(float(draw_samples(data, SAMPLES_OF_A_MEAN, 0).language_sf[:, TOKENS].mean())))


def with_mean_tokens(job: ModuleJob) -> tuple[Model, Workload]:
    """Return model and workload whose every sample is the mean one of the data."""
    prices = job.prices.prices
    mean = {name: float(values[..., TOKENS].mean()) for name, values in job.draws.features_dbf.items()}
    modules = []
    for module in prices.model.modules:
        tokens = max(1, round(mean[module.name]))
        made: dict[int, Layer] = {}
        for layer in module.layers:
            stated = layer.tokens_per_sample is not None
            made.setdefault(id(layer), replace(layer, tokens_per_sample=tokens) if stated else layer)
        modules.append(replace(module, layers=tuple(made[id(layer)] for layer in module.layers)))
    lengths = [mean[module.name] for module in prices.model.modules if module.layers[-1].tokens_per_sample is None]
    seq_len = max(1, round(float(np.max(lengths)))) if lengths else prices.workload.seq_len
    return replace(prices.model, modules=tuple(modules)), replace(prices.workload, seq_len=seq_len)
