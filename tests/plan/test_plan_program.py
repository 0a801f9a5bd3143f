import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.errors import UsageError
from hetplan.plan.program import (
    Action,
    held_counts,
    in_flight,
    in_flight_1f1b,
    parse_action,
    parse_program,
    program,
    program_text,
    schedule_errors,
)
from hetplan.plan.timing import local_source_of, source_of


@st.composite
def counts(draw):
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
    pp = draw(st.integers(1, 7))
    if schedule == "interleaved":
        return schedule, pp, pp * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return schedule, pp, draw(st.integers(1, 20)), 1


def test_1f1b_runs_forward_passes_ahead_then_alternates():
    assert program_text(program("1f1b", 2, 3)) == (
        "1f1b pp=2 vpp=1 microbatches=3\n0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    )


def test_gpipe_does_all_forward_passes_first():
    lines = program_text(program("gpipe", 2, 2)).splitlines()
    assert lines[1:] == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_interleaved_takes_microbatches_in_runs_of_pp():
    lines = program_text(program("interleaved", 2, 4, 2)).splitlines()
    assert lines[1].split()[:6] == ["0F0", "0F1", "2F0", "2F1", "0F2", "2B0"]
    assert lines[2].split()[:5] == ["1F0", "1F1", "3F0", "3B0", "3F1"]


def test_zero_bubble_makes_weight_gradients_late_on_late_ranks():
    lines = program_text(program("zero-bubble", 2, 3)).splitlines()
    assert lines[1:] == ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]


@given(counts())
def test_every_rank_does_each_of_its_actions_once(case):
    schedule, pp, m, vpp = case
    order = program(*case)
    kinds = "FIW" if schedule == "zero-bubble" else "FB"
    for rank, actions in enumerate(order.ranks):
        expected = {Action(k, c * pp + rank, j) for k in kinds for c in range(vpp) for j in range(m)}
        assert len(actions) == len(expected)
        assert set(actions) == expected


@given(counts())
def test_no_schedule_deadlocks(case):
    order = program(*case)
    split = order.schedule == "zero-bubble"
    done = set()
    position = [0] * order.pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needs = {source_of(action, order.pp * order.vpp, split=split), local_source_of(action)} - {None}
                if not needs <= done:
                    break
                done.add(action)
                position[rank] += 1
                moved = True
    assert position == [len(actions) for actions in order.ranks]


@given(counts())
def test_text_round_trip(case):
    order = program(*case)
    assert parse_program(program_text(order)) == order


@given(counts())
def test_held_counts_agree_with_the_actions(case):
    order = program(*case)
    peaks = tuple(max(sum(row) for row in rank) for rank in held_counts(*case))
    assert in_flight(order) == peaks


@given(st.integers(1, 9), st.integers(1, 25))
def test_1f1b_holds_what_the_closed_form_says(pp, m):
    assert in_flight(program("1f1b", pp, m)) == tuple(in_flight_1f1b(pp, s, m) for s in range(pp))


@given(st.integers(1, 9), st.integers(1, 25))
def test_zero_bubble_never_holds_more_than_the_first_rank_of_1f1b(pp, m):
    assert max(in_flight(program("zero-bubble", pp, m))) == in_flight(program("1f1b", pp, m))[0]


def test_counts_a_schedule_cannot_run_are_refused():
    with pytest.raises(UsageError, match="multiple of pp 4 microbatches, not 6"):
        program("interleaved", 4, 6, 2)
    with pytest.raises(UsageError, match="needs schedule interleaved"):
        program("1f1b", 4, 8, 2)
    with pytest.raises(UsageError, match="at least 1"):
        program("1f1b", 0, 8)
    assert schedule_errors("interleaved", 4, 8, 2) == ()


@pytest.mark.parametrize("word", ["", "F", "2G0", "02F0", "2F", "-1F0", "2F00", "2F0x"])
def test_words_that_name_no_action_are_refused(word):
    with pytest.raises(UsageError, match="2F0"):
        parse_action(word)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(UsageError):
        parse_program("2f1b pp=1 vpp=1 microbatches=1\n0F0 0B0\n")
    with pytest.raises(UsageError):
        parse_program("1f1b pp=2 vpp=1 microbatches=1\n0F0 0B0\n")


def test_a_large_program_holds_every_action():
    order = program("1f1b", 64, 512)
    assert sum(map(len, order.ranks)) == 2 * 64 * 512
