"""Thousands of damaged files: each ends in a result or in one line that says where, never in a traceback or a hang."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mutations import mutated

from hetplan.cli.main import run

ROOT = Path(__file__).parents[2]
SEEDS_A_FILE = int(os.environ.get("HETPLAN_FUZZ_SEEDS", "100"))
PLACES = ("--global-batch", "8", "--seq-len", "128")
HANGS_S = 60.0
"""A thousand times what one file takes: a hang, on whatever machine."""
ELSEWHERE = re.compile(r"^error: /\S*:\d+:\d+: |no such file or directory$|in a workload file or --")
"""Errors about a file that the damaged one names, or about a key that an option could have given."""

WORKLOAD = """\
hetplan: workload/v1
seq_len: 128
global_batch: 8
precision: fp16
gradient_precision: fp32
attention: auto
sequence_parallel: true
"""
CALIBRATION = """\
hetplan: calibration/v1
devices:
  A100-SXM4-80GB: {gemm_peak_fraction: 0.78, gemm_half: 2 GFLOP, layer_overhead: 20 us, origin: fitted}
networks:
  ib: {bandwidth_fraction: 0.85, latency: 5 us, origin: measured}
overlap: {gradients: 0.8, gathers: true, tp_fraction: 0.0}
relative_error: 0.08
provenance: {software: torch 2.8}
"""
LAB = "cluster_specs/two-generation-lab.yaml"
MODEL = "model_specs/tinyllama-1.1b.yaml"


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan as the search writes it."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    words = ["search", str(ROOT / LAB), str(ROOT / MODEL), *PLACES, "--uniform", "--no-compare", "-o", str(path), "-q"]
    assert run(words) == 0
    return path.read_text()


def hang(*_: object) -> None:
    raise TimeoutError(f"no answer in {HANGS_S:g} s")


@contextmanager
def no_hang() -> Iterator[None]:
    """A command that does not come to an end fails as a defect."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def broken(words: list[str], capsys: pytest.CaptureFixture[str], codes: set[int], name: str) -> str | None:
    """What is wrong with how a command ended, if anything."""
    capsys.readouterr()
    with no_hang():
        code = run(words)
    captured = capsys.readouterr()
    if code == 0:
        return None
    lines = [line for line in captured.err.splitlines() if not line.startswith("note: ")]
    if code not in codes or len(lines) != 1 or not lines[0].startswith("error: ") or len(lines[0]) > 1000:
        return f"code {code}: {captured.err[-500:]}"
    if code == 2 and captured.out:
        return f"a result beside an error: {captured.out[:100]}"
    if code == 2 and not (name in lines[0] or ELSEWHERE.search(lines[0])):
        return f"does not say where: {lines[0]}"
    return None


def survivors(
    text: str, words: list[str], path: Path, capsys: pytest.CaptureFixture[str], codes: set[int]
) -> list[tuple[int, str]]:
    """Seeds whose damage was not met as it should be."""
    found = []
    for seed in range(SEEDS_A_FILE):
        path.write_bytes(mutated(text, seed).encode("utf-8", "surrogatepass"))
        if problem := broken(words, capsys, codes, path.name):
            found.append((seed, problem))
    return found


@pytest.mark.parametrize(
    "name",
    [LAB, "cluster_specs/mixed-workstation.yaml", "cluster_specs/eight-cities.yaml", "cluster_specs/ib-roce.yaml"],
)
def test_damaged_clusters(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for table in (ROOT / "cluster_specs").glob("*.csv"):
        (tmp_path / table.name).write_bytes(table.read_bytes())
    path = tmp_path / "damaged.yaml"
    words = ["estimate", str(path), "gpt2", *PLACES]
    assert not survivors((ROOT / name).read_text(), words, path, capsys, {2, 3})


@pytest.mark.parametrize("name", [MODEL, "model_specs/mixtral-8x7b.yaml", "model_specs/gpt-by-sizes.yaml"])
def test_damaged_models(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.yaml"
    words = ["estimate", str(ROOT / LAB), str(path), *PLACES]
    assert not survivors((ROOT / name).read_text(), words, path, capsys, {2, 3})


def test_damaged_pair_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cities.yaml").write_bytes((ROOT / "cluster_specs/eight-cities.yaml").read_bytes())
    path = tmp_path / "eight-cities-pairs.csv"
    text = (ROOT / "cluster_specs/eight-cities-pairs.csv").read_text()
    words = ["estimate", str(tmp_path / "cities.yaml"), "gpt2", *PLACES]
    assert not survivors(text, words, path, capsys, {2, 3})


def test_damaged_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.yaml"
    words = ["estimate", str(ROOT / LAB), "gpt2", "--workload", str(path)]
    assert not survivors(WORKLOAD, words, path, capsys, {2, 3})


def test_damaged_calibrations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.yaml"
    words = ["estimate", str(ROOT / LAB), "gpt2", *PLACES, "--calibration", str(path)]
    assert not survivors(CALIBRATION, words, path, capsys, {2, 3})


@pytest.mark.parametrize("command", ["check", "estimate"])
def test_damaged_plans(command: str, plan_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.yaml"
    assert not survivors(plan_text, [command, str(path)], path, capsys, {2, 4})


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{', '.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefghi", "bcdefghij", strict=True)),
        "hetplan: cluster/v1\nname: x\ngroups:\n  a: {device: L4, nodes: 1" + "0" * 30 + ", devices_per_node: 8}\n",
        "hetplan: cluster/v1\nname: x\ngroups:\n  a: {device: L4, nodes: .nan, devices_per_node: 8}\n",
        "hetplan: cluster/v1\nname: x\ngroups:\n  a: {device: L4, nodes: 'n[1-999999999999]', devices_per_node: 8}\n",
        "hetplan: cluster/v1\nname: x\nname: y\n",
        "hetplan: cluster/v1\nname: " + "x" * 50_000_000 + "\n",
        "[" * 100_000,
        "{a: " * 50_000,
        "- " * 100_000,
    ],
    ids=["aliases", "count", "nan", "hostlist", "duplicate", "fifty-megabytes", "lists", "mappings", "dashes"],
)
def test_bombs_are_refused_at_once(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.yaml"
    path.write_text(text)
    capsys.readouterr()
    assert broken(["estimate", str(path), "gpt2", *PLACES], capsys, {2}, path.name) is None
    assert run(["estimate", str(path), "gpt2", *PLACES]) == 2
