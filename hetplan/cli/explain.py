"""`hetplan explain`: what a plan does, what holds it back, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import JsonFlag, PlanArgument, Verbose
from hetplan.errors import HetplanError

if TYPE_CHECKING:
    from hetplan.cli.inputs import SavedPlan
    from hetplan.cli.pricing import Priced
    from hetplan.search.records import Candidate, SearchRequest


def explain(
    plan: PlanArgument,
    no_replan: Annotated[
        bool, typer.Option("--no-replan", help="Skip what needs planning again: more nodes or memory, the next best.")
    ] = False,
    as_json: JsonFlag = False,
    verbose: Verbose = False,
) -> None:
    """Explain a plan: roles, time, memory, what binds, what would help."""
    from hetplan.cli.inputs import load_plan
    from hetplan.cli.output import show, show_json
    from hetplan.cli.pricing import priced_plan
    from hetplan.report.explanations import Explained, explanation_document, explanation_text
    from hetplan.search.explain import explain as explanation_of
    from hetplan.simulate.records import Conditions
    from hetplan.simulate.run import simulate

    saved = load_plan(plan)
    priced = priced_plan(saved)
    if priced.estimate is None:
        raise priced.broken
    request = _request(saved)
    explained = Explained(
        layout=priced.layout,
        estimate=priced.estimate,
        proof=priced.proof,
        explanation=explanation_of(priced.layout, priced.prices, request, replan=not no_replan),
        timeline=simulate(priced.layout, priced.prices, Conditions(contention=False, most_copies=1)),
        next_best=None if no_replan else _next_best(priced, request),
    )
    if as_json:
        show_json(explanation_document(explained))
    else:
        show(explanation_text(explained, priced.job.setting, full=verbose))


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
        compare=False,
    )


def _next_best(priced: Priced, request: SearchRequest) -> Candidate | None:
    """Return the best plan a short search finds beside this one."""
    from hetplan.search.solve import search

    try:
        found = search(priced.prices, request)
    except HetplanError:
        return None
    return next((other for other in (found.best, *found.runners_up) if other.layout != priced.layout), None)
