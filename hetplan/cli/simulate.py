"""`hetplan simulate`: a step of a plan event by event, with links that are shared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetplan.cli.options import JsonFlag, PlanArgument


def simulate(
    plan: PlanArgument,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write a Chrome/Perfetto trace here.")
    ] = None,
    contention: Annotated[
        bool, typer.Option("--contention/--no-contention", help="Transfers share NICs and lines.")
    ] = True,
    jitter: Annotated[
        float, typer.Option("--jitter", metavar="X", min=0.0, help="Standard deviation of delays, relative.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the jitter.")] = 0,
    copies: Annotated[int, typer.Option("--copies", metavar="K", min=1, help="Copies of a shape to simulate.")] = 8,
    as_json: JsonFlag = False,
) -> None:
    """Simulate a step of a plan, with contention and jitter."""
    from hetplan.cli.inputs import load_plan
    from hetplan.cli.output import json_text, require_writable, show, show_json, write_whole
    from hetplan.cli.pricing import priced_plan
    from hetplan.report.documents import timeline_document
    from hetplan.report.timelines import timeline_text
    from hetplan.simulate.records import Conditions
    from hetplan.simulate.run import simulate as run_step
    from hetplan.simulate.trace import chrome_trace

    require_writable(out)
    conditions = Conditions(contention=contention, jitter=jitter, seed=seed, most_copies=copies)
    priced = priced_plan(load_plan(plan))
    if priced.estimate is None:
        raise priced.broken
    timeline = run_step(priced.layout, priced.prices, conditions)
    if out is not None:
        write_whole(out, json_text(chrome_trace(timeline)))
    if as_json:
        show_json(timeline_document(timeline))
    else:
        show(timeline_text(timeline, priced.layout, priced.job.setting))
