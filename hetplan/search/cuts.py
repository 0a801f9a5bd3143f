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

STEPS = 16
"""Bisection steps: tau is found to about 1e-5 of its range."""


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


def best_cuts(problem: Problem, tables: Tables, patterns: Patterns, held: int) -> Cuts:
    """Return the best cut of each pattern when a stage holds min(stages after it + 1, `held`) microbatches."""
    mesh = stage_meshes(patterns)
    flight = np.minimum(patterns.stages[:, None] - np.arange(mesh.shape[1])[None, :], held)
    walk = _Walk(problem, tables, mesh, flight)
    fits, ends, modes, tau_hi = walk.fill(np.full(len(patterns), np.inf))
    rate = np.where(patterns.count > 0, patterns.count / patterns.unit_s, 0.0).sum(axis=1)
    tau_lo = np.minimum(tables.weight_l.sum() / rate * (1 - 1e-12), tau_hi)
    for _ in range(STEPS):
        middle = np.where(fits, (tau_lo + tau_hi) / 2, np.inf)
        better, new_ends, new_modes, busiest = walk.fill(middle)
        better &= fits & (busiest < tau_hi)
        ends = np.where(better[:, None], new_ends, ends)
        modes = np.where(better[:, None], new_modes, modes)
        tau_hi = np.where(better, busiest, tau_hi)
        tau_lo = np.where(better | ~fits, tau_lo, middle)
    return Cuts(least_tau_s=np.where(fits, np.minimum(tau_lo, tau_hi), np.inf), ends=ends, modes=modes, mesh=mesh)


class _Walk:
    """Fills stages front to back for a limit on stage time; what repeats between limits is kept."""

    def __init__(self, problem: Problem, tables: Tables, mesh: Ints, flight: Ints) -> None:
        self.tables = tables
        self.mesh = mesh
        self.flight = flight
        self.num_layers = problem.num_layers
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
        prefix = self.tables.prefix_mrl[mesh]
        seconds = prefix - np.take_along_axis(prefix, at[:, None, None], axis=2)
        held = self.flight[rows, s][:, None, None]
        fixed = self.tables.fixed_mrll[mesh[:, None], np.arange(prefix.shape[1])[None, :], at[:, None]]
        flight = self.tables.flight_mrll[mesh[:, None], np.arange(prefix.shape[1])[None, :], at[:, None]]
        allowed = (seconds <= tau_s[:, None, None]) & (fixed + held * flight <= 1.0)
        allowed &= self._ends_allowed(rows, s, at)[:, None, :]
        any_mode = allowed.any(axis=1)
        places = np.arange(any_mode.shape[1])[None, :]
        end = np.max(np.where(any_mode, places, -1), axis=1)
        found = end > at
        end = np.where(found, end, at)
        row = np.arange(len(rows))
        at_end = np.where(allowed[row, :, end], seconds[row, :, end], np.inf)
        mode = np.argmin(at_end, axis=1)
        return end, mode, np.where(found, at_end[row, mode], np.inf)

    def _ends_allowed(self, rows: Ints, s: int, at: Ints) -> npt.NDArray[np.bool_]:
        """Return which ends leave a layer for every later stage and hold as many decoders as asked."""
        places = np.arange(self.num_layers + 1)[None, :]
        later = (self.stages[rows] - 1 - s)[:, None]
        allowed = (places > at[:, None]) & (places <= self.num_layers - later)
        allowed &= (later > 0) | (places == self.num_layers)
        held = self.decoders[places] - self.decoders[at][:, None]
        if self.pinned is not None:
            allowed &= held == self.pinned[s]
            if s == 0 and len(self.pinned) > 1:
                allowed &= self.decoders[places] < self.decoders[-1]
        elif self.fewest:
            allowed &= held >= self.fewest
        return np.asarray(allowed)
