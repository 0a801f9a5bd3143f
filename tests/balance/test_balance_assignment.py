"""Samples on bins: never worse than LPT, near the bound, caps kept, a complete start never lost."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.balance import balance, lower_bound, make_problem
from hetplan.balance.exact import solve_exactly
from hetplan.balance.greedy import karmarkar_karp, lpt
from hetplan.balance.problem import Floats, Problem
from hetplan.errors import InfeasibleError, UsageError


def skewed(samples: int, seed: int) -> Floats:
    """Seconds of an encoder and a language model: many samples with no image, few with many."""
    random = np.random.default_rng(seed)
    text = np.minimum(random.lognormal(6.0, 0.6, samples), 1600.0)
    image = random.integers(0, 5, samples) * random.integers(100, 1000, samples)
    loads = np.stack([image + 1.0, text + image / 4], axis=1)
    return loads / loads.sum(axis=0)


@pytest.mark.parametrize(("samples", "bins"), [(32, 8), (64, 16), (128, 8), (128, 32), (256, 64), (512, 64)])
def test_greedy_answer_is_near_the_bound_and_never_worse_than_lpt(samples: int, bins: int) -> None:
    ratios, random_ratios = [], []
    for seed in range(20 if samples * bins < 4096 else 4):
        problem = make_problem(skewed(samples, seed), (bins // 2, bins - bins // 2))
        found = balance(problem)
        first = lpt(problem)
        assert first is not None
        assert found.largest_s <= problem.largest_s(first)
        assert problem.is_complete(found.bin_s)
        ratios.append(found.ratio)
        anywhere = np.random.default_rng(seed).integers(bins, size=samples)
        random_ratios.append(problem.largest_s(anywhere) / found.bound_s)
    assert max(ratios) <= 1.04
    assert min(random_ratios) >= 1.15
    assert np.mean(random_ratios) >= 1.3


def brute_force(problem: Problem) -> float:
    every = itertools.product(range(problem.num_bins), repeat=problem.num_samples)
    values = [problem.largest_s(np.array(bins)) for bins in every if problem.is_complete(np.array(bins))]
    return min(values, default=np.inf)


@settings(max_examples=40, deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=3),
    cap=st.integers(8, 40),
)
def test_bound_and_answer_stand_on_either_side_of_the_best(
    loads: list[tuple[int, int]], speeds: list[float], cap: int
) -> None:
    rows = np.array(loads, dtype=np.float64)
    sizes = rows.sum(axis=1)
    problem = make_problem(rows, (1,) * len(speeds), speeds=speeds, sizes=sizes, caps=cap)
    best = brute_force(problem)
    assert lower_bound(problem) <= best * (1 + 1e-9)
    try:
        found = balance(problem)
    except InfeasibleError:
        return
    assert found.largest_s >= best * (1 - 1e-9)
    assert problem.is_complete(found.bin_s)


def test_solver_finds_the_best_of_a_small_batch() -> None:
    problem = make_problem(skewed(7, 3), (3,))
    start = lpt(problem)
    assert start is not None
    found = solve_exactly(problem, start, budget_s=10.0, bound_s=lower_bound(problem))
    assert found is not None
    assert problem.largest_s(found) == pytest.approx(brute_force(problem), rel=1e-4)


def test_a_faster_replica_takes_more() -> None:
    problem = make_problem(np.ones(30), (1, 1), speeds=(1.0, 2.0))
    found = balance(problem)
    assert np.bincount(found.bin_s).tolist() == [10, 20]
    assert found.ratio == pytest.approx(1.0)


def test_a_complete_start_is_never_lost() -> None:
    random = np.random.default_rng(5)
    for seed in range(5):
        problem = make_problem(skewed(40, seed), (8,), sizes=np.ones(40), caps=5)
        start = random.permutation(np.repeat(np.arange(8), 5))
        assert balance(problem, start=start, steps=0).largest_s <= problem.largest_s(start)
    perfect = make_problem(np.array([5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0]), (3,))
    best = np.array([0, 1, 0, 1, 2, 2, 2])
    assert balance(perfect, start=best, steps=0).largest_s == 9.0
    assert balance(perfect, start=best, budget_s=0.05).largest_s == 9.0


def test_an_incomplete_start_is_refused() -> None:
    problem = make_problem(np.ones(4), (2,), sizes=np.ones(4), caps=2)
    with pytest.raises(UsageError, match="leaves out a sample"):
        balance(problem, start=np.array([0, 0, 0, 1]))


def test_caps_are_kept_and_what_cannot_fit_is_said() -> None:
    loads = np.arange(1.0, 13.0)
    problem = make_problem(loads, (4,), sizes=loads, caps=21)
    used = np.bincount(balance(problem).bin_s, weights=loads)
    assert used.max() <= 21
    with pytest.raises(
        InfeasibleError, match=r"samples take 78 together, the microbatches hold 60: use at least 1 more"
    ):
        balance(make_problem(loads, (3,), sizes=loads, caps=20))
    with pytest.raises(InfeasibleError, match="the largest sample takes 12, a microbatch holds 11"):
        balance(make_problem(loads, (9,), sizes=loads, caps=11))


def test_differencing_is_for_equal_bins() -> None:
    found = karmarkar_karp(make_problem(np.array([8.0, 7.0, 6.0, 5.0, 4.0]), (2,)))
    assert found is not None
    assert sorted(np.bincount(found, weights=[8, 7, 6, 5, 4]).tolist()) == [14.0, 16.0]
    assert karmarkar_karp(make_problem(np.ones(4), (1, 1), speeds=(1.0, 2.0))) is None


def test_same_batch_same_answer() -> None:
    problem = make_problem(skewed(64, 1), (8,))
    assert (balance(problem).bin_s == balance(problem).bin_s).all()


def test_it_stands_alone() -> None:
    code = (
        "import sys, hetplan.balance; from hetplan.balance import balance, make_problem;"
        "balance(make_problem([3.0, 2.0, 1.0], (2,)));"
        "parts = {name.split('.')[1] for name in sys.modules if name.startswith('hetplan.')};"
        "print(sorted(parts), [n for n in ('ortools', 'torch', 'scipy', 'yaml', 'typer') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['balance', 'errors'] []"
