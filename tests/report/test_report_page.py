"""The page of a plan: its numbers are those of `estimate --json`, it needs nothing else, and it stays small."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetplan.cli.main import run
from hetplan.report.html import linked, tag
from hetplan.report.svg_timeline import MOST_BARS, SPAN

ROOT = Path(__file__).parents[2]
GOLDEN = sorted((ROOT / "tests" / "golden").glob("*.yaml"))
NOT_SHOWN = {"search_s", "plan", "violations", "status"}
INDICES = {"replica", "stage", "group"}
CLUSTER = """\
hetplan: cluster/v1
name: '<b id="x">&amp; "lab"'
groups:
  new: {device: A100-SXM4-40GB, nodes: 1, devices_per_node: 1, usable_memory: MEMORY, price: 1.5 USD/h}
  old: {device: V100-SXM2-16GB, nodes: 1, devices_per_node: 1, price: 0.5 USD/h}
networks:
  eth: {joins: [new, old], kind: ethernet, bandwidth: 25 Gbit/s, latency: 30 us}
"""
MODEL = """\
hetplan: model/v1
name: '</title><script>alert(1)</script>'
config: gpt2
overrides: {n_layer: 2}
"""


class Elements(HTMLParser):
    """All elements of a page with their attributes, and its text outside script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] not in ("script", "style"):
            self.words.append(data)

    def keyed(self) -> Iterator[tuple[str, str]]:
        """(key, value) of every number."""
        for _, attributes in self.found:
            if "data-key" in attributes:
                yield attributes["data-key"] or "", attributes["data-value"] or ""

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag == name]


def leaves(document: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in a document that is neither null nor left to other parts of the page."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key not in NOT_SHOWN | INDICES:
                yield from leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from leaves(value, f"{path}.{index}")
    elif document is not None:
        yield path, document


def page_of(plan: Path, out: Path, *options: str) -> Elements:
    assert run(["report", str(plan), "-o", str(out), "-q", *options]) == 0
    return Elements(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan whose cluster and model have hostile names, and its page."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "lab.yaml").write_text(CLUSTER.replace("MEMORY", "38 GiB"))
    (folder / "two.yaml").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = ["search", "lab.yaml", "two.yaml", "--global-batch", "4", "--seq-len", "256", "-q", "--no-compare"]
        assert run([*words, "-o", "plan.yaml"]) == 0
        assert run(["report", "plan.yaml", "-o", "page.html", "-q"]) == 0
    return folder


@pytest.fixture
def folder(searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, to work in."""
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("plan", GOLDEN, ids=lambda path: path.stem)
def test_every_number_is_that_of_estimate(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    capsys.readouterr()
    assert run(["estimate", str(plan), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = dict(leaves({key: value for key, value in document.items() if key != "peak_bytes"}))
    shown = list(page_of(plan, tmp_path / "page.html", "--no-replan").keyed())
    assert dict(shown).keys() == expected.keys()
    for key, value in shown:
        assert (float(value) if isinstance(expected[key], float | int) else value) == expected[key], key


def test_the_page_loads_nothing(folder: Path) -> None:
    page = Elements((folder / "page.html").read_text())
    assert [link["href"] for link in page.of("link")] == ["data:,"]
    assert not [attributes for _, attributes in page.found if {"src", "srcset", "action"} & attributes.keys()]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp", (folder / "page.html").read_text())
    policies = [meta["content"] or "" for meta in page.of("meta") if "http-equiv" in meta]
    assert policies[0].startswith("default-src 'none';")


def test_names_cannot_become_elements(folder: Path) -> None:
    page = Elements((folder / "page.html").read_text())
    assert len(page.of("script")) == 1
    assert all("id" not in attributes for attributes in page.of("b"))
    assert any("</title><script>alert(1)</script>" in words for words in page.words)
    assert any('<b id="x">&amp; "lab"' in words for words in page.words)


def test_attributes_and_links_are_escaped() -> None:
    assert tag("i", "a<b", title='"><x>', data_key=None, hidden=True) == (
        '<i title="&quot;&gt;&lt;x&gt;" hidden>a&lt;b</i>'
    )
    assert linked("see https://a.example/x?a=1&b=2, page <3>") == (
        'see <a href="https://a.example/x?a=1&amp;b=2" rel="noreferrer">https://a.example/x?a=1&amp;b=2</a>, '
        "page &lt;3&gt;"
    )
    assert "<a " not in linked("javascript:alert(1)")


def test_a_search_adds_the_comparison(folder: Path) -> None:
    with_search = " ".join(Elements((folder / "page.html").read_text()).words)
    without = " ".join(page_of(folder / "plan.yaml", folder / "b.html", "--no-replan").words)
    for words in ("best uniform", "only V100-SXM2-16GB", "one more node of group new"):
        assert words in with_search
        assert words not in without


def test_the_same_plan_gives_the_same_page(folder: Path) -> None:
    page_of(folder / "plan.yaml", folder / "a.html", "--no-replan")
    page_of(folder / "plan.yaml", folder / "b.html", "--no-replan")
    assert (folder / "a.html").read_bytes() == (folder / "b.html").read_bytes()


def test_a_broken_rule_is_on_the_page_and_in_the_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "lab.yaml").write_text(CLUSTER.replace("MEMORY", "1 GiB"))
    assert run(["report", "plan.yaml", "-o", "page.html", "--no-replan"]) == 4
    words = " ".join(Elements((folder / "page.html").read_text()).words)
    assert "Broken rule" in words
    assert "has changed since the plan was made" in words
    assert "error: " in capsys.readouterr().err


def test_nothing_is_written_where_it_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.iterdir())
    assert run(["report", "plan.yaml", "-o", "missing/page.html"]) == 2
    assert run(["report", "no-plan.yaml", "-o", "other.html"]) == 2
    assert run(["report", "plan.yaml"]) == 2
    assert sorted(folder.iterdir()) == before
    assert capsys.readouterr().out == ""


def test_each_action_of_a_small_step_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = ROOT / "tests" / "golden" / "two-generation-lab.yaml"
    page_of(plan, tmp_path / "page.html", "--no-replan")
    text = (tmp_path / "page.html").read_text()
    layout = yaml.safe_load(plan.read_text())["layout"]["replicas"][0]
    actions = layout["num_microbatches"] * len(layout["stages"])
    assert len(re.findall(r"<title>forward of microbatch \d+: [^<]* from", text)) == actions
    assert len(re.findall(r"<title>backward of microbatch \d+: [^<]* from", text)) == actions
    lanes = re.findall(r'viewBox="0 0 (\d+) 12.4"(.*?)</svg>', text, re.DOTALL)
    ends = [
        int(x) + int(w) for _, lane in lanes for x, w in re.findall(r'<rect x="(\d+)" y="[^"]*" width="(\d+)"', lane)
    ]
    assert max(ends) == SPAN


def test_ten_thousand_devices_stay_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    capsys.readouterr()
    words = ["estimate", "cluster_specs/ten-thousand.yaml", "gpt-1t", "--tp", "8", "--pp", "64", "--json"]
    run([*words, "--global-batch", "5120", "--seq-len", "2048", "--sharding", "optimizer", "--recompute", "full"])
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(json.loads(capsys.readouterr().out)["plan"], sort_keys=False))
    assert run(["report", str(plan), "-o", str(tmp_path / "page.html"), "-q", "--no-replan"]) in (0, 4)
    text = (tmp_path / "page.html").read_text()
    assert len(text) < 2_000_000
    assert 0 < len(re.findall(r"M\d+ ", text)) <= MOST_BARS
    shown = dict(Elements(text).keyed())
    assert float(shown["step_s"]) == yaml.safe_load(plan.read_text())["estimate"]["step_s"]
    assert "10,240 devices" in text
