"""Emitted folders: real shells and parsers read them, and they are written whole or not at all."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from emit_samples import files
from test_emit_golden import CASES, two_three_three

from hetplan.cli.emit import write_folder
from hetplan.cli.main import run
from hetplan.errors import UsageError

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "tests" / "golden" / "ib-roce.yaml"
SHELL = (".sh", ".sbatch")


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "out"
    write_folder(out, files(*CASES[request.param]))
    return out


def scripts(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix in SHELL)


def test_bash_reads_every_script(folder):
    for name in scripts(folder):
        subprocess.run(["bash", "-n", name], cwd=folder, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(folder):
    found = subprocess.run(["shellcheck", *scripts(folder)], cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_other_files_parse(folder):
    for path in folder.iterdir():
        if path.suffix == ".yaml":
            assert list(yaml.safe_load_all(path.read_text()))
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".py":
            ast.parse(path.read_text())


def test_scripts_refuse_to_start_while_something_is_to_be_filled_in(tmp_path):
    out = tmp_path / "out"
    write_folder(out, files(two_three_three()))
    done = start(out, "launch-a-1.sh", {})
    assert done.returncode == 2
    assert "SOCKET_IFNAME_A" in done.stderr and "SOCKET_IFNAME_B" in done.stderr


def start(folder, name, environment, mode="train"):
    """Run a launch script with a `torchrun` that shows what it was given."""
    tools = folder.parent / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "torchrun").write_text('#!/bin/sh\necho "devices $CUDA_VISIBLE_DEVICES if $NCCL_SOCKET_IFNAME: $*"\n')
    (tools / "torchrun").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", str(folder / name), mode]
    return subprocess.run(words, env={"PATH": path, **environment}, capture_output=True, text=True, check=False)


def test_scripts_start_their_own_share_once_filled_in(tmp_path):
    out = tmp_path / "out"
    write_folder(out, files(two_three_three()))
    site = {"SOCKET_IFNAME_A": "eth0", "SOCKET_IFNAME_B": "eth1", "SOCKET_IFNAME_C": "eth1", "MASTER_ADDR": "10.0.0.1"}
    site |= {"DATA_PATH": "tokens of ours.bin", "TRAIN_STEPS": "20"}
    done = start(out, "launch-b-1.sh", site)
    assert done.stdout == (
        "devices 0,1,2 if eth1: --nnodes=3 --node-rank=1 --nproc-per-node=3 --master-addr=10.0.0.1 "
        "--master-port=29500 -m hetplan run plan.yaml --data tokens of ours.bin --steps 20\n"
    )
    assert start(out, "launch-b-1.sh", site, "preflight").stdout.endswith("29500 preflight.py\n")


def test_the_slurm_task_takes_the_place_of_a_planned_node(tmp_path):
    out = tmp_path / "out"
    write_folder(out, files(*CASES["megatron-slurm"]))
    (out / "launch-v100-1.sh").write_text('echo "v100-1 with $MASTER_ADDR $1"\n')
    for given, name, head in (
        ("a100-1 v100-1", "v100-1", "a100-1"),
        ("x7 y9", "y9", "x7"),
        ("v100-1 a100-1", "v100-1", "a100-1"),
    ):
        done = subprocess.run(
            ["bash", "slurm-task.sh", "train"],
            cwd=out,
            env={"PATH": os.environ["PATH"], "HETPLAN_NODES": given, "SLURMD_NODENAME": name},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"v100-1 with {head} train\n"


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_folder(out, {"a.sh": "echo\n"})
    with pytest.raises(UsageError, match="not an empty folder"):
        write_folder(out, {"b.sh": "echo\n"})
    assert [path.name for path in out.iterdir()] == ["a.sh"]


def test_nothing_is_written_when_a_file_cannot_be(tmp_path):
    with pytest.raises(UsageError, match="cannot write"):
        write_folder(tmp_path / "out", {"a.sh": "echo\n", "no/such/folder": ""})
    assert list(tmp_path.iterdir()) == []


def test_the_command_makes_a_folder_whose_plan_stands_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    assert run(["emit", str(PLAN), "--to", "megatron", "--via", "slurm", "-o", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert sorted(path.name for path in out.iterdir()) == shown["files"]
    digest = hashlib.sha256((out / "plan.yaml").read_bytes()).hexdigest()
    assert digest in (out / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    assert run(["check", str(out / "plan.yaml")]) == 0, capsys.readouterr()


def test_the_command_names_the_nearest_plan_an_engine_can_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = ROOT / "tests" / "golden" / "mixed-workstation.yaml"
    assert run(["emit", str(plan), "--to", "megatron", "-o", str(tmp_path / "out")]) == 4
    message = capsys.readouterr().err
    assert "megatron cannot run replicas cut differently" in message
    assert "nearest plan it can run costs +" in message and "a6000 tp1" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([str(PLAN), "--to", "megatron"], "emit needs PLAN, --to ENGINE and -o DIR"),
        ([str(PLAN), "--to", "megatrn", "-o", "x"], "megatron"),
        ([str(PLAN), "--to", "megatron", "--via", "slrm", "-o", "x"], "slurm"),
    ],
)
def test_wrong_words_are_refused(words, message, capsys):
    assert run(["emit", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_list_names_every_engine_and_launcher(capsys):
    assert run(["emit", "--list"]) == 0
    text = capsys.readouterr().out
    for name in ("hetplan", "megatron", "torchtitan", "flagscale", "hexiscale", "deepspeed", "vllm", "skypilot"):
        assert name in text
    assert max(map(len, text.splitlines())) <= 80
    assert run(["emit", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"]["deepspeed"]["mixed_vendors"] is False
