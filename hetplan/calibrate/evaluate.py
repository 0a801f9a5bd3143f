"""Predictions of rows nothing was fitted on, beside the simplest baseline.

Constants come from one set of runs and are asked about another: five folds by configuration of one table, or two
tables. The baseline says that every device reaches one fraction of its peak, recomputation counted as work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.calibrate.dataset import Dataset, folds
from hetplan.calibrate.express import Setup
from hetplan.calibrate.fit import Observation, Predictions
from hetplan.calibrate.memory import fit_memory, fits, peak_bytes
from hetplan.calibrate.predict import step_s
from hetplan.calibrate.stacks import Stacks, fit_stacks
from hetplan.costs.flops import model_flop
from hetplan.costs.records import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One row with what was predicted for it."""

    setup: Setup
    metric: str
    """time, memory or fits."""
    predicted: float
    observed: float
    level: str = ""
    """Where the constants came from: stack, device, all."""
    baseline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """All that is fitted on one set of runs."""

    stacks: Stacks
    memory: dict[str, Floats]
    memory_everywhere: Floats
    peaked: frozenset[str]
    """Stacks whose memory constants rest on observed peaks, not only on what ran and what did not."""
    utilisation: dict[str, float]
    """Baseline: fraction of peak by device; ``""``: of all."""

    def memory_of(self, setup: Setup) -> Floats:
        """Return (overhead, reserve) for a configuration."""
        return self.memory.get(setup.run.stack, self.memory_everywhere)


def learn(data: Dataset, predictions: Predictions | None = None, *, particular: bool = True) -> Constants:
    """Return constants fitted on a table; not `particular`: step times by device only, not by stack."""
    everywhere = fit_memory(data.peaks, data.outcomes)
    measured = {peak.setup.run.stack for peak in data.peaks} | {row.setup.run.stack for row in data.outcomes}
    return Constants(
        stacks=fit_stacks(data.times, predictions, particular=particular),
        memory={
            stack: fit_memory(
                [peak for peak in data.peaks if peak.setup.run.stack == stack],
                [outcome for outcome in data.outcomes if outcome.setup.run.stack == stack],
                everywhere,
            )
            for stack in sorted(measured)
        },
        memory_everywhere=everywhere,
        peaked=frozenset(peak.setup.run.stack for peak in data.peaks),
        utilisation=utilisation(data.times),
    )


def judge(data: Dataset, constants: Constants) -> list[Judged]:
    """Return predictions for every row of a table."""
    judged = [_judge_time(row, constants) for row in data.times]
    for peak in data.peaks:
        known = peak.setup.run.stack in constants.memory
        judged.append(
            Judged(
                setup=peak.setup,
                metric="memory",
                predicted=peak_bytes(peak.stages, constants.memory_of(peak.setup)),
                observed=peak.peak_bytes,
                level="stack" if known else "all",
            )
        )
    for part in data.components:
        judged.append(
            Judged(
                setup=part.setup,
                metric="memory",
                predicted=part.predicted_bytes,
                observed=part.observed_bytes,
                level="formula",
            )
        )
    for outcome in data.outcomes:
        fit = fits(outcome.stages, constants.memory_of(outcome.setup))
        judged.append(Judged(setup=outcome.setup, metric="fits", predicted=float(fit), observed=float(outcome.ran)))
    return judged


def cross_validate(data: Dataset, count: int = 5, share: tuple[int, int] = (0, 1)) -> list[Judged]:
    """Return predictions for every row, each from constants fitted without its configuration's fold.

    `share`: (k, n) asks for every n-th fold from the k-th on, for processes that divide the work.
    """
    predictions = Predictions()
    judged = []
    for held in folds(data, count)[share[0] :: share[1]]:
        constants = learn(data.only(data.configurations - held), predictions)
        judged.extend(judge(data.only(held), constants))
    return judged


def leave_out(data: Dataset) -> list[Judged]:
    """Return predictions for the step times of each stack from constants fitted on all others."""
    predictions = Predictions()
    judged: list[Judged] = []
    for stack in sorted({row.setup.run.stack for row in data.times}):
        own = frozenset(row.setup.run.configuration for row in data.times if row.setup.run.stack == stack)
        constants = learn(data.only(data.configurations - own), predictions, particular=False)
        judged.extend(entry for entry in judge(data.only(own), constants) if entry.metric == "time")
    return judged


def _judge_time(row: Observation, constants: Constants) -> Judged:
    level, fitted = constants.stacks.find(row.setup)
    return Judged(
        setup=row.setup,
        metric="time",
        predicted=step_s(row.setup, fitted.calibration(row.setup)),
        observed=row.step_s,
        level=level,
        baseline=baseline_s(row.setup, constants.utilisation),
    )


def peak_s(setup: Setup) -> float:
    """Return the seconds a step would take at the devices' peak, recomputation counted."""
    flop = model_flop(setup.model, setup.workload) * setup.workload.global_batch
    replica = setup.layout.replicas[0]
    if replica.stages[0].recompute == "full":
        flop *= 4 / 3
    rate = 0.0
    for replica in setup.layout.replicas:
        for stage in replica.stages[: replica.pp]:
            peaks = setup.cluster.group(stage.group).device.peak_flop_per_s
            rate += replica.copies * stage.mesh_size * peaks[setup.workload.precision]
    return flop / rate


def utilisation(rows: Sequence[Observation]) -> dict[str, float]:
    """Return the mean (geometric) fraction of peak by device."""
    logs: dict[str, list[float]] = {}
    for row in rows:
        value = math.log(peak_s(row.setup) / row.step_s)
        for name in ("", "+".join(row.setup.devices)):
            logs.setdefault(name, []).append(value)
    return {name: float(np.exp(np.median(values))) for name, values in logs.items()}


def baseline_s(setup: Setup, known: dict[str, float]) -> float:
    """Return the step time under a constant fraction of peak."""
    return peak_s(setup) / known.get("+".join(setup.devices), known[""])
