"""Curves of a sweep: right places, right words, no wider than a phone."""

import html
import json
import re
import subprocess

import pytest
from test_report_browser import BROWSER, WIDTHS

from hetplan.cli.main import run
from hetplan.report.svg_curves import HEIGHT, WIDTH, Chart, Line, curve_figure

CLUSTER = """\
hetplan: cluster/v1
name: small
groups:
  new: {device: RTX-4090, nodes: 1, devices_per_node: 1, price: 0.5 USD/h}
networks:
  eth: {joins: [new], kind: ethernet, bandwidth: 10 Gbit/s, latency: 30 us}
"""
PROBE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement;
    return {screen: frame.clientWidth, page: root.scrollWidth, charts: page.querySelectorAll(".curve svg").length};
  });
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify(found);
  document.body.replaceChildren(answer);
});
"""


def chart(*lines):
    return Chart(title="throughput", lines=lines, across=lambda x: f"{x:g}", words=lambda y: f"{y:g}/s", key="tokens")


def circles(markup):
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*data-value="([^"]+)"', markup)
    return [(float(x), float(y), float(value)) for x, y, value in found]


def test_points_stand_where_their_values_are():
    even = circles(curve_figure(chart(Line(name="", points=((1.0, 0.0), (2.0, 50.0), (3.0, 100.0))))))
    (x1, y1, _), (x2, y2, _), (x3, y3, value) = even
    assert value == 100.0
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.11)
    wide = circles(curve_figure(chart(Line(name="", points=((1.0, 1.0), (4.0, 1.0), (16.0, 1.0))))))
    assert wide[1][0] - wide[0][0] == pytest.approx(wide[2][0] - wide[1][0], abs=0.11)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y, _ in even + wide)


def test_the_place_where_it_stops_paying_is_marked_once():
    line = Line(name="a", points=((1.0, 1.0), (2.0, 2.0)), stop=1.0)
    assert curve_figure(chart(line, Line(name="b", points=((1.0, 1.0),), stop=1.0))).count("stops paying") == 1
    assert "stops paying" not in curve_figure(chart(line, Line(name="b", points=((1.0, 1.0),))))


def test_nothing_is_drawn_of_nothing_and_names_are_escaped():
    assert curve_figure(chart(Line(name="", points=()))) == ""
    drawn = curve_figure(chart(Line(name="<b>", points=((1.0, 0.0),))))
    assert "<b>" not in drawn and "&lt;b&gt;" in drawn


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_the_page_fits_screens_wide_and_narrow(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CLUSTER)
    words = ["small.yaml", "gpt2", "--seq-len", "256", "--global-batch", "8", "--nodes", "new=1,2", "-q"]
    assert run(["sweep", *words, "--report", "page.html"]) == 0, capsys.readouterr()
    page = html.escape((tmp_path / "page.html").read_text(), quote=True)
    frames = "".join(f'<iframe srcdoc="{page}" style="border:0;width:{w}px;height:900px"></iframe>' for w in WIDTHS)
    (tmp_path / "frames.html").write_text(
        f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><script>{PROBE}</script>{frames}'
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1400,2000"]
    options += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    answer = subprocess.run(
        [str(BROWSER), *options, f"file://{tmp_path / 'frames.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in answer.stderr
    match = re.search(r'<pre id="answer">(.*?)</pre>', answer.stdout)
    assert match, answer.stdout[-2000:]
    looked = json.loads(html.unescape(match[1]))
    assert [found["screen"] for found in looked] == list(WIDTHS)
    assert all(found["page"] <= found["screen"] and found["charts"] == 4 for found in looked)
