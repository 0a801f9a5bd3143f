"""Words of the command line -> the space of plans a search may return."""

from __future__ import annotations

import pytest
from report_samples import CLUSTER, MODEL

from hetplan.cli.options import parse_counts, parse_words
from hetplan.cli.space import LimitWords, limits_from
from hetplan.errors import UsageError
from hetplan.plan.limits import ENGINES, Limits


def limits(**words: object) -> Limits:
    return limits_from(LimitWords(**words), CLUSTER, MODEL)  # type: ignore[arg-type]


def test_no_words_leave_the_engine_as_it_is() -> None:
    assert limits() == ENGINES["hetplan"]
    assert limits(engine="megatron") == ENGINES["megatron"]


def test_lists_restrict() -> None:
    found = limits(tp="1,2, 4", micro_batch="8", recompute="none,full", cp="1,2")
    assert (found.tp, found.microbatch, found.recompute, found.cp) == ((1, 2, 4), (8,), ("none", "full"), (1, 2))
    assert found.sharding == Limits().sharding


def test_uniform_means_one_grid_with_equal_cuts() -> None:
    found = limits(uniform=True)
    assert found.uniform_degrees and found.equal_cuts and found.uniform_cuts and found.uniform_microbatches


def test_a_pin_must_add_up_to_the_model() -> None:
    assert limits(pin="11,12,9,0").pinned_layers == (11, 12, 9, 0)
    with pytest.raises(UsageError, match="33 decoder layers, toy has 32"):
        limits(pin="11,12,10")


def test_unknown_words_name_a_near_match() -> None:
    with pytest.raises(UsageError, match="did you mean 'megatron'"):
        limits(engine="megatrom")
    with pytest.raises(UsageError, match="did you mean 'fast'"):
        limits(exclude=("fasst",))
    with pytest.raises(UsageError, match="there are none, selective, full"):
        limits(recompute="sometimes")


def test_leaving_out_everything_is_refused() -> None:
    assert limits(exclude=("slow",)).exclude == {"slow"}
    with pytest.raises(UsageError, match="every group"):
        limits(exclude=("slow", "fast"))


def test_an_engine_is_not_asked_for_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="engine hexiscale does not do 'full'; it does none"):
        limits(engine="hexiscale", sharding="none,full")


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,2", "1.5", "1e3", "9999999999", "٣", "1,x"])
def test_counts_are_small_whole_numbers(text: str) -> None:
    with pytest.raises(UsageError, match="is not a whole number"):
        parse_counts(text, "--tp")


def test_options_not_given_stay_unset() -> None:
    assert parse_counts(None, "--tp") is None
    assert parse_words(None, "--recompute", ("none",)) is None
