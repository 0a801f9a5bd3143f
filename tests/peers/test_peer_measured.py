"""Estimates from measured layers alone beside real runs."""

import peer_paths  # noqa: F401 - makes the benches importable
import peers_measured


def test_estimates_of_real_runs_keep_their_order_and_their_errors_small():
    told = peers_measured.summary(peers_measured.rows())
    assert told.time_error <= 0.08
    assert told.memory_error <= 0.06
    assert told.pairs == 20
    assert told.right_pairs >= 19
