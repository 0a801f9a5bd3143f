"""A small vision-language model on two processes: batches as samples come against balanced ones, with a prediction.

    python scripts/bench/modular.py [--steps 12] [--batch 16]

Needs torch. Both modules share two ranks (dp 2 each). A cost model is fitted to processor seconds of microbatches run
in arrival order; it then balances the next batches and predicts both step times. A step lasts as long as its slower
rank, in processor seconds, so what else the machine does changes little; the wall ratio is printed beside.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hetplan.balance import CostModel
from hetplan.plan.modules import ModuleLayout, Placement
from hetplan.runtime.modular import ModularRank
from hetplan.runtime.modular_batch import Division, Sample, divide
from hetplan.specs.model import Model
from hetplan.specs.read_model import model_from_text

RANKS = 2
TEXT = """hetplan: model/v1
name: small
style: gpt
modules:
  - {name: vision, hidden: 128, layers: 4, heads: 4, tokens: 16}
  - {name: language, hidden: 192, layers: 4, heads: 4, vocab: 512}
"""
LAYOUT = {
    "placements": (
        Placement(modules=("vision",), group="g", dp=2),
        Placement(modules=("language",), group="g", dp=2),
    ),
    "num_microbatches": 1,
}


def skewed(count: int, random: np.random.Generator, first: int) -> tuple[Sample, ...]:
    """Many short samples, few with many images."""
    found = []
    for i in range(count):
        images = tuple(
            int(np.clip(24 * random.lognormal(0.0, 1.1), 1, 384))
            for _ in range(int(random.choice([0, 1, 2, 8], p=[0.45, 0.3, 0.1, 0.15])))
        )
        text = int(np.clip(24 * random.lognormal(0.0, 0.9), 2, 400))
        found.append(Sample(number=first + i, text=text, images=images))
    return tuple(found)


def features(sample: Sample) -> np.ndarray:
    """Samples, tokens and squares of the encoder, then of the language model."""
    images = np.array(sample.images, dtype=np.float64)
    return np.array([len(images), images.sum(), (images**2).sum(), 1.0, sample.length, sample.length**2])


def loads(batch: tuple[Sample, ...], model: CostModel) -> np.ndarray:
    return np.maximum(model.loads(np.array([features(sample) for sample in batch])), 1e-9)


def work(rank: int, folder: str, jobs: list[tuple[Model, ModuleLayout, tuple[Sample, ...], Division]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    own = ModularRank(jobs[0][0], jobs[0][1], rank)
    rows = []
    for _, _, batch, division in jobs:
        dist.barrier()
        own.spent.encoder_s.clear()
        own.spent.language_s.clear()
        start_s = time.perf_counter()
        own.step(batch, division)
        wall_s = time.perf_counter() - start_s
        rows.append((sum(own.spent.encoder_s.values()), sum(own.spent.language_s.values()), wall_s))
    torch.save(torch.tensor(rows, dtype=torch.float64), f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def measured(jobs: list[tuple[Model, ModuleLayout, tuple[Sample, ...], Division]]) -> np.ndarray:
    """Return seconds, shape (ranks, steps, [encoder, language, wall])."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, args=(folder, jobs), nprocs=RANKS, join=True, start_method="fork")
        return np.stack([torch.load(Path(folder) / f"rank-{rank}.pt").numpy() for rank in range(RANKS)])


def shares(batch: tuple[Sample, ...], division: Division, rank: int) -> np.ndarray:
    """Return the features of what a rank does: the encoder's for its images, the language model's for its samples."""
    encoder = [features(batch[s])[:3] for s in division.encoder[0][rank]]
    language = [features(batch[s])[3:] for s in division.language[0][rank]]
    return np.concatenate([np.sum(encoder, axis=0) if encoder else np.zeros(3), np.sum(language, axis=0)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = model_from_text(TEXT, Path("small.yaml"), lambda name: {})
    layout = ModuleLayout(samples=asked.batch, **LAYOUT)  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    batches = [skewed(asked.batch, random, 1000 * i) for i in range(2 * asked.steps)]
    known, fresh = batches[: asked.steps], batches[asked.steps :]
    costs = CostModel(np.array([[1e-4, 1e-5, 1e-9, 0, 0, 0], [0, 0, 0, 1e-4, 1e-5, 1e-9]]), trust=100.0, outlier=1e3)
    come = [divide(batch, layout, None) for batch in known]
    seconds = measured([(model, layout, batch, own) for batch, own in zip(known, come, strict=True)])
    for _ in range(3):
        for step, (batch, own) in enumerate(zip(known, come, strict=True)):
            for rank in range(RANKS):
                if step:  # the first step also allocates
                    costs.observe(shares(batch, own, rank), seconds[rank, step, :2])
    plans = [divide(batch, layout, None) for batch in fresh]
    even = [divide(batch, layout, loads(batch, costs)) for batch in fresh]
    jobs = [
        (model, layout, batch, own)
        for pair in zip(fresh, plans, even, strict=True)
        for batch, own in ((pair[0], pair[1]), (pair[0], pair[2]))
    ]
    spent = measured([jobs[0], *jobs])[:, 1:]
    slowest = spent[:, :, :2].sum(axis=2).max(axis=0)
    expected = np.array(
        [max(float(costs.loads(shares(b, own, r)[None]).sum()) for r in range(RANKS)) for _, _, b, own in jobs]
    )
    wall = spent[:, :, 2].max(axis=0)
    print(f"processor seconds a step: {slowest[0::2].mean():.4f} as they come, {slowest[1::2].mean():.4f} balanced")
    print(f"ratio measured  {slowest[0::2].sum() / slowest[1::2].sum():.3f}")
    print(f"ratio predicted {expected[0::2].sum() / expected[1::2].sum():.3f}")
    print(f"ratio of wall clocks {wall[0::2].sum() / wall[1::2].sum():.3f}")


if __name__ == "__main__":
    main()
