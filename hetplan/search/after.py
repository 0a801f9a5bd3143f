"""What must follow the pipelines on each stage: the A of the bounds in `patterns` and `cut_lines`.

A stage's gradients are complete only when its last backward pass ends. Of their reduction at most `overlap.gradients`
of that pass is hidden; then come the optimizer and, where states are shared out, the gather of new weights. How fast
gradients meet depends on who else holds the layers; here the ring stays inside the stage's group, in the best place it
can be, with no more members than there must be, so A is never too much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, Holders
from hetplan.plan.stages import tied_tables, whole_params
from hetplan.search.problem import Mesh, Problem, Tables
from hetplan.specs.workload import Sharding

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """A of a unit of layers, for each mesh."""

    first_m: Floats
    """On the first stage, which holds a front part of the chain."""
    each_m: Floats
    """On any stage, layers without parameters left out."""


def _least_ratio(seconds: Floats, weight: Floats) -> float:
    return max(0.0, float(np.min(seconds / np.maximum(weight, 1e-12), initial=np.inf))) if len(weight) else 0.0


def bare_weight(problem: Problem, tables: Tables) -> float:
    """Return the weight of the layers without parameters: nothing follows them."""
    return float(tables.weight_l[whole_params(problem.prices)[0] <= 0].sum())


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
        self._paces = problem.pace_memo.setdefault((sharding, ranks, most_ranks), {})
        self._ties: dict[tuple[Mesh, Mesh], float] = {}

    def units(self, tables: Tables) -> Units:
        """Return A of a unit of layers for each mesh."""
        usable = [m for m in range(len(self._problem.meshes)) if tables.usable_m[m]]
        first_m, each_m = np.zeros(len(self._problem.meshes)), np.zeros(len(self._problem.meshes))
        for m in usable:
            seconds_l = self.of_layers(tables, m)
            first_m[m] = _least_ratio(np.cumsum(seconds_l), np.cumsum(tables.weight_l))
            held = self._dense_l > 0
            each_m[m] = _least_ratio(seconds_l[held], tables.weight_l[held])
        return Units(first_m=first_m, each_m=each_m)

    def of_layers(self, tables: Tables, m: int) -> Floats:
        """Return seconds of each layer whose sum over a stage is at most its A, (layers,); some may be negative."""
        reduce_s, gather_s, optimizer_s = self._pace(m)
        seconds_l = self._dense_l * (reduce_s + gather_s + optimizer_s)
        return seconds_l - self._hidden * tables.backward_mrl[m].min(axis=0) if reduce_s else seconds_l

    def of_stage(self, m: int, span: tuple[int, int], backward_s: float) -> float:
        """Return A of a stage that holds layers `span` and whose backward pass takes `backward_s`."""
        reduce_s, gather_s, optimizer_s = self._pace(m)
        params = float(self._dense_l[span[0] : span[1]].sum())
        return max(0.0, params * reduce_s - self._hidden * backward_s) + params * (gather_s + optimizer_s)

    def of_stages(self, mesh_p: Ints, params: Floats, backward_s: Floats) -> Floats:
        """Return A of stages on meshes `mesh_p`, (P,), with so many parameters (before tp) each, (N, P)."""
        reduce_s, gather_s, update_s = np.array([self._pace(m) for m in mesh_p.tolist()]).T
        reduced_s = np.maximum(0.0, params * reduce_s - self._hidden * backward_s)
        return np.asarray(reduced_s + params * (gather_s + update_s))

    def tied_s(self, first: int, last: int, reduced_s: Floats, last_params: Floats) -> Floats:
        """Return what follows on the first stage once tied tables hold both stages up.

        `reduced_s`: reduction on the first stage that no backward pass hides; `last_params`: of the last stage, which
        updates and gathers only when the tables are added up.
        """
        _, gather_s, update_s = self._pace(last)
        return np.asarray(reduced_s + self.tie_s(first, last) + last_params * (gather_s + update_s))

    def gather_per_param_s(self, m: int) -> float:
        """Return seconds for each parameter (before tp) to gather and update it."""
        _, gather_s, update_s = self._pace(m)
        return gather_s + update_s

    def reduced_s(self, m: int, params: Floats, backward_s: Floats) -> Floats:
        """Return the reduction of so many parameters that a last backward pass of `backward_s` does not hide."""
        return np.maximum(0.0, params * self._pace(m)[0] - self._hidden * backward_s)

    def tie_s(self, first: int, last: int) -> float:
        """Return seconds in which tied tables on the first and on the last stage are added up."""
        key = (self._problem.meshes[first], self._problem.meshes[last])
        if key not in self._ties:
            prices, end = self._problem.prices, self._problem.num_layers - 1
            pair = tuple(Holders(group=mesh.name, num_ranks=1, ranks_per_node=1, tp=mesh.tp) for mesh in key)
            found = [
                prices.sync(float(params), pair, "none").reduce_s
                for table, head, params in tied_tables(prices)
                if table == 0 and head == end
            ]
            self._ties[key] = sum(found)
        return self._ties[key]

    def _pace(self, m: int) -> tuple[float, float, float]:
        """Return seconds for each parameter (before tp): to reduce it, to gather it, to update it."""
        if m not in self._paces:
            mesh = self._problem.meshes[m]
            reduce_s, gather_s = _sync_per_param(self._problem, mesh, self._sharding, self._ranks)
            # A measured update may take less than the analytic one: then nothing is promised.
            measured = self._problem.prices.calibration.layers is not None
            update_s = 0.0 if measured else _optimizer_per_param(self._problem.prices, mesh) / mesh.tp
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
