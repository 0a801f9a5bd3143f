"""Local improvement: the fullest bin gives, takes, or is divided anew together with another bin.

Each step looks at the bin with the largest load and takes the change that leaves the smaller maximum of the two bins
it touches: every move of one sample and every swap of two; where none helps and two bins hold few samples together,
every way of dividing them again. A step is taken only when both bins end strictly below the present maximum, so the
maximum, or the number of bins at it, falls every time. When none is left, a few samples of random bins trade places
and the descent starts again from there; the best assignment ever met is the answer. The number of steps is given, not
measured, so the result repeats bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetplan.balance.problem import Floats, Ints, Problem

MOST_DIVIDED = 11
"""Samples of two bins that are divided in every way; more are left to moves and swaps."""
MOST_PARTNERS = 8
"""Light bins that are tried as the second of such a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """New bins of some samples, and the larger of the two bins touched."""

    value: float
    samples: Ints
    bins: Ints


_NONE = _Change(value=np.inf, samples=np.empty(0, dtype=np.int64), bins=np.empty(0, dtype=np.int64))


def improve(problem: Problem, start: Ints, *, steps: int, seed: int = 0, target_s: float = 0.0) -> Ints:
    """Return an assignment at least as good as `start` after at most `steps` steps, fewer once `target_s` is met."""
    random = np.random.default_rng(seed)
    best = bin_s = start.copy()
    best_value = problem.largest_s(best)
    for _ in range(steps):
        time_bm = problem.loads_of(bin_s)
        current = float(time_bm.max())
        change = _best_change(problem, bin_s, time_bm)
        if change.value < current * (1 - 1e-12):
            bin_s = bin_s.copy()
            bin_s[change.samples] = change.bins
            value = problem.largest_s(bin_s)
            if value < best_value:
                best, best_value = bin_s, value
        elif best_value <= target_s * (1 + 1e-9) or problem.num_bins == 1:
            break
        else:
            bin_s = _kicked(problem, best, random)
    return best


def _best_change(problem: Problem, bin_s: Ints, time_bm: Floats) -> _Change:
    worst = int(time_bm.max(axis=1).argmax())
    room_b = problem.caps_b - np.bincount(bin_s, weights=problem.sizes_s, minlength=problem.num_bins)
    found = _best_trade(problem, bin_s, time_bm, worst, room_b)
    counts_b = np.bincount(bin_s, minlength=problem.num_bins)
    if found.value >= time_bm.max() * (1 - 1e-12) and counts_b[worst] * 2 <= MOST_DIVIDED:
        found = min(found, _best_division(problem, bin_s, worst, time_bm), key=lambda change: change.value)
    return found


def _best_trade(problem: Problem, bin_s: Ints, time_bm: Floats, worst: int, room_b: Floats) -> _Change:
    """Return the best move of a sample out of `worst`, or swap with a sample elsewhere."""
    own = np.flatnonzero(bin_s == worst)
    other = np.flatnonzero(bin_s != worst)
    bins_b = np.delete(np.arange(problem.num_bins), worst)
    if not len(bins_b) or not len(own):
        return _NONE
    target = np.concatenate([bins_b, bin_s[other]])
    back_sm = np.concatenate([np.zeros((len(bins_b), problem.loads_sm.shape[1])), problem.loads_sm[other]])
    back_size = np.concatenate([np.zeros(len(bins_b)), problem.sizes_s[other]])
    value = np.zeros((len(own), len(target)))
    for m in range(problem.loads_sm.shape[1]):
        moved = problem.loads_sm[own, m][:, None] - back_sm[None, :, m]
        np.maximum(value, time_bm[worst, m] - moved / problem.speeds_bm[worst, m], out=value)
        np.maximum(value, time_bm[target, m][None, :] + moved / problem.speeds_bm[target, m][None, :], out=value)
    if np.isfinite(room_b).any():
        size = problem.sizes_s[own][:, None] - back_size[None, :]
        value = np.where((size <= room_b[target][None, :]) & (-size <= room_b[worst]), value, np.inf)
    i, j = divmod(int(value.argmin()), len(target))
    if j < len(bins_b):
        return _Change(value=float(value[i, j]), samples=own[[i]], bins=target[[j]])
    partner = other[j - len(bins_b)]
    return _Change(
        value=float(value[i, j]), samples=np.array([own[i], partner]), bins=np.array([target[j], worst], dtype=np.int64)
    )


@lru_cache(maxsize=16)
def _subsets(count: int) -> Floats:
    """Return every subset of `count` items as rows of 0 and 1."""
    codes = np.arange(2**count, dtype=np.int64)
    return ((codes[:, None] >> np.arange(count)) & 1).astype(np.float64)


def _best_division(problem: Problem, bin_s: Ints, worst: int, time_bm: Floats) -> _Change:
    """Return the best way to divide the samples of `worst` and of one light bin between the two."""
    own = np.flatnonzero(bin_s == worst)
    found = _NONE
    lightest = np.argsort(time_bm.max(axis=1), kind="stable")[:MOST_PARTNERS]
    for b in lightest.tolist():
        members = np.concatenate([own, np.flatnonzero(bin_s == b)])
        if b == worst or len(members) > MOST_DIVIDED:
            continue
        chosen = _subsets(len(members))
        loads_sm, sizes_s = problem.loads_sm[members], problem.sizes_s[members]
        first = (chosen @ loads_sm) / problem.speeds_bm[worst]
        second = (loads_sm.sum(axis=0) - chosen @ loads_sm) / problem.speeds_bm[b]
        value = np.maximum(first.max(axis=1), second.max(axis=1))
        if np.isfinite(problem.caps_b[[worst, b]]).any():
            size = chosen @ sizes_s
            value[(size > problem.caps_b[worst]) | (sizes_s.sum() - size > problem.caps_b[b])] = np.inf
        best = int(value.argmin())
        if value[best] < found.value:
            bins = np.where(chosen[best] > 0, worst, b).astype(np.int64)
            found = _Change(value=float(value[best]), samples=members, bins=bins)
    return found


def _kicked(problem: Problem, bin_s: Ints, random: np.random.Generator) -> Ints:
    """Return `bin_s` with the samples of a few bins, the fullest among them, dealt out anew at random."""
    fullest = int(problem.loads_of(bin_s).max(axis=1).argmax())
    bins = np.unique(np.append(random.integers(problem.num_bins, size=2), fullest))
    members = np.flatnonzero(np.isin(bin_s, bins))
    kicked = bin_s.copy()
    kicked[members] = random.permutation(bin_s[members])
    return kicked if problem.is_complete(kicked) else bin_s
