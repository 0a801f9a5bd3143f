"""What a pipeline takes at least: closed forms that never exceed the exact critical path of `timing`.

Write ``f_s, b_s`` for the passes of stage ``s``, ``tau_s = f_s + b_s``, ``d_s`` for one transfer over the boundary
``s -> s + 1`` and ``c_s = 2 d_s``, ``m`` microbatches, ``p`` stages, ``k_s = min(m, p - s)``, and

    h_s   = sum(tau_i + c_i for i < s)                    what comes before the first and after the last work of s
    lat_s = sum(tau_i for i >= s) + sum(c_i for i >= s)   one microbatch from its start on s until it is through on s

For **1f1b**, with ``x`` the start of ``F(s, 0)`` and ``e_j`` the end of ``B(s, j)``:

- *work*: ``T >= h_s + m tau_s``. ``x >= sum(f_i + d_i for i < s)``; the rank then does ``m tau_s`` of work, its last
  action is ``B(s, m - 1)``, and what follows that takes ``sum(d_i + b_i for i < s)``.
- *fill*: ``T >= h_s + lat_s + (m - k_s) f_s + (m - 1) b_s``. ``B(s, 0)`` starts at ``x + lat_s - b_s`` or later, and
  the rank does ``m`` backward and, having run ``k_s`` ahead, ``m - k_s`` forward passes from then on.
- *round trips*: for ``r >= 2`` and ``q = m - 1 - (r - 1) k_s >= 0``: ``T >= h_s + r lat_s + q tau_s``.
  ``F(s, j + k_s)`` follows ``B(s, j)``, so ``e_{j + k} >= e_j + lat_s``, hence ``e_{m - 1} >= e_q + (r - 1) lat_s``;
  between ``B(s, 0)`` and ``B(s, q)`` lie ``q`` forward passes (``q <= m - k_s``), so ``e_q >= x + lat_s + q tau_s``.
- *link*: ``T >= lat_0 + (m - 1) d_s``. A link carries ``m`` transfers one by one; the first comes no earlier than one
  microbatch gets there, and the last carried still has its way to go.

For *gpipe*, a flow line each way, ``T = lat_0 + (m - 1) (max(f_s, d_s) + max(b_s, d_s))`` exactly: the last stage turns
back when all forward passes are through. *interleaved* keeps work, a rank's virtual stages together, since a rank's
last action is a backward pass of its first one. For *zero-bubble*, with ``i_s = b_s - w_s``, at most ``min(m, s + 1)``
weight gradients of rank ``s`` come after ``I(s, m - 1)``, and rank 0 ends with one:
``T >= sum(f_i + i_i + c_i for i < s) + m (f_s + i_s) + max(0, m - 1 - s) w_s + w_0``, and the rank's work alone.

Equal stages without communication meet *work* exactly: ``(m + p - 1) tau``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from hetplan.plan.program import in_flight_1f1b
from hetplan.plan.records import ScheduleName
from hetplan.plan.timing import Durations


def pipeline_bound_s(schedule: ScheduleName, pp: int, num_microbatches: int, vpp: int, durations: Durations) -> float:
    """Return a lower bound of `timing.pipeline_finish(...).pipeline_s`, up to rounding."""
    if vpp > 1:
        return max(_interleaved_work(pp, num_microbatches, durations))
    if schedule == "zero-bubble":
        return max(_zero_bubble(pp, num_microbatches, durations))
    if schedule == "gpipe":
        return _gpipe(num_microbatches, durations)
    work, links = _work(pp, num_microbatches, durations), _links(num_microbatches, durations)
    return max(*work, *links, *_round_trips(pp, num_microbatches, durations))


def before_and_after_s(durations: Durations) -> tuple[float, ...]:
    """Return `h_s` for each stage."""
    steps = (
        forward + backward + 2 * p2p
        for forward, backward, p2p in zip(durations.forward_s, durations.backward_s, durations.p2p_s, strict=False)
    )
    return tuple(accumulate(steps, initial=0.0))


def latencies_s(durations: Durations) -> tuple[float, ...]:
    """Return `lat_s` for each stage."""
    taus = [f + b for f, b in zip(durations.forward_s, durations.backward_s, strict=True)]
    trips = [2 * p2p for p2p in durations.p2p_s] + [0.0]
    return tuple(accumulate(tau + trip for tau, trip in zip(reversed(taus), reversed(trips), strict=True)))[::-1]


def _gpipe(num_microbatches: int, durations: Durations) -> float:
    slowest_s = max(*durations.forward_s, *durations.p2p_s, 0.0) + max(*durations.backward_s, *durations.p2p_s, 0.0)
    return latencies_s(durations)[0] + (num_microbatches - 1) * slowest_s


def _work(pp: int, num_microbatches: int, durations: Durations) -> Iterator[float]:
    outside_s = before_and_after_s(durations)
    for s in range(pp):
        yield outside_s[s] + num_microbatches * (durations.forward_s[s] + durations.backward_s[s])


def _links(num_microbatches: int, durations: Durations) -> Iterator[float]:
    through_s = latencies_s(durations)[0]
    for p2p in durations.p2p_s:
        yield through_s + (num_microbatches - 1) * p2p


def _round_trips(pp: int, num_microbatches: int, durations: Durations) -> Iterator[float]:
    outside_s, through_s = before_and_after_s(durations), latencies_s(durations)
    m = num_microbatches
    for s in range(pp):
        forward, backward = durations.forward_s[s], durations.backward_s[s]
        ahead = in_flight_1f1b(pp, s, m)
        yield outside_s[s] + through_s[s] + (m - ahead) * forward + (m - 1) * backward
        # The bound is linear in r: only the fewest and the most round trips can be the largest.
        for r in {2, (m - 1) // ahead + 1}:
            rest = m - 1 - (r - 1) * ahead
            if r >= 2 and rest >= 0:
                yield outside_s[s] + r * through_s[s] + rest * (forward + backward)


def _interleaved_work(pp: int, num_microbatches: int, durations: Durations) -> Iterator[float]:
    outside_s = before_and_after_s(durations)
    for rank in range(pp):
        work = sum(durations.forward_s[rank::pp]) + sum(durations.backward_s[rank::pp])
        yield outside_s[rank] + num_microbatches * work


def _zero_bubble(pp: int, num_microbatches: int, durations: Durations) -> Iterator[float]:
    m, around_s, before_s = num_microbatches, 0.0, 0.0
    for s in range(pp):
        forward, weight = durations.forward_s[s], durations.weight_s[s]
        rest = durations.backward_s[s] - weight
        yield around_s + m * (forward + rest) + max(0, m - 1 - s) * weight + durations.weight_s[0]
        yield before_s + m * (forward + durations.backward_s[s])
        if s < pp - 1:
            around_s += forward + rest + 2 * durations.p2p_s[s]
            before_s += forward + durations.p2p_s[s]
