"""Plans of two modules run on four processes, and the same step on one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hetplan.plan.modules import ModuleLayout, Placement
from hetplan.runtime.modular import ModularRank
from hetplan.runtime.modular_batch import Division, Sample, divide, patches_of, text_of
from hetplan.runtime.modular_model import (
    Decoder,
    Tower,
    gradients_of,
    merge_of,
    modules_of,
    num_labels,
    sizes_of,
    start,
)
from hetplan.specs.model import Model
from hetplan.specs.read_model import model_from_text

TEXT = """hetplan: model/v1
name: small
style: gpt
modules:
  - {name: vision, hidden: 32, layers: 2, heads: 4, tokens: 16}
  - {name: language, hidden: 48, layers: 4, heads: 4, vocab: 64}
"""
RANKS = 4


def small_model(train: str = "") -> Model:
    return model_from_text(TEXT + train, Path("small.yaml"), lambda name: {})


def small_batch(count: int = 8, seed: int = 0) -> tuple[Sample, ...]:
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        images = tuple(int(size) for size in random.integers(1, 9, random.integers(0, 4)))
        samples.append(Sample(number=number, text=int(random.integers(2, 12)), images=images))
    return tuple(samples)


def loads_of(batch: tuple[Sample, ...]) -> np.ndarray:
    return np.array([[sum(sample.images) + 0.1, sample.length] for sample in batch], dtype=np.float64)


def two(encoder: tuple[int, int], language: tuple[int, int, int], count: int, samples: int) -> ModuleLayout:
    """Return a layout: (first rank, dp) of the encoder, (first rank, pp, dp) of the language model."""
    return ModuleLayout(
        placements=(
            Placement(modules=("vision",), group="g", first_rank=encoder[0], dp=encoder[1]),
            Placement(modules=("language",), group="g", first_rank=language[0], pp=language[1], dp=language[2]),
        ),
        num_microbatches=count,
        samples=samples,
    )


def single(model: Model, batch: tuple[Sample, ...], seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of one process that runs sample after sample."""
    vision, words = (sizes_of(module) for module in modules_of(model))
    tower, decoder = Tower(vision, words.hidden, merge_of(model)), Decoder(words, 0, words.layers)
    start(tower, "tower", seed)
    start(decoder, "decoder", seed)
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(vision.trains or name.startswith("project"))
    labels = num_labels([sample.length for sample in batch], [sample.text for sample in batch])
    total = torch.zeros(())
    for sample in batch:
        merge = merge_of(model)
        rows = torch.zeros(0, words.hidden)
        if sample.images:
            rows = tower(patches_of(sample, merge, seed), [size * merge for size in sample.images])
        text = text_of(sample, words.vocab, seed)
        lengths = [sample.length]
        total = total + decoder.loss_sum(decoder(decoder.embed([rows], [text]), lengths), lengths, [text])
    (total / labels).backward()
    return float(total.detach() / labels), gradients_of(iter([("tower", tower), ("decoder", decoder)]))


def _work(rank: int, folder: str, jobs: list[tuple[Model, ModuleLayout, tuple[Sample, ...], Division]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found = []
    for model, layout, batch, division in jobs:
        own = ModularRank(model, layout, rank)
        loss = torch.tensor(own.step(batch, division))
        dist.all_reduce(loss)
        found.append((float(loss), own.gradients()))
        dist.barrier()
    torch.save(found, os.path.join(folder, f"rank-{rank}.pt"))
    dist.destroy_process_group()


def run_all(
    folder: Path, jobs: list[tuple[Model, ModuleLayout, tuple[Sample, ...], bool]]
) -> list[list[tuple[float, Mapping[str, torch.Tensor]]]]:
    """Return, by job, every rank's (loss of all, gradients); the last of a job: balanced or as samples come."""
    work = [
        (model, layout, batch, divide(batch, layout, loads_of(batch) if balanced else None))
        for model, layout, batch, balanced in jobs
    ]
    torch.set_num_threads(1)
    mp.start_processes(_work, args=(str(folder), work), nprocs=RANKS, join=True, start_method="fork")  # type: ignore[no-untyped-call]
    ranks = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)]
    return [[ranks[rank][i] for rank in range(RANKS)] for i in range(len(jobs))]
