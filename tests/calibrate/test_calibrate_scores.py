"""Errors, folds and the accuracy script."""

from __future__ import annotations

import csv
import json
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from calibrate_samples import GPT_18B, SMALL

from hetplan.calibrate.dataset import dataset_of, folds
from hetplan.calibrate.evaluate import baseline_s, utilisation
from hetplan.calibrate.runs import Run
from hetplan.calibrate.score import score
from hetplan.cli.main import run as hetplan

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "accuracy.py"


def write_table(path: Path, runs: Sequence[Run]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(runs[0])))
        writer.writeheader()
        writer.writerows(asdict(run) for run in runs)
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    runs = [replace(run, iter_time_s=str(0.1 * (index + 1))) for index, run in enumerate(SMALL[:6])]
    memory = replace(SMALL[0], id="mem", kind="memory", measured_value="20", unit="GiB")
    too_big = replace(
        SMALL[0],
        id="oom",
        config_id="oom",
        kind="feasible",
        measured_value="0",
        micro_batch="64",
        dp="1",
        n_devices="1",
        recompute="none",
        hidden="16384",
        ffn="65536",
        heads="128",
    )
    unknown = replace(SMALL[0], id="odd", device="Z9000")
    return write_table(tmp_path / "rows.csv", [*runs, memory, too_big, unknown])


def test_scores_are_in_percent() -> None:
    found = score([1.1, 2.0, 2.7], [1.0, 2.0, 3.0])
    assert found.mape == pytest.approx(20 / 3)
    assert found.median == pytest.approx(10.0)
    assert found.max == pytest.approx(10.0)
    assert found.bias == pytest.approx(0.0, abs=1e-9)
    assert found.spearman == pytest.approx(100.0)


def test_ranks_that_turn_around_correlate_negatively() -> None:
    assert score([3.0, 2.0, 1.0], [1.0, 2.0, 3.0]).spearman == pytest.approx(-100.0)
    assert score([1.0, 2.0], [1.0, 2.0]).spearman is None


def test_every_configuration_is_left_out_once(table: Path) -> None:
    data = dataset_of(replace(run, iter_time_s="1.0") for run in SMALL)
    parts = folds(data, 5)
    assert set().union(*parts) == data.configurations
    assert sum(map(len, parts)) == len(data.configurations)
    assert data.only(parts[0]).configurations == parts[0]


def test_the_baseline_is_exact_where_devices_reach_one_fraction() -> None:
    data = dataset_of([replace(GPT_18B, iter_time_s="9.4")])
    known = utilisation(data.times)
    assert baseline_s(data.times[0].setup, known) == pytest.approx(9.4)
    assert 0.4 < known[""] < 0.5


def test_the_script_prints_every_stratum(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(table), "--calibration-set", str(table), "--json"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 0
    document = json.loads(capsys.readouterr().out)
    own = document["strata"]["megatron-2021"]
    assert {"n", "mape", "median", "p90", "max", "bias", "spearman"} <= set(own["time"])
    assert (own["time"]["n"], own["memory"]["n"], own["fits"]["n_oom"]) == (6, 1, 1)
    assert document["pooled"]["time"] == own["time"]
    assert own["fits"]["right_oom"] == 100.0
    assert [entry["reason"] for entry in document["inexpressible"]] == ["the catalog has no device 'Z9000'"]


def test_calibrate_writes_a_file_estimate_takes(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibration.yaml"
    assert hetplan(["calibrate", str(table), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "6 step times fitted" in printed
    assert "Z9000" in printed
    assert out.read_text().startswith("hetplan: calibration/v1")


def test_tables_of_several_systems_ask_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [replace(SMALL[0], iter_time_s="1"), replace(SMALL[1], iter_time_s="1", stratum="other")]
    assert hetplan(["calibrate", str(write_table(tmp_path / "rows.csv", runs))]) == 2
    assert "--stack: megatron-2021, other" in capsys.readouterr().err
