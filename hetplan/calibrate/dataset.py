"""Rows sorted into what can be scored: step times, peaks, fits; and the rest, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from hetplan.calibrate.express import Setup, setup_of
from hetplan.calibrate.fit import Observation
from hetplan.calibrate.memory import Outcome, Peak
from hetplan.calibrate.predict import StageMemory, stage_memories, step_s
from hetplan.calibrate.runs import Run
from hetplan.calibrate.tables import with_table
from hetplan.errors import HetplanError, UsageError
from hetplan.specs.calibration import Calibration
from hetplan.specs.layer_table import LayerTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A published part of a peak: states or activations of the fullest stage."""

    setup: Setup
    stages: tuple[StageMemory, ...]
    part: str
    observed_bytes: float

    @property
    def predicted_bytes(self) -> float:
        """What the model says; nothing about it is fitted."""
        return max(stage.states if self.part == "states" else stage.activations for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A row that cannot be scored."""

    run: Run
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Everything of a table."""

    times: tuple[Observation, ...]
    peaks: tuple[Peak, ...]
    components: tuple[Component, ...]
    outcomes: tuple[Outcome, ...]
    left: tuple[Left, ...]

    @property
    def reasons(self) -> Counter[tuple[str, str]]:
        """How many rows of each stratum are left out for which reason."""
        return Counter((entry.run.stack, entry.reason) for entry in self.left)

    def only(self, configurations: frozenset[str]) -> Dataset:
        """Return the rows of some configurations."""
        return replace(
            self,
            times=tuple(row for row in self.times if row.setup.run.configuration in configurations),
            peaks=tuple(row for row in self.peaks if row.setup.run.configuration in configurations),
            components=tuple(row for row in self.components if row.setup.run.configuration in configurations),
            outcomes=tuple(row for row in self.outcomes if row.setup.run.configuration in configurations),
        )

    @property
    def setups(self) -> tuple[Setup, ...]:
        """The setup of every row that is scored."""
        return (
            *(row.setup for row in self.times),
            *(row.setup for row in self.peaks),
            *(row.setup for row in self.components),
            *(row.setup for row in self.outcomes),
        )

    @property
    def configurations(self) -> frozenset[str]:
        """Configurations that are scored."""
        return frozenset(setup.run.configuration for setup in self.setups)


_PARTS = {"mem_weights_grads_optim": "states", "mem_activations": "activations"}


class _Sorter:
    """Collects rows; one setup a configuration and metric."""

    def __init__(self, tables: Sequence[LayerTable]) -> None:
        self._tables = tables
        self.times: list[Observation] = []
        self.peaks: list[Peak] = []
        self.components: list[Component] = []
        self.outcomes: dict[str, Outcome] = {}
        self.left: list[Left] = []

    def add(self, run: Run) -> None:
        """Sort one row in."""
        try:
            setup = with_table(setup_of(run), self._tables)
            self._sort(run, setup)
        except HetplanError as error:
            self.left.append(Left(run=run, reason=str(error)))

    def _sort(self, run: Run, setup: Setup) -> None:
        if run.kind == "time":
            seconds = run.step_s()
            if not seconds or seconds <= 0:
                raise UsageError("no step time can be read")
            step_s(setup, Calibration())
            self.times.append(Observation(setup=setup, step_s=seconds))
            if run.recompute:
                self._outcome(run, setup, stage_memories(setup), ran=True)
            return
        if run.kind == "feasible":
            self._outcome(run, setup, stage_memories(setup), ran=run.measured_value.strip() not in ("0", "0.0"))
            return
        if not run.kind.startswith("memory"):
            raise UsageError(f"nothing is predicted for rows of kind {run.kind!r}")
        self._memory(run, setup)

    def _memory(self, run: Run, setup: Setup) -> None:
        observed = run.memory_bytes()
        if observed is None:
            raise UsageError("no memory can be read")
        if "2p" in run.schedule.lower():
            raise UsageError("a zero-bubble schedule with twice the microbatches in flight cannot be expressed")
        stages = stage_memories(setup)
        part = _PARTS.get(run.measured_metric)
        if part is not None:
            self.components.append(Component(setup=setup, stages=stages, part=part, observed_bytes=observed))
            return
        self.peaks.append(Peak(setup=setup, stages=stages, peak_bytes=observed))
        self._outcome(run, setup, stages, ran=True)

    def _outcome(self, run: Run, setup: Setup, stages: tuple[StageMemory, ...], *, ran: bool) -> None:
        self.outcomes.setdefault(run.configuration, Outcome(setup=setup, stages=stages, ran=ran))


def dataset_of(runs: Iterable[Run], tables: Sequence[LayerTable] = ()) -> Dataset:
    """Return the rows of a table, sorted; `tables`: measured layers, for the runs they cover."""
    sorter = _Sorter(tables)
    for run in runs:
        sorter.add(run)
    return Dataset(
        times=tuple(sorter.times),
        peaks=tuple(sorter.peaks),
        components=tuple(sorter.components),
        outcomes=tuple(sorter.outcomes.values()),
        left=tuple(sorter.left),
    )


def folds(data: Dataset, count: int) -> tuple[frozenset[str], ...]:
    """Return the configurations of each fold: within every stack dealt out in the order of their names' hashes."""
    stacks: dict[str, set[str]] = {}
    for setup in data.setups:
        stacks.setdefault(setup.run.stack, set()).add(setup.run.configuration)
    dealt: list[set[str]] = [set() for _ in range(count)]
    place = 0
    for stack in sorted(stacks):
        for name in sorted(stacks[stack], key=lambda text: sha256(text.encode()).hexdigest()):
            dealt[place % count].add(name)
            place += 1
    return tuple(frozenset(part) for part in dealt)
