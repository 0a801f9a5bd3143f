"""The pre-commit hook and the GitHub Action that check plans really check them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / ".github" / "actions" / "check" / "action.yml").read_text())
GOLDEN = ROOT / "tests" / "golden" / "two-generation-lab.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a plan, its cluster, and the command on the path."""
    (tmp_path / "cluster_specs").mkdir()
    shutil.copy(ROOT / "cluster_specs" / "two-generation-lab.yaml", tmp_path / "cluster_specs")
    (tmp_path / "plans" / "deep").mkdir(parents=True)
    shutil.copy(GOLDEN, tmp_path / "plans" / "deep" / "lab.yaml")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "hetplan"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m hetplan "$@"\n')
    command.chmod(0o755)
    return tmp_path


def check_step(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the action's script as a runner does: `bash -eo pipefail`, inputs in the environment."""
    step = ACTION["runs"]["steps"][-1]
    values = {name: described.get("default", "") for name, described in ACTION["inputs"].items()} | inputs
    environment = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: values[match[1]], text)
        for name, text in step["env"].items()
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder,
        env=os.environ | environment | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_action_passes_plans_that_hold_and_marks_the_line_of_one_that_does_not(folder: Path) -> None:
    done = check_step(folder, plans="plans/**/*.yaml", junit="junit.xml")
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "junit.xml").read_text().startswith("<?xml")
    plan = folder / "plans" / "deep" / "lab.yaml"
    plan.write_text(plan.read_text().replace("  step_s: 2", "  step_s: 9"))
    line = next(i for i, text in enumerate(plan.read_text().splitlines(), 1) if text.startswith("  step_s: "))
    done = check_step(folder, plans="plans/**/*.yaml", arguments="--memory-tolerance 0.5")
    assert done.returncode == 4
    assert f"::error file=plans/deep/lab.yaml,line={line}," in done.stdout


def test_the_action_refuses_a_pattern_without_plans(folder: Path) -> None:
    done = check_step(folder, plans="none/*.yaml")
    assert done.returncode == 2
    assert "::error::no plan matches" in done.stdout


def test_every_input_of_the_action_is_used_and_described() -> None:
    used = set(re.findall(r"inputs\.(\w+)", str(ACTION["runs"])))
    assert used == set(ACTION["inputs"])
    assert all(described["description"] for described in ACTION["inputs"].values())
    assert all(step["shell"] == "bash" for step in ACTION["runs"]["steps"])


@pytest.mark.parametrize(
    ("path", "is_plan"),
    [
        ("plans/lab.yaml", True),
        ("a/plans/b/lab.yml", True),
        ("plan.yaml", True),
        ("lab.plan.yaml", True),
        ("x/lab-plan.yml", True),
        ("cluster_specs/lab.yaml", False),
        ("airplane.yaml", False),
    ],
)
def test_the_hook_takes_plans_only(path: str, is_plan: bool) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "hetplan check"
    assert {"id", "name", "entry", "language", "files"} <= set(hook)
    assert bool(re.search(hook["files"], path)) == is_plan
