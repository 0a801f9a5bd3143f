"""What the ranks of a testbed are told to run; no torch here, so that whoever tells them needs none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetplan.plan.records import Layout
from hetplan.specs.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all ranks run."""

    model: Model
    layouts: tuple[Layout, ...]
    rank_of: Mapping[tuple[str, int], tuple[int, str]]
    """(group, device) -> rank and host."""
    seq_len: int
    num_steps: int
