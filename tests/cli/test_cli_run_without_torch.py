"""`hetplan run` where torch is not installed."""

from __future__ import annotations

import pytest

from hetplan.cli import run as run_command
from hetplan.cli.main import run


def test_without_torch_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_command, "find_spec", lambda name: None)
    assert run(["run", "plan.yaml", "--data", "text"]) == 2
    assert "pip install 'hetplan[torch]'" in capsys.readouterr().err
