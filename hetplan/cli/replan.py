"""`hetplan replan`: plan a running job again, on what is left or on another cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import JsonFlag, PlanArgument, Verbose
from hetplan.errors import CheckFailedError, InfeasibleError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetplan.cli.inputs import SavedPlan
    from hetplan.costs.prices import Prices
    from hetplan.plan.records import Estimate, Layout, Proof
    from hetplan.report.replans import Replanned
    from hetplan.search.records import Candidate, SearchRequest
    from hetplan.specs.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A saved plan, and the facts it is to go on under."""

    saved: SavedPlan
    target: SavedPlan
    """The same plan under the new cluster file, lost devices still in it: indices of the new plan count there."""
    left: Cluster
    """What may be used of it."""
    lost: tuple[str, ...]


def replan(
    plan: PlanArgument,
    lost: Annotated[
        list[str] | None,
        typer.Option("--lost", metavar="NODES", help="Nodes (hostlist) or node:slot that are gone; repeatable."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="FILE", help="Go on on this cluster instead.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="Go on with these constants instead.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the new plan here.")] = None,
    effort: Annotated[float, typer.Option("--effort", metavar="X", min=0.0, help="Effort of the search.")] = 2.0,
    wide: Annotated[bool, typer.Option("--wide", help="Search all plans, not only those like the old one.")] = False,
    as_json: JsonFlag = False,
    verbose: Verbose = False,
) -> None:
    """Plan a job again after a loss or on a new cluster, and say what must move."""
    from hetplan.cli.output import remark, require_writable, show, show_json, write_whole
    from hetplan.plan.text import plan_text
    from hetplan.report.replans import replan_document, replan_text

    if not lost and cluster is None and calibration is None:
        raise UsageError("say what has changed: --lost NODES, --cluster FILE or --calibration FILE")
    require_writable(out)
    change = _change(plan, tuple(lost or ()), cluster, calibration)
    for name in change.saved.changed:
        remark(f"note: {name} has changed since the plan was made; its new content is used")
    found = _replanned(change, effort, wide=wide)
    if out is not None:
        write_whole(out, plan_text(found.plan))
    if as_json:
        show_json(replan_document(found))
    else:
        show(replan_text(found, change.target.job.setting, full=verbose))


def _change(path: str, lost: tuple[str, ...], cluster: str | None, calibration: Path | None) -> _Change:
    """Return what is to be planned again.

    Raises:
        SpecError: a file cannot be read.
        UsageError: a lost node is not in the cluster, or nothing is left.
        CheckFailedError: the old plan makes no sense even on its own cluster.
    """
    from hetplan.cli.inputs import load_plan
    from hetplan.plan.check import check
    from hetplan.plan.placement import place
    from hetplan.plan.survivors import without

    saved = load_plan(path)
    target = load_plan(path, cluster=cluster, calibration=calibration) if cluster or calibration else saved
    broken = [v for v in check(saved.plan.layout, saved.job.prices, saved.limits) if v.unpriceable]
    if broken:
        raise CheckFailedError(f"{path} is no plan for its own cluster {saved.job.cluster_input.name}: {broken[0]}")
    words = tuple(word for given in lost for word in _words(given))
    layout = place(saved.plan.layout, saved.job.cluster)
    return _Change(
        saved=replace(saved, plan=replace(saved.plan, layout=layout)),
        target=target,
        left=without(target.job.cluster, words),
        lost=words,
    )


def _words(given: str) -> tuple[str, ...]:
    from hetplan.specs.hostlist import expand_hostlist

    return (given,) if ":" in given else expand_hostlist(given)


def _replanned(change: _Change, effort: float, *, wide: bool) -> Replanned:
    """Return the job's new plan beside its old one.

    Raises:
        InfeasibleError: nothing valid was found on what is left.
    """
    from hetplan.cli.inputs import plan_of
    from hetplan.costs.prices import price
    from hetplan.plan.difference import difference
    from hetplan.plan.estimate import estimate
    from hetplan.plan.moves import moves
    from hetplan.plan.survivors import carried_over, resized
    from hetplan.report.replans import Replanned
    from hetplan.search.again import request_of

    start_s = time.monotonic()
    saved, job = change.saved, change.target.job
    old_layout, old_cluster = saved.plan.layout, saved.job.cluster
    carried, old, problems = _old_plan(change)
    shrunk = tuple(resized(old_layout, old_cluster, change.left, job.workload.global_batch))
    prices = price(change.left, job.model, job.workload, job.calibration)
    request = request_of(saved.plan, saved.limits, effort)
    known = [*([carried] if carried is not None else []), *shrunk]
    best, proof, space = _found(prices, request, known, old_layout, wide=wide)
    layout = carried_over(best.layout, change.left, job.cluster)
    whole = job.prices
    plan = plan_of(job, layout, estimate(layout, whole), proof)
    return Replanned(
        lost=change.lost,
        saved=saved.plan.estimate,
        old=old,
        old_problems=problems,
        resized=_best_valid(change, shrunk),
        plan=plan,
        difference=difference(saved.plan, plan),
        moves=moves((old_layout, old_cluster), (best.layout, change.left), prices),
        search_s=time.monotonic() - start_s,
        space=space,
    )


def _found(
    prices: Prices, request: SearchRequest, known: Sequence[Layout], old: Layout, *, wide: bool
) -> tuple[Candidate, Proof, str]:
    """Return the best plan, its proof and the space that speaks of; where nothing like the old plan fits, of all.

    Raises:
        InfeasibleError: nothing valid was found.
    """
    from hetplan.search.again import near, search_again

    if not wide:
        try:
            narrow = near(request, old, prices)
            return (*search_again(prices, narrow, known), f"plans like the old one ({_space_words(narrow)})")
        except InfeasibleError:
            pass
    return (*search_again(prices, request, known), "all plans of one shape the engine can run")


def _space_words(request: SearchRequest) -> str:
    """Return the degrees a narrowed request allows."""
    limits = request.limits
    values = {"tp": limits.tp, "ep": limits.ep, "microbatches of": limits.microbatch}
    words = [f"{name} {', '.join(map(str, allowed))}" for name, allowed in values.items() if allowed]
    return "; ".join([*words, f"sharding {limits.sharding[0]}", f"recompute {', '.join(limits.recompute)}"])


def _old_plan(change: _Change) -> tuple[Layout | None, Estimate | None, tuple[str, ...]]:
    """Return the old layout under the new indices, its cost, and what keeps it from going on."""
    from hetplan.costs.prices import price
    from hetplan.plan.check import check
    from hetplan.plan.estimate import estimate
    from hetplan.plan.survivors import carried_over

    saved, job = change.saved, change.target.job
    try:
        layout = carried_over(saved.plan.layout, saved.job.cluster, change.left)
    except UsageError as error:
        return None, None, (str(error),)
    prices = price(change.left, job.model, job.workload, job.calibration)
    violations = check(layout, prices, saved.limits)
    if any(violation.unpriceable for violation in violations):
        return None, None, tuple(map(str, violations))
    return layout, estimate(layout, prices), tuple(map(str, violations))


def _best_valid(change: _Change, layouts: tuple[Layout, ...]) -> Estimate | None:
    """Return the cost of the fastest valid one of some layouts."""
    from hetplan.costs.prices import price
    from hetplan.plan.check import check
    from hetplan.plan.estimate import estimate

    job, limits = change.target.job, change.saved.limits
    prices = price(change.left, job.model, job.workload, job.calibration)
    valid = [estimate(layout, prices) for layout in layouts if not check(layout, prices, limits)]
    return min(valid, key=lambda found: found.step_s, default=None)
