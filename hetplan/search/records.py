"""What a search is asked and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hetplan.plan.limits import Limits
from hetplan.plan.records import Estimate, Layout, Proof

Objective = Literal["time", "cost", "energy", "cost-within-time", "devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to optimise, within which space, for how long."""

    objective: Objective = "time"
    time_budget_s: float | None = None
    """Longest step allowed (objectives `cost-within-time` and `devices`)."""
    limits: Limits = field(default_factory=Limits)
    engine: str = "hetplan"
    effort: float = 10.0
    """CP-SAT deterministic time; the answer depends on this, never on the clock."""
    time_limit_s: float | None = None
    """Wall-clock safety net; a plan it cuts short is marked `limit`."""
    seed: int = 0
    top: int = 5
    """Runners-up to return."""
    simplicity: float = 0.01
    """A plan with fewer shapes is preferred when it costs at most this fraction more."""
    compare: bool = True
    """Also find the best uniform plan and the best of each device type alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a running search stands."""

    best: float | None
    bound: float
    elapsed_s: float
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with its price."""

    layout: Layout
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One row of the comparison that comes with every answer."""

    name: str
    """'best uniform', 'only a100', 'all devices' ..."""
    candidate: Candidate | None
    """None: nothing of this kind fits."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan found, how good it is proved to be, and what else was considered."""

    best: Candidate
    proof: Proof
    runners_up: tuple[Candidate, ...]
    alternatives: tuple[Alternative, ...]
    hetero_efficiency: float | None
    """Throughput of the answer over the sum of the throughputs of each device type alone."""
    dropped: Mapping[str, int]
    """Reason -> candidates dropped for it."""
    space: str
    """The set of plans the bound speaks of, in words."""
    search_s: float
    batches: tuple[int, ...] = ()
    """Global batches searched where larger ones were allowed, the one asked for first."""
