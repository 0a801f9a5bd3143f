"""Where the kernel and the user's rights allow it: links have the rates and delays asked for, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from bed_modules import SCRIPTS, bed_kernel

ROOT = Path(__file__).parents[2]
PROGRAM = SCRIPTS / "testbed.py"
SKIPPED = 77
BED = """
hetplan: testbed/v1
name: small
groups:
  near: {hosts: 1, speed: 0.3, rate: 80 Mbit/s, site: near}
  far: {hosts: 1, speed: 0.2, rate: 1 Gbit/s, site: far}
line: {rate: 200 Mbit/s, delay: 20 ms}
"""
MODEL = """
hetplan: model/v1
name: tiny
config: {model_type: gpt2, n_layer: 2, n_embd: 64, n_head: 4, n_positions: 64, vocab_size: 96}
"""
TALK = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[1])
import bed_kernel, bed_spec
from pathlib import Path
bed_kernel.enter_user_namespace()
network = bed_kernel.Network(bed_spec.read_bed(Path(sys.argv[2])))
try:
    host = network.hosts["far-1"]
    serve = "import socket;s=socket.create_server(('0.0.0.0',5000));print('up',flush=True);c,_=s.accept()\\n"
    serve += "c.send(b'x')\\nn=0\\nwhile n<2000000:n+=len(c.recv(1<<20))\\nc.send(b'y');c.recv(1)"
    import subprocess
    server = subprocess.Popen(host.words(sys.executable, "-c", serve), stdout=subprocess.PIPE, text=True,
                              preexec_fn=bed_kernel.die_with_parent)
    server.stdout.readline()
    call = "import socket,time,sys;a=time.monotonic();s=socket.create_connection((sys.argv[1],5000));s.recv(1)\\n"
    call += "b=time.monotonic();s.sendall(bytes(2000000));s.recv(1);print(b-a,time.monotonic()-b)"
    print(network.hosts["near-1"].run(sys.executable, "-c", call, network.addresses["far-1"]))
    print(host.run("hostname"))
finally:
    network.close()
"""


def program(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def bed(tmp_path: Path) -> Path:
    path = tmp_path / "bed.yaml"
    path.write_text(BED, encoding="utf-8")
    done = program("check", str(path))
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return path


def holders() -> set[str]:
    """Command lines of processes that hold a space of a bed."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words.startswith("sleep infinity") and (folder / "ns" / "uts").stat() != Path("/proc/1/ns/uts").stat():
                found.add(folder.name)
        except OSError:
            continue
    return found


def test_a_link_is_as_slow_and_as_far_as_asked(bed: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.py"
    talk.write_text(TALK, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(talk), str(PROGRAM.parent), str(bed)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    *times, host = done.stdout.split()
    connect_s, transfer_s = map(float, times)
    assert host == "far-1"
    assert connect_s >= 2 * 0.04 * 0.95, "connecting and an answer take two round trips"
    assert transfer_s >= 0.8 * 2e6 / 10e6, "two megabytes over 80 Mbit/s"


def test_an_interrupted_run_leaves_nothing(bed: Path) -> None:
    before = holders()
    groups = Path("/sys/fs/cgroup/cpu")
    running = subprocess.Popen(
        [sys.executable, str(PROGRAM), "run", str(bed), "--", "env"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    until_s = time.monotonic() + 60
    while not holders() - before and running.poll() is None and time.monotonic() < until_s:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    running.wait(60)
    until_s = time.monotonic() + 60
    while holders() - before and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not holders() - before
    assert not list(groups.glob(f"hetplan-testbed-{running.pid}-*"))


def test_a_killed_run_leaves_no_host(bed: Path) -> None:
    before = holders()
    running = subprocess.Popen(
        [sys.executable, str(PROGRAM), "run", str(bed), "--", "env"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    until_s = time.monotonic() + 60
    while not holders() - before and running.poll() is None and time.monotonic() < until_s:
        time.sleep(0.02)
    running.kill()
    running.wait(60)
    until_s = time.monotonic() + 60
    while holders() - before and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not holders() - before


def test_a_failing_rank_ends_the_run_with_its_code(bed: Path) -> None:
    done = program("run", str(bed), "--", "check", "no-such-plan.yaml")
    assert done.returncode == 2
    assert "near-1: error:" in done.stderr


def test_without_the_programs_it_says_so_and_skips(tmp_path: Path) -> None:
    path = tmp_path / "bed.yaml"
    path.write_text(BED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "check", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": str(tmp_path)},
    )
    assert done.returncode == SKIPPED
    assert "no testbed here" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_small_round_measures_the_beds_links(bed: Path, tmp_path: Path) -> None:
    from hetplan.catalog.load import load_calibration, load_cluster
    from hetplan.costs.links import link_between

    (tmp_path / "model.yaml").write_text(MODEL, encoding="utf-8")
    cluster, out = tmp_path / "cluster.yaml", tmp_path / "calibration.yaml"
    cluster.write_text(program("cluster", str(bed)).stdout, encoding="utf-8")
    words = f"profile {tmp_path / 'model.yaml'} --cluster {cluster} --quick --micro-batch 1 --tp 1 -o {out}"
    done = program("run", str(bed), "--", *words.split())
    assert done.returncode == 0, done.stderr
    calibration, _ = load_calibration(out)
    assert calibration.networks["line"].origin == "measured"
    link = link_between(load_cluster(cluster)[0], "near", "far", calibration)
    assert link is not None
    assert link.bandwidth_bytes_per_s < 1.3 * 10e6
    assert link.latency_s > 0.9 * 20e-3
    assert calibration.layers is not None
    assert {row.device for row in calibration.layers.rows} == {"near-core", "far-core"}


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed_kernel.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(bed_kernel.UnsupportedError, match="tc"):
        bed_kernel.require_tools()
