"""Searches beyond the reach of trying everything: their plans are valid, their figures true, their bounds too."""

import random

import numpy as np
import pattern_samples as samples
from hypothesis import event, given
from hypothesis import strategies as st

from hetplan.errors import InfeasibleError
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.search.book import Book
from hetplan.search.columns import make_columns
from hetplan.search.exhaustive_price import objective_value
from hetplan.search.patterned import PatternSearch
from hetplan.search.records import SearchRequest
from hetplan.search.shapes import copies_of
from hetplan.search.solve import num_shapes, search

TRIES = 60


def random_plans(dice, problem, search):
    """Yield (plan, estimate) of valid plans of one shape of the patterns the search looks at, with whatever cut."""
    fields = [field for field in search.fields() if (field.copies > 0).any()]
    for _ in range(TRIES if fields else 0):
        field = dice.choice(fields)
        row = int(dice.choice(np.flatnonzero(field.copies > 0)))
        copies = int(field.copies[row])
        layout = samples.random_layout(dice, problem, field.tables, field.patterns, row, copies)
        for placed, found in samples.priced(problem.prices, problem.limits, layout) if layout else ():
            yield placed, found
        for layout in balanced_plans(problem, search, field, row, dice.choice([copies, dice.randint(1, copies)])):
            for placed, found in samples.priced(problem.prices, problem.limits, layout):
                yield placed, found


def balanced_plans(problem, search, field, row, copies):
    """Yield the layouts of copies of a pattern with its best-balanced cut."""
    size = field.tables.microbatch
    tables = search.tables(size, field.sharding, copies, copies)
    if tables is None or problem.batch % size:
        return
    held = -(-(problem.batch // size) // copies)
    (column,) = make_columns(problem, tables, field.patterns.take(np.array([row])), held)
    if column is not None:
        yield from copies_of(problem, column, copies)


def hold_true(prices, request, result):
    """Hold every layout of an answer to the rule book and every figure to the estimate."""
    for candidate in (result.best, *result.runners_up):
        assert check(candidate.layout, prices, request.limits) == ()
        assert candidate.layout.num_samples == prices.workload.global_batch
        assert estimate(candidate.layout, prices) == candidate.estimate
    proof = result.proof
    assert proof.value == objective_value(result.best.estimate, request)
    assert 0 < proof.floor <= proof.bound <= proof.value
    assert request.limits.max_shapes is None or len(result.best.layout.replicas) <= request.limits.max_shapes


@samples.many(25)
@given(
    instance=samples.instances(min_devices=13, max_devices=24),
    objective=st.sampled_from(["time", "time", "time", "cost", "energy"]),
    seed=st.integers(0, 10**6),
)
def test_answers_are_valid_and_their_bounds_hold(instance, objective, seed):
    prices, limits = instance
    request = SearchRequest(limits=limits, objective=objective, effort=1.0, compare=False)
    problem = samples.problem_of(instance)
    patterned = PatternSearch(problem, Book(problem, request))
    tried = list(random_plans(random.Random(seed), problem, patterned)) if problem.meshes else []
    try:
        result = search(prices, request)
    except InfeasibleError:
        assert not [found for _, found in tried if objective_value(found, request) is not None]
        event("infeasible")
        return
    hold_true(prices, request, result)
    event(f"{num_shapes(result.best.layout)} shapes")
    for layout, found in tried:
        value = objective_value(found, request)
        if value is not None:
            assert result.proof.floor <= value * (1 + 1e-9), (value, layout)
            if num_shapes(result.best.layout) == 1:
                assert result.proof.bound <= value * (1 + 1e-9), (value, layout)
