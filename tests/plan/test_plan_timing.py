import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.pipelines import equal, pipelines

from hetplan.errors import UsageError
from hetplan.plan.program import Action, Program, program
from hetplan.plan.timing import (
    Durations,
    action_seconds,
    finish_times,
    local_source_of,
    pipeline_finish,
    source_of,
)


def finish_by_definition(order: Program, durations: Durations):
    """Evaluate the recurrences of the module's docstring by recursion to a fixed point, with no clever order."""
    num_stages = order.pp * order.vpp
    split = order.schedule == "zero-bubble"
    end, arrival, position, line = {}, {}, [0] * order.pp, {}
    free = [0.0] * order.pp
    while any(p < len(r) for p, r in zip(position, order.ranks, strict=True)):
        for rank in reversed(range(order.pp)):
            if position[rank] == len(order.ranks[rank]):
                continue
            action = order.ranks[rank][position[rank]]
            source, local = source_of(action, num_stages, split=split), local_source_of(action)
            if (source is not None and source not in arrival) or (local is not None and local not in end):
                continue
            start = max(free[rank], arrival[source] if source else 0.0)
            free[rank] = end[action] = start + action_seconds(action, durations)
            arrival[action] = end[action]
            step = {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            target = action.stage + step
            if step and 0 <= target < num_stages and order.pp > 1:
                key = (rank, target % order.pp)
                boundary = min(action.stage, target)
                arrival[action] = max(end[action], line.get(key, 0.0)) + durations.p2p_s[boundary]
                line[key] = arrival[action]
            position[rank] += 1
    return tuple(free), end


@given(pipelines())
def test_the_pass_over_flat_lists_equals_the_definition(case):
    schedule, pp, m, vpp, durations = case
    order = program(schedule, pp, m, vpp)
    ranks, end = finish_by_definition(order, durations)
    last = "W" if schedule == "zero-bubble" else "B"
    expected = tuple(max(end[Action(last, v, j)] for j in range(m)) for v in range(pp * vpp))
    for finish in (finish_times(order, durations), pipeline_finish(schedule, pp, m, vpp, durations)):
        assert finish.rank_s == ranks
        assert finish.gradients_s == expected


@given(st.integers(1, 9), st.integers(1, 20), st.sampled_from(["gpipe", "1f1b"]))
def test_equal_stages_leave_a_bubble_of_p_minus_1_over_m(pp, m, schedule):
    total = pipeline_finish(schedule, pp, m, 1, equal(pp)).pipeline_s
    busy = m * 3.0
    assert total == pytest.approx(busy * (1 + (pp - 1) / m), rel=1e-12)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_vpp(pp, rounds, vpp):
    m = pp * rounds
    total = pipeline_finish("interleaved", pp, m, vpp, equal(pp * vpp)).pipeline_s
    assert total == pytest.approx(m * vpp * 3.0 * (1 + (pp - 1) / (vpp * m)), rel=1e-12)


@given(st.integers(1, 7), st.integers(0, 12))
def test_zero_bubble_leaves_what_its_paper_says(pp, extra):
    m = pp + extra
    total = pipeline_finish("zero-bubble", pp, m, 1, equal(pp)).pipeline_s
    assert total == m * 3.0 + (pp - 1) * (1.0 + 1.0 - 1.0)


@given(pipelines(), st.floats(1.0, 3.0))
def test_slower_work_never_ends_earlier(case, factor):
    schedule, pp, m, vpp, durations = case
    slower = dataclasses.replace(durations, forward_s=tuple(s * factor for s in durations.forward_s))
    assert (
        pipeline_finish(schedule, pp, m, vpp, slower).pipeline_s
        >= pipeline_finish(schedule, pp, m, vpp, durations).pipeline_s
    )


def test_transfers_in_one_direction_go_one_after_the_other():
    durations = equal(2, forward=1.0, backward=1.0, weight=0.5, p2p=10.0)
    finish = pipeline_finish("gpipe", 2, 3, 1, durations)
    assert finish.gradients_s[1] == 1 + 3 * 10 + 1 + 3
    assert finish.gradients_s[0] == 32 + 1 + 3 * 10 + 1


def test_a_program_that_waits_for_itself_is_refused():
    order = Program(schedule="1f1b", vpp=1, num_microbatches=1, ranks=((Action("B", 0, 0), Action("F", 0, 0)),))
    with pytest.raises(UsageError, match="waits for the input of 0B0"):
        finish_times(order, equal(1))
