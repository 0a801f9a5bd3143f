"""First assignments: longest processing time, and Karmarkar-Karp's differencing.

*LPT* (Graham 1969) takes samples from heavy to light and puts each where the largest load grows least. *Differencing*
(Karmarkar and Karp 1982, many-way by Korf 1998) keeps a heap of partial partitions and merges the two with the widest
spread, heavy bins of one onto light bins of the other. It knows neither caps nor speeds, so it is used where bins are
equal and dropped where a cap is exceeded.
"""

from __future__ import annotations

import heapq

import numpy as np

from hetplan.balance.problem import Floats, Ints, Problem


def weights_of(problem: Problem) -> Floats:
    """Return one number a sample: its seconds on its heaviest module at mean speed, ties broken by the rest."""
    time_sm = problem.loads_sm / problem.speeds_bm.mean(axis=0)
    weight_s: Floats = time_sm.max(axis=1) + 1e-6 * time_sm.sum(axis=1)
    return weight_s


def lpt(problem: Problem) -> Ints | None:
    """Return the LPT assignment; by size instead of weight where caps leave no room for that; None: no room at all."""
    found = _place(problem, np.argsort(-weights_of(problem), kind="stable"))
    if found is None:
        found = _place(problem, np.argsort(-problem.sizes_s, kind="stable"))
    return found


def _place(problem: Problem, order: Ints) -> Ints | None:
    bin_s = np.full(problem.num_samples, -1, dtype=np.int64)
    inverse_bm = 1.0 / problem.speeds_bm
    time_bm = np.zeros_like(inverse_bm)
    room_b = problem.caps_b * (1 + 1e-12)
    capped = bool(np.isfinite(room_b).any())
    for sample in order.tolist():
        added_bm = time_bm + problem.loads_sm[sample] * inverse_bm
        largest_b = added_bm.max(axis=1)
        if capped:
            largest_b = np.where(room_b >= problem.sizes_s[sample], largest_b, np.inf)
        best = int(largest_b.argmin())
        if not np.isfinite(largest_b[best]):
            return None
        bin_s[sample] = best
        time_bm[best] = added_bm[best]
        room_b[best] -= problem.sizes_s[sample]
    return bin_s


def karmarkar_karp(problem: Problem) -> Ints | None:
    """Return the differencing assignment; None where bins are unequal or a cap is exceeded."""
    if (problem.speeds_bm != problem.speeds_bm[0]).any() or (problem.caps_b != problem.caps_b[0]).any():
        return None
    bins = problem.num_bins
    weight_s = weights_of(problem)
    heap: list[tuple[float, int, Floats, list[list[int]]]] = []
    for sample, weight in enumerate(weight_s.tolist()):
        sums = np.zeros(bins)
        sums[0] = weight
        heap.append((-weight, sample, sums, [[sample], *([] for _ in range(bins - 1))]))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, first, first_parts = heapq.heappop(heap)
        _, _, second, second_parts = heapq.heappop(heap)
        sums = first + second[::-1]
        parts = [a + b for a, b in zip(first_parts, reversed(second_parts), strict=True)]
        order = np.argsort(-sums, kind="stable")
        sums = sums[order]
        serial += 1
        heapq.heappush(heap, (-float(sums[0] - sums[-1]), serial, sums - sums[-1], [parts[i] for i in order.tolist()]))
    bin_s = np.empty(problem.num_samples, dtype=np.int64)
    for b, part in enumerate(heap[0][3]):
        bin_s[part] = b
    return bin_s if problem.is_complete(bin_s) else None
