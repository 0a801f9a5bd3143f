"""A plan: which devices hold which layers, how the batch is divided, in what order work runs.

A *placement* maps a task (here always `train`) to *replicas*. A replica is one whole copy of the model: a pipeline of
*stages* with its own share of the batch, `num_microbatches` microbatches of `microbatch` samples each. `copies` equal
replicas are written once. A stage is a half-open range of the model's chain (embedding and head are layers of the
chain) on a mesh of `dp x cp x tp` devices of one group; the `dp` axis splits each microbatch's samples, `ep` is folded
into the `dp x cp` ranks. With `vpp > 1` a replica lists its `p * vpp` virtual stages in model order and entry `i` runs
on the mesh of entry `i % p`.

Devices are named by index within their group (see `specs.cluster`): `devices` holds half-open ranges, and copy `k`
of a replica takes the `k`-th run of `dp * cp * tp` indices out of them, tp fastest, then cp, then dp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hetplan.costs.records import MemoryUse
from hetplan.specs.workload import Recompute, Sharding

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Status = Literal["optimal", "feasible", "limit", "interrupted", "given"]

SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of consecutive layers on one mesh of one group."""

    group: str
    first_layer: int
    end_layer: int
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    recompute: Recompute = "none"
    devices: tuple[tuple[int, int], ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of the chain this stage holds."""
        return self.end_layer - self.first_layer

    @property
    def mesh_size(self) -> int:
        """Devices one copy of this stage runs on."""
        return self.tp * self.cp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """`copies` equal pipelines, each fed `num_microbatches` microbatches of `microbatch` samples a step."""

    stages: tuple[Stage, ...]
    microbatch: int
    num_microbatches: int
    copies: int = 1
    vpp: int = 1

    @property
    def pp(self) -> int:
        """Pipeline degree: meshes the microbatches pass through."""
        return len(self.stages) // self.vpp

    @property
    def num_samples(self) -> int:
        """Samples all copies take in one step."""
        return self.copies * self.num_microbatches * self.microbatch

    @property
    def num_devices(self) -> int:
        """Devices all copies run on."""
        return self.copies * sum(stage.mesh_size for stage in self.stages[: self.pp])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything that decides what a step costs; `estimate`, `check` and `program` read nothing else of a plan."""

    replicas: tuple[Replica, ...]
    schedule: ScheduleName = "1f1b"
    sharding: Sharding = "none"

    @property
    def num_samples(self) -> int:
        """The global batch this layout really processes."""
        return sum(replica.num_samples for replica in self.replicas)

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return sum(replica.num_devices for replica in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """Where a step's seconds go, seen from the rank that is busiest; the parts sum to the step time."""

    compute_s: float
    """Forward and backward arithmetic, recomputation included."""
    tp_s: float
    cp_s: float
    ep_s: float
    pp_s: float
    """Waiting for activations and gradients to travel between stages."""
    bubble_s: float
    """Idle for want of microbatches or because another stage or replica is slower."""
    dp_s: float
    """Gradient synchronisation and weight gathers that nothing hides."""
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """The step time."""
        return (
            self.compute_s
            + self.tp_s
            + self.cp_s
            + self.ep_s
            + self.pp_s
            + self.bubble_s
            + self.dp_s
            + self.optimizer_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """One physical stage of one replica (all its virtual stages together)."""

    replica: int
    stage: int
    group: str
    forward_s: float
    """One microbatch, communication inside the stage included."""
    backward_s: float
    busy_s: float
    """All microbatches of a step."""
    in_flight: int
    """Microbatches whose activations are held at the peak."""
    memory: MemoryUse
    capacity_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a layout costs."""

    step_s: float
    parts: TimeParts
    replica_s: tuple[float, ...]
    """Seconds until each replica's last backward pass ends."""
    dp_overlapped_s: float
    """Gradient synchronisation that hides behind backward passes."""
    tokens_per_s: float
    mfu: float
    """Model FLOPs (no recompute) over dense peak of the devices in use."""
    usd_per_step: float | None
    joules_per_step: float
    stages: tuple[StageEstimate, ...]
    relative_error: float | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    """Kind of number (device or network name) -> measured, fitted, datasheet or assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the search can say about a plan's rank among all plans of its space."""

    objective: str
    value: float
    bound: float
    status: Status
    effort: float
    """CP-SAT deterministic time spent."""
    engine: str = "hetplan"
    floor: float = 0.0
    """Bound over plans that may mix any number of replica shapes (`bound` may speak of plans of one shape)."""

    @property
    def gap(self) -> float:
        """(value - bound) / value, 0 when the bound is met."""
        return max(0.0, (self.value - self.bound) / self.value) if self.value > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file the plan was made from."""

    name: str
    """Path as given, or catalog name."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout together with what it was made from, what it should cost and how good it is proved to be."""

    layout: Layout
    cluster: Input
    model: Input
    calibration: Input | None
    workload: Mapping[str, str | int | bool]
    """The workload's fields that differ from their defaults, plus seq_len, global_batch and precision."""
    estimate: Estimate
    proof: Proof | None = None
