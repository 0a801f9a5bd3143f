"""With torch: figures are those of the work that was done, and the command makes a machine plannable."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from hetplan.catalog.load import load_calibration, load_cluster
from hetplan.profiling import kernels, stopwatch
from hetplan.profiling.shapes import AttentionShape, GemmShape
from hetplan.profiling.stopwatch import Stopwatch, summary

WATCH = Stopwatch(device="cpu", round_s=0.01, rounds=1)
MODEL = """
hetplan: model/v1
name: tiny
config: {model_type: gpt2, n_layer: 3, n_embd: 64, n_head: 4, n_positions: 64, vocab_size: 96}
"""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_product_is_told_with_its_size() -> None:
    figure = kernels.gemm(GemmShape(rows=16, inputs=256, outputs=128), "fp32", WATCH)
    assert figure.timing.seconds > 0
    assert figure.flop == 2 * 16 * 256 * 128


def test_a_rank_slowed_to_a_quarter_takes_four_times_its_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(stopwatch.time, "thread_time", lambda: float(next(clock)))
    quarter = replace(WATCH, speed=0.25).time(lambda: None)
    assert quarter.seconds == 4.0
    assert WATCH.time(lambda: None).seconds == 1.0


def test_both_passes_of_attention_are_timed() -> None:
    forward, backward = kernels.attention(AttentionShape(samples=1, heads=2, seq_len=128, head_dim=24), "fp32", WATCH)
    assert (forward.way, backward.way) == ("forward", "backward")
    assert forward.timing.seconds > 0
    assert backward.timing.seconds > 0


def test_spread_is_the_distance_of_the_quartiles() -> None:
    timing = summary([1.0, 2.0, 3.0, 4.0, 5.0])
    assert timing.seconds == 3.0
    assert timing.spread == pytest.approx(1.0)
    assert not timing.is_steady
    assert summary([2.0] * 5).is_steady


@pytest.mark.slow
def test_the_command_measures_this_machine_and_its_files_are_valid(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL, encoding="utf-8")
    words = "profile model.yaml --quick --ranks 2 --micro-batch 1,2 -o here.yaml --cluster-out cluster.yaml --json"
    done = subprocess.run(
        [sys.executable, "-m", "hetplan", *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert all(figure["seconds"] > 0 for figure in figures)
    names = {figure["name"] for figure in figures}
    assert any("decoder tp 2 microbatch 2 backward" in name for name in names)
    assert any(name.startswith("all-reduce 0-1") for name in names)
    cluster, _ = load_cluster(tmp_path / "cluster.yaml")
    calibration, _ = load_calibration(tmp_path / "here.yaml")
    (group,) = cluster.groups
    assert group.devices_per_node == 2
    assert calibration.device(group.device.name).origin == "measured"
    assert calibration.layers is not None
    assert {(row.tp, row.microbatch) for row in calibration.layers.rows} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert calibration.provenance["command"].startswith("hetplan profile model.yaml")


def test_an_interrupted_profile_leaves_no_rank(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "hetplan", "profile", "--ranks", "2"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until_s = time.monotonic() + 120
    while len(children(running.pid)) < 2 and running.poll() is None and time.monotonic() < until_s:
        time.sleep(0.05)
    ranks = children(running.pid)
    assert len(ranks) >= 2
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    until_s = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[1]) == pid:
            found.append(int(path.parent.name))
    return found
