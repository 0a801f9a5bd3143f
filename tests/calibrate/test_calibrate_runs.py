"""Tables and logs of observed runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetplan.calibrate.runs import by_configuration, read_runs, run_of, steady
from hetplan.errors import SpecError


def test_a_table_is_read_by_its_column_names(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("global_batch,device,seq,n_devices,tokens_per_s_per_gpu,colour\n512,H100,2048,64,1000,blue\n")
    (run,) = read_runs(path)
    assert run.device == "H100"
    assert run.step_s() == pytest.approx(512 * 2048 / (64 * 1000))
    assert run.id == "run-1"


def test_a_log_is_summed_up_by_configuration_without_its_warm_up(tmp_path: Path) -> None:
    lines = [{"device": "H100", "global_batch": 8, "tp": 2}]
    lines += [{"step": i, "step_s": s} for i, s in enumerate([90.0, 30.0, 2.0, 2.1, 1.9, 2.0])]
    lines += [{"tp": 4}, {"step": 6, "step_s": 1.5}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    first, second = read_runs(path)
    assert (first.tp, first.step_s()) == ("2", 2.0)
    assert (second.tp, second.step_s()) == ("4", 1.5)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"device": "H100"}\n', '{"step_s": 1}\n[1]\n', '{"step_s": \n'])
def test_what_is_neither_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs"
    path.write_text(text)
    with pytest.raises(SpecError, match="runs"):
        read_runs(path)


def test_few_steps_are_all_used() -> None:
    assert steady([3.0, 1.0, 2.0]) == 2.0


@pytest.mark.parametrize(("unit", "factor"), [("GiB (max over ranks)", 2**30), ("GB", 1e9), ("parsec", None)])
def test_memory_is_read_in_its_unit(unit: str, factor: float | None) -> None:
    run = run_of({"measured_value": "2", "unit": unit})
    assert run.memory_bytes() == (None if factor is None else 2 * factor)


def test_rows_without_a_rate_hold_no_time() -> None:
    assert run_of({"iter_time_s": "nan", "global_batch": "8"}).step_s() is None


def test_rows_of_one_configuration_are_kept_together() -> None:
    runs = [run_of({"id": "a/time", "config_id": "a"}), run_of({"id": "b"}), run_of({"id": "a/mem", "config_id": "a"})]
    assert {name: len(rows) for name, rows in by_configuration(runs).items()} == {"a": 2, "b": 1}


def test_a_release_is_read_from_its_source() -> None:
    assert run_of({"source": "archive.md [26.04.01 Container; Pre-Training]"}).release == "26.04.01"
    assert run_of({"source": "a paper [12]"}).release == ""
