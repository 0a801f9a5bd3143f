"""The whole space of a small instance as pools of columns, one pool for what a plan must share.

A plan has one sharding and one schedule; where the limits ask for uniform degrees, also one recomputation and one set
of degrees. Within a pool any columns may be combined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats
from hetplan.plan.limits import Limits
from hetplan.plan.placement import places_of
from hetplan.plan.rules_model import degree_errors, valid_ep
from hetplan.search.exhaustive_columns import Columns, ShapeBatch, batch_columns, concatenate
from hetplan.search.exhaustive_combine import Budget, DeviceVectors, Pool, Rules
from hetplan.search.exhaustive_shapes import (
    Context,
    CountClass,
    Mesh,
    Shape,
    chain_cuts,
    count_classes,
    mesh_sequences,
)
from hetplan.search.exhaustive_table import Condition, is_shared, stage_table
from hetplan.specs.workload import RECOMPUTES, SHARDINGS

Degrees = tuple[int, int, int, int]
SHAPE_VISITS = 10
COLUMN_VISITS = 5
"""A shape, and a cut of it, count as so many visits of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """One pool of columns with what turns its rows back into layouts."""

    context: Context
    shapes: tuple[Shape, ...]
    pool: Pool
    joules: Floats
    """What the devices of a column draw for computing one microbatch, beyond what they draw idle."""


def free_devices(prices: Prices, limits: Limits) -> dict[str, int]:
    """Return the devices of each group that may be used."""
    return {
        group.name: group.num_devices
        for group in prices.cluster.groups
        if group.name not in limits.exclude
        and group.num_devices
        and prices.workload.precision in group.device.peak_flop_per_s
    }


def microbatch_sizes(limits: Limits, global_batch: int) -> tuple[int, ...]:
    """Return the sizes the limits name, else the powers of two, up to the global batch."""
    sizes = limits.microbatch or [1 << k for k in range(global_batch.bit_length())]
    return tuple(sorted({size for size in sizes if 1 <= size <= global_batch}))


def mesh_options(prices: Prices, limits: Limits) -> tuple[Mesh, ...]:
    """Return every mesh some group has devices for and some layers can be cut by."""
    found: list[Mesh] = []
    for group, count in free_devices(prices, limits).items():
        domain = int(np.unique(places_of(prices)[group].domain_d, return_counts=True)[1].max())
        most_tp = min(count, domain) if limits.tp_within_node else count
        for tp in limits.tp or range(1, most_tp + 1):
            if tp <= most_tp:
                degrees = _degrees(prices, limits, count // tp)
                found.extend(Mesh(group=group, tp=tp, cp=cp, dp=dp, ep=ep) for cp, dp, ep in degrees)
    return tuple(found)


def _degrees(prices: Prices, limits: Limits, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (cp, dp, ep); a stage's own dp beyond `stage_dp` is there for expert parallelism only."""
    model, seq_len = prices.model, prices.workload.seq_len
    wanted_ep = [ep for ep in valid_ep(model) if limits.ep is None or ep in limits.ep]
    for cp in limits.cp:
        if degree_errors(model, cp=cp, seq_len=seq_len):
            continue
        for dp in range(1, most // cp + 1):
            for ep in wanted_ep:
                if (dp * cp) % ep == 0 and (dp in limits.stage_dp or ep > 1):
                    yield cp, dp, ep


def spaces(prices: Prices, limits: Limits, budget: Budget) -> list[Space]:
    """Return all pools of the space; all shapes are counted before any is priced.

    Raises:
        BudgetSpentError: there are more columns than the budget allows.
    """
    free = free_devices(prices, limits)
    budget.spend(math.prod(count + 1 for count in free.values()) ** 2 // 10)
    meshes = mesh_options(prices, limits)
    lister = _Lister(prices, limits, budget)
    listed = [lister.shapes(context, chosen) for context, chosen in _contexts(limits, meshes)]
    return [space for batches in listed if (space := _space(prices, limits, batches)) is not None]


def _contexts(limits: Limits, meshes: Sequence[Mesh]) -> Iterator[tuple[Context, tuple[Mesh, ...]]]:
    recomputes = tuple(mode for mode in RECOMPUTES if mode in limits.recompute)
    shardings = tuple(word for word in SHARDINGS if word in limits.sharding)
    for sharding, schedule, alone in product(shardings, limits.schedules, (True, False)):
        first = sharding == shardings[0]
        context = Context(sharding=sharding, schedule=schedule, recomputes=recomputes, alone=alone, first=first)
        if not limits.uniform_degrees:
            yield context, tuple(meshes)
            continue
        for degrees in sorted({_degrees_of(mesh) for mesh in meshes}):
            equal = tuple(mesh for mesh in meshes if _degrees_of(mesh) == degrees)
            yield from ((replace(context, recomputes=(mode,)), equal) for mode in recomputes)


def _degrees_of(mesh: Mesh) -> Degrees:
    return mesh.tp, mesh.cp, mesh.dp, mesh.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """The shapes of one context for one microbatch size, by (stages, virtual stages a mesh)."""

    context: Context
    size: int
    counts: range
    meshes: tuple[Mesh, ...]
    shapes: Mapping[tuple[int, int], Sequence[Shape]]


class _Lister:
    """Lists shapes and counts their cuts against the budget."""

    def __init__(self, prices: Prices, limits: Limits, budget: Budget) -> None:
        self._batch = prices.workload.global_batch
        self._num_layers = len(prices.model.chain)
        self._limits = limits
        self._budget = budget
        self._free = free_devices(prices, limits)
        self._sequences: dict[tuple[Mesh, ...], list[tuple[Mesh, ...]]] = {}

    def shapes(self, context: Context, meshes: Sequence[Mesh]) -> list[_Listed]:
        """Return the shapes of a context for every microbatch size.

        Raises:
            BudgetSpentError: there are more than the budget allows.
        """
        found = []
        for size in microbatch_sizes(self._limits, self._batch):
            usable = tuple(mesh for mesh in meshes if size % mesh.dp == 0)
            counts = _counts(self._batch, size, context)
            if counts:
                by_length = self._by_length(context, usable)
                found.append(_Listed(context=context, size=size, counts=counts, meshes=usable, shapes=by_length))
        return found

    def _by_length(self, context: Context, meshes: tuple[Mesh, ...]) -> dict[tuple[int, int], list[Shape]]:
        """Return the shapes by (stages, virtual stages a mesh), those with fewer first.

        Several replicas leave devices for each other; a replica alone that shares nothing is the same plan under every
        sharding, and is listed under the first.
        """
        everyone = sum(self._free.values())
        shapes: dict[tuple[int, int], list[Shape]] = {}
        for sequence in self._sequences_of(meshes):
            pp = len(sequence)
            if self._limits.pp is not None and pp not in self._limits.pp:
                continue
            if context.alone and not context.first and not any(is_shared(mesh, context) for mesh in sequence):
                continue
            if not context.alone and sum(mesh.size for mesh in sequence) == everyone:
                continue
            most_vpp = self._num_layers // pp if context.schedule == "interleaved" else 1
            for vpp in range(1, most_vpp + 1):
                self._budget.spend(COLUMN_VISITS * math.comb(self._num_layers - 1, pp * vpp - 1))
                shapes.setdefault((pp, vpp), []).append(Shape(meshes=sequence, vpp=vpp))
        return dict(sorted(shapes.items()))

    def _sequences_of(self, meshes: tuple[Mesh, ...]) -> list[tuple[Mesh, ...]]:
        if meshes not in self._sequences:
            longest = min(self._num_layers, max(self._limits.pp) if self._limits.pp is not None else self._num_layers)
            self._sequences[meshes] = []
            for sequence in mesh_sequences(meshes, self._free, longest):
                self._budget.spend(SHAPE_VISITS + COLUMN_VISITS * math.comb(self._num_layers - 1, len(sequence) - 1))
                self._sequences[meshes].append(sequence)
        return self._sequences[meshes]


def _space(prices: Prices, limits: Limits, listed: Sequence[_Listed]) -> Space | None:
    free = free_devices(prices, limits)
    shapes: list[Shape] = []
    parts: list[Columns] = []
    joules: list[Floats] = []
    for one in listed:
        classes = {key: count_classes(one.context.schedule, *key, one.counts) for key in one.shapes}
        batches = {
            key: ShapeBatch(
                shapes=tuple(equal),
                first_shape=0,
                cuts=chain_cuts(prices, key[0] * key[1], limits),
                groups=tuple(free),
                meshes=one.meshes,
                spare=tuple(_spare(shape, one.context, sum(free.values())) for shape in equal),
            )
            for key, equal in one.shapes.items()
        }
        if not batches:
            continue
        table = stage_table(prices, one.meshes, one.size, one.context, _conditions(batches, classes))
        for key, unnumbered in batches.items():
            batch = replace(unnumbered, first_shape=len(shapes))
            columns = batch_columns(batch, one.size, table, classes[key], one.context)
            shapes.extend(batch.shapes)
            parts.append(columns)
            joules.append(_joules(prices, batch, columns))
    if not parts:
        return None
    context = listed[0].context
    pool = _pool(prices, limits, concatenate(parts), shapes, alone=context.alone)
    return Space(context=context, shapes=tuple(shapes), pool=pool, joules=np.concatenate(joules))


def _spare(shape: Shape, context: Context, everyone: int) -> int:
    """Return the devices a shape leaves for others; 0 where nobody shares states with it."""
    return 0 if context.alone or context.sharding == "none" else everyone - sum(mesh.size for mesh in shape.meshes)


def _conditions(
    batches: Mapping[tuple[int, int], ShapeBatch], classes: Mapping[tuple[int, int], Sequence[CountClass]]
) -> list[Condition]:
    return sorted(
        {
            Condition(held, spare)
            for key, batch in batches.items()
            for one in classes[key]
            for held in one.held
            for spare in batch.spare
        }
    )


def _counts(batch: int, size: int, context: Context) -> range:
    """Return the microbatch counts a replica can take: all of the batch alone, else what leaves some to others."""
    if context.alone:
        return range(batch // size, batch // size + 1) if batch % size == 0 else range(0)
    return range(1, (batch - 1) // size + 1)


def _joules(prices: Prices, batch: ShapeBatch, columns: Columns) -> Floats:
    pp = len(batch.shapes[0].meshes)
    watts = {group: prices.power_w(group, 1.0) - prices.power_w(group, 0.0) for group in batch.groups}
    draw = np.array([[mesh.size * watts[mesh.group] for mesh in shape.meshes] for shape in batch.shapes])
    return np.asarray((draw[columns.shape - batch.first_shape] * columns.slope_s[:, :pp]).sum(axis=1))


def _pool(prices: Prices, limits: Limits, columns: Columns, shapes: Sequence[Shape], *, alone: bool) -> Pool:
    vectors = DeviceVectors(tuple(free_devices(prices, limits).values()))
    vpp = np.array([shape.vpp for shape in shapes])[columns.shape]
    _, family = np.unique(np.column_stack([vpp, columns.cuts]), axis=0, return_inverse=True)
    return Pool(
        columns=columns,
        vectors=vectors,
        used=columns.used @ vectors.radix,
        family=family.ravel(),
        rules=Rules(
            same_cut=limits.uniform_cuts,
            same_microbatches=limits.uniform_microbatches,
            max_rows=limits.max_shapes,
            alone=alone,
        ),
        batch=prices.workload.global_batch,
    )
