"""What would make a layout given by degrees fit memory: one degree or option changed, everything else as it was.

Every change was laid out, priced and held to the rules; one that breaks a rule other than memory is not offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetplan.costs.prices import Prices, price
from hetplan.errors import HetplanError
from hetplan.plan.check import check, valid_tp
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.limits import Limits
from hetplan.search.diagnosis import Fix, Need
from hetplan.search.grown import with_nodes
from hetplan.search.infeasible import beyond_plans, fix_lines, need_lines
from hetplan.search.infeasible_fixes import smallest
from hetplan.search.lightest import Near
from hetplan.specs.workload import RECOMPUTES, SHARDINGS

MOST_FACTOR = 64
"""Nodes are multiplied by at most this."""
MOST_FIXES = 6


def grid_step_s(prices: Prices, grid: Grid) -> float | None:
    """Return the step time of a grid, None where it breaks a rule."""
    try:
        layout = grid_layout(prices, grid)
        limits = Limits(cp=(grid.cp,), stage_dp=(grid.stage_dp,), schedules=(layout.schedule,), tp_within_node=False)
        return None if check(layout, prices, limits) else estimate(layout, prices).step_s
    except HetplanError:
        return None


def grid_fixes(prices: Prices, grid: Grid) -> tuple[Fix, ...]:
    """Return what each single change of a grid brings."""
    changed = list(_changes(prices, grid))[:MOST_FIXES]
    return tuple(Fix(words=words, step_s=grid_step_s(prices, other)) for words, other in changed)


def _changes(prices: Prices, grid: Grid) -> Iterator[tuple[str, Grid]]:
    for recompute in RECOMPUTES[RECOMPUTES.index(grid.recompute) + 1 :]:
        yield f"recompute {recompute}", replace(grid, recompute=recompute)
    if grid.sharding != "full":
        yield f"sharding {SHARDINGS[-1]}", replace(grid, sharding=SHARDINGS[-1])
    if grid.sharding == "none":
        yield "sharding optimizer", replace(grid, sharding="optimizer")
    if grid.micro_batch > 1:
        yield "a microbatch of 1", replace(grid, micro_batch=1)
    wider = [tp for tp in valid_tp(prices.model) if tp > grid.tp]
    if wider:
        yield f"tp {wider[0]}", replace(grid, tp=wider[0], dp=None)
    yield f"pp {grid.pp * 2}", replace(grid, pp=grid.pp * 2, dp=None, layers_per_stage=None)


def grid_needs(prices: Prices, grid: Grid) -> tuple[Need, ...]:
    """Return the nodes of a group with which the grid, its dp grown, would fit; states must be shared for that."""
    if grid.sharding == "none" or len(prices.cluster.groups) != 1:
        return ()
    (group,) = prices.cluster.groups
    existing = len(group.nodes)

    def sized(count: int) -> Prices:
        cluster = with_nodes(prices.cluster, group.name, count)
        return price(cluster, prices.model, prices.workload, prices.calibration)

    most = existing * MOST_FACTOR
    count = smallest(lambda n: grid_step_s(sized(n), replace(grid, dp=None)) is not None, existing, most)
    if count is None:
        return ()
    devices = sized(count).cluster.groups[0].num_devices
    return (Need(group=group.name, nodes=count, devices=devices, existing_nodes=existing),)


def grid_advice(prices: Prices, grid: Grid) -> str:
    """Return what would make a grid fit memory, in sentences."""
    layout = grid_layout(prices, grid)
    near = Near(layout=layout, estimate=estimate(layout, prices), violations=())
    lines = [*fix_lines(grid_fixes(prices, grid)), *need_lines(grid_needs(prices, grid)), *beyond_plans(near, prices)]
    return " ".join(f"{line}." for line in lines)
