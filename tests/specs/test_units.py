from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.errors import UsageError
from hetplan.units import (
    UnitKind,
    format_bits,
    format_bytes,
    format_count,
    format_energy,
    format_flop_rate,
    format_power,
    format_rate,
    format_seconds,
    format_usd,
    hint,
    parse_quantity,
    quantity_text,
    show,
)

RANGES: dict[UnitKind, tuple[float, float]] = {
    "bytes": (1.0, 1e18),
    "bytes/s": (1.0, 1e18),
    "s": (1e-12, 1e10),
    "flop": (1.0, 1e30),
    "flop/s": (1.0, 1e21),
    "W": (1e-3, 1e8),
    "USD/h": (1e-9, 1e9),
    "USD/B": (1e-24, 1.0),
}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("80GB", "bytes", 80e9),
        ("1.5 TiB", "bytes", 1.5 * 2**40),
        ("12 B", "bytes", 12),
        ("0 B", "bytes", 0),
        ("200 Gbit/s", "bytes/s", 25e9),
        ("1.5 Gbps", "bytes/s", 0.1875e9),
        ("600 GB/s", "bytes/s", 600e9),
        ("1 GiB/s", "bytes/s", 2**30),
        ("3.35 TB/s", "bytes/s", 3.35e12),
        ("5 us", "s", 5e-6),
        ("5 µs", "s", 5e-6),
        ("150 ns", "s", 150e-9),
        ("12 ms", "s", 12e-3),
        ("2 min", "s", 120),
        ("1.5 h", "s", 5400),
        ("312 TFLOP/s", "flop/s", 312e12),
        ("19.5 TFLOPS", "flop/s", 19.5e12),
        ("2 GFLOP", "flop", 2e9),
        ("0.4 kW", "W", 400),
        ("1.89 USD/h", "USD/h", 1.89),
        ("0.02 USD/GB", "USD/B", 2e-11),
        ("1e3 GB", "bytes", 1e12),
        (" 3  us ", "s", 3e-6),
    ],
)
def test_a_quantity_becomes_its_base_unit(text, kind, value):
    assert parse_quantity(text, kind) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("80", "bytes", "without a unit"),
        ("80 GiB", "s", "the unit 'GiB'"),
        ("80 Gb", "bytes", "'Gb'"),
        ("25 Gb/s", "bytes/s", "write 'Gbit/s' or 'GB/s'"),
        ("25 gbit/s", "bytes/s", "did you mean 'Gbit/s'?"),
        ("-3 us", "s", "cannot be negative"),
        ("nan s", "s", "not a finite number"),
        (".inf s", "s", "not a finite number"),
        ("1e400 s", "s", "too large"),
        ("1e30 GiB", "bytes", "too large"),
        ("1e-300 GB/s", "bytes/s", "too small"),
        ("GiB", "bytes", "found 'GiB'"),
        ("", "bytes", "such as '80 GiB'"),
        ("1.2.3 s", "s", "'.3 s'"),
        ("1,5 s", "s", "',5 s'"),
        ("0x10 B", "bytes", "'x10 B'"),
        ("12:30", "s", "':30'"),
        ("9" * 100_000 + " s", "s", "100002 characters"),
    ],
)
def test_what_is_no_quantity_is_refused_with_its_reason(text, kind, problem):
    with pytest.raises(UsageError) as caught:
        parse_quantity(text, kind)
    assert problem in str(caught.value)


@given(data=st.data())
def test_text_of_a_quantity_reads_back_exactly(data):
    kind = data.draw(st.sampled_from(sorted(RANGES)))
    low, high = RANGES[kind]
    value = data.draw(st.floats(low, high))
    assert parse_quantity(quantity_text(value, kind), kind) == value


def test_text_of_a_quantity_is_short():
    assert quantity_text(80 * 2.0**30, "bytes") == "80 GiB"
    assert quantity_text(25e9, "bytes/s") == "25 GB/s"
    assert quantity_text(20e-6, "s") == "20 us"
    assert quantity_text(0.0, "s") == "0 s"


def test_numbers_for_people():
    assert format_bytes(79.15 * 2**30) == "79.15 GiB"
    assert format_bytes(512 * 2**20) == "512 MiB"
    assert format_bytes(0) == "0 B"
    assert format_bytes(40 * 2**40) == "40 TiB"
    assert format_bytes(-1.5 * 2**30) == "-1.5 GiB"
    assert format_seconds(1.23456) == "1.235 s"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(5e-6) == "5 us"
    assert format_seconds(2e-9) == "2 ns"
    assert format_seconds(200) == "3 min 20 s"
    assert format_seconds(7500) == "2 h 05 min"
    assert format_rate(25e9) == "25 GB/s"
    assert format_bits(25e9) == "200 Gbit/s"
    assert format_flop_rate(312e12) == "312 TFLOP/s"
    assert format_power(6500) == "6.5 kW"
    assert format_energy(1.5e6) == "1.5 MJ"
    assert format_usd(1234.5) == "$1,234.50"
    assert format_usd(0.0123) == "$0.0123"
    assert format_count(8_030_261_248) == "8.03 G"
    assert format_count(12) == "12"


@given(value=st.floats(1.0, 1e15))
def test_a_size_for_people_is_within_one_percent(value):
    assert parse_quantity(format_bytes(value), "bytes") == pytest.approx(value, rel=0.01, abs=0.51)


def test_shown_text_is_one_short_line():
    assert show("a\nb\x1b[31m\u202e") == "'a\\nb\\x1b[31m\\u202e'"
    assert len(show("\n" * 10_000)) <= 62
    assert len(show("x" * 10_000)) <= 62


def test_a_hint_is_given_for_a_near_word_only():
    assert hint("A100-SMX4-80GB", ["A100-SXM4-80GB", "V100"]) == "; did you mean 'A100-SXM4-80GB'?"
    assert hint("a100", ["A100"]) == "; did you mean 'A100'?"
    assert hint("zzz", ["A100"]) == ""
    assert hint("x" * 100_000, ["A100"]) == ""
