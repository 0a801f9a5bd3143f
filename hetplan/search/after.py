"""What must follow the pipelines on each stage: the A of the bounds in `patterns` and `cut_lines`.

A stage's gradients are complete only when its last backward pass ends. Of their reduction at most `overlap.gradients`
of that pass is hidden; then come the optimizer and, where states are shared out, the gather of new weights. How fast
gradients meet depends on who else holds the layers; here the ring stays inside the stage's group, in the best place it
can be, with no more members than there must be, so A is never too much.
"""

from __future__ import annotations

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, Holders
from hetplan.plan.stages import whole_params
from hetplan.search.problem import Mesh, Problem, Tables
from hetplan.specs.workload import Sharding


class Ending:
    """A of stages when there are at least `ranks` replicas, and at most `most_ranks` (None: any number).

    Ranks that share optimizer states each update their own part, which takes the less time the more there are.
    """

    def __init__(self, problem: Problem, sharding: Sharding, ranks: int, most_ranks: int | None = None) -> None:
        self._problem = problem
        self._sharding = sharding
        self._ranks = ranks
        self._most_ranks = most_ranks
        self._dense_l = whole_params(problem.prices)[0]
        self._hidden = problem.prices.calibration.overlap.gradients
        self._paces: dict[int, tuple[float, float, float]] = {}

    def units(self, tables: Tables) -> Floats:
        """Return A of a unit of layers for each mesh."""
        usable = [m for m in range(len(self._problem.meshes)) if tables.usable_m[m]]
        result = np.zeros(len(self._problem.meshes))
        result[usable] = [self._unit(tables, m) for m in usable]
        return result

    def _unit(self, tables: Tables, m: int) -> float:
        reduce_s, gather_s, optimizer_s = self._pace(m)
        reduced_l = self._dense_l * reduce_s
        if reduce_s:
            reduced_l = reduced_l - self._hidden * tables.backward_mrl[m].min(axis=0)
        seconds_l = reduced_l + self._dense_l * (gather_s + optimizer_s)
        return max(0.0, float(np.min(seconds_l / np.maximum(tables.weight_l, 1e-12))))

    def of_stage(self, m: int, span: tuple[int, int], backward_s: float) -> float:
        """Return A of a stage that holds layers `span` and whose backward pass takes `backward_s`."""
        reduce_s, gather_s, optimizer_s = self._pace(m)
        params = float(self._dense_l[span[0] : span[1]].sum())
        return max(0.0, params * reduce_s - self._hidden * backward_s) + params * (gather_s + optimizer_s)

    def _pace(self, m: int) -> tuple[float, float, float]:
        """Return seconds for each parameter (before tp): to reduce it, to gather it, to update it."""
        if m not in self._paces:
            mesh = self._problem.meshes[m]
            reduce_s, gather_s = _sync_per_param(self._problem, mesh, self._sharding, self._ranks)
            update_s = _optimizer_per_param(self._problem.prices, mesh) / mesh.tp
            if self._sharding != "none":
                sharers = None if self._most_ranks is None else self._most_ranks * mesh.dp * mesh.cp
                update_s = 0.0 if sharers is None else update_s / sharers
            self._paces[m] = (reduce_s, gather_s, update_s)
        return self._paces[m]


def _optimizer_per_param(prices: Prices, mesh: Mesh) -> float:
    return max(0.0, (prices.optimizer_s(mesh.name, 2e9) - prices.optimizer_s(mesh.name, 1e9)) / 1e9)


def _sync_per_param(problem: Problem, mesh: Mesh, sharding: Sharding, ranks: int) -> tuple[float, float]:
    """Return seconds for each parameter (before tp) to reduce its gradient and to gather it, latency left out."""
    members = ranks * mesh.dp * mesh.cp
    if members < 2 or sharding == "full":
        return 0.0, 0.0
    packed = max(1, problem.domain_g[mesh.group] // mesh.tp)
    best = (np.inf, np.inf)
    for near in {1, packed}:
        ring = (Holders(group=mesh.name, num_ranks=members, ranks_per_node=min(near, members), tp=mesh.tp),)
        small, large = (problem.prices.sync(size, ring, sharding) for size in (1e9, 2e9))
        cost = ((large.reduce_s - small.reduce_s) / 1e9, (large.gather_s - small.gather_s) / 1e9)
        if np.isfinite(sum(cost)) and sum(cost) < sum(best):
            best = cost
    if not np.isfinite(best[0]):
        return 0.0, 0.0
    return (0.0 if sharding == "gradients" else best[0]), best[1]
