"""The JUnit file of `hetplan check` against the schema servers read it by, restated from its XSD."""

import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hetplan.cli.main import run

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "tests" / "golden" / "mixed-workstation.yaml"

SCHEMA = {
    "testsuites": ({"name", "time", "tests", "failures", "disabled", "errors"}, set(), {"testsuite"}),
    "testsuite": (
        {
            "name",
            "tests",
            "failures",
            "errors",
            "skipped",
            "disabled",
            "time",
            "timestamp",
            "hostname",
            "id",
            "package",
        },
        {"name"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name", "assertions", "time", "classname", "status", "file", "line"},
        {"name"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
    "failure": ({"type", "message"}, set(), set()),
    "error": ({"type", "message"}, set(), set()),
    "skipped": ({"type", "message"}, set(), set()),
}
"""Element -> attributes it may have, must have, children it may have: jenkinsci/xunit-plugin, junit-10.xsd, with `file`
and `line` of a test case as GitLab and pytest write them."""


def wrong(element):
    """What an element and its children break of the schema."""
    if element.tag not in SCHEMA:
        return [f"<{element.tag}>"]
    may, must, children = SCHEMA[element.tag]
    found = [f"{element.tag}@{name}" for name in set(element.keys()) - may]
    found += [f"{element.tag} lacks {name}" for name in must - set(element.keys())]
    found += [f"{element.tag}/{child.tag}" for child in element if child.tag not in children]
    return found + [problem for child in element for problem in wrong(child)]


def numbers(element):
    """What counts of an element do not equal what it holds."""
    cases = list(element.iter("testcase"))
    held = {
        "tests": len(cases),
        "failures": sum(case.find("failure") is not None for case in cases),
        "errors": sum(case.find("error") is not None for case in cases),
    }
    return {name: element.get(name) for name, count in held.items() if element.get(name) != str(count)}


CHANGES = [
    None,
    ("step_s: ", "step_s: 9"),
    ("num_microbatches: ", "num_microbatches: 9"),
    ("hetplan: plan", "hetplan: plane"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_junit_keeps_to_its_schema(change, tmp_path, monkeypatch, capsys):
    plan = tmp_path / "plan.yaml"
    shutil.copy(PLAN, plan)
    if change:
        assert change[0] in plan.read_text()
        plan.write_text(plan.read_text().replace(*change, 1))
    monkeypatch.chdir(ROOT)
    code = run(["check", str(plan), str(PLAN), "--junit", str(tmp_path / "junit.xml")])
    capsys.readouterr()
    assert (code == 0) == (change is None)
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert wrong(root) == []
    assert [numbers(root), *map(numbers, root)] == [{}, {}, {}]
