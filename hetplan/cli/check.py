"""`hetplan check`: do saved plans still keep every rule and what they promised?"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.modules import module_verdict
from hetplan.cli.options import JsonFlag, refuse_given
from hetplan.errors import CheckFailedError, HetplanError, SpecError, UsageError

if TYPE_CHECKING:
    from hetplan.cli.inputs import SavedPlan
    from hetplan.costs.prices import Prices
    from hetplan.plan.drift import Finding, Outcome, Tolerances
    from hetplan.report.checks import Located, Rival, Verdict

MOST_PRICES = 8
"""Cost models kept for the next plan; plans of one job share one."""
OF_SEARCH = frozenset({"margin", "effort"})
"""Options that say how to search again."""


@dataclass(slots=True, kw_only=True)  # mutable: remembers cost models and what could not be read
class Checker:
    """Checks plan after plan against the same facts."""

    tolerances: Tolerances
    cluster: str | None
    calibration: Path | None
    effort: float | None
    """Effort of a search for a better plan; None: none is made."""
    margin: float
    """Fraction by which a better plan may be better."""
    unreadable: list[HetplanError] = field(default_factory=list)
    _prices: dict[tuple[object, ...], Prices] = field(default_factory=dict)

    def verdict(self, path: str) -> Verdict:
        """Return what is found in one plan; a file that cannot be read is a finding too."""
        from hetplan.cli.inputs import load_plan
        from hetplan.plan.drift import review
        from hetplan.plan.module_text import is_module_plan
        from hetplan.report.checks import Verdict

        try:
            if is_module_plan(Path(path)):
                return module_verdict(path)
            saved = load_plan(path, cluster=self.cluster, calibration=self.calibration)
            prices = self._prices_of(saved)
            outcome = review(saved.plan, prices, saved.limits, saved.changed, self.tolerances)
        except HetplanError as error:
            self.unreadable.append(error)
            return Verdict(path=path, findings=(_unreadable(path, error),))
        found, notes, rival = list(outcome.findings), list[str](), None
        if self.effort is not None:
            rival, better, notes = self._search(saved, prices, outcome, self.effort)
            found += better
        return Verdict(
            path=path,
            findings=_located(path, found),
            saved=saved.plan.estimate,
            now=outcome.estimate,
            rival=rival,
            notes=tuple(notes),
        )

    def _prices_of(self, saved: SavedPlan) -> Prices:
        job = saved.job
        sources = (job.cluster_input, job.model_input, job.calibration_input)
        key = (*(source.sha256 if source else None for source in sources), job.workload)
        if key not in self._prices:
            if len(self._prices) >= MOST_PRICES:
                del self._prices[next(iter(self._prices))]
            self._prices[key] = job.prices
        return self._prices[key]

    def _search(
        self, saved: SavedPlan, prices: Prices, outcome: Outcome, effort: float
    ) -> tuple[Rival | None, list[Finding], list[str]]:
        """Return the best plan a new search finds, what that says of the saved one, and remarks."""
        from hetplan.plan.drift import Finding
        from hetplan.report.checks import Rival
        from hetplan.report.estimates import objective_value
        from hetplan.report.searches import layout_words
        from hetplan.report.tables import percent
        from hetplan.search.again import request_of, value_of
        from hetplan.search.solve import search

        if outcome.estimate is None or any(finding.aspect == "rules" for finding in outcome.findings):
            return None, [], ["not compared with a new search: the plan breaks a rule"]
        request = request_of(saved.plan, saved.limits, effort)
        value = value_of(outcome.estimate, request)
        if value is None:
            return None, [], [f"not compared with a new search: it has no {request.objective}"]
        try:
            best = search(prices, request).best
        except HetplanError as error:
            return None, [], [f"a new search finds no plan: {error}"]
        rival = Rival(
            objective=request.objective,
            saved_value=value,
            best_value=min(value, value_of(best.estimate, request) or value),
            estimate=best.estimate,
            layout_words=layout_words(best.layout),
        )
        if rival.gain <= self.margin:
            return rival, [], [f"still within {percent(self.margin)} of the best plan a new search finds"]
        words = f"a better plan is known: {objective_value(rival.best_value, rival.objective)} a step"
        words += f", {percent(rival.gain)} less than this plan: {rival.layout_words}"
        return rival, [Finding(aspect="search", message=words, keys=("proof",))], []


def check(
    context: typer.Context,
    plans: Annotated[list[str], typer.Argument(metavar="PLAN...", help="Saved plans.", show_default=False)],
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="FILE", help="Check against this cluster instead.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="Check against these constants instead.")
    ] = None,
    time_tolerance: Annotated[
        float, typer.Option("--time-tolerance", metavar="X", min=0.0, help="Relative drift of the step time allowed.")
    ] = 0.01,
    memory_tolerance: Annotated[
        float, typer.Option("--memory-tolerance", metavar="X", min=0.0, help="Relative drift of peak memory allowed.")
    ] = 0.01,
    search: Annotated[
        bool, typer.Option("--search", help="Search again: fail when a plan is better by more than --margin.")
    ] = False,
    margin: Annotated[
        float, typer.Option("--margin", metavar="X", min=0.0, help="How much better a new plan may be.")
    ] = 0.01,
    effort: Annotated[float, typer.Option("--effort", metavar="X", min=0.0, help="Effort of --search.")] = 10.0,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write the verdicts as JUnit XML.")
    ] = None,
    annotations: Annotated[
        bool, typer.Option("--annotations", help="Also print GitHub annotations at lines of the plans.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check that saved plans keep every rule and their promises."""
    from hetplan.cli.output import require_writable, show, show_json, write_whole
    from hetplan.plan.drift import Tolerances
    from hetplan.report.checks import annotations_text, checks_document, checks_text, junit_text

    if as_json and annotations:
        raise UsageError("--json and --annotations both go to stdout: ask for one of them")
    if not search:
        refuse_given(context, context.params.keys() - OF_SEARCH, "needs --search")
    require_writable(junit)
    checker = Checker(
        tolerances=Tolerances(time=time_tolerance, memory=memory_tolerance),
        cluster=cluster,
        calibration=calibration,
        effort=effort if search else None,
        margin=margin,
    )
    verdicts = [checker.verdict(path) for path in plans]
    if junit is not None:
        write_whole(junit, junit_text(verdicts))
    marks = annotations_text(verdicts) if annotations else ""
    if as_json and len(checker.unreadable) < len(verdicts):
        show_json(checks_document(verdicts))
    elif not as_json and (text := "\n\n".join(part for part in (checks_text(verdicts), marks) if part)):
        show(text)
    _fail(checker, verdicts)


def _fail(checker: Checker, verdicts: list[Verdict]) -> None:
    """End with the error of the first plan that could not be read, else with the plans that failed, if any."""
    if checker.unreadable:
        first = checker.unreadable[0]
        if len(checker.unreadable) == 1:
            raise first
        raise UsageError(f"{first} (and {len(checker.unreadable) - 1} more plans cannot be read)")
    failed = [verdict.path for verdict in verdicts if not verdict.is_true]
    if failed:
        raise CheckFailedError(f"{len(failed)} of {len(verdicts)} plans failed: {', '.join(failed)}")


def _unreadable(path: str, error: HetplanError) -> Located:
    from hetplan.plan.drift import Finding
    from hetplan.report.checks import Located

    finding = Finding(aspect="file", message=str(error))
    place = error.location if isinstance(error, SpecError) else None
    if place is None:
        return Located(finding=finding, file=path)
    return Located(finding=finding, file=place.file, line=place.line, column=place.column)


def _located(path: str, found: list[Finding]) -> tuple[Located, ...]:
    """Return findings with the lines of the plan's file they speak of."""
    from hetplan.plan.drift import line_of
    from hetplan.report.checks import Located
    from hetplan.specs.nodes import nodes_from_bytes, read_bytes

    if not found:
        return ()
    root = nodes_from_bytes(read_bytes(Path(path)), path)
    places = [line_of(root, finding.keys) for finding in found]
    return tuple(
        Located(finding=finding, file=path, line=line, column=column)
        for finding, (line, column) in zip(found, places, strict=True)
    )
