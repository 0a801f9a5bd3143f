"""Samples of a batch, their made-up content, and which shard of each unit has which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetplan.balance import balance, make_problem
from hetplan.plan.modules import ModuleLayout
from hetplan.runtime.modular_model import PATCH_WIDTH
from hetplan.specs.data import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample's sizes; its content follows from its number."""

    number: int
    text: int
    images: tuple[int, ...]
    """Rows of each image at the decoder."""

    @property
    def length(self) -> int:
        """Rows at the decoder."""
        return self.text + sum(self.images)


def samples_of(rows: Sequence[Row], first_number: int = 0) -> tuple[Sample, ...]:
    """Return samples of rows of lengths."""
    return tuple(
        Sample(
            number=first_number + i,
            text=row.text,
            images=tuple(size for sizes in row.items.values() for size in sizes if size),
        )
        for i, row in enumerate(rows)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which sample is where: by microbatch, the samples (places in the batch) of every shard."""

    encoder: tuple[tuple[tuple[int, ...], ...], ...]
    language: tuple[tuple[tuple[int, ...], ...], ...]


def divide(
    batch: Sequence[Sample], layout: ModuleLayout, loads: np.ndarray[tuple[int, int], np.dtype[np.float64]] | None
) -> Division:
    """Return samples in the order they come (`loads` None), or balanced by their seconds (encoder, language)."""
    encoder, language = layout.placements
    count = layout.num_microbatches
    if loads is None:
        parts = [tuple(range(j * layout.samples, (j + 1) * layout.samples)) for j in range(count)]
        return Division(
            encoder=tuple(_runs(part, encoder.dp) for part in parts),
            language=tuple(_runs(part, language.dp) for part in parts),
        )
    found = balance(make_problem(loads, (count,) * language.dp)).bin_s
    by_shard = [
        tuple(tuple(np.flatnonzero(found == d * count + j).tolist()) for d in range(language.dp)) for j in range(count)
    ]
    encoders = []
    for shards in by_shard:
        members = np.array([s for shard in shards for s in shard], dtype=np.int64)
        if len(members) == 0:
            encoders.append(((),) * encoder.dp)
            continue
        own = balance(make_problem(loads[members, :1], (1,) * encoder.dp)).bin_s
        encoders.append(tuple(tuple(members[own == e].tolist()) for e in range(encoder.dp)))
    return Division(encoder=tuple(encoders), language=tuple(by_shard))


def _runs(part: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    width = len(part) // count
    return tuple(part[i * width : (i + 1) * width] for i in range(count))


def patches_of(sample: Sample, merge: int, seed: int) -> torch.Tensor:
    """Return the patches of a sample's images, the same on every rank."""
    source = torch.Generator().manual_seed(2 * (seed * 1_000_003 + sample.number))
    return torch.randn(sum(sample.images) * merge, PATCH_WIDTH, generator=source)


def text_of(sample: Sample, vocab: int, seed: int) -> torch.Tensor:
    """Return the words of a sample, the same on every rank."""
    source = torch.Generator().manual_seed(2 * (seed * 1_000_003 + sample.number) + 1)
    return torch.randint(vocab, (sample.text,), generator=source)
