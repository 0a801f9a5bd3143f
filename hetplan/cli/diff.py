"""`hetplan diff`: what sets two saved plans apart, and what that costs or gains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import JsonFlag

if TYPE_CHECKING:
    from hetplan.plan.records import Plan


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A saved plan.", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help="The plan to compare it with.", show_default=False)],
    reprice: Annotated[
        bool, typer.Option("--reprice", help="Price both as their inputs are now, not as they were saved.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compare two plans: what moved, what it costs or gains by part."""
    from hetplan.cli.output import show, show_json
    from hetplan.plan.difference import difference
    from hetplan.report.differences import difference_document, difference_text

    old, new = (_plan(path, reprice=reprice) for path in (before, after))
    found = difference(old, new)
    if as_json:
        show_json({"before": before, "after": after, **difference_document(found)})
    else:
        show(difference_text(found, (before, after)))


def _plan(path: str, *, reprice: bool) -> Plan:
    """Return a saved plan, with its cost of today where that is asked for.

    Raises:
        SpecError: the plan, or a file it names, cannot be read.
        CheckFailedError: it is to be priced and breaks a rule that makes that senseless.
    """
    from hetplan.cli.inputs import load_plan, plan_of
    from hetplan.cli.pricing import priced_plan
    from hetplan.plan.read_plan import read_plan

    if not reprice:
        return read_plan(Path(path))
    priced = priced_plan(load_plan(path))
    return plan_of(priced.job, priced.layout, priced.sound_estimate, priced.proof)
