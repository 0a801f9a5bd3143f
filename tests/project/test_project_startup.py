"""The program starts fast because nothing heavy is imported before a command needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"numpy", "scipy", "ortools", "torch", "rich", "yaml", "pandas"}


def modules_after(arguments: list[str]) -> set[str]:
    code = (
        "import sys\n"
        "from hetplan.cli.main import run\n"
        f"code = run({arguments!r})\n"
        "sys.stderr.write(' '.join(sorted({name.split('.')[0] for name in sys.modules})))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["env"]])
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    assert not modules_after(arguments) & HEAVY
