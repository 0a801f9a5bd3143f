"""What is wrong with a request that nothing satisfies, as numbers; `infeasible` finds them and puts them into words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hetplan.search.lightest import Near

Constraint = Literal[
    "precision",
    "divisibility",
    "batch",
    "sequence",
    "layers",
    "pinned layers",
    "devices",
    "network",
    "vendors",
    "memory",
    "price",
    "time budget",
    "limits",
    "search",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One change of the request, tried alone."""

    words: str
    step_s: float | None
    """Step time of a plan that is valid then; None: nothing fits even so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """How many nodes of a group would do."""

    group: str
    nodes: int
    """Smallest number of nodes of the group, everything else as it is."""
    devices: int
    """Usable devices of the group then."""
    existing_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why nothing satisfies a request, and what would."""

    constraint: Constraint
    sentence: str
    """One sentence that stands alone."""
    near: Near | None = None
    """The layout that comes nearest, where memory binds."""
    replica: int | None = None
    stage: int | None = None
    group: str | None = None
    shortfall_bytes: float = 0.0
    """Bytes a device of that stage lacks."""
    component: str | None = None
    """What takes most of that stage: weights, gradients, optimizer, activations, logits, buffers, reserve."""
    component_bytes: float = 0.0
    fixes: tuple[Fix, ...] = ()
    devices_needed: tuple[Need, ...] = ()
    remarks: tuple[str, ...] = ()
    """What lies outside a plan's space: offloading, adapters."""
