"""`hetplan check`: do saved plans still keep every rule and what they promised?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli.options import JsonFlag
from hetplan.errors import CheckFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hetplan.plan.records import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Relative drift of a prediction that is still no failure."""

    time: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check found in one plan."""

    path: str
    problems: tuple[str, ...]
    saved_step_s: float
    step_s: float | None
    """As priced now; None where the layout cannot be priced."""

    @property
    def document(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "path": self.path,
            "ok": not self.problems,
            "problems": list(self.problems),
            "saved_step_s": self.saved_step_s,
            "step_s": self.step_s,
        }


def check(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN...", help="Saved plans.", show_default=False)],
    time_tolerance: Annotated[
        float, typer.Option("--time-tolerance", metavar="X", min=0.0, help="Relative drift of the step time allowed.")
    ] = 0.01,
    memory_tolerance: Annotated[
        float, typer.Option("--memory-tolerance", metavar="X", min=0.0, help="Relative drift of peak memory allowed.")
    ] = 0.01,
    as_json: JsonFlag = False,
) -> None:
    """Check that saved plans keep every rule and their promises."""
    from hetplan.cli.output import show, show_json

    tolerances = Tolerances(time=time_tolerance, memory=memory_tolerance)
    verdicts = [_verdict(path, tolerances) for path in plans]
    if as_json:
        show_json({"plans": [verdict.document for verdict in verdicts]})
    else:
        show("\n".join(_verdict_text(verdict) for verdict in verdicts))
    failed = [verdict.path for verdict in verdicts if verdict.problems]
    if failed:
        raise CheckFailedError(f"{len(failed)} of {len(plans)} plans failed: {', '.join(failed)}")


def _verdict_text(verdict: Verdict) -> str:
    from hetplan.report.tables import bullets
    from hetplan.units import format_seconds

    word = "FAILED" if verdict.problems else "ok"
    headline = f"{verdict.path}: {word}, step time {format_seconds(verdict.saved_step_s)}"
    return f"{headline}\n{bullets(verdict.problems)}".rstrip()


def _verdict(path: str, tolerances: Tolerances) -> Verdict:
    from hetplan.cli.inputs import load_plan
    from hetplan.plan.check import check as broken_rules
    from hetplan.plan.estimate import estimate

    saved = load_plan(path)
    plan, job = saved.plan, saved.job
    prices = job.prices
    violations = broken_rules(plan.layout, prices, saved.limits)
    problems = [f"{name} has changed since the plan was made" for name in saved.changed]
    problems += [str(violation) for violation in violations]
    now = None if any(violation.unpriceable for violation in violations) else estimate(plan.layout, prices)
    if now is not None and not violations:
        problems += _drift(plan.estimate, now, tolerances)
    return Verdict(
        path=path,
        problems=tuple(problems),
        saved_step_s=plan.estimate.step_s,
        step_s=now.step_s if now is not None else None,
    )


def _drift(saved: Estimate, now: Estimate, tolerances: Tolerances) -> Iterator[str]:
    """Yield what is no longer as predicted."""
    from hetplan.report.layouts import shape_name
    from hetplan.units import format_bytes, format_seconds

    if abs(now.step_s - saved.step_s) > tolerances.time * saved.step_s:
        yield f"step time was {format_seconds(saved.step_s)}, is now {format_seconds(now.step_s)}"
    for before, after in zip(saved.stages, now.stages, strict=True):
        old, new = before.memory.total_bytes, after.memory.total_bytes
        if abs(new - old) > tolerances.memory * old:
            where = f"replica {shape_name(after.replica)} stage {after.stage}"
            yield f"peak memory of {where} was {format_bytes(old)}, is now {format_bytes(new)}"
