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

MOST_LAYOUTS = 200
ENOUGH = 10**9


def many(count):
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


def tried(prices, limits):
    """Return every valid layout of an instance with its estimate, and the limits they obey."""
    step, last = 0, False
    while not last:
        tighter, last = tiny.shrink_limits(limits, step)
        try:
            return brute.every_layout(prices, tighter, most=MOST_LAYOUTS), tighter
        except brute.TooManyError:
            step += 1
    return None, limits


def agree(instance, objective, slack=1.0):
    prices, limits = instance
    every, limits = tried(prices, limits)
    if every is None:
        return
    fastest_s = min((found.step_s for _, found in every), default=1.0)
    request = SearchRequest(objective=objective, limits=limits, time_budget_s=slack * fastest_s * (1 + 1e-9))
    values = [value for _, found in every if (value := objective_value(found, request)) is not None]
    answer = exhaustive(prices, request, None, ENOUGH)
    assert answer.complete
    if not values:
        event("infeasible")
        assert answer.candidates == ()
        assert answer.bound == math.inf
        return
    best = answer.candidates[0]
    event(f"{sum(replica.copies for replica in best.layout.replicas)} replicas")
    assert objective_value(best.estimate, request) == pytest.approx(min(values), rel=1e-9)
    assert answer.bound <= min(values) * (1 + 1e-9)


@many(150)
@given(instance=tiny.instances())
def test_fastest_layout_is_that_of_trying_every_one(instance):
    agree(instance, "time")


@many(150)
@given(instance=tiny.busy_instances())
def test_fastest_set_of_replicas_is_that_of_trying_every_one(instance):
    agree(instance, "time")


@pytest.mark.parametrize("objective", ["cost", "energy"])
@many(80)
@given(instance=st.one_of(tiny.instances(), tiny.busy_instances()))
def test_cheapest_layout_is_that_of_trying_every_one(objective, instance):
    agree(instance, objective)


@many(80)
@given(instance=st.one_of(tiny.instances(), tiny.busy_instances()), slack=st.sampled_from([1.0, 1.2, 2.0, 10.0]))
def test_cheapest_layout_within_a_time_is_that_of_trying_every_one(instance, slack):
    agree(instance, "cost-within-time", slack)
