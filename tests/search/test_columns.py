"""A column knows exactly how long its pipeline takes, and never promises more than the pipeline does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pattern_samples import many

from hetplan.plan.timing import Durations, pipeline_finish
from hetplan.search.columns import Column

SECONDS = st.floats(1e-3, 1.0) | st.sampled_from([0.1, 0.2, 0.3, 1.0])
TRANSFERS = st.sampled_from([0.0, 1e-6, 1e-3, 0.05, 0.3, 2.0])


@st.composite
def columns(draw, most_stages=9, travel=TRANSFERS):
    num = draw(st.integers(1, most_stages))
    equal = draw(st.booleans())
    forward = [draw(SECONDS)] * num if equal else [draw(SECONDS) for _ in range(num)]
    ratio = draw(st.sampled_from([1.0, 2.0, 3.0]))
    backward = tuple(ratio * f for f in forward) if draw(st.booleans()) else tuple(draw(SECONDS) for _ in range(num))
    link = draw(travel)
    p2p = tuple(link if equal else draw(travel) for _ in range(num - 1))
    after = tuple(draw(st.sampled_from([0.0, 0.0, 0.1, 5.0])) for _ in range(num)) if draw(st.booleans()) else ()
    durations = Durations(forward_s=tuple(forward), backward_s=backward, weight_s=(0.0,) * num, p2p_s=p2p)
    return Column(
        stages=(None,) * num, microbatch=1, sharding="none", used_g=(num,), durations=durations, after_s=after
    )


def exact_s(column, num_microbatches):
    num = len(column.stages)
    ends = pipeline_finish("1f1b", num, num_microbatches, 1, column.durations).rank_s
    return max(end + after for end, after in zip(ends, column.after_s or (0.0,) * num, strict=True))


@many(300)
@given(column=columns(), num_microbatches=st.integers(1, 88))
def test_seconds_are_those_of_the_critical_path(column, num_microbatches):
    assert column.step_s(num_microbatches) == pytest.approx(exact_s(column, num_microbatches), rel=1e-9)


@many(60)
@given(column=columns(most_stages=16), num_microbatches=st.integers(1000, 3000))
def test_long_pipelines_go_on_at_their_pace(column, num_microbatches):
    assert column.step_s(num_microbatches) == pytest.approx(exact_s(column, num_microbatches), rel=1e-2)


@many(60)
@given(num=st.integers(1, 16), forward_s=SECONDS, backward_s=SECONDS, num_microbatches=st.integers(1000, 3000))
def test_long_pipelines_of_equal_stages_have_one_bubble(num, forward_s, backward_s, num_microbatches):
    durations = Durations(
        forward_s=(forward_s,) * num, backward_s=(backward_s,) * num, weight_s=(0.0,) * num, p2p_s=(0.0,) * (num - 1)
    )
    column = Column(stages=(None,) * num, microbatch=1, sharding="none", used_g=(num,), durations=durations)
    expected_s = (num_microbatches + num - 1) * (forward_s + backward_s)
    assert column.step_s(num_microbatches) == pytest.approx(expected_s, rel=1e-9)


@many(300)
@given(column=columns(), num_microbatches=st.integers(1, 400))
def test_least_seconds_never_exceed_the_critical_path(column, num_microbatches):
    assert column.least_s(num_microbatches) <= exact_s(column, num_microbatches) * (1 + 1e-9)


@many(200)
@given(column=columns(), slack=st.floats(0.5, 60.0))
def test_most_microbatches_are_the_most_within_the_limit(column, slack):
    limit_s = slack * exact_s(column, 1)
    most = column.most_microbatches(limit_s)
    assert most == 0 or exact_s(column, most) <= limit_s * (1 + 1e-9)
    assert exact_s(column, most + 1) > limit_s * (1 - 1e-9)
