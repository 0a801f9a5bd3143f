"""How the learning rate goes up and comes down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up over `warmup` steps, then down to `floor` of the peak at step `steps`."""

    peak: float
    steps: int
    warmup: int = 0
    decay: Decay = "cosine"
    floor: float = 0.1

    def at(self, step: int) -> float:
        """Return the rate of a step, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.decay == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.floor + (1.0 - self.floor) * left)
