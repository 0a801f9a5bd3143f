"""The exact search finds what trying every layout finds, and proves no more than is true."""

import math

import brute
import pytest
import tiny
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from hetplan.search.exhaustive import exhaustive
from hetplan.search.exhaustive_price import objective_value
from hetplan.search.records import SearchRequest

MOST_LAYOUTS = 150
ENOUGH = 10**9


def tried(prices, limits):
    """Return every valid layout of an instance with its estimate, and the limits they obey."""
    step, last = 0, False
    while not last:
        tighter, last = tiny.shrink_limits(limits, step)
        try:
            return list(brute.every_layout(prices, tighter, most=MOST_LAYOUTS)), tighter
        except brute.TooManyError:
            step += 1
    return None, limits


@pytest.mark.parametrize("objective", ["time", "cost", "energy", "cost-within-time"])
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(instance=tiny.instances(), slack=st.sampled_from([1.0, 1.2, 2.0, 10.0]))
def test_best_layout_is_that_of_trying_every_one(objective, instance, slack):
    prices, limits = instance
    every, limits = tried(prices, limits)
    if every is None:
        return
    fastest_s = min((found.step_s for _, found in every), default=1.0)
    request = SearchRequest(objective=objective, limits=limits, time_budget_s=slack * fastest_s * (1 + 1e-9))
    values = [value for _, found in every if (value := objective_value(found, request)) is not None]
    answer = exhaustive(prices, request, None, ENOUGH)
    event("feasible" if values else "infeasible")
    assert answer.complete
    if not values:
        assert answer.candidates == ()
        assert answer.bound == math.inf
        return
    value = objective_value(answer.candidates[0].estimate, request)
    assert value == pytest.approx(min(values), rel=1e-9)
    assert answer.bound <= min(values) * (1 + 1e-9)
