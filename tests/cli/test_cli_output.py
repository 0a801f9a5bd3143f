"""Files are written whole or not at all, and stdout carries nothing but the result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetplan.cli.output import complain, require_writable, show, write_whole
from hetplan.errors import UsageError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    path.chmod(0o640)
    write_whole(path, "new\n")
    assert path.read_text() == "new\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_a_new_file_gets_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_whole(tmp_path / "plan.yaml", "new\n")
    assert (tmp_path / "plan.yaml").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old")

    def full_disk(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UsageError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_a_link_keeps_pointing_at_the_file_it_names(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    write_whole(tmp_path / "link.yaml", "new")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text() == "new"


@pytest.mark.parametrize(
    "name", [".", "missing/plan.yaml", "loop/plan.yaml", "loop", "lost", "file/plan.yaml", "x" * 300]
)
def test_impossible_places_are_refused_before_any_work(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lost").symlink_to("missing/plan.yaml")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        require_writable(tmp_path / name)
    with pytest.raises(UsageError, match="cannot write"):
        write_whole(tmp_path / name, "text")


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    complain("first\n  second\x1b[31m")
    captured = capsys.readouterr()
    assert captured.err == "error: first second\\x1b[31m\n"
    assert captured.out == ""


def test_results_end_with_one_newline(capsys: pytest.CaptureFixture[str]) -> None:
    show("one")
    show("two\n")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "from hetplan.cli.output import show\nfor _ in range(100): show('x' * 10000)"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.read(10)
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(timeout=30) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_named() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hetplan", "env"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr == "error: cannot write the result: No space left on device\n"


def test_names_no_terminal_can_show_are_escaped() -> None:
    command = [sys.executable, "-c", "from hetplan.cli.output import show; show('caf\\xe9 \\udcff')"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=30, check=True)
    assert done.stdout == b"caf\\xe9 \\udcff\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_read_only_folder_is_refused_before_any_work(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="permission denied"):
        require_writable(tmp_path / "plan.yaml")


def test_a_long_name_that_a_file_may_have_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    require_writable(path)
    write_whole(path, "text")
    assert path.read_text() == "text"


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="no shell")
@pytest.mark.parametrize(("closed", "code"), [(">&-", 2), ("2>&-", 0), (">&- 2>&-", 2), ("<&-", 0)])
def test_closed_streams_are_no_defect(closed: str, code: int) -> None:
    command = f'"{sys.executable}" -m hetplan catalog models gpt2 {closed}'
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr == ("error: cannot write the result: stdout is closed\n" if closed == ">&-" else "")


INTERRUPTED_AT = """
import builtins, os, signal
real = builtins.__import__
def importing(name, *rest):
    if name == WHERE:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest)
builtins.__import__ = importing
from hetplan.cli.start import main
main()
"""


@pytest.mark.parametrize(
    "where", ["typer", "hetplan.cli.options", "numpy", "hetplan.plan.check", "hetplan.report.sizes"]
)
def test_an_interrupt_while_starting_ends_with_130_and_one_line(where: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_AT.replace("WHERE", repr(where)), "size", "cluster_specs/ib-roce.yaml"]
    command += ["gpt2", "--group", "ib", "--global-batch", "8", "--seq-len", "128", "--most", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
