"""Every command from the outside: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cli.command_samples import CLUSTER, SIZES, Answer, Hetplan, one_line

from hetplan.errors import InterruptedSearchError
from hetplan.search.records import SearchResult
from hetplan.search.solve import search

ROOT = Path(__file__).parents[2]


def test_search_prints_one_document_and_nothing_else(searched: Answer) -> None:
    assert (searched.code, searched.err) == (0, "")
    document = json.loads(searched.out)
    assert 0 < document["bound_s"] <= document["step_s"]
    assert document["gap"] == pytest.approx(1 - document["bound_s"] / document["step_s"])
    assert sum(document["time_parts_s"].values()) == pytest.approx(document["step_s"])
    assert document["peak_bytes"] == [stage["peak_bytes"] for stage in document["stages"]]
    assert all(stage["peak_bytes"] <= stage["capacity_bytes"] for stage in document["stages"])
    assert document["tokens_per_s"] == pytest.approx(8 * 256 / document["step_s"])


def test_json_carries_the_plan_of_the_file(searched: Answer, tmp_path: Path) -> None:
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert json.loads(searched.out)["plan"] == written


def test_an_estimate_of_a_plan_says_what_the_search_said(hetplan: Hetplan, searched: Answer) -> None:
    again = hetplan("estimate", "plan.yaml", "--json")
    assert (again.code, again.err) == (0, "")
    before, after = json.loads(searched.out), json.loads(again.out)
    same = ("step_s", "bound_s", "gap", "status", "peak_bytes", "tokens_per_s", "mfu", "plan", "time_parts_s")
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    assert after["violations"] == []


def test_text_answers_fit_80_columns_without_colour(hetplan: Hetplan) -> None:
    found = hetplan("search", "small.yaml", "two.yaml", *SIZES)
    priced = hetplan("estimate", "small.yaml", "two.yaml", *SIZES, "--pp", "2")
    assert (found.code, priced.code) == (0, 0)
    for text in (found.out, priced.out):
        assert text.isascii()
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 80


def test_equal_searches_write_equal_bytes(hetplan: Hetplan, searched: Answer, tmp_path: Path) -> None:
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "hetplan", "search", "small.yaml", "two.yaml", *SIZES, "-o", f"{seed}.yaml"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
        assert (tmp_path / f"{seed}.yaml").read_bytes() == (tmp_path / "plan.yaml").read_bytes()


def test_a_fresh_plan_passes_its_check(hetplan: Hetplan, searched: Answer) -> None:
    assert hetplan("check", "plan.yaml").out.startswith("plan.yaml: ok, step time ")
    document = json.loads(hetplan("check", "plan.yaml", "--json").out)
    assert document["plans"][0]["ok"]


def test_a_plan_is_checked_from_another_folder(
    hetplan: Hetplan, searched: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    assert hetplan("check", str(tmp_path / "plan.yaml")).code == 0


def test_check_sees_a_changed_input(hetplan: Hetplan, searched: Answer, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CLUSTER.replace("name: small", "name: renamed"))
    answer = hetplan("check", "plan.yaml")
    assert answer.code == 4
    assert "small.yaml has changed since the plan was made" in answer.out
    assert "1 of 1 plans failed: plan.yaml" in one_line(answer)
    assert hetplan("estimate", "plan.yaml").err.startswith("note: small.yaml has changed")


def test_check_sees_drifted_time_and_memory(hetplan: Hetplan, searched: Answer, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    step_s = json.loads(searched.out)["step_s"]
    plan.write_text(plan.read_text().replace(f"step_s: {step_s}", f"step_s: {0.9 * step_s}", 1))
    assert hetplan("check", "plan.yaml", "--time-tolerance", "0.2").code == 0
    answer = hetplan("check", "plan.yaml")
    assert answer.code == 4
    assert "step time was" in answer.out

    text = plan.read_text()
    weights = re.search(r"weights_bytes: ([\d.e+]+)", text)
    assert weights is not None
    plan.write_text(text.replace(weights[0], f"weights_bytes: {2e9 + float(weights[1])}", 1))
    answer = hetplan("check", "plan.yaml", "--time-tolerance", "0.2")
    assert answer.code == 4
    assert "peak memory of replica A stage 0 was" in answer.out


def test_check_names_the_rule_a_plan_breaks(hetplan: Hetplan, searched: Answer, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(re.sub(r"num_microbatches: \d+", "num_microbatches: 77", plan.read_text()))
    answer = hetplan("check", "plan.yaml")
    assert answer.code == 4
    assert "samples, not 8" in answer.out


def test_check_goes_through_all_plans(hetplan: Hetplan, searched: Answer, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text((tmp_path / "plan.yaml").read_text().replace("microbatch: ", "microbatch: 7"))
    answer = hetplan("check", "bad.yaml", "plan.yaml")
    assert answer.code == 4
    assert re.search(r"^plan.yaml +ok ", answer.out, re.MULTILINE)
    assert re.search(r"^bad.yaml +FAILED ", answer.out, re.MULTILINE)
    assert "1 of 2 plans failed: bad.yaml" in answer.err


def test_a_layout_that_does_not_fit_is_priced_and_fails_with_3(hetplan: Hetplan) -> None:
    answer = hetplan("estimate", "small.yaml", "llama-3.1-8b", *SIZES, "--json")
    assert answer.code == 3
    assert "GiB short" in one_line(answer)
    assert any("GiB short" in violation for violation in json.loads(answer.out)["violations"])


def test_a_simulation_without_contention_is_the_estimate(hetplan: Hetplan, searched: Answer, tmp_path: Path) -> None:
    answer = hetplan("simulate", "plan.yaml", "--no-contention", "--json", "-o", "trace.json")
    assert (answer.code, answer.err) == (0, "")
    document = json.loads(answer.out)
    assert document["step_s"] == document["estimated_s"] == json.loads(searched.out)["step_s"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    last_us = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last_us == pytest.approx(1e6 * document["step_s"])


def test_jitter_delays_and_repeats(hetplan: Hetplan, searched: Answer) -> None:
    first, second, other = (
        json.loads(hetplan("simulate", "plan.yaml", "--jitter", "0.3", "--seed", seed, "--json").out)["step_s"]
        for seed in ("1", "1", "2")
    )
    assert first == second != other
    assert min(first, other) > json.loads(searched.out)["step_s"]


def test_an_explanation_draws_the_pipeline_and_names_what_binds(hetplan: Hetplan, searched: Answer) -> None:
    answer = hetplan("explain", "plan.yaml")
    assert (answer.code, answer.err) == (0, "")
    for title in ("Where time goes", "Where memory goes", "What binds", "One more node", "A0 |"):
        assert title in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    document = json.loads(hetplan("explain", "plan.yaml", "--no-replan", "--json").out)
    assert sum(part["seconds"] for part in document["time"]) == pytest.approx(document["step_s"])
    assert document["one_more_node"] == []


@pytest.mark.parametrize("command", ["explain", "simulate", "estimate"])
def test_a_plan_that_cannot_be_priced_fails_with_4(
    hetplan: Hetplan, searched: Answer, tmp_path: Path, command: str
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(re.sub(r"group: \w+", "group: gone", plan.read_text()))
    answer = hetplan(command, "plan.yaml")
    assert (answer.code, answer.out) == (4, "")
    assert "gone" in one_line(answer)


def test_catalog_shows_every_shelf(hetplan: Hetplan) -> None:
    assert "A100-SXM4-80GB" in hetplan("catalog", "devices").out
    assert "infiniband" in hetplan("catalog", "networks").out
    assert "8,030,261,248" in hetplan("catalog", "models").out
    assert "http" in hetplan("catalog", "devices", "A100-SXM4-80GB").out
    for shelf, name in (("devices", "H100-SXM5-80GB"), ("networks", "NVLink4"), ("models", "llama-3.1-8b")):
        assert json.loads(hetplan("catalog", shelf, name, "--json").out)["name"] == name
        assert name in [entry["name"] for entry in json.loads(hetplan("catalog", shelf, "--json").out)[shelf]]


def test_an_interrupt_keeps_the_best_plan_so_far(
    hetplan: Hetplan, searched: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> SearchResult:
        found = search(*arguments)  # type: ignore[arg-type]
        kept = replace(found, proof=replace(found.proof, status="interrupted", bound=0.0))
        raise InterruptedSearchError("interrupted", kept)

    monkeypatch.setattr("hetplan.search.solve.search", interrupted)
    answer = hetplan("search", "small.yaml", "two.yaml", *SIZES, "-o", "kept.yaml")
    assert answer.code == 130
    assert "interrupted: no bound yet" in answer.out
    kept, whole = ((tmp_path / name).read_text() for name in ("kept.yaml", "plan.yaml"))
    assert yaml.safe_load(kept)["layout"] == yaml.safe_load(whole)["layout"]
    assert yaml.safe_load(kept)["proof"]["status"] == "interrupted"


def test_an_interrupt_before_any_plan_writes_nothing(
    hetplan: Hetplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> SearchResult:
        raise InterruptedSearchError("interrupted before any plan was found")

    monkeypatch.setattr("hetplan.search.solve.search", interrupted)
    answer = hetplan("search", "small.yaml", "two.yaml", *SIZES, "-o", "kept.yaml")
    assert (answer.code, answer.out) == (130, "")
    one_line(answer)
    assert not (tmp_path / "kept.yaml").exists()


def test_a_signal_in_the_middle_of_a_search_ends_it_with_130(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    command = [sys.executable, "-m", "hetplan", "search", str(ROOT / "cluster_specs/ten-thousand.yaml"), "gpt3-175b"]
    command += ["--global-batch", "4096", "--seq-len", "2048", "-o", str(plan)]
    for delay_s in (2.5, 1.2, 0.6):  # a fast machine may be done before
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        if process.returncode:
            break
        plan.unlink()
    assert process.returncode == 130, err
    assert err.startswith("error: interrupted")
    assert err.count("\n") == 1
    assert plan.exists() == ("step time" in out)


def test_files_of_a_plan_are_looked_for_beside_it_and_here_only(
    hetplan: Hetplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hetplan("search", "small.yaml", "two.yaml", *SIZES, "--no-compare", "-o", "plan.yaml").code == 0
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "plan.yaml").write_bytes((tmp_path / "plan.yaml").read_bytes())
    assert hetplan("check", "inner/plan.yaml").code == 0
    monkeypatch.chdir(inner)
    answer = hetplan("check", "plan.yaml")
    assert (answer.code, answer.out) == (2, "")
    lines = (inner / "plan.yaml").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "small.yaml" in text)
    where = f"plan.yaml:{line}:{lines[line - 1].index('name') + 1}: cluster.name"
    assert answer.err == f"error: {where}: there is no file 'small.yaml' beside the plan or in the current folder\n"
    (inner / "small.yaml").write_bytes((tmp_path / "small.yaml").read_bytes())
    (inner / "two.yaml").write_bytes((tmp_path / "two.yaml").read_bytes())
    monkeypatch.chdir("/")
    assert hetplan("check", str(inner / "plan.yaml")).code == 0


def test_samples_longer_than_the_model_has_positions_are_remarked(hetplan: Hetplan) -> None:
    words = ["small.yaml", "two.yaml", "--global-batch", "8", "--seq-len"]
    for command in ("estimate", "search"):
        more = ["--no-compare"] if command == "search" else ["--dp", "2"]
        assert hetplan(command, *words, "1024", *more).err == ""
        answer = hetplan(command, *words, "1025", *more)
        assert answer.code == 0
        assert answer.err == "note: 1,025 tokens a sample are more than the 1,024 positions of two-layers\n"
    assert hetplan("search", *words, "1025", "--no-compare", "-q").err == ""


def test_more_nodes_never_do_worse_and_a_short_search_says_that_it_is_one(hetplan: Hetplan) -> None:
    words = ["size", "small.yaml", "two.yaml", "--group", "new", "--global-batch", "8", "--seq-len", "128"]
    answer = hetplan(*words)
    assert answer.out.startswith("two-layers needs at least 1 node of group new (2 devices)\n")
    assert "of a short search among plans of one shape" in answer.out
    assert "plans may also use the rest of the cluster: old" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    seconds = [size["step_s"] for size in json.loads(hetplan(*words, "--json").out)["sizes"]]
    assert len(seconds) == 5
    assert seconds == sorted(seconds, reverse=True)
