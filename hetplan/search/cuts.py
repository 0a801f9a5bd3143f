"""Best cuts of the chain for many patterns at once.

A cut is feasible for a stage time tau when every stage's span takes at most tau and fits in memory with the
microbatches it holds, in some recompute mode. Both only grow with the span, so filling stages front to back as far as
they go finds a feasible cut whenever there is one; bisection on tau finds the least. The largest infeasible tau met is
a lower bound on the busiest stage of any cut.

Legend: N patterns, P stages, R recompute modes, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.search.patterns import Ints, Patterns
from hetplan.search.problem import Problem, Tables

STEPS = 12
"""Bisection steps: tau is mostly found to 1e-4."""
MOST_STEPS, WELL_KNOWN = 20, 1 + 1e-3
"""Some more where stages differ so much that tau is not yet known that well."""
FIRST_GUESSES = (1.3, 1.08)
"""Where the first steps look, in units of the lower bound: most cuts come close to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The best cut of each pattern."""

    least_tau_s: Floats
    """No cut's busiest stage is faster; infinite where no cut fits."""
    ends: Ints
    """End layer of each stage, (N, P), -1 after the last stage."""
    modes: Ints
    """Recompute mode of each stage, (N, P)."""
    mesh: Ints
    """Mesh of each stage, (N, P), -1 after the last stage."""


def stage_meshes(patterns: Patterns) -> Ints:
    """Return the mesh of every stage, (N, P), -1 after a pattern's last stage."""
    most = int(patterns.stages.max(initial=0))
    position = np.arange(most)[None, :]
    first = np.cumsum(patterns.count, axis=1) - patterns.count
    result = np.full((len(patterns), most), -1, dtype=np.int64)
    for block in range(patterns.mesh.shape[1]):
        begin, end = first[:, block, None], (first + patterns.count)[:, block, None]
        result = np.where((position >= begin) & (position < end), patterns.mesh[:, block, None], result)
    return result


def best_cuts(problem: Problem, tables: Tables, patterns: Patterns, held: int, limit_s: Floats | None = None) -> Cuts:
    """Return the best cut of each pattern when a stage holds min(stages after it + 1, `held`) microbatches.

    `limit_s`: stage time beyond which a cut is of no use, (N,); patterns without a faster cut count as unfit.
    """
    mesh = stage_meshes(patterns)
    flight = np.minimum(patterns.stages[:, None] - np.arange(mesh.shape[1])[None, :], held)
    walk = _Walk(problem, tables, mesh, flight)
    fits, ends, modes, tau_hi = walk.fill(np.full(len(patterns), np.inf) if limit_s is None else limit_s)
    rate = np.where(patterns.count > 0, patterns.count / patterns.unit_s, 0.0).sum(axis=1)
    tau_lo = np.minimum(tables.weight_l.sum() / np.maximum(rate, 1e-300) * (1 - 1e-12), tau_hi)
    for step in range(MOST_STEPS):
        if step >= STEPS and not np.any(fits & (tau_hi > tau_lo * WELL_KNOWN)):
            break
        middle = np.where(tau_hi > 2 * tau_lo, np.sqrt(tau_lo * tau_hi), (tau_lo + tau_hi) / 2)
        if step < len(FIRST_GUESSES):
            middle = np.minimum(middle, tau_lo * FIRST_GUESSES[step])
        middle = np.where(fits, middle, np.inf)
        better, new_ends, new_modes, busiest = walk.fill(middle)
        better &= fits & (busiest < tau_hi)
        ends = np.where(better[:, None], new_ends, ends)
        modes = np.where(better[:, None], new_modes, modes)
        tau_hi = np.where(better, busiest, tau_hi)
        tau_lo = np.where(better | ~fits, tau_lo, middle)
    return Cuts(least_tau_s=np.where(fits, np.minimum(tau_lo, tau_hi), np.inf), ends=ends, modes=modes, mesh=mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Prefix sums of every mesh and mode, one after the other in one rising sequence, for a single binary search."""

    prefix_kl: Floats
    """(meshes x modes, layers + 1); unusable meshes rise beyond any limit."""
    shifted: Floats
    step_s: float
    span_s: float
    """More than any mesh takes for the whole chain."""

    def furthest(self, key: Ints, until_s: Floats) -> Ints:
        """Return the last layer boundary whose prefix does not exceed `until_s`, for rows `key`."""
        width = self.prefix_kl.shape[1]
        found = np.searchsorted(self.shifted, until_s * (1 + 1e-12) + key * self.step_s, side="right") - 1
        return np.asarray(np.minimum(found - key * width, width - 1))


def flatten(tables: Tables) -> Flat:
    """Return the prefix sums of all meshes and modes as one sequence."""
    num = tables.prefix_mrl.shape[0] * tables.prefix_mrl.shape[1]
    prefix = tables.prefix_mrl.reshape(num, -1)
    finite = np.isfinite(prefix)
    span = 2.0 * float(prefix[finite].max(initial=1e-9))
    prefix = np.where(finite, prefix, 3.0 * span)
    step = 4.0 * span
    return Flat(prefix_kl=prefix, shifted=(prefix + np.arange(num)[:, None] * step).ravel(), step_s=step, span_s=span)


class _Walk:
    """Fills stages front to back for a limit on stage time; what repeats between limits is kept."""

    def __init__(self, problem: Problem, tables: Tables, mesh: Ints, flight: Ints) -> None:
        self.tables = tables
        self.mesh = mesh
        held, self.fit_of = np.unique(np.maximum(flight, 1), return_inverse=True)
        self.fit_of = self.fit_of.reshape(flight.shape)
        self.fits = np.stack([tables.furthest_fit(k) for k in held.tolist()])
        self.num_layers = problem.num_layers
        self.num_modes = len(tables.recomputes)
        self.flat = flatten(tables)
        self.stages = (mesh >= 0).sum(axis=1)
        decoder = np.array([layer.kind == "decoder" for layer in problem.prices.model.chain])
        self.decoders = np.concatenate([[0], np.cumsum(decoder)])
        self.fewest = problem.limits.min_decoder_layers
        self.pinned = problem.limits.pinned_layers

    def fill(self, tau_s: Floats) -> tuple[npt.NDArray[np.bool_], Ints, Ints, Floats]:
        """Return (fits, ends, modes, busiest stage's seconds) under a stage time limit for each pattern."""
        num, most = self.mesh.shape
        at = np.zeros(num, dtype=np.int64)
        fits = np.ones(num, dtype=bool)
        ends = np.full((num, most), -1, dtype=np.int64)
        modes = np.zeros((num, most), dtype=np.int64)
        busiest = np.zeros(num)
        for s in range(most):
            rows = np.flatnonzero((self.stages > s) & fits)
            if not len(rows):
                break
            end, mode, seconds = self._extend(rows, s, at[rows], tau_s[rows])
            good = end > at[rows]
            fits[rows[~good]] = False
            ends[rows, s], modes[rows, s] = end, mode
            busiest[rows] = np.maximum(busiest[rows], seconds)
            at[rows] = end
        fits &= at == self.num_layers
        return fits, ends, modes, np.where(fits, busiest, np.inf)

    def _extend(self, rows: Ints, s: int, at: Ints, tau_s: Floats) -> tuple[Ints, Ints, Floats]:
        """Return the furthest end of stage `s`, its fastest mode and its seconds; the end is `at` where none fits."""
        mesh = self.mesh[rows, s]
        key = mesh[:, None] * self.num_modes + np.arange(self.num_modes)[None, :]
        before = self.flat.prefix_kl[key, at[:, None]]
        by_time = self.flat.furthest(key, before + np.minimum(tau_s, self.flat.span_s)[:, None])
        fit = self.fit_of[rows, s]
        by_memory = self.fits[fit[:, None], mesh[:, None], np.arange(self.num_modes)[None, :], at[:, None]]
        reach = np.minimum(by_time, by_memory)
        end = self._allowed_end(rows, s, at, reach.max(axis=1))
        seconds = np.where(reach >= end[:, None], self.flat.prefix_kl[key, end[:, None]] - before, np.inf)
        mode = np.argmin(seconds, axis=1)
        found = end > at
        return end, mode, np.where(found, seconds[np.arange(len(rows)), mode], np.inf)

    def _allowed_end(self, rows: Ints, s: int, at: Ints, reach: Ints) -> Ints:
        """Return the furthest end within reach that leaves later stages enough and keeps the limits, or `at`."""
        later = self.stages[rows] - 1 - s
        end = np.minimum(reach, self.num_layers - later)
        if self.pinned is not None:
            target = self.decoders[at] + self.pinned[s]
            last = np.searchsorted(self.decoders, target, side="right") - 1
            end = np.where(later > 0, np.minimum(end, last), end)
            end = np.where(self.decoders[np.maximum(end, 0)] == target, end, at)
        if self.fewest:
            left = np.searchsorted(self.decoders, self.decoders[-1] - later * self.fewest, side="right") - 1
            end = np.minimum(end, left)
            end = np.where(self.decoders[np.maximum(end, 0)] - self.decoders[at] >= self.fewest, end, at)
        end = np.where((later > 0) | (end == self.num_layers), end, at)
        return np.asarray(np.maximum(end, at))
