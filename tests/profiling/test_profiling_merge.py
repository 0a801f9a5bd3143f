"""Calibrations of several hosts become one, and what cannot be one is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.cli.main import run
from hetplan.errors import UsageError
from hetplan.profiling.merge import merged
from hetplan.specs.calibration import Calibration, DeviceConstants, NetworkConstants, Overlap
from hetplan.specs.layer_table import LayerRow, LayerTable
from hetplan.specs.read_calibration import calibration_text, read_calibration

ROW = LayerRow(device="A", tp=1, microbatch=1, first_layer=0, end_layer=2, forward_s=1e-3, backward_s=2e-3)
FIRST = Calibration(
    devices={"A": DeviceConstants(gemm_peak_fraction=0.4, origin="measured")},
    networks={"ib": NetworkConstants(bandwidth_fraction=0.9, origin="measured")},
    layers=LayerTable(model="m", num_layers=3, rows=(ROW,)),
    provenance={"date": "1"},
)
SECOND = Calibration(
    devices={"A": DeviceConstants(gemm_peak_fraction=0.9, origin="measured"), "B": DeviceConstants(origin="measured")},
    layers=LayerTable(model="m", num_layers=3, rows=(replace(ROW, forward_s=4e-3), replace(ROW, device="B"))),
    provenance={"date": "2"},
)


def test_shared_devices_get_the_mean_and_others_stay() -> None:
    both = merged([("one.yaml", FIRST), ("two.yaml", SECOND)])
    assert both.devices["A"].gemm_peak_fraction == pytest.approx(0.6)
    assert both.devices["B"] == SECOND.devices["B"]
    assert both.networks == FIRST.networks
    assert both.provenance == {"one.yaml: date": "1", "two.yaml: date": "2"}


def test_equal_layers_are_averaged_and_others_lie_side_by_side() -> None:
    layers = merged([("one.yaml", FIRST), ("two.yaml", SECOND)]).layers
    assert layers is not None
    assert {row.device: row.forward_s for row in layers.rows} == {"A": pytest.approx(2e-3), "B": 1e-3}


def test_layers_of_two_models_are_refused() -> None:
    other = replace(SECOND, layers=LayerTable(model="n", num_layers=3, rows=(ROW,)))
    with pytest.raises(UsageError, match="one model at a time"):
        merged([("one.yaml", FIRST), ("two.yaml", other)])


def test_disagreement_about_overlap_is_refused() -> None:
    with pytest.raises(UsageError, match="overlaps"):
        merged([("one.yaml", FIRST), ("two.yaml", replace(SECOND, overlap=Overlap(gradients=0.1)))])


def test_the_command_merges_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    for path, calibration in zip(paths, (FIRST, SECOND), strict=True):
        path.write_text(calibration_text(calibration), encoding="utf-8")
    out = tmp_path / "all.yaml"
    assert run(["profile", "--merge", str(paths[0]), "--merge", str(paths[1]), "-o", str(out)]) == 0
    assert "2 calibrations merged" in capsys.readouterr().out
    assert read_calibration(out) == merged([("one.yaml", FIRST), ("two.yaml", SECOND)])
