"""A layout from degrees alone: the grid tp x cp x dp x pp that uniform engines run, over a cluster of any groups.

Ranks go over the cluster's devices in group order, tp fastest, then cp, then dp, then pp, as Megatron-LM lays them out.
Where copies of a stage land on different groups, copies with the same groups make one row of the layout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import gcd

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, StageOption
from hetplan.errors import UsageError
from hetplan.plan.cuts import balanced_cut, pinned_cut
from hetplan.plan.placement import cluster_places, place
from hetplan.plan.program import schedule_errors
from hetplan.plan.records import Layout, Replica, ScheduleName, Stage
from hetplan.plan.stages import layer_seconds
from hetplan.specs.workload import Recompute, Sharding
from hetplan.units import hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Degrees of a uniform layout, as trainers take them."""

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    """Data-parallel degree; None: the largest the devices have room for that divides the batch."""
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    micro_batch: int = 1
    """Samples of a microbatch on one data-parallel rank."""
    recompute: Recompute = "none"
    sharding: Sharding = "none"
    schedule: ScheduleName | None = None
    """None: interleaved where vpp > 1, else 1f1b."""
    layers_per_stage: tuple[int, ...] | None = None
    """Decoder layers of each virtual stage; None: balanced by time, embedding and head included."""
    groups: tuple[str, ...] | None = None
    """Groups to use, in this order; None: all, as the cluster lists them."""

    @property
    def stage_dp(self) -> int:
        """Data-parallel ranks a stage's mesh must hold for its experts."""
        return self.ep // gcd(self.ep, self.cp)

    @property
    def mesh_size(self) -> int:
        """Devices of one copy of a stage."""
        return self.tp * self.cp * self.stage_dp


def grid_layout(prices: Prices, grid: Grid) -> Layout:
    """Return the placed layout of a uniform grid.

    Raises:
        UsageError: the degrees do not fit the devices, the batch, the schedule or the layers.
    """
    _require_positive(grid)
    blocks = _blocks(prices, grid)
    copies = _copies(grid, blocks, prices.workload.global_batch)
    num_microbatches = _num_microbatches(grid, prices.workload.global_batch, copies * grid.stage_dp)
    schedule = grid.schedule or ("interleaved" if grid.vpp > 1 else "1f1b")
    for message in schedule_errors(schedule, grid.pp, num_microbatches, grid.vpp):
        raise UsageError(message)
    rows = Counter(tuple(blocks[s * copies + k] for s in range(grid.pp)) for k in range(copies))
    cuts = _cuts(prices, grid, list(rows))
    replicas = tuple(
        Replica(
            stages=_stages(grid, groups, cuts),
            microbatch=grid.micro_batch * grid.stage_dp,
            num_microbatches=num_microbatches,
            copies=count,
            vpp=grid.vpp,
        )
        for groups, count in rows.items()
    )
    return place(Layout(replicas=replicas, schedule=schedule, sharding=grid.sharding), prices.cluster)


def _require_positive(grid: Grid) -> None:
    for name in ("tp", "pp", "cp", "ep", "vpp", "micro_batch"):
        if getattr(grid, name) < 1:
            raise UsageError(f"{name.replace('_', ' ')} must be at least 1, not {getattr(grid, name)}")
    if grid.dp is not None and (grid.dp < 1 or grid.dp % grid.stage_dp):
        raise UsageError(
            f"ep {grid.ep} with cp {grid.cp} needs a dp that is a positive multiple of {grid.stage_dp}, not {grid.dp}"
        )


def _blocks(prices: Prices, grid: Grid) -> list[str]:
    """Return the group of every mesh the devices have room for, in order."""
    places = cluster_places(prices.cluster)
    blocks: list[str] = []
    for name in grid.groups if grid.groups is not None else tuple(places):
        if name not in places:
            raise UsageError(f"the cluster has no group {name!r}{hint(name, places)}")
        sizes = np.unique(places[name].domain_d, return_counts=True)[1]
        fits = grid.mesh_size <= int(sizes.max(initial=0))
        blocks.extend([name] * int((sizes // grid.mesh_size).sum() if fits else sizes.sum() // grid.mesh_size))
    return blocks


def _copies(grid: Grid, blocks: list[str], global_batch: int) -> int:
    """Return how many copies of the pipeline there are."""
    words = f"tp {grid.tp} x cp {grid.cp} x pp {grid.pp}"
    if grid.dp is None:
        if len(blocks) < grid.pp:
            raise UsageError(f"{words} does not fit: the devices give {len(blocks)} meshes of {grid.mesh_size}")
        most = len(blocks) // grid.pp
        dividing = (n for n in range(most, 0, -1) if global_batch % (n * grid.stage_dp * grid.micro_batch) == 0)
        return next(dividing, most)
    copies = grid.dp // grid.stage_dp
    if copies * grid.pp > len(blocks):
        raise UsageError(
            f"{words} x dp {grid.dp} needs {copies * grid.pp * grid.mesh_size} devices; "
            f"the cluster gives {len(blocks)} meshes of {grid.mesh_size}"
        )
    return copies


def _num_microbatches(grid: Grid, global_batch: int, dp: int) -> int:
    size = grid.micro_batch * dp
    if global_batch % size:
        raise UsageError(
            f"a global batch of {global_batch} is no multiple of micro batch {grid.micro_batch} x dp {dp} = {size}"
        )
    return global_batch // size


def _cuts(prices: Prices, grid: Grid, rows: list[tuple[str, ...]]) -> tuple[int, ...]:
    num_stages = grid.pp * grid.vpp
    if grid.layers_per_stage is not None:
        if len(grid.layers_per_stage) != num_stages:
            raise UsageError(
                f"layers per stage names {len(grid.layers_per_stage)} stages; pp {grid.pp} x vpp {grid.vpp} "
                f"makes {num_stages}"
            )
        return pinned_cut(prices.model, grid.layers_per_stage)
    layer_s = [_slowest(prices, grid, {groups[v % grid.pp] for groups in rows}) for v in range(num_stages)]
    return balanced_cut(layer_s)


def _slowest(prices: Prices, grid: Grid, groups: set[str]) -> Floats:
    """Return what each layer takes on the slowest of some groups."""
    options = [
        StageOption(
            group=name,
            tp=grid.tp,
            cp=grid.cp,
            dp=grid.stage_dp,
            ep=grid.ep,
            samples=grid.micro_batch,
            recompute=grid.recompute,
        )
        for name in sorted(groups)
    ]
    return np.asarray(np.max([layer_seconds(prices, option) for option in options], axis=0), dtype=np.float64)


def _stages(grid: Grid, groups: tuple[str, ...], cuts: tuple[int, ...]) -> tuple[Stage, ...]:
    return tuple(
        Stage(
            group=groups[v % grid.pp],
            first_layer=cuts[v],
            end_layer=cuts[v + 1],
            tp=grid.tp,
            cp=grid.cp,
            dp=grid.stage_dp,
            ep=grid.ep,
            recompute=grid.recompute,
        )
        for v in range(len(cuts) - 1)
    )
