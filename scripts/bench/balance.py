"""Figures of `hetplan.balance` and of searches over modules: quality over bounds, and seconds.

    python scripts/bench/balance.py

Prints one line a case; processor seconds, so a busy machine changes them little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hetplan.balance import (
    SequenceCost,
    balance,
    flow_shop_s,
    make_problem,
    order_microbatches,
    plan_degrees,
    plan_segments,
    static_cut,
    static_degrees,
)
from hetplan.balance.greedy import lpt

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start_s = time.process_time()
    found = work()
    return found, time.process_time() - start_s


def assignments() -> None:
    print("samples  bins  greedy/bound  LPT/bound  random/bound  with 1 s/bound  greedy ms")
    for samples, bins in ((32, 8), (64, 16), (128, 32), (256, 64), (512, 64), (512, 8)):
        rows = []
        for seed in range(10):
            random = np.random.default_rng(seed)
            text = np.minimum(random.lognormal(6.0, 0.6, samples), 1600.0)
            image = random.integers(0, 5, samples) * random.integers(100, 1000, samples)
            loads = np.stack([image + 1.0, text + image / 4], axis=1)
            problem = make_problem(loads / loads.sum(axis=0), (bins,))
            found, seconds = timed(lambda problem=problem: balance(problem))
            longer = balance(problem, budget_s=1.0) if seed < 2 else None
            first = lpt(problem)
            anywhere = random.integers(bins, size=samples)
            rows.append(
                (
                    found.ratio,
                    problem.largest_s(first) / found.bound_s if first is not None else np.nan,
                    problem.largest_s(anywhere) / found.bound_s,
                    longer.ratio if longer else np.nan,
                    1e3 * seconds,
                )
            )
        worst, mean = np.nanmax(rows, axis=0), np.nanmean(rows, axis=0)
        print(
            f"{samples:7d} {bins:5d}  {worst[0]:12.3f}  {mean[1]:9.3f}  {mean[2]:12.2f}  {worst[3]:14.3f}"
            f"  {mean[4]:9.1f}"
        )


def degrees() -> None:
    cost = SequenceCost(
        linear_s_per_token=1e-5, quadratic_s_per_token2=2e-10, exchange_s_per_token=5e-7, latency_s=2e-5
    )
    random = np.random.default_rng(0)
    for name, lengths in (
        ("long-tailed", np.minimum(random.lognormal(7.5, 1.4, 512), 131_072.0)),
        ("uniform", random.uniform(3000.0, 5000.0, 512)),
    ):
        plan, seconds = timed(lambda lengths=lengths: plan_degrees(lengths, 64, 16_384.0, cost))
        best = min(one.total_s for one in static_degrees(lengths, 64, 16_384.0, cost).values())
        print(f"integer degrees, {name}: {best / plan.total_s:.3f}x the best static one, {seconds:.2f} s")


def orders() -> None:
    random = np.random.default_rng(1)
    times = random.exponential(1.0, (24, 4))
    order, seconds = timed(lambda: order_microbatches(times))
    anyhow = np.mean([flow_shop_s(times, random.permutation(24)) for _ in range(50)])
    print(
        f"order of 24 microbatches on 4 machines: given {flow_shop_s(times):.2f}, random {anyhow:.2f}, "
        f"found {flow_shop_s(times, order):.2f}, {1e3 * seconds:.0f} ms"
    )


def segments() -> None:
    for seed in range(3):
        random = np.random.default_rng(seed)
        images = np.minimum(random.lognormal(0.0, 1.0, 64) * (random.random(64) < 0.6), 4.0)
        forward = np.stack([images * 0.3, np.full(64, 0.3)], axis=1)
        cut = static_cut(forward, 2 * forward, 4, in_flight=4, layers=(24, 32))
        plan, seconds = timed(
            lambda forward=forward: plan_segments(forward, 2 * forward, 4, in_flight=12, slices=(1, 2, 3))
        )
        print(
            f"segments, seed {seed}: bubble {cut.bubble:.1%} of the static cut (holds {cut.held:.1f} microbatches), "
            f"{plan.bubble:.1%} of segments (holds {plan.held:.1f}); "
            f"step {plan.step_s:.1f} s, planned in {seconds:.2f} s"
        )


if __name__ == "__main__":
    assignments()
    degrees()
    orders()
    segments()
