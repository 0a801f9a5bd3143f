"""The line that says where a search stands: on a terminal only, gone at the end."""

from __future__ import annotations

import io

import pytest

from hetplan.cli.progress import ProgressLine, progress_text
from hetplan.search.records import Progress

STANDING = Progress(best=2.0, bound=1.9, elapsed_s=3.21, phase="combining shapes")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, quiet: bool = False, term: str = "xterm") -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", term)
    with ProgressLine("time", quiet=quiet) as line:
        line(STANDING)
        line(STANDING)
    return stream.getvalue()


def test_the_line_names_best_bound_gap_and_time() -> None:
    assert progress_text(STANDING, "time") == "combining shapes: best 2 s, bound 1.9 s, gap 5.0 %, 3.2 s"
    nothing = Progress(best=None, bound=0.0, elapsed_s=0.5, phase="shapes")
    assert progress_text(nothing, "time") == "shapes: no plan yet, 0.5 s"


def test_money_is_shown_as_money() -> None:
    assert "best $2.00" in progress_text(STANDING, "cost")


def test_a_terminal_sees_one_line_that_is_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(monkeypatch, Terminal())
    assert text.count("combining shapes") == 1
    assert "\n" not in text
    assert text.endswith(" \r")


@pytest.mark.parametrize(
    ("stream", "options"),
    [(io.StringIO(), {}), (Terminal(), {"quiet": True}), (Terminal(), {"term": "dumb"})],
    ids=["pipe", "quiet", "dumb terminal"],
)
def test_everyone_else_sees_nothing(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, options: dict[str, bool | str]
) -> None:
    assert drawn(monkeypatch, stream, **options) == ""  # type: ignore[arg-type]
