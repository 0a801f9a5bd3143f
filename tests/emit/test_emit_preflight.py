"""The preflight under a real `torchrun`: 2 + 3 + 3 processes on one machine are one world of eight."""

import os
import shutil
import socket
import subprocess

import pytest
from emit_samples import files
from test_emit_golden import two_three_three

from hetplan.cli.emit import write_folder

pytestmark = pytest.mark.skipif(shutil.which("torchrun") is None, reason="torchrun is not installed")
NODES = ("a-1", "b-1", "c-1")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def preflight(folder):
    """Start the preflight of every node on this machine; return exit codes and all they said."""
    site = {f"SOCKET_IFNAME_{name}": "lo" for name in "ABC"} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    site |= {"DATA_PATH": "/dev/null", "TRAIN_STEPS": "1"}
    environment = os.environ | site | {"HETPLAN_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PREFLIGHT_TIMEOUT_S": "60"}
    started = [
        subprocess.Popen(
            ["bash", str(folder / f"launch-{node}.sh"), "preflight"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in NODES
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    return [process.returncode for process in started], "".join(said)


def test_two_three_three_processes_are_the_planned_world(tmp_path):
    write_folder(tmp_path / "out", files(two_three_three()))
    codes, said = preflight(tmp_path / "out")
    assert codes == [0, 0, 0], said
    assert "preflight: 8 ranks on 3 nodes are as planned" in said


def test_a_world_of_another_size_is_stopped(tmp_path):
    made = dict(files(two_three_three()))
    made["expected.json"] = made["expected.json"].replace('"world_size": 8', '"world_size": 22')
    write_folder(tmp_path / "out", made)
    codes, said = preflight(tmp_path / "out")
    assert all(codes)
    assert "8 processes were started, the plan needs 22" in said
