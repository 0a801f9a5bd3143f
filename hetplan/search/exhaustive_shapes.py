"""Every replica a small cluster could run: shapes, cuts of the chain, ranges of microbatch counts.

A *shape* is a sequence of meshes (group and degrees of every stage) with `vpp` virtual stages a mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from hetplan.costs.prices import Prices
from hetplan.costs.records import StageOption
from hetplan.plan.limits import Limits
from hetplan.plan.program import held_counts
from hetplan.plan.records import ScheduleName
from hetplan.specs.workload import Recompute, Sharding

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of one stage on one group."""

    group: str
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        """Devices it takes."""
        return self.tp * self.cp * self.dp

    def option(self, microbatch: int, recompute: Recompute) -> StageOption:
        """Return the stage option this mesh is for microbatches of `microbatch` samples."""
        return StageOption(
            group=self.group,
            tp=self.tp,
            cp=self.cp,
            dp=self.dp,
            ep=self.ep,
            samples=microbatch // self.dp,
            recompute=recompute,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Meshes of a replica in the order microbatches pass them, with `vpp` virtual stages on each."""

    meshes: tuple[Mesh, ...]
    vpp: int = 1

    @property
    def num_stages(self) -> int:
        """Virtual stages."""
        return len(self.meshes) * self.vpp


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What is the same for the whole plan."""

    sharding: Sharding
    schedule: ScheduleName
    recomputes: tuple[Recompute, ...]
    alone: bool
    """One replica is the whole plan; else several share every layer."""
    first: bool
    """The first of the shardings allowed."""


def chain_cuts(prices: Prices, num_stages: int, limits: Limits) -> Ints:
    """Return every cut of the chain into non-empty stages that the limits on cuts allow, (cuts, num_stages + 1)."""
    chain = prices.model.chain
    decoders = np.concatenate([[0], np.cumsum([layer.kind == "decoder" for layer in chain])])
    inside = list(combinations(range(1, len(chain)), num_stages - 1))
    inner = np.array(inside, dtype=np.int64).reshape(len(inside), num_stages - 1)
    ends = np.zeros((len(inner), 1), dtype=np.int64)
    cuts = np.concatenate([ends, inner, ends + len(chain)], axis=1)
    held = np.diff(decoders[cuts], axis=1)
    keep = held.min(axis=1) >= limits.min_decoder_layers
    if limits.equal_cuts:
        keep &= held.min(axis=1) == held.max(axis=1)
    if limits.pinned_layers is not None:
        pinned = np.array(limits.pinned_layers)
        keep &= (held == pinned).all(axis=1) if len(pinned) == num_stages else False
    return np.asarray(cuts[keep])


def mesh_sequences(meshes: Sequence[Mesh], capacity: Mapping[str, int], longest: int) -> Iterator[tuple[Mesh, ...]]:
    """Yield every sequence of at most `longest` meshes that the free devices can hold at once."""
    left = dict(capacity)
    chosen: list[Mesh] = []

    def extend() -> Iterator[tuple[Mesh, ...]]:
        for mesh in meshes:
            if mesh.size > left[mesh.group]:
                continue
            left[mesh.group] -= mesh.size
            chosen.append(mesh)
            yield tuple(chosen)
            if len(chosen) < longest:
                yield from extend()
            chosen.pop()
            left[mesh.group] += mesh.size

    yield from extend()


@dataclass(frozen=True, slots=True, kw_only=True)
class CountClass:
    """A range of microbatch counts and what each virtual stage holds under it."""

    first_m: int
    end_m: int
    held: tuple[int, ...]


def count_classes(schedule: ScheduleName, pp: int, vpp: int, counts: range) -> tuple[CountClass, ...]:
    """Return ranges of microbatch counts, from many to few, that hold the same number on every virtual stage.

    With several virtual stages a rank only the least any of them can hold (one microbatch) is used: which of them
    peak together is left to the exact check.
    """
    if vpp > 1:
        return (CountClass(first_m=counts.start, end_m=counts.stop, held=(1,) * (pp * vpp)),)
    classes: list[CountClass] = []
    for m in reversed(counts):
        held = tuple(moments[0][0] for moments in held_counts(schedule, pp, m))
        if classes and classes[-1].held == held:
            classes[-1] = CountClass(first_m=m, end_m=classes[-1].end_m, held=held)
        else:
            classes.append(CountClass(first_m=m, end_m=m + 1, held=held))
    return tuple(classes)
