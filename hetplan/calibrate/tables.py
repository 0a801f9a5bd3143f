"""Measured layers for observed runs: a table holds for a run whose model it names and whose stages it covers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hetplan.calibrate.express import Setup
from hetplan.costs.prices import price
from hetplan.plan.stages import option_of
from hetplan.specs.calibration import Calibration
from hetplan.specs.layer_table import LayerTable


def with_table(setup: Setup, tables: Sequence[LayerTable]) -> Setup:
    """Return a setup with the first table that holds for it, or as it is."""
    for table in tables:
        if _plain(table.model) in _plain(setup.run.model) and table.num_layers == len(setup.model.chain):
            prices = price(setup.cluster, setup.model, setup.workload, Calibration(layers=table))
            stages = [(stage, replica) for replica in setup.layout.replicas for stage in replica.stages]
            if all(prices.covers(option_of(stage, replica)) for stage, replica in stages):
                return replace(setup, layers=table)
    return setup


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
