"""The README tells the truth: its examples are read, its commands run, its output is what they print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model_config
from hetplan.cli.main import app, run
from hetplan.specs.read_calibration import calibration_from_text
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.read_data import data_from_text
from hetplan.specs.read_model import model_from_text
from hetplan.specs.read_workload import workload_fields_from_text

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
OUTPUT = re.compile(r"(<!-- output -->\n```console\n\$ (hetplan [^\n]*)\n)(.*?)(```\n)", re.DOTALL)
CLOCK = re.compile(r"\d+(\.\d+)? (ms|s), effort")

READERS: dict[str, Callable[[str], object]] = {
    "cluster": lambda text: cluster_from_text(text, "README.md", find_device),
    "model": lambda text: model_from_text(text, README, find_model_config),
    "workload": lambda text: workload_fields_from_text(text, "README.md"),
    "calibration": lambda text: calibration_from_text(text, "README.md"),
    "data": lambda text: data_from_text(text, "README.md"),
}


@pytest.mark.parametrize("kind", READERS)
def test_example_files_are_read(kind: str) -> None:
    examples = re.findall(rf"```yaml\n(hetplan: {kind}/v1\n.*?)```", TEXT, re.DOTALL)
    assert examples
    for example in examples:
        READERS[kind](example)


@pytest.mark.slow
def test_shown_output_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    monkeypatch.chdir(ROOT)
    shown = list(OUTPUT.finditer(TEXT))
    assert shown
    text = TEXT
    for example in shown:
        capsys.readouterr()
        assert run(shlex.split(example[2])[1:]) == 0
        printed = CLOCK.sub("a few s, effort", capsys.readouterr().out)
        if update_golden:
            text = text.replace(example[0], example[1] + printed + example[4])
        else:
            assert example[3] == printed, "the README shows old output; pytest --update-golden rewrites it"
    if update_golden:
        README.write_text(text, encoding="utf-8")


def test_every_command_is_described() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    described = set(re.findall(r"^\| `hetplan (\w+)", TEXT, re.MULTILINE))
    assert names == described


def test_exactly_two_commands_start_with_an_installation() -> None:
    commands = re.findall(r"^pip install .*$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    assert commands[1].endswith("&& pytest")
