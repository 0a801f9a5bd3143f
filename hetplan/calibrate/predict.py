"""What hetplan's own estimate says about an observed configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetplan.calibrate.express import Setup
from hetplan.costs.prices import Prices, price, price_together
from hetplan.costs.records import MemoryUse
from hetplan.plan.estimate import arrange, row_finish, work_on
from hetplan.plan.memory import mesh_memory
from hetplan.plan.sync import finish_step
from hetplan.specs.calibration import Calibration, DeviceConstants


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one device of a stage, before any allocator's overhead."""

    states: float
    """Weights, gradients and optimizer states."""
    logits: float
    activations: float
    grown: float
    """What an allocator's overhead applies to: activations and buffers."""
    capacity: float

    def total_bytes(self, overhead: float, reserve: float) -> float:
        """Return the peak."""
        return self.states + self.logits + self.grown * (1.0 + overhead) + reserve


def states_bytes(memory: MemoryUse) -> float:
    """Return what a stage holds whether or not it computes."""
    return memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes


class Predictor:
    """`estimate`'s step time of one configuration, without the rest of it, under many calibrations."""

    def __init__(self, setup: Setup) -> None:
        self._prices = price(setup.cluster, setup.model, setup.workload, Calibration())
        self._at = arrange(setup.layout, self._prices)
        self._layers = setup.layers
        self._options = tuple(dict.fromkeys(option for options in self._at.options for option in options))

    def steps_s(self, calibrations: Sequence[Calibration]) -> list[float]:
        """Return the step time under each calibration."""
        if self._layers is not None:
            calibrations = [replace(calibration, layers=self._layers) for calibration in calibrations]
        variants = [self._prices.under(calibration) for calibration in calibrations]
        price_together(variants, self._options)
        return [self._finish_s(prices) for prices in variants]

    def _finish_s(self, prices: Prices) -> float:
        work = work_on(self._at, prices)
        finishes = [row_finish(row, work.layout) for row in work.rows]
        return finish_step(work.ending, [f.rank_s for f in finishes], [f.gradients_s for f in finishes]).step_s


def step_s(setup: Setup, calibration: Calibration) -> float:
    """Return the step time of a configuration under one calibration."""
    return Predictor(setup).steps_s([calibration])[0]


def stage_memories(setup: Setup) -> tuple[StageMemory, ...]:
    """Return what each stage holds, its allocator's overhead and reserve apart."""
    prices = price(setup.cluster, setup.model, setup.workload, Calibration())
    overhead = 1.0 + DeviceConstants().memory_overhead_fraction
    stages = []
    for row, replica in enumerate(setup.layout.replicas):
        for q in range(replica.pp):
            memory = mesh_memory(setup.layout, prices, (row, q))[1]
            grown = memory.activations_bytes + memory.scores_bytes + memory.buffers_bytes
            stages.append(
                StageMemory(
                    states=states_bytes(memory),
                    logits=memory.logits_bytes,
                    activations=memory.activations_bytes / overhead,
                    grown=grown / overhead,
                    capacity=prices.capacity_bytes(replica.stages[q].group),
                )
            )
    return tuple(stages)
