"""`hetplan check` on plans that drifted: what is found, where in the file, in every form of output."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hetplan.cli.main import run

ROOT = Path(__file__).parents[2]
CLUSTER = """\
hetplan: cluster/v1
name: small
groups:
  new: {device: A100-SXM4-40GB, nodes: 1, devices_per_node: 2}
  old: {device: V100-SXM2-16GB, nodes: 1, devices_per_node: 2}
networks:
  eth: {joins: [new, old], kind: ethernet, bandwidth: 25 Gbit/s, latency: 30 us, pairs: pairs.csv}
"""
PAIRS = "from,to,latency,bandwidth\nnew,old,40 us,10 Gbit/s\n"
MODEL = "hetplan: model/v1\nname: two-layers\nconfig: gpt2\noverrides: {n_layer: 2}\n"
CALIBRATION = """\
hetplan: calibration/v1
devices:
  A100-SXM4-40GB: {origin: measured, gemm_peak_fraction: 0.5}
"""
SEARCH = ("small.yaml", "two.yaml", "--global-batch", "8", "--seq-len", "256", "--effort", "1", "--no-compare", "-q")
Check = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan and what it was made from."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in (
        ("small.yaml", CLUSTER),
        ("pairs.csv", PAIRS),
        ("two.yaml", MODEL),
        ("ours.yaml", CALIBRATION),
    ):
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["search", *SEARCH, "--calibration", "ours.yaml", "-o", "plan.yaml"]) == 0
    return folder


@pytest.fixture
def check(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs `hetplan check` in a copy of that folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["check", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def change(name: str, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, Path(name).read_text(), count=1)
    assert count == 1
    Path(name).write_text(text)


def line_with(words: str) -> int:
    return next(i for i, line in enumerate(Path("plan.yaml").read_text().splitlines(), 1) if words in line)


def findings(out: str) -> list[dict[str, object]]:
    (plan,) = json.loads(out)["plans"]
    return list(plan["findings"])


@pytest.mark.parametrize(
    ("name", "pattern", "new", "line"),
    [
        ("small.yaml", "name: small", "name: renamed", "cluster:"),
        ("pairs.csv", "40 us", "40.0 us", "cluster:"),
        ("two.yaml", "name: two-layers", "name: renamed", "model:"),
        ("ours.yaml", "0.5}", "0.50}", "calibration:"),
    ],
)
def test_each_changed_input_is_found_at_its_line(check: Check, name: str, pattern: str, new: str, line: str) -> None:
    change(name, pattern, new)
    code, out, _ = check("plan.yaml", "--json")
    assert code == 4
    (found,) = findings(out)
    assert (found["aspect"], found["line"]) == ("inputs", line_with(line))


@pytest.mark.parametrize(
    ("pattern", "new", "aspect", "line"),
    [
        (r"step_s: ([\d.]+)", "step_s: 9\\1", "time", "step_s:"),
        (r"weights_bytes: (\d+)", "weights_bytes: 9\\1", "memory", "weights_bytes:"),
        (r"num_microbatches: \d+", "num_microbatches: 77", "rules", "layout:"),
        (r"tp: \d+", "tp: 5", "rules", "tp: 5"),
    ],
)
def test_each_drift_and_broken_rule_is_found_alone(
    check: Check, pattern: str, new: str, aspect: str, line: str
) -> None:
    change("plan.yaml", pattern, new)
    code, out, _ = check("plan.yaml", "--json")
    assert code == 4
    found = findings(out)
    assert {one["aspect"] for one in found} == {aspect}
    assert line_with(line) in {one["line"] for one in found}
    assert all(bool(one["rule"]) == (aspect == "rules") for one in found)


def test_new_facts_take_the_place_of_the_old(check: Check) -> None:
    Path("slow.yaml").write_text(CLUSTER.replace("devices_per_node: 2}", "devices_per_node: 2, speed: 0.5}"))
    code, out, _ = check("plan.yaml", "--cluster", "slow.yaml", "--json")
    assert code == 4
    assert {one["aspect"] for one in findings(out)} == {"time"}
    Path("slow.yaml").write_text(CLUSTER)
    assert check("plan.yaml", "--cluster", "slow.yaml")[0] == 0
    Path("better.yaml").write_text(CALIBRATION.replace("0.5", "0.9"))
    code, out, _ = check("plan.yaml", "--calibration", "better.yaml", "--json")
    assert code == 4
    assert {one["aspect"] for one in findings(out)} == {"time"}


def test_a_cluster_too_small_breaks_a_rule(check: Check) -> None:
    Path("less.yaml").write_text(CLUSTER.replace("devices_per_node: 2", "devices_per_node: 1"))
    used = re.findall(r'devices: "?0-1', Path("plan.yaml").read_text())
    code, out, _ = check("plan.yaml", "--cluster", "less.yaml", "--json")
    assert (code, {one["aspect"] for one in findings(out)}) == ((4, {"rules"}) if used else (0, set()))


def test_a_new_search_confirms_the_best_plan(check: Check) -> None:
    code, out, _ = check("plan.yaml", "--search", "--effort", "1")
    assert code == 0
    assert "still within 1.0 % of the best plan a new search finds" in out
    code, out, _ = check("plan.yaml", "--search", "--effort", "1", "--json")
    assert json.loads(out)["plans"][0]["search"]["gain"] == pytest.approx(0.0, abs=1e-12)


def test_a_new_search_says_by_how_much_another_plan_wins(check: Check) -> None:
    words = ["search", *SEARCH, "--calibration", "ours.yaml", "--pp", "2", "-o", "deep.yaml"]
    assert run(words) == 0
    assert check("deep.yaml")[0] == 0
    code, out, _ = check("deep.yaml", "--search", "--effort", "1", "--json")
    assert code == 4
    (plan,) = json.loads(out)["plans"]
    assert {one["aspect"] for one in plan["findings"]} == {"search"}
    best_s = json.loads(check("plan.yaml", "--json")[1])["plans"][0]["step_s"]
    assert plan["search"]["best_step_s"] == pytest.approx(best_s, rel=0.011)
    assert plan["search"]["gain"] == pytest.approx(1 - plan["search"]["best_step_s"] / plan["step_s"])
    assert check("deep.yaml", "--search", "--effort", "1", "--margin", "0.99")[0] == 0


def test_unreadable_plans_do_not_hide_the_others(check: Check) -> None:
    Path("bad.yaml").write_text("hetplan: plan/v1\ncluster: 3\n")
    code, out, err = check("bad.yaml", "plan.yaml", "--junit", "junit.xml", "--annotations")
    assert code == 2
    assert err.startswith("error: bad.yaml:2:10: ")
    assert re.search(r"^plan.yaml +ok ", out, re.MULTILINE)
    assert "::error file=bad.yaml,line=2,col=10,title=hetplan check%3A file::bad.yaml:2:10: " in out
    root = ElementTree.parse("junit.xml").getroot()
    assert (root.get("errors"), root.get("failures"), root.get("tests")) == ("1", "0", "10")


def test_junit_has_the_form_servers_read(check: Check) -> None:
    """Elements and attributes as https://github.com/jenkinsci/xunit-plugin (junit-10.xsd) allows them."""
    change("plan.yaml", r"step_s: ([\d.]+)", "step_s: 9\\1")
    change("small.yaml", "name: small", "name: a <small> & wide")
    code, _, _ = check("plan.yaml", "--junit", "junit.xml")
    assert code == 4
    root = ElementTree.parse("junit.xml").getroot()
    assert root.tag == "testsuites"
    (suite,) = root
    assert suite.tag == "testsuite"
    assert set(suite.keys()) >= {"name", "tests", "failures", "errors", "skipped", "time"}
    cases = {case.get("name"): case for case in suite}
    assert all(case.tag == "testcase" and set(case.keys()) >= {"name", "classname", "time"} for case in suite)
    assert int(suite.get("tests", "")) == len(suite)
    assert int(suite.get("failures", "")) == sum(len(case.findall("failure")) for case in suite) == 2
    failure = cases["step time is as predicted"].find("failure")
    assert failure is not None
    assert failure.get("type") == "time"
    assert (failure.text or "").startswith(f"plan.yaml:{line_with('step_s:')}: step time was ")


def test_drift_of_a_broken_plan_is_skipped_not_passed(check: Check) -> None:
    change("plan.yaml", r"num_microbatches: \d+", "num_microbatches: 77")
    check("plan.yaml", "--junit", "junit.xml")
    suite = ElementTree.parse("junit.xml").getroot()[0]
    assert suite.get("skipped") == "2"


def test_annotations_escape_what_github_reads(check: Check) -> None:
    """Escapes as in https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts."""
    change("plan.yaml", r"step_s: ([\d.]+)", "step_s: 9\\1")
    Path("a,b:100%.yaml").write_text(Path("plan.yaml").read_text())
    code, out, _ = check("a,b:100%.yaml", "--annotations")
    assert code == 4
    (line,) = [line for line in out.splitlines() if line.startswith("::")]
    match = re.fullmatch(r"::error file=([^,:]+),line=(\d+),col=(\d+),title=([^,:]+)::(.+)", line)
    assert match is not None
    assert match[1] == "a%2Cb%3A100%25.yaml"
    assert int(match[2]) == line_with("step_s:")
    assert "%25)" in match[5]
    assert check("plan.yaml", "--annotations", "--json")[0] == 2


def test_a_plan_that_holds_has_no_annotation(check: Check) -> None:
    code, out, _ = check("plan.yaml", "--annotations")
    assert code == 0
    assert "::" not in out


def test_two_hundred_plans_are_checked_in_one_call(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = sorted((ROOT / "tests" / "golden").glob("*.yaml"))
    for index in range(200):
        shutil.copy(golden[index % len(golden)], f"saved-{index}.yaml")
    paths = [str(path.resolve()) for path in Path().glob("saved-*.yaml")]
    monkeypatch.chdir(ROOT)
    code, out, _ = check(*paths, "--json")
    assert (code, len(json.loads(out)["plans"])) == (0, 200)
