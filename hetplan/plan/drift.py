"""Is a saved plan still true? What it breaks, what has changed under it, how far its numbers have drifted.

Everything is a `Finding`: an aspect, one sentence, and the place of the plan's file it speaks of, as the keys and
indices that lead there, so that a report can name the line. Drift is relative to the saved number:
``|now - saved| > tolerance * saved``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hetplan.costs.prices import Prices
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.plan.records import Estimate, Plan
from hetplan.plan.rules import Violation, stage_place
from hetplan.specs.nodes import ListNode, MapNode, Node
from hetplan.units import format_bytes, format_seconds

Aspect = Literal["file", "inputs", "rules", "time", "memory", "search"]
"""file: the plan, or a file it names, cannot be read; search: a better plan is known now."""

ASPECTS: tuple[Aspect, ...] = ("file", "inputs", "rules", "time", "memory", "search")
Keys = tuple[str | int, ...]

_ROW = re.compile(r"replica ([A-Z])(\d*)(?: stage (\d+))?")
_INPUTS = ("cluster", "model", "calibration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Relative drift of a prediction that is still no failure."""

    time: float = 0.01
    memory: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One reason why a plan is no longer what it promised."""

    aspect: Aspect
    message: str
    keys: Keys = ()
    """Where in the plan's file: `("layout", "replicas", 0, "stages", 2)`; empty: the whole file."""
    rule: str = ""
    """The rule of `check` that is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What looking at one plan again gave."""

    findings: tuple[Finding, ...]
    estimate: Estimate | None
    """As priced now; None where the layout cannot be priced."""


def review(plan: Plan, prices: Prices, limits: Limits, changed: Iterable[str], tolerances: Tolerances) -> Outcome:
    """Return what a saved plan breaks under the prices of today; `changed` names inputs whose content is another.

    Drift is only looked for where no rule is broken: a broken layout's numbers promise nothing.
    """
    violations = check(plan.layout, prices, limits)
    priceable = not any(violation.unpriceable for violation in violations)
    now = estimate(plan.layout, prices) if priceable else None
    found = [_changed_input(plan, name) for name in changed]
    found += [_broken_rule(violation) for violation in violations]
    if now is not None and not violations:
        found += drift(plan.estimate, now, tolerances)
    return Outcome(findings=tuple(found), estimate=now)


def drift(saved: Estimate, now: Estimate, tolerances: Tolerances) -> Iterator[Finding]:
    """Yield what is no longer as predicted."""
    if _has_drifted(saved.step_s, now.step_s, tolerances.time):
        message = f"step time was {format_seconds(saved.step_s)}, is now {format_seconds(now.step_s)}"
        message += _change_text(saved.step_s, now.step_s)
        yield Finding(aspect="time", message=message, keys=("estimate", "step_s"))
    for index, (before, after) in enumerate(zip(saved.stages, now.stages, strict=True)):
        old, new = before.memory.total_bytes, after.memory.total_bytes
        if _has_drifted(old, new, tolerances.memory):
            message = f"peak memory of {stage_place(after.replica, after.stage)} was {format_bytes(old)}"
            message += f", is now {format_bytes(new)}{_change_text(old, new)}"
            yield Finding(aspect="memory", message=message, keys=("estimate", "stages", index))


def _has_drifted(saved: float, now: float, tolerance: float) -> bool:
    return abs(now - saved) > tolerance * saved


def _change_text(saved: float, now: float) -> str:
    return f" ({100 * (now / saved - 1):+.2g} %)" if saved > 0 else ""


def _changed_input(plan: Plan, name: str) -> Finding:
    sources = (plan.cluster, plan.model, plan.calibration)
    keys = next((kind for kind, source in zip(_INPUTS, sources, strict=True) if source and source.name == name), "")
    return Finding(aspect="inputs", message=f"{name} has changed since the plan was made", keys=(keys, "sha256"))


def _broken_rule(violation: Violation) -> Finding:
    return Finding(aspect="rules", message=str(violation), keys=_layout_keys(violation.where), rule=violation.rule)


def _layout_keys(where: str) -> Keys:
    """Return the keys of the row or stage that words such as `replica B1 stage 2` name."""
    match = _ROW.match(where)
    if match is None:
        return ("layout",)
    row = ord(match[1]) - ord("A") + 26 * int(match[2] or 0)
    stage: Keys = ("stages", int(match[3])) if match[3] else ()
    return ("layout", "replicas", row, *stage)


def line_of(root: Node, keys: Keys) -> tuple[int, int]:
    """Return the line and column where `keys` lead in a document, or as far as they lead."""
    place, node = (root.line, root.column), root
    for key in keys:
        if isinstance(node, MapNode) and key in node.entries:
            name, node = node.entries[str(key)]
            place = (name.line, name.column)
        elif isinstance(node, ListNode) and isinstance(key, int) and key < len(node.items):
            node = node.items[key]
            place = (node.line, node.column)
        else:
            break
    return place
