"""`hetplan diff` and `hetplan replan` from the outside, on a saved plan of the repository's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hetplan.cli.main import run
from hetplan.search.patterned import PatternSearch

ROOT = Path(__file__).parents[2]
PLAN = "tests/golden/ib-roce.yaml"
OTHER = "tests/golden/two-generation-lab.yaml"
Hetplan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hetplan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hetplan:
    monkeypatch.chdir(ROOT)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def narrow(text: str) -> bool:
    return text.isascii() and max(map(len, text.splitlines())) <= 80


def test_replan_after_a_loss_writes_a_plan_that_passes_its_check(hetplan: Hetplan, tmp_path: Path) -> None:
    out = str(tmp_path / "new.yaml")
    code, text, err = hetplan("replan", OTHER, "--lost", "v100-03", "-o", out)
    assert (code, err) == (0, "")
    assert narrow(text[text.index("Old and new") :])
    assert "8 devices it runs on are gone: v100-03 (8)" in text
    assert hetplan("check", out)[0] == 0
    _, shown, _ = hetplan("explain", out, "--no-replan", "-v")
    assert "v100-03" not in shown
    assert "v100-04" in shown
    code, text, _ = hetplan("diff", OTHER, out)
    assert code == 0
    assert narrow(text.replace(str(tmp_path), ""))


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many replica shapes each search looks at, in turn."""
    counts: list[int] = []
    look = PatternSearch.shapes

    def counted(search: PatternSearch, most_visited: int | None = None) -> float:
        bound_s = look(search, most_visited)
        counts.append(search.num_shapes)
        return bound_s

    monkeypatch.setattr(PatternSearch, "shapes", counted)
    return counts


@pytest.mark.slow
def test_replan_looks_at_little_and_beats_the_old_pipelines_on_what_is_left(
    hetplan: Hetplan, tmp_path: Path, visited: list[int]
) -> None:
    cluster = tmp_path / "seven.yaml"
    text = (ROOT / "cluster_specs" / "ib-roce-8-nodes.yaml").read_text()
    cluster.write_text(text)
    job = ("llama-3.1-8b", "--global-batch", "256", "--seq-len", "8192", "-q")
    start = str(tmp_path / "plan.yaml")
    assert hetplan("search", str(cluster), *job, "--no-compare", "-o", start)[0] == 0
    visited.clear()
    code, out, _ = hetplan("replan", start, "--lost", "roce-2", "--json")
    looked_at = sum(visited)
    assert code == 0
    found = json.loads(out)
    assert found["step_s"] < found["resized_step_s"]
    assert found["old_step_s"] is None
    cluster.write_text(text.replace("'roce-[1-4]'", "'roce-[1,3-4]'"))
    visited.clear()
    code, out, _ = hetplan("search", str(cluster), *job, "--json")
    assert 0 < looked_at < 0.25 * sum(visited)
    assert found["step_s"] <= 1.01 * json.loads(out)["step_s"]


def test_replan_under_the_same_facts_keeps_everything(hetplan: Hetplan) -> None:
    cluster = "cluster_specs/ib-roce.yaml"
    code, out, _ = hetplan("replan", PLAN, "--cluster", cluster, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["old_step_s"] == pytest.approx(found["saved_step_s"])
    assert found["step_s"] == found["old_step_s"]
    assert found["moves"]["layers"] == []
    assert found["difference"]["same"]


def test_replan_on_other_groups_takes_all_from_a_checkpoint(hetplan: Hetplan, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    text = (ROOT / "cluster_specs" / "ib-roce.yaml").read_text()
    other.write_text(re.sub(r"\bib\b", "fast", text).replace("roce-", "rack-"))
    code, out, _ = hetplan("replan", PLAN, "--cluster", str(other), "--json")
    assert code == 0
    found = json.loads(out)
    assert found["old_step_s"] is None
    assert "are gone" in found["old_problems"][0]
    assert (found["moves"]["moved_bytes"], found["moves"]["kept_bytes"]) == (0, 0)
    assert found["moves"]["checkpoint_bytes"] > 0
    assert {move["from"] for move in found["moves"]["layers"]} == {"checkpoint"}


def test_replan_on_a_slower_network_prices_the_old_plan_too(hetplan: Hetplan, tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    text = (ROOT / "cluster_specs" / "two-generation-lab.yaml").read_text()
    assert "25 Gbit/s" in text
    slow.write_text(text.replace("25 Gbit/s", "2 Gbit/s"))
    code, out, _ = hetplan("replan", OTHER, "--cluster", str(slow), "--json")
    assert code == 0
    found = json.loads(out)
    assert found["old_problems"] == []
    assert found["old_step_s"] > found["saved_step_s"]
    assert found["step_s"] <= found["old_step_s"]


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["replan", PLAN], 2, "say what has changed"),
        (["replan", PLAN, "--lost", "nowhere"], 2, "there is no node 'nowhere'"),
        (["replan", PLAN, "--lost", "ib-1:99"], 2, "no slot"),
        (["replan", PLAN, "--lost", "ib-1", "-o", "missing/plan.yaml"], 2, "there is no folder missing"),
        (["diff", PLAN, "none.yaml"], 2, "none.yaml"),
    ],
)
def test_wrong_usage_is_said_in_one_line(hetplan: Hetplan, words: list[str], code: int, reason: str) -> None:
    found = hetplan(*words)
    assert (found[0], found[1]) == (code, "")
    assert reason in found[2]
    assert found[2].count("\n") == 1


def test_diff_says_nothing_differs(hetplan: Hetplan) -> None:
    code, out, _ = hetplan("diff", PLAN, PLAN)
    assert code == 0
    assert "The plans are the same" in out
    assert json.loads(hetplan("diff", PLAN, PLAN, "--json")[1])["same"] is True


def test_diff_of_other_jobs_warns_and_reprices(hetplan: Hetplan) -> None:
    code, out, _ = hetplan("diff", PLAN, OTHER, "--reprice")
    assert code == 0
    assert narrow(out)
    assert "These differ too" in out
    found = json.loads(hetplan("diff", PLAN, OTHER, "--json")[1])
    step = found["totals"]["step_s"]
    assert step["change"] == pytest.approx(step["after"] - step["before"])
    assert sum(part["change"] for part in found["time_parts_s"].values()) == pytest.approx(step["change"])


def test_absurd_plans_are_refused_or_compared_at_once(hetplan: Hetplan, tmp_path: Path) -> None:
    absurd = tmp_path / "absurd.yaml"
    text = (ROOT / PLAN).read_text().replace("cluster_specs/", f"{ROOT}/cluster_specs/")
    text = re.sub(r'devices: "[^"]+"', 'devices: "0-99999999999"', text)
    absurd.write_text(re.sub(r"copies: \d+", "copies: 100000000", text))
    assert hetplan("diff", PLAN, str(absurd))[0] == 0
    code, out, err = hetplan("replan", str(absurd), "--lost", "ib-1")
    assert (code, out) == (4, "")
    assert "is no plan for its own cluster" in err
