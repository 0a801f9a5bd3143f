"""What was measured, as plain figures; `hetplan.profiling.fit` turns them into constants of the cost model.

Every figure carries its spread: the distance between the quartiles of the repetitions over their median. A figure
whose spread stayed above `STEADY_SPREAD` in every round it was given is kept and marked, never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hetplan.specs.cluster import Precision

STEADY_SPREAD = 0.10
"""Assumed: quartiles of a quiet machine lie closer than this; above it a figure is measured again, then marked."""

Pass = Literal["forward", "backward"]
LinkKind = Literal["send", "all_reduce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one piece of work."""

    seconds: float
    """Median of the repetitions of the steadiest round."""
    spread: float
    repeats: int

    @property
    def is_steady(self) -> bool:
        """Whether the repetitions agree."""
        return self.spread <= STEADY_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmFigure:
    """A product of `rows x inputs` and `inputs x outputs`."""

    rows: int
    inputs: int
    outputs: int
    precision: Precision
    timing: Timing

    @property
    def flop(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFigure:
    """Causal attention of `samples` sequences."""

    samples: int
    heads: int
    seq_len: int
    head_dim: int
    precision: Precision
    way: Pass
    timing: Timing

    @property
    def forward_flop(self) -> float:
        """Two products over the lower triangle of the scores."""
        return 2.0 * self.samples * self.heads * self.seq_len * (self.seq_len + 1) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFigure:
    """Elementwise work, norms, the optimizer's update or a copy: bytes that must move, and how long it took."""

    name: str
    num_bytes: float
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigure:
    """One layer of the planned model on one rank, its tensor-parallel communication included."""

    kind: str
    samples: int
    seq_len: int
    tp: int
    precision: Precision
    forward: Timing
    backward: Timing
    params: float
    """Parameters this rank holds of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigure:
    """One message size over one set of ranks."""

    kind: LinkKind
    ranks: tuple[int, ...]
    num_bytes: int
    timing: Timing
    together: int = 1
    """Sets of ranks that did the same at the same time (2: how links are shared)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """All a rank measured alone."""

    gemms: tuple[GemmFigure, ...] = ()
    attentions: tuple[AttentionFigure, ...] = ()
    traffic: tuple[TrafficFigure, ...] = ()
    launch: Timing | None = None
    """A kernel so small that only its launch takes time."""
    layers: tuple[LayerFigure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a rank runs on."""

    host: str
    device: str
    """Name the calibration uses."""
    kind: Literal["cpu", "cuda", "rocm"]
    memory_bytes: float
    host_memory_bytes: float
    threads: int
    reserve_bytes: float
    """Memory the process holds before it has made a tensor of its own."""
    software: str
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank found."""

    machine: Machine
    figures: DeviceFigures
    seconds: float
    """What its measurements took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What all ranks found, in rank order, and the links between them."""

    ranks: tuple[RankReport, ...]
    links: tuple[LinkFigure, ...] = field(default=())
