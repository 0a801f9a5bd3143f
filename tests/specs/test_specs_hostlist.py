from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.errors import UsageError
from hetplan.specs.hostlist import expand_hostlist, hostlist_text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a100-[01-02]", ["a100-01", "a100-02"]),
        ("a100-[01-04,07],b-[1-2]", ["a100-01", "a100-02", "a100-03", "a100-04", "a100-07", "b-1", "b-2"]),
        ("node", ["node"]),
        ("b,a", ["b", "a"]),
        ("r[1-2]-n[08-10]", ["r1-n08", "r1-n09", "r1-n10", "r2-n08", "r2-n09", "r2-n10"]),
        ("n[098-101]x", ["n098x", "n099x", "n100x", "n101x"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        (" a[1-2], b.example.com ", ["a1", "a2", "b.example.com"]),
        ("[1,3]", ["1", "3"]),
    ],
)
def test_a_hostlist_stands_for_names_in_order(text, names):
    assert list(expand_hostlist(text)) == names


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "malformed at character 1"),
        ("a,", "malformed at character 3"),
        (",a", "malformed at character 1"),
        ("a[1-2", "malformed"),
        ("a]", "malformed"),
        ("a[]", "not a range"),
        ("a[x]", "'x' in hostlist 'a[x]' is not a range"),
        ("a[1-2-3]", "not a range"),
        ("a[[1]]", "malformed"),
        ("a[4-1]", "runs backwards"),
        ("a,b,a", "names 'a' twice"),
        ("a[1-3,2]", "names 'a2' twice"),
        ("a b", "'a b' is not a node name"),
        ("a:1", "not a node name"),
        ("-a", "not a node name"),
        ("a\nb", "not a node name"),
        ("a" * 1000, "not a node name"),
        ("a[1-1000001]", "stands for 1,000,001 names; at most 1,000,000"),
        ("a[1-999999999999]" * 50, "10^15 or more names"),
        ("a[1-9999999999999]", "not a range"),
    ],
)
def test_what_is_no_hostlist_is_refused_at_once(text, problem):
    tracemalloc.start()
    try:
        with pytest.raises(UsageError) as caught:
            expand_hostlist(text)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert problem in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_number_of_names_may_be_limited_further():
    assert len(expand_hostlist("a[1-10]", 10)) == 10
    with pytest.raises(UsageError):
        expand_hostlist("a[1-11]", 10)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a1"], "a1"),
        (["a100-01", "a100-02", "a100-04"], "a100-[01-02,04]"),
        (["n9", "n10"], "n[9-10]"),
        (["n09", "n10"], "n[09-10]"),
        (["n9", "n010"], "n[9,010]"),
        (["b", "a2", "a1", "b1"], "b,a[2,1],b1"),
    ],
)
def test_names_become_a_compact_hostlist(names, text):
    assert hostlist_text(names) == text


NAMES = st.lists(st.from_regex(r"(a|b-|n0|x[0-9]y)[0-9]{0,3}", fullmatch=True), min_size=1, max_size=20, unique=True)


@given(names=NAMES)
def test_a_compact_hostlist_reads_back(names):
    assert list(expand_hostlist(hostlist_text(names))) == names


@given(first=st.integers(0, 2000), count=st.integers(1, 300), width=st.integers(1, 5))
def test_one_run_of_numbers_is_one_range(first, count, width):
    names = [f"n-{str(number).zfill(width)}" for number in range(first, first + count)]
    text = hostlist_text(names)
    assert list(expand_hostlist(text)) == names
    assert "," not in text


@given(text=st.text(alphabet="ab[]-,0123456789 .\n", max_size=30))
def test_any_text_is_a_hostlist_or_refused(text):
    try:
        names = expand_hostlist(text, 1000)
    except UsageError:
        return
    assert 1 <= len(names) == len(set(names)) <= 1000
