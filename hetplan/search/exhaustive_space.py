"""The whole space of a small instance as pools of columns, one pool for what a plan must share.

A plan has one sharding and one schedule; where the limits ask for uniform degrees, also one recomputation and one set
of degrees. Within a pool any columns may be combined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    Mesh,
    Shape,
    chain_cuts,
    count_classes,
    mesh_sequences,
)
from hetplan.search.exhaustive_table import is_shared, stage_table
from hetplan.specs.workload import RECOMPUTES, SHARDINGS

Degrees = tuple[int, int, int, int]


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
    """Return all pools of the space.

    Raises:
        BudgetSpentError: there are more columns than the budget allows.
    """
    free = free_devices(prices, limits)
    budget.spend(math.prod(count + 1 for count in free.values()) ** 2 // 10)
    meshes = mesh_options(prices, limits)
    found = []
    for context, chosen in _contexts(limits, meshes):
        space = _space(prices, limits, budget, (context, chosen))
        if space is not None:
            found.append(space)
    return found


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


def _space(prices: Prices, limits: Limits, budget: Budget, part: tuple[Context, tuple[Mesh, ...]]) -> Space | None:
    context, meshes = part
    free = free_devices(prices, limits)
    shapes: list[Shape] = []
    parts: list[Columns] = []
    joules: list[Floats] = []
    for size in microbatch_sizes(limits, prices.workload.global_batch):
        usable = tuple(mesh for mesh in meshes if size % mesh.dp == 0)
        counts = _counts(prices.workload.global_batch, size, context)
        if not counts:
            continue
        by_length = _shapes_by_length(prices, limits, context, (usable, free, budget))
        classes = {key: count_classes(context.schedule, *key, counts) for key in by_length}
        held = sorted({count for some in classes.values() for one in some for count in one.held})
        if not held:
            continue
        table = stage_table(prices, usable, size, context, held)
        for key, equal in by_length.items():
            batch = ShapeBatch(
                shapes=tuple(equal),
                first_shape=len(shapes),
                cuts=chain_cuts(prices, key[0] * key[1], limits),
                groups=tuple(free),
                meshes=usable,
            )
            columns = batch_columns(batch, size, table, classes[key], context)
            shapes.extend(equal)
            parts.append(columns)
            joules.append(_joules(prices, batch, columns))
    if not parts:
        return None
    pool = _pool(prices, limits, concatenate(parts), shapes, alone=context.alone)
    return Space(context=context, shapes=tuple(shapes), pool=pool, joules=np.concatenate(joules))


def _counts(batch: int, size: int, context: Context) -> range:
    """Return the microbatch counts a replica can take: all of the batch alone, else what leaves some to others."""
    if context.alone:
        return range(batch // size, batch // size + 1) if batch % size == 0 else range(0)
    return range(1, (batch - 1) // size + 1)


def _shapes_by_length(
    prices: Prices, limits: Limits, context: Context, part: tuple[tuple[Mesh, ...], dict[str, int], Budget]
) -> dict[tuple[int, int], list[Shape]]:
    """Return the shapes by (stages, virtual stages a mesh), those with fewer first.

    Several replicas leave devices for each other; a replica alone that shares nothing is the same plan under every
    sharding, and is listed under the first.
    """
    meshes, free, budget = part
    num_layers = len(prices.model.chain)
    longest = min(num_layers, max(limits.pp) if limits.pp is not None else num_layers)
    shapes: dict[tuple[int, int], list[Shape]] = {}
    for sequence in mesh_sequences(meshes, free, longest):
        pp = len(sequence)
        budget.spend(1)
        if limits.pp is not None and pp not in limits.pp:
            continue
        if context.alone and not context.first and not any(is_shared(mesh, context) for mesh in sequence):
            continue
        if not context.alone and sum(mesh.size for mesh in sequence) == sum(free.values()):
            continue
        most_vpp = num_layers // pp if context.schedule == "interleaved" else 1
        for vpp in range(1, most_vpp + 1):
            budget.spend(math.comb(num_layers - 1, pp * vpp - 1))
            shapes.setdefault((pp, vpp), []).append(Shape(meshes=sequence, vpp=vpp))
    return dict(sorted(shapes.items()))


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
