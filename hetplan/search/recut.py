"""The best cut of one pattern for a given number of microbatches, by moving layers while the pipeline gets faster.

A balanced cut is best only when there are many microbatches: with few of them stages at the front may be longer (they
hold every microbatch anyway), and what follows the pipeline counts as well. Each round looks at every move of one layer
from one stage to another (the boundaries between them shift by one) and takes the best; pipelines of a round are timed
side by side.

Legend: N cuts, P stages, R recompute modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.plan.stages import whole_params
from hetplan.search.after import Ending
from hetplan.search.columns import Place, transfers_s
from hetplan.search.patterns import NEVER_S, Ints
from hetplan.search.pipelines import ends_s
from hetplan.search.problem import Problem, Tables

EXACT_PASSES = 240
"""Stages times microbatches up to which a pipeline is followed to the end; longer ones go on at the pace they have."""
PROVED_PASSES = 4000
"""The same where a bound depends on it; beyond, what a pipeline takes at least counts."""
ALL_PAIRS = 14
"""Stages up to which a layer may move between any two; beyond, between neighbours and to and from block ends."""
TIMED = 48
"""Moves of one round that are timed exactly: the best by their lower bound."""
MOST_ROUNDS = 60
MOST_TIMED = 4000
"""Cuts timed in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Cuts with their recompute modes and step times, infinite where a cut is not valid."""

    ends: Ints
    modes: Ints
    forward_s: Floats
    backward_s: Floats
    after_s: Floats
    valid: npt.NDArray[np.bool_]


class Recut:
    """Improves cuts of the stages `mesh_p`, one mesh a stage, for so many microbatches."""

    def __init__(self, problem: Problem, tables: Tables, mesh_p: Ints, num_microbatches: int, ending: Ending) -> None:
        self.num_microbatches = num_microbatches
        self._mesh_p = mesh_p
        self._ending = ending
        self._tables = tables
        self._p = len(mesh_p)
        self._params = np.concatenate([[0.0], np.cumsum(whole_params(problem.prices)[0])])
        self.decoders: Ints = np.concatenate(
            [[0], np.cumsum([layer.kind == "decoder" for layer in problem.prices.model.chain])]
        )
        self._forward = _prefix(tables.forward_mrl[mesh_p])
        self._total = tables.prefix_mrl[mesh_p]
        self._held = np.minimum(num_microbatches, self._p - np.arange(self._p))
        self._fewest = problem.limits.min_decoder_layers
        self._pinned = problem.limits.pinned_layers
        self._p2p_s = np.array(transfers_s(problem, tables, mesh_p.tolist()))
        self._moves = _moves(mesh_p)
        self._tie_s = ending.tie_s(int(mesh_p[0]), int(mesh_p[-1])) if len(mesh_p) > 1 else 0.0

    def best(self, starts: Ints) -> tuple[Place, ...] | None:
        """Return the stages of the best cut found from any of `starts`, (N, P) end layers; None where none is valid."""
        timed = self._timed(starts)
        seconds = self._exact_s(timed)
        at = int(np.argmin(seconds))
        if not np.isfinite(seconds[at]):
            return None
        ends, modes, best_s = timed.ends[at], timed.modes[at], seconds[at]
        for _ in range(MOST_ROUNDS):
            if self._pinned is not None or not len(self._moves):
                break
            moved = self._timed(ends[None, :] + self._moves)
            least = self._least_s(moved)
            order = np.argsort(least, kind="stable")[:TIMED]
            order = order[least[order] < best_s * (1 - 1e-9)]
            if not len(order):
                break
            some = _take(moved, order)
            seconds = self._exact_s(some)
            at = int(np.argmin(seconds))
            if not seconds[at] < best_s * (1 - 1e-9):
                break
            ends, modes, best_s = some.ends[at], some.modes[at], seconds[at]
        spans = pairwise([0, *ends.tolist()])
        return tuple((m, span, r) for m, span, r in zip(self._mesh_p.tolist(), spans, modes.tolist(), strict=True))

    def any_fits(self, cuts: Ints) -> bool:
        """Return whether one of the cuts is valid."""
        return bool(self._timed(cuts).valid.any())

    def least_of(self, cuts: Ints, limit_s: float, *, proved: bool = False) -> tuple[float, Ints]:
        """Return the least step time of `cuts`, at most the limit, and the cut it belongs to (empty: none).

        `proved`: none of the cuts is faster; else long pipelines go on at the pace they have.
        """
        best_s, best = limit_s, cuts[:0]
        for at in range(0, len(cuts), MOST_TIMED):
            timed = self._timed(cuts[at : at + MOST_TIMED])
            near = np.flatnonzero(self._least_s(timed) < best_s)
            if not len(near):
                continue
            some = _take(timed, near)
            seconds = self._proved_s(some) if proved else self._exact_s(some)
            row = int(np.argmin(seconds))
            if seconds[row] < best_s:
                best_s, best = float(seconds[row]), some.ends[row : row + 1]
        return best_s, best

    def _timed(self, ends: Ints) -> Timed:
        """Return cuts with the fastest recompute mode that fits on every stage."""
        first = np.concatenate([np.zeros((len(ends), 1), dtype=np.int64), ends[:, :-1]], axis=1)
        num = len(self._params) - 1
        valid = np.all(ends > first, axis=1) & (ends[:, -1] == num)
        a, e = np.clip(first, 0, num), np.clip(ends, 0, num)
        decoders = self.decoders[e] - self.decoders[a]
        valid &= np.all(decoders >= self._fewest, axis=1)
        if self._pinned is not None:
            valid &= np.all(decoders == np.array(self._pinned), axis=1)
        stage, mesh = np.arange(self._p)[None, :], self._mesh_p[None, :]
        fixed = self._tables.fixed_mrll.transpose(0, 2, 3, 1)[mesh, a, e]
        flight = self._tables.flight_mrll.transpose(0, 2, 3, 1)[mesh, a, e]
        by_mode = self._total.transpose(0, 2, 1)
        with np.errstate(invalid="ignore"):
            seconds = by_mode[stage, e] - by_mode[stage, a]
            taken = fixed + self._held[None, :, None] * flight
        fits = np.where((taken <= 1.0) & np.isfinite(seconds), seconds, np.inf)
        modes = np.argmin(fits, axis=2)
        total = np.take_along_axis(fits, modes[:, :, None], axis=2)[:, :, 0]
        valid &= np.all(np.isfinite(total), axis=1)
        with np.errstate(invalid="ignore"):
            forward = self._forward[stage, modes, e] - self._forward[stage, modes, a]
        total = np.where(valid[:, None], total, 0.0)
        forward = np.where(valid[:, None], forward, 0.0)
        backward = total - forward
        after = self._ending.of_stages(self._mesh_p, self._params[e] - self._params[a], backward)
        if self._tie_s:
            params = self._params[e] - self._params[a]
            ends_of = int(self._mesh_p[0]), int(self._mesh_p[-1])
            reduced = self._ending.reduced_s(ends_of[0], params[:, 0], backward[:, 0])
            held_up = self._ending.tied_s(*ends_of, reduced, params[:, -1])
            after[:, 0] = np.maximum(after[:, 0] + self._tie_s, held_up)
        return Timed(ends=ends, modes=modes, forward_s=forward, backward_s=backward, after_s=after, valid=valid)

    def _proved_s(self, cuts: Timed) -> Floats:
        if self.num_microbatches * self._p <= PROVED_PASSES:
            return self._done_s(cuts, self.num_microbatches)
        return self._least_s(cuts)

    def _exact_s(self, cuts: Timed) -> Floats:
        known = max(EXACT_PASSES // self._p, 3 * self._p)
        if self.num_microbatches <= known:
            return self._done_s(cuts, self.num_microbatches)
        late, early = self._done_s(cuts, known), self._done_s(cuts, known // 2)
        with np.errstate(invalid="ignore"):
            ahead = late + (self.num_microbatches - known) * (late - early) / (known - known // 2)
        return np.where(cuts.valid, np.maximum(np.where(cuts.valid, ahead, 0.0), self._least_s(cuts)), np.inf)

    def _done_s(self, cuts: Timed, num_microbatches: int) -> Floats:
        p2p = np.broadcast_to(self._p2p_s, (len(cuts.ends), self._p - 1))
        ends = ends_s(cuts.forward_s, cuts.backward_s, p2p, num_microbatches)
        return np.where(cuts.valid, (ends + cuts.after_s).max(axis=1), np.inf)

    def _least_s(self, cuts: Timed) -> Floats:
        """Return a step time each cut takes at least, (N,)."""
        tau = cuts.forward_s + cuts.backward_s
        p2p_s = np.minimum(self._p2p_s, NEVER_S)
        up = np.concatenate([[0.0], np.cumsum(p2p_s)])
        before = np.cumsum(tau, axis=1) - tau + 2 * up
        latency = tau.sum(axis=1) + 2 * up[-1]
        held = self._p - np.arange(self._p)
        journeys = np.where(
            self.num_microbatches > held,
            2 * latency[:, None] - before + (self.num_microbatches - 1 - held) * tau,
            latency[:, None] + (self.num_microbatches - 1) * np.maximum(cuts.forward_s, cuts.backward_s),
        )
        backward_before = np.cumsum(cuts.backward_s, axis=1) - cuts.backward_s + up
        ending = (cuts.after_s - backward_before).max(axis=1)
        pace = (before - backward_before + self.num_microbatches * tau + cuts.after_s).max(axis=1)
        loops = np.where(self.num_microbatches > held, journeys, latency[:, None]).max(axis=1) + np.maximum(ending, 0.0)
        return np.where(cuts.valid, np.maximum.reduce([journeys.max(axis=1), loops, pace]), np.inf)


def _take(cuts: Timed, rows: Ints) -> Timed:
    return Timed(
        ends=cuts.ends[rows],
        modes=cuts.modes[rows],
        forward_s=cuts.forward_s[rows],
        backward_s=cuts.backward_s[rows],
        after_s=cuts.after_s[rows],
        valid=cuts.valid[rows],
    )


def _prefix(seconds_prl: Floats) -> Floats:
    zero = np.zeros((*seconds_prl.shape[:2], 1))
    return np.concatenate([zero, np.cumsum(seconds_prl, axis=2)], axis=2)


def _moves(mesh_p: Ints) -> Ints:
    """Return what each move of one layer adds to the end layers, (moves, P)."""
    p = len(mesh_p)
    edge = np.flatnonzero(np.diff(mesh_p) != 0)
    edges = {0, p - 1, *edge.tolist(), *(edge + 1).tolist()}
    found = []
    for i in range(p):
        for j in range(i + 1, p):
            if p <= ALL_PAIRS or j == i + 1 or i in edges or j in edges:
                shift = np.zeros(p, dtype=np.int64)
                shift[i:j] = 1
                found += [shift, -shift]
    return np.array(found, dtype=np.int64).reshape(-1, p)


def even_cuts(decoders_before: Ints, mesh_p: Ints, block_ends: Ints) -> Ints:
    """Return cuts that spread each block's decoder layers evenly over its stages, spare ones in front or behind."""
    num = len(decoders_before) - 1
    p = len(mesh_p)
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(mesh_p) != 0) + 1, [p]])
    found = []
    for behind in (False, True):
        ends, begin = [], 0
        for k, (first, last) in enumerate(pairwise(bounds.tolist())):
            end, stages = int(block_ends[k]), last - first
            q = int(decoders_before[end] - decoders_before[begin])
            spread = np.arange(1, stages) * q
            done = spread // stages if behind else -(-spread // stages)
            inner = np.searchsorted(decoders_before, decoders_before[begin] + done, side="left")
            ends += [*inner.tolist(), end]
            begin = end
        ends[-1] = num
        cut = np.array(ends, dtype=np.int64)
        cut = np.maximum(cut, np.arange(1, p + 1))
        for s in range(1, p):
            cut[s] = max(cut[s], cut[s - 1] + 1)
        found.append(np.minimum(cut, num - np.arange(p - 1, -1, -1)))
    return np.array(found)
