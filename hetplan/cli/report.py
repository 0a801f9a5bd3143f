"""`hetplan report`: a plan as one page of HTML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import PlanArgument, Quiet
from hetplan.errors import EffortError, InfeasibleError

if TYPE_CHECKING:
    from hetplan.cli.inputs import SavedPlan
    from hetplan.cli.pricing import Priced
    from hetplan.report.html_page import Report
    from hetplan.search.records import SearchRequest, SearchResult


def report(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Write the page here.", show_default=False)],
    no_replan: Annotated[
        bool, typer.Option("--no-replan", help="Skip what needs planning again: comparison, more nodes or memory.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write a plan as one self-contained page: map, timeline, memory, time, what binds."""
    from hetplan.cli.inputs import load_plan
    from hetplan.cli.output import remark, require_writable, write_whole
    from hetplan.cli.pricing import priced_plan
    from hetplan.report.html_page import report_html

    require_writable(out)
    saved = load_plan(plan)
    priced = priced_plan(saved)
    if priced.estimate is None:
        raise priced.broken
    write_whole(out, report_html(_report(saved, priced, replan=not no_replan)))
    if not quiet:
        remark(f"wrote {out}")
    if priced.violations:
        raise priced.broken


def _report(saved: SavedPlan, priced: Priced, *, replan: bool) -> Report:
    from hetplan.report.explanations import Explained
    from hetplan.report.html_page import Report
    from hetplan.search.compare import hetero_efficiency
    from hetplan.search.explain import explain
    from hetplan.search.records import Candidate
    from hetplan.simulate.records import Conditions
    from hetplan.simulate.run import simulate
    from hetplan.specs.calibration import Calibration

    job, request, estimate = priced.job, _request(saved), priced.sound_estimate
    found = _searched(priced, request) if replan else None
    others = (found.best, *found.runners_up) if found is not None else ()
    alternatives = found.alternatives if found is not None else ()
    return Report(
        explained=Explained(
            layout=priced.layout,
            estimate=estimate,
            proof=priced.proof,
            explanation=explain(priced.layout, priced.prices, request, replan=replan),
            timeline=simulate(priced.layout, priced.prices, Conditions(contention=False, most_copies=1)),
            next_best=next((other for other in others if other.layout != priced.layout), None),
        ),
        setting=job.setting,
        inputs=tuple(each for each in (job.cluster_input, job.model_input, job.calibration_input) if each is not None),
        calibration=job.calibration or Calibration(),
        alternatives=alternatives,
        hetero_efficiency=hetero_efficiency(Candidate(layout=priced.layout, estimate=estimate), alternatives),
        warnings=(
            *(f"Broken rule: {violation}" for violation in priced.violations),
            *(f"{name} has changed since the plan was made; its new content is used." for name in saved.changed),
        ),
    )


def _request(saved: SavedPlan) -> SearchRequest:
    """Return a request that would find such a plan; a budget of time is not asked again."""
    from hetplan.search.records import SearchRequest

    proof = saved.plan.proof
    return SearchRequest(
        objective="cost" if proof is not None and proof.objective in ("cost", "cost-within-time") else "time",
        limits=saved.limits,
        engine=proof.engine if proof is not None else "hetplan",
        effort=1.0,
        top=2,
    )


def _searched(priced: Priced, request: SearchRequest) -> SearchResult | None:
    """Return what a short search finds beside this plan, with all that its engine can run."""
    from hetplan.plan.limits import ENGINES
    from hetplan.search.solve import search

    try:
        return search(priced.prices, replace(request, limits=ENGINES[request.engine]))
    except (InfeasibleError, EffortError):
        return None
