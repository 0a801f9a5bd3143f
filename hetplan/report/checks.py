"""Verdicts on saved plans: for a terminal, for programs (JSON), for CI servers (JUnit XML, GitHub annotations).

JUnit: one test suite a plan, one test case an aspect of it. GitHub: workflow commands
``::error file=F,line=L,col=C,title=T::MESSAGE`` with percent-escapes, as
https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands describes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from hetplan.plan.drift import ASPECTS, Finding
from hetplan.plan.records import Estimate
from hetplan.report.tables import bullets, percent, table
from hetplan.units import format_seconds

Document = dict[str, Any]

ASPECT_WORDS = {
    "file": "files can be read",
    "inputs": "inputs are unchanged",
    "rules": "keeps every rule",
    "time": "step time is as predicted",
    "memory": "memory is as predicted",
    "search": "no better plan is known",
}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A finding with its place in the plan's file."""

    finding: Finding
    file: str
    line: int = 1
    column: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The best plan a new search finds, against the saved one as priced now; in the objective's unit."""

    objective: str
    saved_value: float
    best_value: float
    estimate: Estimate
    layout_words: str

    @property
    def gain(self) -> float:
        """Fraction by which the new plan is better; 0 where it is not."""
        return max(0.0, 1.0 - self.best_value / self.saved_value) if self.saved_value > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check found in one plan."""

    path: str
    findings: tuple[Located, ...] = ()
    saved: Estimate | None = None
    """None: the plan could not be read."""
    now: Estimate | None = None
    """As priced now; None where the layout cannot be priced."""
    rival: Rival | None = None
    """What a new search found, where one was asked for."""
    notes: tuple[str, ...] = ()

    @property
    def is_true(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def checks_text(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as text: a line for a single plan, a table for more; what failed below."""
    readable = [verdict for verdict in verdicts if verdict.saved is not None or verdict.notes]
    if len(verdicts) == 1 and readable:
        return _single(readable[0], readable[0].saved)
    rows = [_row(verdict, verdict.saved) for verdict in readable if verdict.saved is not None]
    if not rows:
        return "\n\n".join(_single(verdict, None) for verdict in readable)
    text = table(("plan", "verdict", "saved step", "now", "drift", "fullest", "better plan"), rows)
    for verdict in readable:
        if verdict.findings or verdict.notes:
            text += f"\n\n{verdict.path}\n{bullets(_sentences(verdict))}"
    return text


def _single(verdict: Verdict, saved: Estimate | None) -> str:
    step = f", step time {format_seconds(saved.step_s)}" if saved is not None else ""
    return f"{verdict.path}: {_word(verdict)}{step}\n{bullets(_sentences(verdict))}".rstrip()


def _word(verdict: Verdict) -> str:
    return "ok" if verdict.is_true else "FAILED"


def _sentences(verdict: Verdict) -> list[str]:
    return [located.finding.message for located in verdict.findings] + list(verdict.notes)


def _row(verdict: Verdict, saved: Estimate) -> tuple[str, ...]:
    now = verdict.now
    return (
        verdict.path,
        _word(verdict),
        format_seconds(saved.step_s),
        format_seconds(now.step_s) if now is not None else "-",
        f"{100 * (now.step_s / saved.step_s - 1):+.1f} %" if now is not None and saved.step_s > 0 else "-",
        percent(_fullest(now)) if now is not None else "-",
        percent(verdict.rival.gain) if verdict.rival is not None else "",
    )


def _fullest(estimate: Estimate) -> float:
    return max(stage.memory.total_bytes / stage.capacity_bytes for stage in estimate.stages)


def checks_document(verdicts: Sequence[Verdict]) -> Document:
    """Return the verdicts for JSON."""
    return {"plans": [_verdict_document(verdict) for verdict in verdicts]}


def _verdict_document(verdict: Verdict) -> Document:
    saved, now, rival = verdict.saved, verdict.now, verdict.rival
    document: Document = {
        "path": verdict.path,
        "ok": verdict.is_true,
        "problems": [located.finding.message for located in verdict.findings],
        "findings": [_finding_document(located) for located in verdict.findings],
        "notes": list(verdict.notes),
        "saved_step_s": saved.step_s if saved is not None else None,
        "step_s": now.step_s if now is not None else None,
        "saved_peak_bytes": [stage.memory.total_bytes for stage in saved.stages] if saved is not None else None,
        "peak_bytes": [stage.memory.total_bytes for stage in now.stages] if now is not None else None,
    }
    if rival is not None:
        document["search"] = {
            "objective": rival.objective,
            "value": rival.saved_value,
            "best_value": rival.best_value,
            "best_step_s": rival.estimate.step_s,
            "gain": rival.gain,
        }
    return document


def _finding_document(located: Located) -> Document:
    finding = located.finding
    return {
        "aspect": finding.aspect,
        "rule": finding.rule or None,
        "message": finding.message,
        "file": located.file,
        "line": located.line,
        "column": located.column,
    }


def junit_text(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as JUnit XML: a suite a plan, a case an aspect, the findings of an aspect in its failure."""
    root = ElementTree.Element("testsuites", name="hetplan check")
    for verdict in verdicts:
        _add_suite(root, verdict)
    suites = list(root)
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_suite(root: ElementTree.Element, verdict: Verdict) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=_xml(verdict.path))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for aspect in ASPECTS:
        if aspect == "search" and verdict.rival is None:
            continue
        found = [located for located in verdict.findings if located.finding.aspect == aspect]
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(verdict.path), name=ASPECT_WORDS[aspect], time="0"
        )
        counts["tests"] += 1
        if found:
            kind = "error" if aspect == "file" else "failure"
            counts["errors" if aspect == "file" else "failures"] += 1
            result = ElementTree.SubElement(case, kind, message=_xml(found[0].finding.message), type=aspect)
            result.text = _xml("\n".join(f"{one.file}:{one.line}: {one.finding.message}" for one in found))
        elif not _was_asked(verdict, aspect):
            counts["skipped"] += 1
            ElementTree.SubElement(case, "skipped", message="could not be asked")
    for name, number in counts.items():
        suite.set(name, str(number))
    suite.set("time", "0")


def _was_asked(verdict: Verdict, aspect: str) -> bool:
    """Return whether an aspect without findings was looked at: nothing of a broken file, no drift of a broken plan."""
    found = {located.finding.aspect for located in verdict.findings}
    if "file" in found:
        return aspect == "file"
    return aspect not in ("time", "memory") or "rules" not in found


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)


def annotations_text(verdicts: Sequence[Verdict]) -> str:
    """Return one GitHub workflow command a finding, nothing for plans that hold."""
    lines = []
    for verdict in verdicts:
        for located in verdict.findings:
            title = f"hetplan check: {located.finding.aspect}"
            place = f"file={_property(located.file)},line={located.line},col={located.column}"
            lines.append(f"::error {place},title={_property(title)}::{_data(located.finding.message)}")
    return "\n".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
