"""Orders of microbatches, per-batch segments, and integer context-parallel degrees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hetplan.balance import (
    SequenceCost,
    flow_shop_s,
    order_microbatches,
    plan_degrees,
    plan_segments,
    static_cut,
    static_degrees,
)
from hetplan.balance.segments import Segment
from hetplan.errors import InfeasibleError


@pytest.mark.parametrize("machines", [2, 3, 5])
def test_reordering_is_never_worse_and_better_than_random(machines: int) -> None:
    gains = []
    for seed in range(8):
        random = np.random.default_rng(seed)
        times = random.exponential(1.0, (20, machines))
        order = order_microbatches(times)
        assert sorted(order.tolist()) == list(range(20))
        found = flow_shop_s(times, order)
        assert found <= flow_shop_s(times)
        gains.append(np.mean([flow_shop_s(times, random.permutation(20)) for _ in range(20)]) / found)
    assert min(gains) > 1.0
    assert np.mean(gains) > 1.1


def test_two_machines_are_solved_exactly() -> None:
    for seed in range(5):
        times = np.random.default_rng(seed).integers(1, 20, (6, 2)).astype(np.float64)
        best = min(flow_shop_s(times, order) for order in itertools.permutations(range(6)))
        assert flow_shop_s(times, order_microbatches(times)) == best


def images_and_text(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    images = np.minimum(random.lognormal(0.0, 1.0, count) * (random.random(count) < 0.6), 4.0)
    forward = np.stack([images * 0.3, np.full(count, 0.3)], axis=1)
    return forward, 2 * forward


def test_segments_fill_what_a_static_cut_leaves_idle() -> None:
    for seed in range(3):
        forward, backward = images_and_text(64, seed)
        cut = static_cut(forward, backward, 4, in_flight=4, layers=(24, 32))
        plan = plan_segments(forward, backward, 4, in_flight=12, slices=(1, 2, 3))
        assert cut.bubble > 0.20
        assert plan.bubble < 0.10
        assert plan.held < 1.5 * cut.held
        assert plan.step_s < static_cut(forward, backward, 4, in_flight=12, layers=(24, 32)).step_s


def test_segments_respect_what_each_needs_and_how_many_are_begun() -> None:
    forward, backward = images_and_text(12, 7)
    plan = plan_segments(forward, backward, 4, in_flight=6, slices=(2,))
    length = 4 * 2 * 2
    work = [one for rank in plan.ranks for one in rank]
    assert len(set(work)) == len(work) == 12 * length * 2
    end: dict[Segment, float] = {}
    free, at = [0.0] * 4, [0] * 4
    while len(end) < len(work):
        moved = False
        for rank, todo in enumerate(plan.ranks):
            while at[rank] < len(todo):
                one = todo[at[rank]]
                chain = [Segment(one.microbatch, i, False) for i in range(length)]
                chain += [Segment(one.microbatch, i, True) for i in reversed(range(length))]
                place = chain.index(one)
                if place and chain[place - 1] not in end:
                    break
                seconds = (backward if one.backward else forward)[one.microbatch, one.position // 8] / 8
                free[rank] = end[one] = max(free[rank], end[chain[place - 1]] if place else 0.0) + seconds
                at[rank] += 1
                moved = True
        assert moved, "the order cannot run"
    assert max(free) <= plan.step_s * (1 + 1e-9)
    starts = sorted((end[Segment(j, 0, False)], 1) for j in range(12))
    stops = sorted((end[Segment(j, 0, True)], -1) for j in range(12))
    begun = np.cumsum([sign for _, sign in sorted(starts + stops)])
    assert begun.max() <= 6


COST = SequenceCost(linear_s_per_token=1e-5, quadratic_s_per_token2=2e-10, exchange_s_per_token=5e-7, latency_s=2e-5)


def test_any_integer_degree_beats_the_best_static_one_where_lengths_differ() -> None:
    random = np.random.default_rng(0)
    for lengths, least in (
        (np.minimum(random.lognormal(7.5, 1.4, 512), 131_072.0), 1.1),
        (random.uniform(3000.0, 5000.0, 512), 1.0),
    ):
        plan = plan_degrees(lengths, 64, 16_384.0, COST)
        best = min(one.total_s for one in static_degrees(lengths, 64, 16_384.0, COST).values())
        assert best / plan.total_s >= least
        assert best / plan.total_s <= (3.0 if least > 1 else 1.02)
        degrees = {group.degree for groups in plan.microbatches for group in groups}
        assert (degrees - {1, 2, 4, 8, 16, 32, 64} != set()) == (least > 1)
        seen = sorted(i for groups in plan.microbatches for group in groups for i in group.sequences)
        assert seen == list(range(512))
        for groups in plan.microbatches:
            assert sum(group.degree for group in groups) == 64
            for group in groups:
                held = lengths[list(group.sequences)].sum() / group.degree
                assert held <= 16_384.0 * (1 + 1e-9)
                seconds = float(COST.seconds(lengths[list(group.sequences)], group.degree).sum())
                assert group.seconds == pytest.approx(seconds)


def test_a_sequence_too_long_for_all_ranks_is_named() -> None:
    with pytest.raises(InfeasibleError, match="the longest sequence has 9000 tokens, 8 ranks hold 8000"):
        plan_degrees(np.array([9000.0, 10.0]), 8, 1000.0, COST)
