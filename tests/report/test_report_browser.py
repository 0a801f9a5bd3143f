"""The page in a browser: no error, nothing wider than the screen, and a timeline that zooms."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hetplan.cli.main import run

ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTHS = (1280, 400)
PROBE = """
const look = frame => {
  const page = frame.contentDocument, root = page.documentElement;
  for (const part of page.querySelectorAll("details")) part.open = true;
  const lane = page.querySelector(".timeline .lane svg"), before = lane.getAttribute("viewBox");
  page.querySelector('[data-do="in"]').click();
  const zoomed = lane.getAttribute("viewBox") !== before;
  page.querySelector('[data-do="all"]').click();
  return {
    screen: frame.clientWidth, page: root.scrollWidth, zoomed,
    back: lane.getAttribute("viewBox") === before, ticks: page.querySelectorAll(".axis.live span").length
  };
};
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(look);
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify(found);
  document.body.replaceChildren(answer);
});
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_pages_fit_screens_wide_and_narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = ROOT / "tests" / "golden" / "two-generation-lab.yaml"
    assert run(["report", str(plan), "-o", str(tmp_path / "page.html"), "-q", "--no-replan"]) == 0
    page = html.escape((tmp_path / "page.html").read_text(), quote=True)
    frames = "".join(f'<iframe srcdoc="{page}" style="border:0;width:{w}px;height:900px"></iframe>' for w in WIDTHS)
    (tmp_path / "frames.html").write_text(
        f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><script>{PROBE}</script>{frames}'
    )
    answer = subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'browser'}",
            "--window-size=1400,2000",
            "--dump-dom",
            f"file://{tmp_path / 'frames.html'}",
        ],
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
    for found in looked:
        assert found["page"] <= found["screen"]
        assert found["zoomed"]
        assert found["back"]
        assert found["ticks"] >= 2
