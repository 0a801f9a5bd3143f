"""Every cut of one pattern that could be faster than a limit: what is left where the bound of `blocks` is too weak.

Division by division of the chain between blocks, stages take layers front to back. A stage that holds layers a .. e is
ruled out when one of these exceeds the limit (W, F, B: the least seconds of all layers, forward and backward, where the
division puts them; t, A: what the stage takes and ends with; h: microbatches it holds under 1F1B):

    W + C + (work from layer a on) + (m - 1 - h) t                        m > h
    (work before a) + m t
    (F before a) + m t + A
    W + C / 2 - (B before a) + A                                          (C on the first stage)

All of them are least over recompute modes, so nothing valid is ruled out. The cuts that are left are timed exactly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.plan.stages import whole_params
from hetplan.search.after import Ending
from hetplan.search.patterns import Ints
from hetplan.search.problem import Problem, Tables

MOST_CUTS = 60_000
"""More than so many cuts are not listed."""


class EveryCut:
    """Cuts of the stages `mesh_p` for so many microbatches."""

    def __init__(self, problem: Problem, tables: Tables, mesh_p: Ints, at: tuple[int, float], ending: Ending) -> None:
        self._m, self._comm_s = at
        self._mesh_p = mesh_p
        self._p = len(mesh_p)
        self._num = problem.num_layers
        self._held = np.minimum(self._m, self._p - np.arange(self._p))
        self._forward = _prefix(tables.forward_mrl.min(axis=1)[mesh_p])
        self._backward = _prefix(tables.backward_mrl.min(axis=1)[mesh_p])
        self._seconds = np.stack([self._spans(tables, s) for s in range(self._p)])
        params = np.concatenate([[0.0], np.cumsum(whole_params(problem.prices)[0])])
        span = np.maximum(params[None, :] - params[:, None], 0.0)
        backward = self._seconds - np.where(
            np.isfinite(self._seconds), self._forward[:, None, :] - self._forward[:, :, None], 0.0
        )
        backward = np.where(np.isfinite(backward), backward, 0.0)
        shape = (self._num + 1) ** 2
        after = ending.of_stages(
            mesh_p, np.repeat(span.reshape(1, shape, 1), self._p, axis=2)[0], backward.reshape(self._p, shape).T
        )
        self._after = after.T.reshape(self._p, self._num + 1, self._num + 1)

    def below(self, divisions: Ints, limit_s: float) -> Ints | None:
        """Return end layers of all cuts under `divisions`, (D, K), that may be below the limit; None: too many."""
        found: list[Ints] = []
        total = 0
        for ends in divisions.tolist():
            cuts = self._of_division(ends, limit_s)
            if cuts is None:
                return None
            total += len(cuts)
            if total > MOST_CUTS:
                return None
            found.append(cuts)
        return np.concatenate(found) if found else np.zeros((0, self._p), dtype=np.int64)

    def _spans(self, tables: Tables, s: int) -> Floats:
        """Return seconds of stage `s` holding layers a .. e in its fastest mode that fits, (L + 1, L + 1)."""
        m = self._mesh_p[s]
        fits = tables.fixed_mrll[m] + self._held[s] * tables.flight_mrll[m] <= 1.0
        prefix = tables.prefix_mrl[m]
        with np.errstate(invalid="ignore"):
            seconds = prefix[:, None, :] - prefix[:, :, None]
        return np.asarray(np.where(fits & (seconds > 0), seconds, np.inf).min(axis=0))

    def _of_division(self, ends: list[int], limit_s: float) -> Ints | None:
        edge = np.flatnonzero(np.diff(self._mesh_p) != 0) + 1
        firsts = [0, *edge.tolist()]
        lasts = [*edge.tolist(), self._p]
        begins = [0, *ends[:-1]]
        forward = [
            float(self._forward[s, e] - self._forward[s, b]) for s, b, e in zip(firsts, begins, ends, strict=True)
        ]
        backward = [
            float(self._backward[s, e] - self._backward[s, b]) for s, b, e in zip(firsts, begins, ends, strict=True)
        ]
        all_f, all_b = sum(forward), sum(backward)
        moves = []
        for k, end in enumerate(ends):
            for s in range(firsts[k], lasts[k]):
                f_before = sum(forward[:k]) + self._forward[s] - self._forward[s, begins[k]]
                b_before = sum(backward[:k]) + self._backward[s] - self._backward[s, begins[k]]
                allowed = self._allowed(s, (f_before, b_before), (all_f, all_b), limit_s)
                spare = lasts[k] - 1 - s
                allowed[:, end - spare + 1 :] = False
                if not spare:
                    allowed[:, :end] = False
                moves.append(allowed)
        return self._walk(moves)

    def _walk(self, moves: list[npt.NDArray[np.bool_]]) -> Ints | None:
        """Return every way from the front of the chain to its end; None: too many."""
        ends_well = np.arange(self._num + 1) == self._num
        for allowed in reversed(moves):
            allowed &= ends_well[None, :]
            ends_well = allowed.any(axis=1)
        cuts = np.zeros((1, 0), dtype=np.int64)
        at = np.zeros(1, dtype=np.int64)
        for allowed in moves:
            row, target = np.nonzero(allowed[at])
            if len(row) > MOST_CUTS:
                return None
            cuts, at = np.column_stack([cuts[row], target]), target
        return cuts

    def _allowed(
        self, s: int, before: tuple[Floats, Floats], total: tuple[float, float], limit_s: float
    ) -> npt.NDArray[np.bool_]:
        f_before, b_before = (column[:, None] for column in before)
        t, work, held = self._seconds[s], sum(total), int(self._held[s])
        limit = limit_s * (1 + 1e-9)
        with np.errstate(invalid="ignore"):
            ok = f_before + b_before + self._m * t <= limit
            ok &= f_before + self._m * t + self._after[s] <= limit
            ok &= work + self._comm_s / (2 if s else 1) - b_before + self._after[s] <= limit
            if self._m > self._p - s:
                behind = work - f_before - b_before
                ok &= work + self._comm_s + behind + (self._m - 1 - held) * t <= limit
        return np.asarray(ok)


def _prefix(seconds_pl: Floats) -> Floats:
    return np.concatenate([np.zeros((len(seconds_pl), 1)), np.cumsum(seconds_pl, axis=1)], axis=1)
