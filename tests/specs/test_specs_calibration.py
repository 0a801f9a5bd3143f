from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.errors import SpecError
from hetplan.specs.calibration import Calibration, DeviceConstants, NetworkConstants, Overlap
from hetplan.specs.read_calibration import (
    DEVICE_KEYS,
    NETWORK_KEYS,
    ORIGINS,
    OVERLAP_KEYS,
    calibration_from_text,
    calibration_text,
    read_calibration,
)

TEXT = """\
hetplan: calibration/v1
devices:
  A100-SXM4-80GB: {gemm_peak_fraction: 0.71, gemm_half: 3 GFLOP, layer_overhead: 15 us, reserve: 2 GB, origin: fitted}
  L4: {}
networks:
  ib: {bandwidth_fraction: 0.9, latency: 5 us, origin: measured}
overlap: {gradients: 0.5, gathers: false}
relative_error: 0.08
provenance: {software: torch 2.8, date: '2026-01-02'}
"""


def test_what_is_written_replaces_the_assumed_default():
    calibration = calibration_from_text(TEXT, "c.yaml")
    assert calibration.device("A100-SXM4-80GB") == DeviceConstants(
        gemm_peak_fraction=0.71, gemm_half_flop=3e9, layer_overhead_s=15e-6, reserve_bytes=2e9, origin="fitted"
    )
    assert calibration.device("L4") == calibration.device("unknown") == DeviceConstants()
    assert calibration.network("ib") == NetworkConstants(bandwidth_fraction=0.9, latency_s=5e-6, origin="measured")
    assert calibration.overlap == Overlap(gradients=0.5, gathers=False)
    assert calibration.relative_error == 0.08
    assert calibration.provenance == {"software": "torch 2.8", "date": "2026-01-02"}


def test_an_empty_calibration_assumes_everything():
    assert calibration_from_text("hetplan: calibration/v1\n", "c.yaml") == Calibration()


@pytest.mark.parametrize(
    ("keys", "record", "others"),
    [
        (DEVICE_KEYS, DeviceConstants, {"origin"}),
        (NETWORK_KEYS, NetworkConstants, {"origin"}),
        (OVERLAP_KEYS, Overlap, {"gathers", "pipeline"}),
    ],
)
def test_every_constant_has_a_key(keys, record, others):
    assert {key.attribute for key in keys} | others == {field.name for field in dataclasses.fields(record)}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("0.71", "0", "devices.A100-SXM4-80GB.gemm_peak_fraction: must be at least"),
        ("0.71", "71", "must be at most 1.5"),
        ("0.71", ".nan", "not finite"),
        ("3 GFLOP", "3", "without a unit"),
        ("15 us", "15 GB", "the unit 'GB'"),
        ("gemm_half", "gemm_haf", "did you mean 'gemm_half'?"),
        ("origin: fitted", "origin: fited", "did you mean 'fitted'?"),
        ("gradients: 0.5", "gradients: 1.5", "overlap.gradients: must be at most 1"),
        ("relative_error", "relativ_error", "did you mean 'relative_error'?"),
        ("torch 2.8", "[torch]", "provenance.software: expected a text"),
        ("L4: {}", "L4: 3", "devices.L4: expected a mapping"),
    ],
)
def test_a_bad_calibration_is_refused(old, new, problem):
    assert TEXT.count(old) == 1
    with pytest.raises(SpecError) as caught:
        calibration_from_text(TEXT.replace(old, new), "c.yaml")
    assert problem in str(caught.value)


def _record(record, keys, **others):
    """Records with every constant within its bounds."""
    smallest = {"s": 1e-9, "bytes": 1.0, "flop": 1.0}
    values = {
        key.attribute: st.floats(smallest[key.unit], 1e9) if key.unit else st.floats(key.minimum, key.maximum)
        for key in keys
    }
    return st.builds(record, **values, **others)


WORDS = st.text(min_size=1, max_size=12).filter(lambda text: "\ud800" not in text and text.encode("utf-8", "ignore"))
CALIBRATIONS = st.builds(
    Calibration,
    devices=st.dictionaries(WORDS, _record(DeviceConstants, DEVICE_KEYS, origin=st.sampled_from(ORIGINS)), max_size=3),
    networks=st.dictionaries(
        WORDS, _record(NetworkConstants, NETWORK_KEYS, origin=st.sampled_from(ORIGINS)), max_size=3
    ),
    overlap=_record(Overlap, OVERLAP_KEYS, gathers=st.booleans()),
    relative_error=st.none() | st.floats(0, 10),
    provenance=st.dictionaries(WORDS, WORDS, max_size=3),
)


@given(calibration=CALIBRATIONS)
def test_a_written_calibration_reads_back_exactly(calibration):
    assert calibration_from_text(calibration_text(calibration), "c.yaml") == calibration


def test_a_written_calibration_has_a_stable_order(tmp_path):
    one = Calibration(devices={"b": DeviceConstants(), "a": DeviceConstants()}, provenance={"y": "1", "x": "no"})
    two = Calibration(devices={"a": DeviceConstants(), "b": DeviceConstants()}, provenance={"x": "no", "y": "1"})
    assert calibration_text(one) == calibration_text(two)
    path = tmp_path / "c.yaml"
    path.write_text(calibration_text(one))
    assert read_calibration(path) == one
