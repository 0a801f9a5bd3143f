"""What is refused: one line, the documented exit code, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command_samples import CLUSTER, SIZES, Hetplan, one_line


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tp", "5"], "tp 5"),
        (["--tp", "2", "--pp", "3"], "does not fit"),
        (["--micro-batch", "3"], "no multiple"),
        (["--pp", "2", "--layers-per-stage", "1,2"], "2"),
        (["--schedule", "2f2b"], "unknown '2f2b'"),
        (["--recompute", "ful"], "did you mean 'full'"),
        (["--groups", "newer"], "did you mean 'new'"),
        (["--vpp", "2", "--pp", "2", "--schedule", "1f1b"], "interleaved"),
    ],
)
def test_impossible_degrees_fail_with_2_and_print_no_result(hetplan: Hetplan, options: list[str], reason: str) -> None:
    answer = hetplan("estimate", "small.yaml", "two.yaml", *SIZES, *options)
    assert (answer.code, answer.out) == (2, "")
    assert reason in one_line(answer)


def test_an_impossible_search_fails_with_3_and_writes_nothing(hetplan: Hetplan, tmp_path: Path) -> None:
    answer = hetplan("search", "small.yaml", "llama-3.1-70b", *SIZES, "-o", "plan.yaml")
    assert (answer.code, answer.out) == (3, "")
    one_line(answer)
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["search", "none.yaml", "two.yaml", *SIZES], "none.yaml"),
        (["search", "small.yaml", "lama-3.1-8b", *SIZES], "did you mean 'llama-3.1-8b'"),
        (["search", "small.yaml", "two.yaml", "--seq-len", "8"], "--global-batch"),
        (["search", "small.yaml", "two.yaml", *SIZES, "--objective", "cost-within-time"], "--within"),
        (["search", "small.yaml", "two.yaml", *SIZES, "--within", "3"], "cost-within-time"),
        (["search", "small.yaml", "two.yaml", *SIZES, "-o", "."], "it is a folder"),
        (["search", "small.yaml", "two.yaml", *SIZES, "-o", "missing/plan.yaml"], "there is no folder missing"),
        (["search", "small.yaml", "two.yaml", *SIZES, "--engine", "megatro"], "did you mean 'megatron'"),
        (["search", "small.yaml", "two.yaml", "--seq-len", "x"], "--seq-len"),
        (["search", "small.yaml", "two.yaml", *SIZES, "--precision", "fp7"], "fp7"),
        (["search", "small.yaml"], "MODEL"),
        (["search", "small.yaml", "two.yaml", *SIZES, "--nope"], "--nope"),
        (["search", "small.yaml", "two.yaml", *SIZES, "--microbatches", "4"], "--microbatches needs --data"),
        (["check", "none.yaml", "--margin", "0.5"], "--margin needs --search"),
        (["serch"], "serch"),
        (["check"], "PLAN"),
        (["check", "small.yaml"], "small.yaml:1:10"),
        (["estimate", "none.yaml"], "none.yaml"),
        (["catalog", "devices", "A100-SMX4-80GB"], "did you mean 'A100-SXM4-80GB'"),
        (["catalog", "shelves"], "shelves"),
    ],
)
def test_wrong_usage_fails_with_2_and_one_line(hetplan: Hetplan, words: list[str], reason: str) -> None:
    answer = hetplan(*words)
    assert (answer.code, answer.out) == (2, "")
    assert reason in one_line(answer)


def test_a_wrong_file_is_named_with_line_and_column(hetplan: Hetplan, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CLUSTER.replace("A100-SXM4-40GB", "A100-SMX4-40GB"))
    answer = hetplan("search", "small.yaml", "two.yaml", *SIZES)
    assert answer.code == 2
    assert "small.yaml:4:17: groups.new.device: unknown device 'A100-SMX4-40GB'" in one_line(answer)


def test_debug_shows_the_traceback_first(hetplan: Hetplan) -> None:
    answer = hetplan("--debug", "search", "none.yaml", "two.yaml", *SIZES)
    assert answer.code == 2
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("error: ")


def test_a_defect_is_called_one(hetplan: Hetplan, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("hetplan.catalog.load.load_cluster", broken)
    answer = hetplan("search", "small.yaml", "two.yaml", *SIZES)
    assert answer.code == 1
    assert "internal error (ZeroDivisionError: division by zero)" in one_line(answer)


def test_options_beside_a_saved_plan_are_refused(hetplan: Hetplan, tmp_path: Path) -> None:
    assert hetplan("search", "small.yaml", "two.yaml", *SIZES, "--no-compare", "-o", "plan.yaml").code == 0
    for words in (["--tp", "2"], ["--global-batch", "16"], ["--micro-batch", "1"], ["--no-sequence-parallel"]):
        answer = hetplan("estimate", "plan.yaml", *words)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith(f"error: {words[0]} does not go with a saved plan")
    (tmp_path / "fast.yaml").write_text(
        "hetplan: calibration/v1\nnetworks:\n  eth: {bandwidth_fraction: 0.5, origin: measured}\n"
    )
    given = hetplan("estimate", "plan.yaml", "--calibration", "fast.yaml", "--json")
    assert json.loads(given.out)["origins"]["eth"] == "measured"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["size", "small.yaml", "two.yaml", *SIZES, "--group", "new", "--most", "100000000"],
            "--most: 100,000,000 nodes",
        ),
        (["size", "small.yaml", "two.yaml", *SIZES, "--group", "new", "--tokens", "1e308"], "--tokens: 1e+308"),
        (["fit", "small.yaml", "two.yaml", "--groups", "new,new"], "names a group twice"),
        (["fit", "small.yaml", "two.yaml", "--groups", ""], "--groups: unknown ''"),
        (["estimate", "small.yaml", "two.yaml", *SIZES, "--groups", ""], "no group ''"),
    ],
)
def test_senseless_counts_and_groups_are_refused(hetplan: Hetplan, words: list[str], reason: str) -> None:
    answer = hetplan(*words)
    assert (answer.code, answer.out) == (2, "")
    assert reason in answer.err
