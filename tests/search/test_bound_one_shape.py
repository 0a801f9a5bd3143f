"""The bound of plans of one shape is never above what any valid plan of that shape takes."""

import random

import numpy as np
import pattern_samples as samples
from hypothesis import event, given
from hypothesis import strategies as st

from hetplan.search.book import Book
from hetplan.search.pattern_fields import least_step_s
from hetplan.search.patterned import PatternSearch
from hetplan.search.records import SearchRequest

TRIES = 20


def bound_s(problem, fields, layout, best_s):
    """Return the least bound of the patterns a plan of one shape belongs to."""
    stages = layout.replicas[0].stages
    microbatch = layout.replicas[0].microbatch
    alone = sum(row.copies for row in layout.replicas) * stages[0].dp * stages[0].cp == 1
    found = []
    for field in fields:
        kinds = {layout.sharding, "none"} if alone else {layout.sharding}
        if field.tables.microbatch == microbatch and field.sharding in kinds:
            rows = samples.rows_of(problem, field.patterns, stages)
            found += least_step_s(problem, field, field.copies, best_s)[rows].tolist()
    return min(found)


@samples.many(60)
@given(instance=samples.instances(), seed=st.integers(0, 10**6))
def test_no_plan_of_a_shape_is_faster_than_its_bound(instance, seed):
    prices, limits = instance
    problem = samples.problem_of(instance)
    dice = random.Random(seed)
    tried = 0
    fields = PatternSearch(problem, Book(problem, SearchRequest(limits=limits))).fields()
    for field in fields:
        for row in dice.choices(range(len(field.patterns)), k=TRIES) if len(field.patterns) else ():
            copies = int(field.copies[row])
            layout = samples.random_layout(dice, problem, field.tables, field.patterns, row, copies) if copies else None
            for placed, found in samples.priced(prices, limits, layout) if layout else ():
                loose_s = bound_s(problem, fields, placed, np.inf)
                tight_s = bound_s(problem, fields, placed, found.step_s * (1 + 1e-9))
                assert loose_s <= tight_s * (1 + 1e-9), placed
                assert tight_s <= found.step_s * (1 + 1e-9), placed
                tried += 1
    event(f"{min(tried, 100) // 20 * 20}+ plans")
