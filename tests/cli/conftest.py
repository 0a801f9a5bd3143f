"""Commands run in a folder that holds the files they name."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.command_samples import CLUSTER, MODEL, SIZES, Answer, Hetplan

from hetplan.cli.main import run


@pytest.fixture
def hetplan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hetplan:
    """Runs a command in a folder that holds a small cluster and a small model."""
    (tmp_path / "small.yaml").write_text(CLUSTER)
    (tmp_path / "two.yaml").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Answer:
        capsys.readouterr()
        code = run(words)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture
def searched(hetplan: Hetplan) -> Answer:
    """The answer of a search that wrote plan.yaml."""
    return hetplan("search", "small.yaml", "two.yaml", *SIZES, "--json", "-o", "plan.yaml")
