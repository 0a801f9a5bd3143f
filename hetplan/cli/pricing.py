"""A layout priced and held to the rules: what `estimate` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetplan.errors import CheckFailedError, HetplanError, InfeasibleError, UsageError

if TYPE_CHECKING:
    from hetplan.cli.inputs import Job, SavedPlan
    from hetplan.costs.prices import Prices
    from hetplan.plan.check import Violation
    from hetplan.plan.layouts import Grid
    from hetplan.plan.records import Estimate, Layout, Proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout, what it costs, and the rules it breaks."""

    job: Job
    prices: Prices
    layout: Layout
    estimate: Estimate | None
    """None: a rule it breaks makes it senseless to price."""
    violations: tuple[Violation, ...]
    proof: Proof | None
    failure: type[HetplanError]
    """What it is to break a rule that is not about memory."""
    advice: str = ""
    """What would make it fit memory."""

    @property
    def sound_estimate(self) -> Estimate:
        """What the layout costs.

        Raises:
            HetplanError: it breaks a rule that makes it senseless to price.
        """
        if self.estimate is None:
            raise self.broken
        return self.estimate

    @property
    def broken(self) -> HetplanError:
        """The error that names the rules that are broken."""
        about_memory = all(violation.rule == "memory" for violation in self.violations)
        error = InfeasibleError if about_memory and self.failure is UsageError else self.failure
        more = f" (and {len(self.violations) - 1} more)" if len(self.violations) > 1 else ""
        return error(f"{self.violations[0]}{more}{f'. {self.advice}' if self.advice else ''}")


def priced_grid(job: Job, grid: Grid) -> Priced:
    """Return the uniform layout of some degrees, priced.

    Raises:
        UsageError: the degrees do not fit the devices, the batch, the schedule or the layers.
    """
    from hetplan.plan.check import check
    from hetplan.plan.estimate import estimate
    from hetplan.plan.layouts import grid_layout
    from hetplan.plan.limits import Limits
    from hetplan.search.explain_grid import grid_advice

    prices = job.prices
    layout = grid_layout(prices, grid)
    limits = Limits(cp=(grid.cp,), stage_dp=(grid.stage_dp,), schedules=(layout.schedule,), tp_within_node=False)
    violations = check(layout, prices, limits)
    priceable = not any(violation.unpriceable for violation in violations)
    too_large = bool(violations) and all(violation.rule == "memory" for violation in violations)
    return Priced(
        job=job,
        prices=prices,
        layout=layout,
        estimate=estimate(layout, prices) if priceable else None,
        violations=violations,
        proof=None,
        failure=UsageError,
        advice=grid_advice(prices, grid) if too_large else "",
    )


def priced_plan(saved: SavedPlan) -> Priced:
    """Return a saved plan, priced as its inputs are now; a remark names those that have changed."""
    from hetplan.cli.output import remark
    from hetplan.plan.check import check
    from hetplan.plan.estimate import estimate

    for name in saved.changed:
        remark(f"note: {name} has changed since the plan was made; its new content is used")
    job, plan = saved.job, saved.plan
    prices = job.prices
    violations = check(plan.layout, prices, saved.limits)
    priceable = not any(violation.unpriceable for violation in violations)
    cost = estimate(plan.layout, prices) if priceable else None
    unchanged = cost is not None and cost.step_s == plan.estimate.step_s
    return Priced(
        job=job,
        prices=prices,
        layout=plan.layout,
        estimate=cost,
        violations=violations,
        proof=plan.proof if unchanged else None,
        failure=CheckFailedError,
    )


def show_priced(priced: Priced, *, as_json: bool, full: bool) -> None:
    """Show what a layout costs, and fail when it breaks a rule.

    Raises:
        InfeasibleError: a layout given by degrees does not fit memory.
        UsageError: a layout given by degrees breaks another rule.
        CheckFailedError: a saved plan breaks a rule.
    """
    from hetplan.cli.inputs import plan_of
    from hetplan.cli.output import show, show_json
    from hetplan.report.documents import estimate_document
    from hetplan.report.estimates import estimate_text

    job, cost, violations = priced.job, priced.estimate, priced.violations
    about_memory = all(violation.rule == "memory" for violation in violations)
    if cost is not None and (about_memory or priced.failure is CheckFailedError):
        if as_json:
            from hetplan.plan.document import plan_document

            plan = plan_of(job, priced.layout, cost, priced.proof)
            document = estimate_document(cost, priced.proof, plan_document(plan))
            show_json(document | {"violations": [str(violation) for violation in violations]})
        else:
            show(estimate_text(priced.layout, cost, priced.proof, job.setting, full=full))
    if violations:
        raise priced.broken
