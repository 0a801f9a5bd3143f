"""`hetplan sweep`: table, CSV, JSON and page say the same numbers."""

import csv
import io
import json
import re

import pytest

from hetplan.cli.main import run

CLUSTER = """\
hetplan: cluster/v1
name: small
groups:
  new: {device: RTX-4090, nodes: 1, devices_per_node: 1, price: 0.5 USD/h}
  old: {device: RTX-3090, nodes: 1, devices_per_node: 1, price: 0.2 USD/h}
networks:
  eth: {joins: [new, old], kind: ethernet, bandwidth: 10 Gbit/s, latency: 30 us}
"""
WORDS = ("small.yaml", "gpt2", "--seq-len", "256", "--nodes", "new=1,2")


@pytest.fixture
def swept(tmp_path, monkeypatch, capsys):
    """Runs `hetplan sweep` in a folder with a small cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CLUSTER)

    def call(*words):
        code = run(["sweep", *words])
        return code, *capsys.readouterr()

    return call


def test_all_forms_say_the_same(swept, tmp_path):
    words = (*WORDS, "--batches", "8,16", "--csv", "points.csv", "--report", "page.html", "--json", "-q")
    code, out, _ = swept(*words)
    assert code == 0
    points = json.loads(out)["points"]
    assert [(p["nodes_new"], p["global_batch"], p["devices"]) for p in points] == [
        (1, 8, 2), (1, 16, 2), (2, 8, 3), (2, 16, 3)
    ]  # fmt: skip
    rows = list(csv.DictReader(io.StringIO((tmp_path / "points.csv").read_text())))
    for row, point in zip(rows, points, strict=True):
        assert row.keys() == point.keys()
        for key, value in point.items():
            word = "yes" if value else "no"
            assert row[key] == ("" if value is None else word if isinstance(value, bool) else str(value))
    page = (tmp_path / "page.html").read_text()
    drawn = re.findall(r'data-key="(\w+)" data-value="([^"]+)"', page)
    for key in ("tokens_per_s", "usd_per_million_tokens", "joules_per_token", "marginal_tokens_per_s_per_device"):
        expected = sorted(point[key] for point in points if point[key] is not None)
        assert sorted(float(value) for name, value in drawn if name == key) == expected
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_the_table_names_axes_and_where_it_stops(swept):
    code, out, _ = swept(*WORDS, "--global-batch", "16", "--worth", "1000", "-q")
    assert code == 0
    assert "nodes of group new" in out.splitlines()[0]
    assert "adding hardware stops paying after 1 node of group new" in out
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = swept(*WORDS, "--global-batch", "16", "--worth", "0", "-q")
    assert "pays as far as was looked, 2 nodes" in out


def test_without_axes_the_largest_group_is_doubled(swept):
    code, out, _ = swept("small.yaml", "gpt2", "--seq-len", "256", "--global-batch", "8", "--json", "-q")
    assert code == 0
    assert json.loads(out)["axes"] == [{"name": "nodes_new", "kind": "nodes", "of": "new", "values": [1.0, 2.0]}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "nwe=1"], "new"),
        (["--nodes", "new"], "is not NAME=LIST"),
        (["--nodes", "new=0"], "whole number of at least 1"),
        (["--nodes", "new=1-9999999"], "more than 200 values"),
        (["--nodes", "new=1", "--nodes", "new=2"], "given twice"),
        (["--bandwidth", "eth=10"], "unit"),
        (["--bandwidth", "ib=10 Gbit/s"], "eth"),
        (["--batches", "8,x"], "--batches"),
        (["--engine", "megatrn"], "megatron"),
        (["--report", "no/such/folder.html"], "there is no folder"),
    ],
)
def test_wrong_words_are_refused_before_any_search(swept, words, said):
    code, out, err = swept("small.yaml", "gpt2", "--seq-len", "256", "--global-batch", "8", *words)
    assert (code, out) == (2, "")
    assert said in err
