"""A batch sampler for torch's `DataLoader`: each rank gets the microbatches the balance gives its replica.

`DataLoader(dataset, batch_sampler=BalancedBatchSampler(...))` needs only something to iterate, so torch itself is not
imported here. Every rank draws the same global batches from the same seed and balances them alike (the effort is
counted in steps, not seconds), so ranks agree without talking. A replica yields `microbatches[replica]` lists of
indices a step; a microbatch that got no sample is an empty list, and the trainer skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hetplan.balance.assign import QUICK_STEPS, balance
from hetplan.balance.order import order_microbatches
from hetplan.balance.problem import Assignment, Floats, Ints, Problem, make_problem
from hetplan.errors import UsageError

Loads = Callable[[Ints], Floats]
"""From sample indices to seconds, shape (samples, modules)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a global batch is divided."""

    global_batch: int
    microbatches: tuple[int, ...]
    """Microbatches a step of each replica."""
    speeds: tuple[float, ...] | None = None
    """Of each replica; None: all alike."""
    sizes: Floats | None = None
    """Tokens (or bytes) of every sample, where `cap` limits what a microbatch holds."""
    cap: float | None = None
    reorder: bool = True
    """Put a replica's microbatches in the order in which its modules wait least."""
    steps: int = QUICK_STEPS
    """Effort: the same number gives the same answer on every rank."""


class BalancedBatchSampler:
    """Yields one microbatch (a list of sample indices) of one replica at a time."""

    def __init__(
        self,
        loads: Loads | Floats,
        division: Division,
        *,
        num_samples: int,
        replica: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Describe the batches.

        `loads`: seconds of every sample and module, or a function of indices that is asked anew each step (a corrected
        cost model).

        Raises:
            UsageError: a number makes no sense.
        """
        if division.global_batch < 1 or num_samples < division.global_batch:
            raise UsageError(
                f"a global batch of {division.global_batch} needs as many samples; there are {num_samples}"
            )
        if not 0 <= replica < len(division.microbatches):
            raise UsageError(f"replica {replica} is not one of {len(division.microbatches)}")
        self._loads: Loads = loads if callable(loads) else _lookup(loads)
        self._num_samples = num_samples
        self._division = division
        self._replica = replica
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._start_step = 0

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch; a rest that fills none is left out."""
        return self._num_samples // self._division.global_batch

    def __len__(self) -> int:
        return (self.steps_per_epoch - self._start_step) * self._division.microbatches[self._replica]

    def set_epoch(self, epoch: int, *, start_step: int = 0) -> None:
        """Choose the epoch to iterate next, and where in it to begin (after a restart)."""
        self._epoch, self._start_step = epoch, start_step

    def state(self) -> dict[str, int]:
        """Return what a checkpoint keeps; `set_epoch(**state)` goes on from there."""
        return {"epoch": self._epoch, "start_step": self._start_step}

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self._num_samples)
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(self._num_samples)
        for step in range(self._start_step, self.steps_per_epoch):
            batch = order[step * self._division.global_batch : (step + 1) * self._division.global_batch]
            yield from self.divide(batch)

    def divide(self, batch: Ints) -> list[list[int]]:
        """Return this replica's microbatches of one global batch, in the order they should run."""
        problem = self._problem(batch)
        answer = balance(problem, steps=self._division.steps, seed=self._seed)
        first = sum(self._division.microbatches[: self._replica])
        own = range(first, first + self._division.microbatches[self._replica])
        parts = [[int(i) for i in batch[answer.bin_s == b]] for b in own]
        if self._division.reorder and problem.loads_sm.shape[1] > 1:
            loads_jm = problem.loads_of(answer.bin_s)[list(own)]
            parts = [parts[j] for j in order_microbatches(loads_jm).tolist()]
        return parts

    def answer(self, batch: Ints) -> Assignment:
        """Return the whole assignment of one global batch, all replicas, with its bound."""
        return balance(self._problem(batch), steps=self._division.steps, seed=self._seed)

    def _problem(self, batch: Ints) -> Problem:
        return make_problem(
            self._loads(batch),
            self._division.microbatches,
            speeds=self._division.speeds,
            sizes=None if self._division.sizes is None else np.asarray(self._division.sizes)[batch],
            caps=self._division.cap,
        )


def _lookup(loads: Floats) -> Loads:
    table = np.asarray(loads, dtype=np.float64)
    return lambda batch: table[batch]
