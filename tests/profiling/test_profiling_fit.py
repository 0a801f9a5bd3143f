"""Fits find the constants the figures were made of, and are not led astray by a figure that did not keep still."""

from __future__ import annotations

from dataclasses import replace

import pytest
from survey_samples import (
    ATTENTION,
    FRACTION,
    HALF,
    LATENCY_S,
    MEMORY,
    PEAK,
    PENALTY,
    RATE,
    RING_LATENCY_S,
    RING_RATE,
    attentions,
    gemms,
    link,
    links,
    timed,
)

from hetplan.profiling import fit

PEAKS = {"fp32": PEAK}


def test_products_give_back_fraction_half_size_and_penalty() -> None:
    found = fit.fit_gemms(gemms(), PEAKS, MEMORY)
    assert found.fraction == pytest.approx(FRACTION, rel=1e-3)
    assert found.half_flop == pytest.approx(HALF, rel=0.02)
    assert found.penalty == pytest.approx(PENALTY, rel=0.02)
    assert found.error < 1e-3


def test_one_product_measured_while_the_machine_was_busy_moves_little() -> None:
    figures = list(gemms())
    figures[-1] = replace(figures[-1], timing=timed(5 * figures[-1].timing.seconds, spread=0.8))
    assert fit.fit_gemms(figures, PEAKS, MEMORY).fraction == pytest.approx(FRACTION, rel=0.05)


def test_attention_counts_its_backward_pass_two_and_a_half_times() -> None:
    assert fit.attention_fraction(attentions(), PEAKS, HALF) == pytest.approx(ATTENTION)


def test_transfers_give_back_latency_and_rate() -> None:
    line = fit.fit_sends([figure for figure in links((0, 1)) if figure.kind == "send"])
    assert line.latency_s == pytest.approx(LATENCY_S, rel=1e-3)
    assert 1 / line.s_per_byte == pytest.approx(RATE, rel=1e-3)


def test_all_reduces_of_several_sizes_of_group_share_one_ring() -> None:
    figures = [link("all_reduce", ranks, size) for ranks in ((0, 1), (0, 1, 2, 3)) for size in (4096, 1 << 20, 1 << 24)]
    line = fit.fit_all_reduces(figures)
    assert line.latency_s == pytest.approx(RING_LATENCY_S, rel=1e-3)
    assert 1 / line.s_per_byte == pytest.approx(RING_RATE, rel=1e-3)
