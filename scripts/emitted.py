"""An emitted folder as a launcher would use it: its scripts run with stand-ins for what they start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ANSWERS = {"LEARNING_RATE": "1e-4", "TRAIN_STEPS": "10", "NORM_EPSILON": "1e-5", "ROTARY_BASE": "10000"}
"""What is filled in for variables that must hold a number; the others get a word."""
_TORCHRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$CAPTURED/$$.words"
env > "$CAPTURED/$$.env"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One `torchrun` a script made."""

    num_nodes: int
    node_rank: int
    num_processes: int
    program: tuple[str, ...]
    environment: Mapping[str, str]


def answers(folder: Path) -> dict[str, str]:
    """Return a value for every variable of `site.sh` that is to be filled in."""
    names = re.findall(r'^export ([A-Z0-9_]+)="\$\{[A-Z0-9_]+:-FILL_IN\}"', (folder / "site.sh").read_text(), re.M)
    return {name: ANSWERS.get(name, "lo") for name in names}


def starts(folder: Path, scratch: Path, most: int | None = None) -> list[Start]:
    """Return what the launch scripts of a folder (at most so many, spread over it) start, by node rank."""
    captured, tools = scratch / "captured", scratch / "tools"
    for place in (captured, tools):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    (tools / "torchrun").write_text(_TORCHRUN)
    (tools / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "CAPTURED": str(captured), **answers(folder)}
    scripts = launch_scripts(folder)
    if most is not None and len(scripts) > most:
        scripts = [scripts[i * (len(scripts) - 1) // (most - 1)] for i in range(most)]
    for script in scripts:
        subprocess.run(["bash", str(script)], env=environment, check=True, capture_output=True, text=True)
    found = [_start(path, path.with_suffix(".env")) for path in captured.glob("*.words")]
    return sorted(found, key=lambda start: start.node_rank)


def launch_scripts(folder: Path) -> list[Path]:
    """Return the scripts of nodes."""
    return [path for path in sorted(folder.glob("launch-*.sh")) if path.name != "launch-deepspeed.sh"]


def _start(words: Path, environment: Path) -> Start:
    line = words.read_text().splitlines()
    options = dict(word.removeprefix("--").split("=", 1) for word in line if re.match(r"--n[a-z-]+=", word))
    end = next(i for i, word in enumerate(line) if word.startswith("--master-port")) + 1
    variables = dict(pair.split("=", 1) for pair in environment.read_text().splitlines() if "=" in pair)
    return Start(
        num_nodes=int(options["nnodes"]),
        node_rank=int(options["node-rank"]),
        num_processes=int(options["nproc-per-node"]),
        program=tuple(line[end:]),
        environment=variables,
    )


def world_problems(folder: Path, found: Sequence[Start]) -> list[str]:
    """Return how the world that scripts start differs from the plan's."""
    expected = json.loads((folder / "expected.json").read_text())["world_size"]
    problems = []
    started, ranks = sum(start.num_processes for start in found), [start.node_rank for start in found]
    sizes = {start.num_nodes for start in found}
    is_sample = len(found) < max(sizes, default=0) and len(launch_scripts(folder)) > len(found)
    if started > expected or (not is_sample and started != expected):
        problems.append(f"scripts start {started} processes, the plan needs {expected}")
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(max(sizes, default=0))):
        problems.append(f"node ranks are {ranks}")
    if len(sizes) != 1 or (not is_sample and sizes != {len(found)}):
        problems.append("--nnodes is not the number of torchruns")
    if len({start.program for start in found}) > 1:
        problems.append("nodes start different programs")
    return problems


def shell_problems(folder: Path, most: int = 12, passed: set[str] | None = None) -> list[str]:
    """Return what `bash -n` and shellcheck say of (at most so many of each kind of) a folder's scripts.

    Texts in `passed` are not looked at again; those that pass are added.
    """
    kinds: dict[str, list[Path]] = {}
    for path in sorted([*folder.glob("*.sh"), *folder.glob("*.sbatch")]):
        kinds.setdefault(path.name.split("-")[0], []).append(path)
    texts = {path.name: path.read_text() for own in kinds.values() for path in own[:most]}
    scripts = [name for name, text in texts.items() if passed is None or text not in passed]
    problems = []
    for command in (["bash", "-n"], ["shellcheck"]):
        if shutil.which(command[0]) is None:
            continue
        batches = [[name] for name in scripts] if command[0] == "bash" else [scripts] * bool(scripts)
        for batch in batches:
            done = subprocess.run([*command, *batch], cwd=folder, capture_output=True, text=True, check=False)
            problems += [(done.stdout + done.stderr).strip()[:1000]] if done.returncode else []
    if passed is not None and not problems:
        passed.update(texts[name] for name in scripts)
    return problems
