"""The order in which microbatches enter a pipeline of modules (permutation flow shop).

Microbatch `j` takes `times_jm[j, m]` seconds on machine `m` (a module, or a stage); machines work beside each other,
each in the same order:

    end[j, m] = max(end[j - 1, m], end[j, m - 1]) + times_jm[j, m]

Two machines are solved exactly by Johnson's rule (Johnson 1954); more by NEH insertion (Nawaz, Enscore and Ham 1983)
and single reinsertions until none helps. The answer is never worse than the order given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.balance.problem import Floats, Ints

MOST_ROUNDS = 4
MOST_INSERTED = 200
"""Microbatches beyond which only Johnson-like orders are tried: an insertion looks at every place."""


def flow_shop_s(times_jm: Floats, order: Sequence[int] | Ints | None = None) -> float:
    """Return when the last machine is done with the last microbatch."""
    rows = times_jm if order is None else times_jm[np.asarray(order)]
    end = [0.0] * rows.shape[1]
    for row in rows.tolist():
        before = 0.0
        for m, seconds in enumerate(row):
            before = max(before, end[m]) + seconds
            end[m] = before
    return end[-1]


def order_microbatches(times_jm: Floats) -> Ints:
    """Return an order (a permutation) whose flow shop ends no later than the given one."""
    times_jm = np.asarray(times_jm, dtype=np.float64)
    count = len(times_jm)
    candidates = [np.arange(count), *_johnson_orders(times_jm)]
    if times_jm.shape[1] > 2 and count <= MOST_INSERTED:
        candidates.append(_neh(times_jm))
        best = min(candidates, key=lambda order: flow_shop_s(times_jm, order))
        candidates.append(_reinserted(times_jm, best))
    return min(candidates, key=lambda order: flow_shop_s(times_jm, order))


def _johnson_orders(times_jm: Floats) -> list[Ints]:
    """Return Johnson's order of every pair (first machines together, last machines together); exact for two."""
    orders = []
    for split in range(1, times_jm.shape[1]):
        first, last = times_jm[:, :split].sum(axis=1), times_jm[:, split:].sum(axis=1)
        short = np.flatnonzero(first < last)
        long = np.flatnonzero(first >= last)
        head = short[np.argsort(first[short], kind="stable")]
        tail = long[np.argsort(-last[long], kind="stable")]
        orders.append(np.concatenate([head, tail]).astype(np.int64))
    return orders


def _neh(times_jm: Floats) -> Ints:
    order: list[int] = []
    for j in np.argsort(-times_jm.sum(axis=1), kind="stable").tolist():
        order = _inserted(times_jm, order, j)[0]
    return np.array(order, dtype=np.int64)


def _inserted(times_jm: Floats, order: list[int], j: int) -> tuple[list[int], float]:
    """Return `order` with `j` at its best place, by heads and tails (Taillard 1990): every place in one sweep."""
    machines = times_jm.shape[1]
    head = np.zeros((len(order) + 1, machines))
    for i, k in enumerate(order):
        before = 0.0
        for m in range(machines):
            before = max(before, head[i, m]) + times_jm[k, m]
            head[i + 1, m] = before
    tail = np.zeros((len(order) + 1, machines))
    for i in range(len(order) - 1, -1, -1):
        behind = 0.0
        for m in range(machines - 1, -1, -1):
            behind = max(behind, tail[i + 1, m]) + times_jm[order[i], m]
            tail[i, m] = behind
    end = np.zeros(len(order) + 1)
    largest = np.zeros(len(order) + 1)
    for m in range(machines):
        end = np.maximum(end, head[:, m]) + times_jm[j, m]
        largest = np.maximum(largest, end + tail[:, m])
    place = int(largest.argmin())
    return [*order[:place], j, *order[place:]], float(largest[place])


def _reinserted(times_jm: Floats, start: Ints) -> Ints:
    order = [int(j) for j in start]
    value = flow_shop_s(times_jm, order)
    for _ in range(MOST_ROUNDS):
        before = value
        for j in list(order):
            rest = [k for k in order if k != j]
            candidate, seconds = _inserted(times_jm, rest, j)
            if seconds < value - 1e-12 * value:
                order, value = candidate, seconds
        if value >= before:
            break
    return np.array(order, dtype=np.int64)
