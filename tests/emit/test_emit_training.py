"""Emitted folders really train: 2 + 3 + 3 processes of three nodes on this machine, by `torchrun` and by Slurm."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from emit_samples import replica, stage
from slurm_node import SlurmNode, why_no_slurm
from test_emit_preflight import free_port

from hetplan.cli.inputs import WorkloadWords, load_job, plan_of
from hetplan.cli.main import run
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.plan.placement import place
from hetplan.plan.records import Layout
from hetplan.plan.text import plan_text

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
CLUSTER = """\
hetplan: cluster/v1
name: two-three-three
groups:
  a: {device: RTX-3090, nodes: a, devices_per_node: 2}
  b: {device: RTX-4090, nodes: b, devices_per_node: 3}
  c: {device: RTX-4090, nodes: c, devices_per_node: 3}
networks:
  eth: {joins: [a, b, c], kind: ethernet, bandwidth: 10 Gbit/s, latency: 30 us}
"""
MODEL = """\
hetplan: model/v1
name: tiny
config:
  model_type: llama
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  vocab_size: 256
  max_position_embeddings: 64
  rms_norm_eps: 1.0e-05
"""
STEPS = 20
NODES = ("a", "b", "c")


def write_plan(layout):
    """Price and save a layout for cluster.yaml and tiny.yaml."""
    words = WorkloadWords(seq_len=32, global_batch=layout.num_samples, precision="fp32")
    job = load_job("cluster.yaml", "tiny.yaml", words, None)
    placed = place(layout, job.cluster)
    assert check(placed, job.prices, Limits()) == ()
    Path("plan.yaml").write_text(plan_text(plan_of(job, placed, estimate(placed, job.prices), None)))


def unlike():
    """Eight devices: two pipelines a -> b, one b -> c with tp 2 there, one whole model on c."""
    return Layout(
        replicas=(
            replica(stage("a", 0, 3), stage("b", 3, 6), copies=2, num_microbatches=3),
            replica(stage("b", 0, 2), stage("c", 2, 6, tp=2), num_microbatches=4),
            replica(stage("c", 0, 6), num_microbatches=3, microbatch=2),
        )
    )


@pytest.fixture
def place_to_work(tmp_path, monkeypatch):
    """A folder with a model, a text and nothing else."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(MODEL)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return tmp_path


def site(folder, **more):
    """What only the user knows, and this interpreter's torchrun."""
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DATA_PATH": str(folder / "text.txt"),
        "TRAIN_STEPS": str(STEPS),
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": free_port(),
        **more,
    }


def _heard(process):
    """Return all a process says, and that it was ended where it did not end by itself."""
    try:
        return process.communicate(timeout=200)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.communicate()[0] + f"{process.args} had not ended\n"


def require_trained(said, out):
    """The run's own report names every step and a loss that fell."""
    losses = {int(step): float(loss) for step, loss in re.findall(r"^ +(\d+) +(\d+\.\d+) ", said, re.M)}
    assert sorted(losses) == list(range(1, STEPS + 1)), said
    assert losses[STEPS] < losses[1] - 0.1
    assert json.loads((out / "plan.measured.json").read_text())


def test_two_three_three_processes_train_twenty_steps(place_to_work, capsys):
    Path("cluster.yaml").write_text(CLUSTER)
    write_plan(unlike())
    assert run(["emit", "plan.yaml", "--to", "hetplan", "-o", "out"]) == 0, capsys.readouterr()
    interfaces = {f"SOCKET_IFNAME_{name.upper()}": "lo" for name in NODES}
    environment = os.environ | site(place_to_work, MASTER_ADDR="127.0.0.1", **interfaces)
    started = [
        subprocess.Popen(
            ["bash", f"out/launch-{node}.sh"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in NODES
    ]
    said = "".join(_heard(process) for process in started)
    assert [process.returncode for process in started] == [0, 0, 0], said
    require_trained(said, place_to_work / "out")


@pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "Slurm is here")
def test_the_slurm_script_trains_on_one_node(place_to_work, tmp_path_factory, capsys):
    slurm = tmp_path_factory.mktemp("slurm")
    slurm.chmod(0o755)
    with SlurmNode(slurm / "node", devices=4) as node:
        Path("cluster.yaml").write_text(
            "hetplan: cluster/v1\nname: one\ngroups:\n"
            f"  a: {{device: RTX-4090, nodes: {node.host}, devices_per_node: 4}}\nnetworks: {{}}\n"
        )
        write_plan(Layout(replicas=(replica(stage("a", 0, 3), stage("a", 3, 6), copies=2),)))
        assert run(["emit", "plan.yaml", "--to", "hetplan", "--via", "slurm", "-o", "out"]) == 0, capsys.readouterr()
        out = place_to_work / "out"
        tested = node.say("sbatch", "--test-only", "job.sbatch", cwd=out)
        assert "to start at" in tested, tested
        code, said = node.run("job.sbatch", out, site(place_to_work))
    assert code == 0, said
    require_trained(said, out)
