"""What is balanced, and the answer.

Sample `s` costs `loads_sm[s, m]` seconds on module `m` of a replica of speed 1, and takes `sizes_s[s]` tokens (or
bytes). A bin is one microbatch of one replica; bins of replica `r` stand side by side, replica after replica. With
`x[s]` the bin of sample `s`:

    minimise    max over b, m of  sum(loads_sm[s, m] for x[s] = b) / speeds_bm[b, m]
    subject to  sum(sizes_s[s] for x[s] = b) <= caps_b[b]

Suffixes: `_s` samples, `_b` bins, `_m` modules (so `_sm`, `_bm`); a name that ends in `_s` after a number's name,
as `largest_s`, is in seconds as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.errors import UsageError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One batch to divide."""

    loads_sm: Floats
    sizes_s: Floats
    speeds_bm: Floats
    caps_b: Floats

    def __post_init__(self) -> None:
        samples, modules = self.loads_sm.shape
        bins = len(self.caps_b)
        if self.speeds_bm.shape != (bins, modules) or self.sizes_s.shape != (samples,):
            raise UsageError("loads, sizes, speeds and caps do not agree on the numbers of samples, bins and modules")
        if min(samples, modules, bins) < 1:
            raise UsageError("there must be at least one sample, one module and one bin")
        if not (np.isfinite(self.loads_sm).all() and (self.loads_sm >= 0).all() and (self.sizes_s >= 0).all()):
            raise UsageError("loads and sizes must be finite and not negative")
        if not (np.isfinite(self.speeds_bm).all() and (self.speeds_bm > 0).all()):
            raise UsageError("speeds must be finite and above zero")

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return len(self.sizes_s)

    @property
    def num_bins(self) -> int:
        """Microbatches of all replicas."""
        return len(self.caps_b)

    def loads_of(self, bin_s: Ints) -> Floats:
        """Return the seconds of every bin and module, shape (bins, modules)."""
        sums_bm = np.stack(
            [np.bincount(bin_s, weights=load_s, minlength=self.num_bins) for load_s in self.loads_sm.T], axis=1
        )
        return sums_bm / self.speeds_bm

    def largest_s(self, bin_s: Ints) -> float:
        """Return the objective."""
        return float(self.loads_of(bin_s).max())

    def is_complete(self, bin_s: Ints) -> bool:
        """Return whether every sample has a bin and no cap is exceeded."""
        if bin_s.shape != self.sizes_s.shape or bin_s.min() < 0 or bin_s.max() >= self.num_bins:
            return False
        used_b = np.bincount(bin_s, weights=self.sizes_s, minlength=self.num_bins)
        return bool((used_b <= self.caps_b * (1 + 1e-12)).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Samples on bins, with what is proved about it."""

    bin_s: Ints
    """The bin of each sample."""
    largest_s: float
    bound_s: float
    """No assignment is below this."""
    method: str
    """What found it: given, lpt, karmarkar-karp, improved, cp-sat."""

    @property
    def ratio(self) -> float:
        """Largest load over its lower bound."""
        return self.largest_s / self.bound_s if self.bound_s > 0 else 1.0

    def bins(self, num_bins: int) -> tuple[tuple[int, ...], ...]:
        """Return the samples of each bin."""
        return tuple(tuple(np.flatnonzero(self.bin_s == b).tolist()) for b in range(num_bins))


def make_problem(
    loads: Sequence[Sequence[float]] | Floats,
    microbatches: Sequence[int],
    *,
    speeds: Sequence[float] | Sequence[Sequence[float]] | None = None,
    sizes: Sequence[float] | Floats | None = None,
    caps: float | Sequence[float] | None = None,
) -> Problem:
    """Return the problem of `microbatches[r]` bins on each replica `r`.

    `loads`: samples x modules, or one number a sample. `speeds`: one number a replica, or one a replica and module.
    `caps`: tokens (bytes) a microbatch may hold, one number or one a replica.

    Raises:
        UsageError: the shapes do not agree, or a number makes no sense.
    """
    loads_sm = np.asarray(loads, dtype=np.float64)
    loads_sm = loads_sm[:, None] if loads_sm.ndim == 1 else loads_sm
    if loads_sm.ndim != 2 or not microbatches or min(microbatches) < 1:
        raise UsageError("loads are one row a sample, and every replica runs at least one microbatch")
    repeats = np.asarray(microbatches, dtype=np.int64)
    speeds_rm = np.ones((len(repeats), loads_sm.shape[1])) if speeds is None else np.asarray(speeds, dtype=np.float64)
    speeds_rm = np.broadcast_to(
        speeds_rm[:, None] if speeds_rm.ndim == 1 else speeds_rm, (len(repeats), loads_sm.shape[1])
    )
    caps_r = np.broadcast_to(np.asarray(np.inf if caps is None else caps, dtype=np.float64), repeats.shape)
    return Problem(
        loads_sm=loads_sm,
        sizes_s=np.zeros(len(loads_sm)) if sizes is None else np.asarray(sizes, dtype=np.float64),
        speeds_bm=np.repeat(speeds_rm, repeats, axis=0),
        caps_b=np.repeat(caps_r, repeats),
    )
