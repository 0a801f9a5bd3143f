"""A plan as one page of HTML that needs no network: everything `estimate` and `explain` say, drawn.

Each number of the estimate carries its exact value and its key in `estimate --json` (`data-key`, `data-value`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import hetplan
from hetplan.plan.placement import place
from hetplan.plan.records import Input
from hetplan.report.explanations import Explained
from hetplan.report.html import Markup, bullets, joined, section, tag
from hetplan.report.html_cluster import cluster_map, layer_strips
from hetplan.report.html_origins import origins
from hetplan.report.html_rows import StageRow, stage_rows
from hetplan.report.html_script import SCRIPT
from hetplan.report.html_sections import advice, comparison, header, stage_table
from hetplan.report.html_style import STYLE
from hetplan.report.layouts import Setting
from hetplan.report.searches import runner_up_notes
from hetplan.report.svg_bars import memory_figure, time_figure
from hetplan.report.svg_timeline import left_out_note, timeline_figure
from hetplan.search.records import Alternative, Candidate
from hetplan.specs.calibration import Calibration
from hetplan.units import format_seconds

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The page may load nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan with all that a page says of it."""

    explained: Explained
    setting: Setting
    inputs: tuple[Input, ...]
    calibration: Calibration
    alternatives: tuple[Alternative, ...] = ()
    hetero_efficiency: float | None = None
    warnings: tuple[str, ...] = ()
    """Rules the plan breaks, files that have changed."""


def report_html(report: Report) -> str:
    """Return the page."""
    explained, setting = report.explained, report.setting
    layout = place(explained.layout, setting.cluster)
    rows = stage_rows(layout, explained.estimate)
    title = f"{setting.model.name} on {setting.cluster.name}: {format_seconds(explained.estimate.step_s)} a step"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    body = tag(
        "body",
        header(layout, explained.estimate, explained.proof, setting),
        tag("div", bullets(report.warnings), class_="warning") if report.warnings else "",
        tag("main", *_placed(report, rows), *_spent(report, rows), *_advised(report)),
        tag("footer", f"hetplan {hetplan.__version__}; every marked number is that of `hetplan estimate PLAN --json`"),
        tag("script", Markup(SCRIPT)),
    )
    return f'<!doctype html>\n<html lang="en">{head}\n{body}</html>\n'


def _placed(report: Report, rows: Sequence[StageRow]) -> list[Markup]:
    layout, estimate, setting = report.explained.layout, report.explained.estimate, report.setting
    placed = place(layout, setting.cluster)
    idle = [f"{count:,} devices of group {name} are idle" for name, count in report.explained.explanation.unused]
    return [
        section(
            "Who holds what",
            layer_strips(placed, setting),
            cluster_map(placed, setting),
            tag("p", "; ".join(idle), class_="note") if idle else "",
            name="map",
            note="Decoder layers of each stage, first to last, in the colour of its group; below, where each runs.",
        ),
        section("Stages", stage_table(rows, placed, setting, estimate.step_s), name="stages"),
    ]


def _spent(report: Report, rows: Sequence[StageRow]) -> list[Markup]:
    explained, cluster = report.explained, report.setting.cluster
    estimate = explained.estimate
    one = "One copy of each replica shape"
    note = f"{one}, links not shared. {left_out_note(rows, len(estimate.stages))}".strip()
    return [
        section("A step over time", timeline_figure(explained.timeline, rows, cluster), name="timeline", note=note),
        section("Where time goes", time_figure(estimate), name="time"),
        section(
            "Memory",
            memory_figure(rows, cluster),
            name="memory",
            note="Of one device at the peak, against what it has.",
        ),
    ]


def _advised(report: Report) -> list[Markup]:
    explained = report.explained
    found, best = explained.explanation, Candidate(layout=explained.layout, estimate=explained.estimate)
    compared = comparison(best, report.alternatives, report.hetero_efficiency)
    runners = runner_up_notes(best, [explained.next_best]) if explained.next_best is not None else []
    next_best = joined([tag("h3", "Next best"), bullets(runners)]) if runners else ""
    inputs = origins(explained.layout, explained.estimate, report.setting, report.inputs, report.calibration)
    binds = [binding.sentence for binding in found.bindings]
    return [
        section("Compared with", compared, next_best, name="comparison"),
        section("What binds", bullets(binds) if binds else "", name="binds", note="Most seconds first."),
        section("What would help", advice(found), name="advice", note="One change at a time."),
        section("Before it runs", bullets(found.remarks) if found.remarks else "", name="remarks"),
        section("Where the numbers come from", inputs, name="origins"),
    ]
