"""A calibration corrected by what a run measured: each device kind until its stages are predicted as they ran.

A device's rates are divided by measured over predicted busy time and its fixed costs multiplied by it, the plan is
priced again, and so on until the two agree (a product of small matrices answers to its rate and to its fixed cost in
unequal parts). One ratio cannot tell which kind of work was off: `hetplan profile` measures that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetplan.costs.prices import price
from hetplan.plan.estimate import estimate
from hetplan.plan.records import Layout
from hetplan.specs.calibration import Calibration, DeviceConstants
from hetplan.specs.cluster import Cluster
from hetplan.specs.layer_table import LayerTable
from hetplan.specs.model import Model
from hetplan.specs.workload import Workload

MOST_FRACTION = 1.5
"""Largest factor on a nominal figure that a calibration may hold."""
MOST_ROUNDS = 30
DAMPING = 0.5
"""Seconds of small products go with their fixed cost over their rate: correcting both in full would do so twice."""
CLOSE = 0.002
"""Relative difference of predicted and measured that ends the rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was run."""

    cluster: Cluster
    model: Model
    workload: Workload
    layout: Layout


def corrected(calibration: Calibration | None, run: Run, document: Mapping[str, Any]) -> Calibration:
    """Return the calibration with every device of the run as slow or fast as it was measured."""
    found = before = calibration or Calibration()
    measured = _by_device(run.cluster, [(s["group"], s["busy"]["measured_s"]) for s in document["stages"]])
    ratios: dict[str, float] = {}
    whole: dict[str, float] = {}
    for _ in range(MOST_ROUNDS):
        said = estimate(run.layout, price(run.cluster, run.model, run.workload, found))
        predicted = _by_device(run.cluster, [(stage.group, stage.busy_s) for stage in said.stages])
        ratios = {name: measured[name] / predicted[name] for name in measured if predicted[name] > 0}
        whole = whole or ratios
        if all(abs(ratio - 1.0) < CLOSE for ratio in ratios.values()):
            break
        devices = {**found.devices, **{name: _scaled(found.device(name), r**DAMPING) for name, r in ratios.items()}}
        found = replace(found, devices=devices, layers=found.layers and _scaled_rows(found.layers, ratios))
    notes = {
        f"corrected {name}": f"a run took {ratio:.3f} times the seconds predicted" for name, ratio in whole.items()
    }
    return replace(found, provenance={**before.provenance, **notes})


def _by_device(cluster: Cluster, rows: list[tuple[str, float]]) -> dict[str, float]:
    """Return the sums of (group, seconds) rows by device kind."""
    sums: dict[str, float] = {}
    for group, seconds in rows:
        name = cluster.group(group).device.name
        sums[name] = sums.get(name, 0.0) + seconds
    return sums


def _scaled(constants: DeviceConstants, ratio: float) -> DeviceConstants:
    def fraction(value: float) -> float:
        return min(MOST_FRACTION, value / ratio)

    return replace(
        constants,
        gemm_peak_fraction=fraction(constants.gemm_peak_fraction),
        gemm_half_flop=constants.gemm_half_flop * ratio,
        attention_fraction=fraction(constants.attention_fraction),
        memory_fraction=fraction(constants.memory_fraction),
        layer_overhead_s=constants.layer_overhead_s * ratio,
        expert_overhead_s=constants.expert_overhead_s * ratio,
        origin="measured",
    )


def _scaled_rows(table: LayerTable, ratios: Mapping[str, float]) -> LayerTable:
    rows = tuple(
        replace(
            row,
            forward_s=row.forward_s * ratios.get(row.device, 1.0),
            backward_s=row.backward_s * ratios.get(row.device, 1.0),
        )
        for row in table.rows
    )
    return replace(table, rows=rows)
