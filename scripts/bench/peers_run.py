"""Runs of the hetplan command line with what they cost, and plan files read back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "peer_data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One command and what it took."""

    stdout: str
    cpu_s: float
    wall_s: float
    peak_mib: float


def hetplan(*words: str | Path) -> Run:
    """Run a hetplan command; its time and memory include starting Python.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "hetplan", *map(str, words)]
    started = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        out = process.stdout.read() if process.stdout else ""
        err = process.stderr.read() if process.stderr else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"hetplan {' '.join(map(str, words))}: {err.strip()}")
    return Run(
        stdout=out,
        cpu_s=usage.ru_utime + usage.ru_stime,
        wall_s=time.monotonic() - started,
        peak_mib=usage.ru_maxrss / 1024,
    )


def read_yaml(path: Path) -> Any:
    """Return a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def span(text: str) -> list[int]:
    """Return `3-7` as [3, 8]."""
    first, _, last = str(text).partition("-")
    return [int(first), int(last or first) + 1]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "--|" * len(headers)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
