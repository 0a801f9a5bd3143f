"""Saved plans keep what they promised; `pytest --update-golden` plans them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetplan.cli.main import run

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"

SEARCHES = {
    "two-generation-lab": ["llama-3.1-8b", "--global-batch", "256", "--seq-len", "8192"],
    "ib-roce": ["gpt-3.6b", "--global-batch", "256", "--seq-len", "2048"],
    "a800-4090-3090": ["llama-2-13b", "--global-batch", "64", "--seq-len", "2048"],
    "mixed-workstation": ["tinyllama-1.1b", "--global-batch", "64", "--seq-len", "2048"],
}
"""Cluster file -> model and workload."""


@pytest.mark.parametrize("name", SEARCHES)
def test_saved_plans_still_hold(
    name: str, update_golden: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    path = GOLDEN / f"{name}.yaml"
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        words = ["search", f"cluster_specs/{name}.yaml", *SEARCHES[name], "--no-compare", "-q", "-o", str(path)]
        assert run(words) == 0
    capsys.readouterr()
    assert run(["check", str(path)]) == 0, capsys.readouterr().out


def test_every_saved_plan_has_its_search() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == SEARCHES.keys()
