"""Lower bounds for objectives other than time.

Dollars: a device is paid for the whole step, so at least for the time it works; every layer of every sample must be
worked on somewhere, so a step costs at least the batch times the cheapest way to run each layer. Energy likewise: a
device draws at least its busy power while it works. Seconds come from `bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hetplan.search.bound import device_seconds_s
from hetplan.search.problem import Problem, Tables, build_tables
from hetplan.search.records import SearchRequest
from hetplan.specs.workload import SHARDINGS


def value_floor(problem: Problem, request: SearchRequest, tables: Sequence[Tables]) -> float:
    """Return a value of the objective no plan of the space beats."""
    if not tables:
        loosest = next(s for s in reversed(SHARDINGS) if s in problem.limits.sharding)
        built = (build_tables(problem, size, loosest, 1 << 20) for size in problem.microbatches)
        tables = [table for table in built if table is not None]
    prices = problem.prices
    match request.objective:
        case "time":
            return device_seconds_s(problem, tables)
        case "energy":
            return _cheapest(problem, tables, lambda group: prices.power_w(group, 1.0))
        case _:
            return _cheapest(problem, tables, lambda group: prices.usd_per_s(group) or 0.0)


def _cheapest(problem: Problem, tables: Sequence[Tables], rate_of: Callable[[str], float]) -> float:
    best_l = np.full(problem.num_layers, np.inf)
    for table in tables:
        seconds = (table.forward_mrl + table.backward_mrl).min(axis=1) / table.microbatch
        for m, mesh in enumerate(problem.meshes):
            if table.usable_m[m]:
                best_l = np.minimum(best_l, seconds[m] * mesh.size * rate_of(mesh.name))
    total = float(best_l.sum()) * problem.batch
    return total * (1 - 1e-9) if np.isfinite(total) else 0.0
