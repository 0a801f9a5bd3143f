"""A request is diagnosed only where no layout is valid, and the lightest layout fits wherever one does."""

import tiny
from hypothesis import HealthCheck, event, given, settings

from hetplan.plan.check import check
from hetplan.search.exhaustive import exhaustive
from hetplan.search.infeasible import diagnose, diagnosis_text
from hetplan.search.lightest import fits
from hetplan.search.problem import build_problem
from hetplan.search.records import SearchRequest

ENOUGH = 10_000


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(instance=tiny.instances())
def test_something_fits_exactly_where_trying_everything_finds_a_plan(instance):
    prices, limits = instance
    request = SearchRequest(limits=limits)
    every = exhaustive(prices, request, None, ENOUGH)
    if not every.complete:
        return
    problem = build_problem(prices, limits)
    near = fits(problem) if problem.meshes else None
    assert (near is not None) == bool(every.candidates)
    if near is not None:
        event("feasible")
        assert not check(near.layout, prices, limits) and near.overflow_bytes <= 0
        return
    found = diagnose(problem, request)
    event(f"infeasible: {found.constraint}")
    assert found.constraint != "search"
    assert all(fix.step_s is None or fix.step_s > 0 for fix in found.fixes)
    first, *advice = diagnosis_text(found).split("\n")
    assert first and all(line.startswith("  ") for line in advice)
    if found.constraint == "memory":
        assert found.shortfall_bytes > 0 and found.near is not None
