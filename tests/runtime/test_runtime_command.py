"""`hetplan run` from its command line to its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the executor needs torch; pip install 'hetplan[torch]'")

from runtime_cases import replica
from runtime_plans import write_plan

from hetplan.catalog.load import load_calibration
from hetplan.cli.inputs import load_plan
from hetplan.cli.main import run
from hetplan.cli.pricing import priced_plan
from hetplan.emit.ranks import ranks_of
from hetplan.emit.records import Job as EmitJob
from hetplan.plan.records import Layout
from hetplan.runtime.ranks import seats_of_plan

MIXED = Layout(replicas=(replica("gpt2", "5+3", count=3), replica("gpt2", "8", count=2)))
OTHER = Layout(replicas=(replica("gpt2", "3+5", tp="2+1", count=3), replica("gpt2", "8", count=2)))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Something to read."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 300)
    return path


def said(metrics: Path) -> list[dict[str, float]]:
    """The steps of a metrics file."""
    return [row for row in map(json.loads, metrics.read_text().splitlines()) if row["event"] == "step"]


def test_a_run_writes_metrics_checkpoints_and_what_was_measured(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, metrics, root = write_plan(tmp_path, "plan.yaml", MIXED), tmp_path / "metrics.jsonl", tmp_path / "saved"
    other = write_plan(tmp_path, "other.yaml", OTHER)
    same = ["--data", str(text), "--decay", "constant", "--lr", "1e-3", "--metrics", str(metrics)]
    assert run(["run", str(plan), *same, "--steps", "4", "--checkpoint", str(root), "--every", "3"]) == 0
    shown = capsys.readouterr()
    assert "3 ranks, 4 steps, 5 samples a step" in shown.err
    assert "step-00000003" in shown.err
    assert "predicted" in shown.out
    rows = said(metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["tokens_per_s"] > 0 and row["memory_bytes"] > 2**20 for row in rows)
    document = json.loads((tmp_path / "plan.measured.json").read_text())
    assert [stage["layers"] for stage in document["stages"]] == [[[0, 6]], [[6, 10]], [[0, 10]]]
    assert set(document["parts"]) >= {"compute", "tp", "pp", "bubble", "dp", "optimizer"}
    assert document["parts"]["compute"]["measured_s"] > 0
    assert run(["run", str(other), *same, "--steps", "5", "--resume", str(root), "-q", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"]
    assert [row["step"] for row in said(metrics)] == [1, 2, 3, 4, 5]


def test_a_corrected_calibration_predicts_the_run_it_was_corrected_by(tmp_path: Path, text: Path) -> None:
    plan, corrected = write_plan(tmp_path, "plan.yaml", MIXED), tmp_path / "corrected.yaml"
    words = ["--data", str(text), "--steps", "3", "-q", "--update-calibration", str(corrected)]
    assert run(["run", str(plan), *words]) == 0
    document = json.loads((tmp_path / "plan.measured.json").read_text())
    constants, _ = load_calibration(corrected)
    assert constants.device("Core").origin == "measured"
    priced = priced_plan(load_plan(str(plan), calibration=corrected))
    predicted = sum(stage.busy_s for stage in priced.sound_estimate.stages)
    assert predicted == pytest.approx(sum(stage["busy"]["measured_s"] for stage in document["stages"]), rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "nowhere"], "cannot read nowhere"),
        (["--data", "short"], "less than one sample"),
        (["--data", "text.txt", "--resume", "."], "no complete checkpoint"),
        (["--data", "text.txt", "--tokens", "uint32"], "no whole number of uint32 tokens"),
    ],
)
def test_what_the_user_did_wrong_is_said_before_anything_starts(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    plan = write_plan(tmp_path, "plan.yaml", MIXED)
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("abc")
    text.write_text(text.read_text() + "!")
    assert run(["run", str(plan), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_precision_that_is_planned_but_not_run_is_refused(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path, "plan.yaml", MIXED)
    plan.write_text(plan.read_text().replace("precision: fp32", "precision: fp16"))
    assert run(["run", str(plan), "--data", str(text)]) in (2, 4)
    assert "fp16" in capsys.readouterr().err


def test_ranks_are_those_of_the_emitted_scripts(tmp_path: Path) -> None:
    saved = load_plan(str(write_plan(tmp_path, "plan.yaml", OTHER)))
    inputs, layout = saved.job, saved.plan.layout
    seats = seats_of_plan(layout, inputs.cluster, inputs.model, inputs.workload)
    job = EmitJob(
        layout=layout,
        cluster=inputs.cluster,
        model=inputs.model,
        workload=inputs.workload,
        plan_text="",
        plan_sha256="",
        peak_bytes={},
    )
    emitted = ranks_of(job, "nodes")
    assert [(s.node, s.index, s.row, s.copy, s.stage, s.place) for s in seats] == [
        (r.node, r.index, r.row, r.copy, r.stage, r.place) for r in emitted
    ]
