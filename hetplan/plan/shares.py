"""How unlike data-parallel ranks divide a batch, and how their losses are weighed so that nothing is biased.

A step of data parallelism ends with its slowest rank: with ``b_i`` samples on ranks that take ``t_i`` seconds a sample
it lasts ``max(b_i t_i)``. Each rank averages the loss over its own samples, so the mean over all samples weighs rank
``i`` with ``b_i / sum(b)``; a plain mean over ranks would weigh a sample of a small share more.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hetplan.errors import UsageError
from hetplan.plan.records import Layout


def step_s(shares: Sequence[int], seconds_per_sample: Sequence[float]) -> float:
    """Return the seconds of a step with `shares[i]` samples on rank `i`."""
    return max(count * seconds for count, seconds in zip(shares, seconds_per_sample, strict=True))


def samples_per_s(shares: Sequence[int], seconds_per_sample: Sequence[float]) -> float:
    """Return the throughput of a step."""
    return sum(shares) / step_s(shares, seconds_per_sample)


def evened_out(shares: Sequence[int], seconds_per_sample: Sequence[float]) -> tuple[int, ...]:
    """Return the largest shares that make the step no longer: every rank filled up to the slowest one's time."""
    limit_s = step_s(shares, seconds_per_sample)
    return tuple(
        max(count, int(limit_s / seconds * (1 + 1e-12)))
        for count, seconds in zip(shares, seconds_per_sample, strict=True)
    )


def proportional_shares(batch: int, seconds_per_sample: Sequence[float]) -> tuple[int, ...]:
    """Return whole shares of a batch with the shortest step: samples go one by one to the rank that ends first.

    Raises:
        UsageError: a rank's time is not positive.
    """
    if any(not seconds > 0 for seconds in seconds_per_sample):
        raise UsageError("seconds a sample must be positive")
    total = sum(1 / seconds for seconds in seconds_per_sample)
    shares = [int(batch / seconds / total) for seconds in seconds_per_sample]
    while sum(shares) < batch:
        ends = [(count + 1) * seconds for count, seconds in zip(shares, seconds_per_sample, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def loss_weights(layout: Layout) -> tuple[Fraction, ...]:
    """Return, for each replica (copies written out), the weight of its mean loss; they sum to 1."""
    total = layout.num_samples
    return tuple(
        Fraction(replica.num_microbatches * replica.microbatch, total)
        for replica in layout.replicas
        for _ in range(replica.copies)
    )
