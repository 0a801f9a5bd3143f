import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.pipelines import equal, pipelines

from hetplan.plan.bounds import before_and_after_s, latencies_s, pipeline_bound_s
from hetplan.plan.timing import Durations, pipeline_finish


@settings(max_examples=600)
@given(pipelines(most_pp=5))
def test_the_bound_never_exceeds_the_exact_time(case):
    schedule, pp, m, vpp, durations = case
    exact = pipeline_finish(schedule, pp, m, vpp, durations).pipeline_s
    assert pipeline_bound_s(schedule, pp, m, vpp, durations) <= exact * (1 + 1e-12)


@given(st.integers(1, 9), st.integers(1, 30), st.sampled_from(["1f1b", "gpipe"]))
def test_equal_stages_without_communication_meet_it(pp, m, schedule):
    assert pipeline_bound_s(schedule, pp, m, 1, equal(pp)) == (m + pp - 1) * 3.0
    assert pipeline_finish(schedule, pp, m, 1, equal(pp)).pipeline_s == (m + pp - 1) * 3.0


@given(st.integers(1, 8), st.integers(0, 20))
def test_equal_stages_meet_it_under_zero_bubble(pp, extra):
    m = pp + extra
    exact = pipeline_finish("zero-bubble", pp, m, 1, equal(pp)).pipeline_s
    assert pipeline_bound_s("zero-bubble", pp, m, 1, equal(pp)) == exact


@given(pipelines(schedules=("gpipe",)))
def test_gpipe_is_a_flow_line_each_way(case):
    schedule, pp, m, vpp, durations = case
    exact = pipeline_finish(schedule, pp, m, vpp, durations).pipeline_s
    assert pipeline_bound_s(schedule, pp, m, vpp, durations) == pytest.approx(exact, rel=1e-12)


def test_long_links_are_met_by_round_trips():
    durations = equal(2, forward=1.0, backward=1.0, weight=0.5, p2p=10.0)
    exact = pipeline_finish("1f1b", 2, 6, 1, durations).pipeline_s
    assert pipeline_bound_s("1f1b", 2, 6, 1, durations) >= 0.9 * exact


def test_the_sums_by_hand():
    durations = Durations(forward_s=(1.0, 2.0, 3.0), backward_s=(2.0, 4.0, 6.0), weight_s=(0.0,) * 3, p2p_s=(0.5, 0.25))
    assert before_and_after_s(durations) == (0.0, 4.0, 10.5)
    assert latencies_s(durations) == (19.5, 15.5, 9.0)
