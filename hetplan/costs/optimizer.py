"""Seconds of the AdamW update: memory traffic only.

The gradient is read twice (its norm, then the update), optimizer states are read and written, the weights the GEMMs
read are written, and read as well where they are the only copy.
"""

from __future__ import annotations

from hetplan.costs.batch import Rates
from hetplan.specs.workload import Workload


def optimizer_s(params: float, rates: Rates, workload: Workload) -> float:
    """Return the seconds one device takes to update `params` parameters."""
    weights = workload.weight_bytes * (2 if workload.weight_bytes == 4 else 1)
    moved = 2 * workload.gradient_bytes + 2 * workload.optimizer_bytes + weights
    return params * moved / rates.update_bytes_per_s
