"""How many stages of each kind a replica may consist of, and what no order or cut of such stages beats.

Suffixes: `_nk` compositions x kinds, `_n` compositions, `_k` kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.plan.timing import SHORT_PIPELINE

Ints = npt.NDArray[np.int64]
MOST_OF_CLASS = 1500
MOST_TOGETHER = 400_000
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Compositions of a replica."""

    stages: Ints
    """Stages of each kind, (compositions, kinds)."""
    complete: bool
    """All there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """What a stage of each kind takes."""

    unit_k: Floats
    """Seconds of the cheapest layer that repeats."""
    sent_k: Floats
    """Seconds of the quickest transfer a stage can send for each microbatch."""
    most_k: Ints
    """Repeated layers that fit at most."""
    weight: float
    """All layers, in units."""
    repeated: int
    """Layers of at least one unit."""


def compositions(
    kinds: Sequence[tuple[int, int]], room: Sequence[int], most_stages: int, depths: Sequence[int] | None
) -> Counts:
    """Return the ways to fill a replica; kinds are (class, devices of a stage), `room` a class's devices a replica."""
    complete = True
    lists: list[Ints] = []
    for number, devices in enumerate(room):
        sizes = [size for one, size in kinds if one == number]
        found, whole = _of_class(sizes, devices, most_stages)
        complete = complete and whole
        lists.append(found)
    while np.prod([float(len(found)) for found in lists]) > MOST_TOGETHER:
        longest = max(range(len(lists)), key=lambda i: len(lists[i]))
        lists[longest] = lists[longest][: max(2, len(lists[longest]) * 2 // 3)]
        complete = False
    total = np.zeros((1, 0), dtype=np.int64)
    for found in lists:
        left = np.repeat(total, len(found), axis=0)
        right = np.tile(found, (len(total), 1))
        total = np.concatenate([left, right], axis=1)
        total = total[total.sum(axis=1) <= most_stages]
    stages = total.sum(axis=1)
    keep = stages >= 1
    if depths is not None:
        keep &= np.isin(stages, np.array(depths))
    return Counts(stages=total[keep], complete=complete)


def _of_class(sizes: Sequence[int], devices: int, most_stages: int) -> tuple[Ints, bool]:
    """Return counts by size with at most so many devices, those that use most devices first."""
    if not sizes:
        return np.zeros((1, 0), dtype=np.int64), True
    ranges = [range(min(most_stages, devices // size) + 1) for size in sizes]
    if np.prod([float(len(each)) for each in ranges]) > 200 * MOST_OF_CLASS:
        step = [_thinned(len(each) - 1) for each in ranges]
        found = np.array(list(product(*step)), dtype=np.int64)
        complete = False
    else:
        found = np.array(list(product(*ranges)), dtype=np.int64)
        complete = True
    used = found @ np.array(sizes, dtype=np.int64)
    fits = (used <= devices) & (found.sum(axis=1) <= most_stages)
    found, used = found[fits], used[fits]
    order = np.lexsort([*found.T, -used])
    found = found[order]
    if len(found) > MOST_OF_CLASS:
        none = np.zeros((1, found.shape[1]), dtype=np.int64)
        found, complete = np.concatenate([none, found[: MOST_OF_CLASS - 1]]), False
    return found, complete


def _thinned(most: int) -> list[int]:
    """Return 0, 1, 2, 3, 4, 6, 8, 12 ... up to and with `most`."""
    steps = {0, 1, 3, most} | {2**k for k in range(20)} | {3 * 2**k for k in range(20)}
    return sorted(value for value in steps if value <= most)


def loose_bounds_s(counts: Counts, paces: Paces, num_microbatches: int) -> Floats:
    """Return seconds from the layers' weight alone, transfers left out: quick, and below `bounds_s`."""
    speed_n = counts.stages @ (1.0 / paces.unit_k)
    return np.asarray(num_microbatches * paces.weight / speed_n * (1 - ROUNDING))


def bounds_s(counts: Counts, paces: Paces, num_microbatches: int, *, closed_form: bool) -> Floats:
    """Return seconds of the pipeline that no plan of each composition is below, infinite where layers do not fit."""
    stages_nk = counts.stages
    if not len(stages_nk):
        return np.zeros(0)
    if not closed_form:
        return num_microbatches * np.maximum(_whole_layers(stages_nk, paces), _weight(stages_nk, paces))
    found_n = np.full(len(stages_nk), np.inf)
    num_n = stages_nk.sum(axis=1)
    for transfers, which_n in (
        (0, num_n == 1),
        (1, (num_n > 1) & (num_n <= SHORT_PIPELINE)),
        (2, num_n > SHORT_PIPELINE),
    ):
        if which_n.any():
            sending = replace(paces, sent_k=transfers * paces.sent_k)
            found_n[which_n] = _in_lock_step(stages_nk[which_n], sending, num_microbatches)
    return found_n


def _in_lock_step(stages_nk: Ints, paces: Paces, num_microbatches: int) -> Floats:
    tau_n = np.maximum(_whole_layers(stages_nk, paces), _weight(stages_nk, paces))
    used_nk = stages_nk > 0
    fastest_n = np.min(np.where(used_nk, paces.unit_k, np.inf), axis=1)
    through_n = stages_nk @ paces.sent_k + paces.weight * fastest_n
    bound_n = through_n + (num_microbatches - 1) * tau_n
    return np.where(np.isfinite(tau_n), bound_n, np.inf) * (1 - ROUNDING)


def _weight(stages_nk: Ints, paces: Paces) -> Floats:
    """Return tau at which the stages hold all layers by weight."""
    speed_n = stages_nk @ (1.0 / paces.unit_k)
    sent_n = stages_nk @ (paces.sent_k / paces.unit_k)
    return np.asarray((paces.weight + sent_n) / speed_n)


def _whole_layers(stages_nk: Ints, paces: Paces) -> Floats:
    """Return the least tau at which the stages hold all repeated layers, whole ones, by bisection over what tau is."""
    steps = np.arange(1, paces.repeated + 1)
    taus = np.unique((paces.sent_k[:, None] + paces.unit_k[:, None] * steps[None, :]).ravel())
    low_n = np.zeros(len(stages_nk), dtype=np.int64)
    high_n = np.full(len(stages_nk), len(taus), dtype=np.int64)
    while np.any(low_n < high_n):
        middle_n = (low_n + high_n) // 2
        tau_n = taus[np.minimum(middle_n, len(taus) - 1)]
        held_n = np.zeros(len(stages_nk))
        for k in range(stages_nk.shape[1]):
            fit_n = np.floor((tau_n - paces.sent_k[k]) / paces.unit_k[k] + 1e-6)
            held_n += stages_nk[:, k] * np.clip(fit_n, 0, paces.most_k[k])
        enough_n = held_n >= paces.repeated
        going_n = low_n < high_n
        high_n = np.where(going_n & enough_n, middle_n, high_n)
        low_n = np.where(going_n & ~enough_n, middle_n + 1, low_n)
    return np.where(low_n < len(taus), taus[np.minimum(low_n, len(taus) - 1)], np.inf)
