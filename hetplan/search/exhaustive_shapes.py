"""Every replica a small cluster could run: shapes, cuts of the chain, and what a stage costs at least.

A *shape* is a sequence of meshes (group and degrees of every stage) with `vpp` virtual stages a mesh. Stage times are
the least any recomputation that fits in memory allows, so bounds made of them hold for every choice of recomputation.

Array legend: O mesh options, K held microbatches, N layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, ShardDegrees, StageOption
from hetplan.plan.limits import Limits
from hetplan.plan.placement import places_of
from hetplan.plan.program import held_counts
from hetplan.plan.records import ScheduleName
from hetplan.plan.rules_model import degree_errors
from hetplan.specs.model import Module
from hetplan.specs.workload import Recompute, Sharding

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
LENIENT = 1.0 + 1e-9
"""Memory filters forgive this much rounding; the exact check decides."""


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
class StageTable:
    """Least seconds of every span on every mesh, and the first recomputation that fits, by held microbatches.

    Shapes: `forward_s`, `backward_s`, `input_s` (O, K, N + 1, N + 1), infinite where nothing fits; `mode` alike, -1
    where nothing fits; `boundary_s` (O, O, N + 1), seconds from a stage that ends before layer `j`. `input_s` is the
    part of a backward pass that the previous stage waits for when the schedule splits it, else `backward_s`.
    """

    held: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    mode: Ints
    boundary_s: Floats


def stage_table(
    prices: Prices,
    meshes: Sequence[Mesh],
    microbatch: int,
    context: Context,
    held: Sequence[int],
    degrees: ShardDegrees,
) -> StageTable:
    """Return what every span of layers costs on every mesh when nothing more is known of the plan."""
    num_layers = len(prices.model.chain)
    shape = (len(meshes), len(held), num_layers + 1, num_layers + 1)
    forward, backward, inward = (np.full(shape, np.inf) for _ in range(3))
    mode = np.full(shape, -1, dtype=np.int64)
    for o, mesh in enumerate(meshes):
        possible = _divisible(prices, mesh.tp)
        for r, recompute in reversed(list(enumerate(context.recomputes))):
            option = mesh.option(microbatch, recompute)
            costs = prices.layers(option)
            fixed, per_microbatch = prices.memory_matrices(option, context.sharding, degrees)
            room = prices.capacity_bytes(mesh.group) * LENIENT
            late_s = costs.weight_gradient_s if context.schedule == "zero-bubble" else 0.0
            parts = (costs.forward_total_s, costs.backward_total_s, costs.backward_total_s - late_s)
            spans = [_spans(part) for part in parts]
            for k, num_held in enumerate(held):
                fits = possible & (fixed + num_held * per_microbatch <= room)
                for table, seconds in zip((forward, backward, inward), spans, strict=True):
                    table[o, k] = np.where(fits, np.minimum(seconds, table[o, k]), table[o, k])
                mode[o, k] = np.where(fits, r, mode[o, k])
    return StageTable(
        held=tuple(held),
        forward_s=forward,
        backward_s=backward,
        input_s=inward,
        mode=mode,
        boundary_s=_boundaries(prices, meshes, microbatch, context.recomputes[0]),
    )


def _divisible(prices: Prices, tp: int) -> Flags:
    """Return which spans tp can cut: an embedding or a head alone takes degrees that decoder layers do not."""
    alone = [replace(prices.model, modules=(Module(name=layer.name, layers=(layer,)),)) for layer in prices.model.chain]
    refused_l = np.array([float(bool(degree_errors(model, tp=tp))) for model in alone])
    return np.asarray(_spans(refused_l) == 0)


def _spans(seconds_l: Floats) -> Floats:
    """Return the sum over layers `i` to `j - 1` at [i, j]."""
    ends = np.concatenate([[0.0], np.cumsum(seconds_l)])
    return np.asarray(ends[None, :] - ends[:, None])


def _boundaries(prices: Prices, meshes: Sequence[Mesh], microbatch: int, recompute: Recompute) -> Floats:
    num_layers = len(prices.model.chain)
    options = [mesh.option(microbatch, recompute) for mesh in meshes]
    seconds = np.zeros((len(meshes), len(meshes), num_layers + 1))
    for o, sender in enumerate(options):
        for q, receiver in enumerate(options):
            ways = _ways(prices, meshes[o], meshes[q])
            for layer in range(num_layers - 1):
                found = (prices.boundary_s(sender, receiver, layer, same_node=near) for near in ways)
                seconds[o, q, layer + 1] = min(found, default=np.inf)
    return seconds


def _ways(prices: Prices, sender: Mesh, receiver: Mesh) -> tuple[bool, ...]:
    """Return whether two meshes can lie near each other (in one domain), apart, both, or not exist at once."""
    places = places_of(prices)
    first, second = (places[mesh.group].domain_d for mesh in (sender, receiver))
    if sender.group == receiver.group:
        needed = 2 if sender.size == receiver.size else sender.size + receiver.size
        near = int(np.unique(first, return_counts=True)[1].max()) >= needed
    else:
        near = bool(np.isin(first, second).any())
    apart = len(np.unique(np.concatenate([first, second]))) > 1
    return tuple(way for way, possible in ((True, near), (False, apart)) if possible)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountClass:
    """A range of microbatch counts and what each virtual stage holds under it."""

    first_m: int
    end_m: int
    held: tuple[int, ...]


def count_classes(schedule: ScheduleName, pp: int, vpp: int, most_m: int) -> tuple[CountClass, ...]:
    """Return ranges of microbatch counts, from many to few, that hold the same number on every virtual stage.

    With several virtual stages a rank only the least any of them can hold (one microbatch) is used: which of them
    peak together is left to the exact check.
    """
    if vpp > 1:
        return (CountClass(first_m=1, end_m=most_m + 1, held=(1,) * (pp * vpp)),)
    classes: list[CountClass] = []
    for m in range(most_m, 0, -1):
        held = tuple(counts[0][0] for counts in held_counts(schedule, pp, m))
        if classes and classes[-1].held == held:
            classes[-1] = CountClass(first_m=m, end_m=classes[-1].end_m, held=held)
        else:
            classes.append(CountClass(first_m=m, end_m=m + 1, held=held))
    return tuple(classes)
