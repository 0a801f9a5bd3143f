"""What a simulation is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hetplan.errors import UsageError
from hetplan.plan.program import Kind
from hetplan.plan.sync import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a simulation adds to the critical path, and how much of a large layout it looks at."""

    contention: bool = True
    """Transfers of all simulated copies share nodes' NICs and shared lines."""
    jitter: float = 0.0
    """Every action takes longer by this fraction times the absolute value of a standard normal draw."""
    seed: int = 0
    most_copies: int = 8
    """Copies of a replica shape that are simulated; the others are taken to end when `estimate` says."""
    most_actions: int = 400_000
    """Actions of all simulated copies together; at least one copy of each shape is simulated all the same."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.jitter <= 10.0 or self.most_copies < 1:
            raise UsageError("jitter must be between 0 and 10, and at least one copy is simulated")


class Interval(NamedTuple):
    """One action of a rank, or the transfer of its result."""

    start_s: float
    end_s: float
    kind: Kind
    stage: int
    """Virtual stage."""
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one rank does, or what one rank sends to another."""

    row: int
    copy: int
    rank: int
    receiver: int | None
    """None: the rank's own work; else the rank it sends to."""
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step as it ran."""

    step_s: float
    estimated_s: float
    """What the critical path alone says."""
    replica_s: tuple[float, ...]
    """End of the last backward pass of each replica shape."""
    lanes: tuple[Lane, ...]
    events: tuple[Event, ...]
    """Synchronisation and optimizer."""
    waited_s: Mapping[str, float] = field(default_factory=dict)
    """Shared resource -> seconds transfers waited for it."""
    copies: tuple[tuple[int, int], ...] = ()
    """(simulated, all) copies of each replica shape."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the simulation left out, in words."""
        return tuple(
            f"{simulated} of {total} copies of replica shape {row} are simulated"
            for row, (simulated, total) in enumerate(self.copies)
            if simulated < total
        )
