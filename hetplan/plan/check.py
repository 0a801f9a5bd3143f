"""The one rule book: what a layout may be. One function a rule; a layout is valid where none finds anything.

Rules come in rounds, because what one round refuses the next cannot look at: first what the layout is, then where it
runs. A layout that names no devices is checked where `place` would put it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from hetplan.costs.prices import Prices
from hetplan.errors import UsageError
from hetplan.plan.limits import Limits
from hetplan.plan.placement import is_placed, place
from hetplan.plan.records import Layout
from hetplan.plan.rules import Case, Violation
from hetplan.plan.rules_limits import LIMIT_RULES
from hetplan.plan.rules_model import MODEL_RULES, degree_errors, layers_tp, valid_ep, valid_tp
from hetplan.plan.rules_place import DEVICE_RULES, GROUP_RULES, PLACE_RULES
from hetplan.plan.rules_shape import COUNT_RULES, SHAPE_RULES

__all__ = ["Violation", "check", "degree_errors", "layers_tp", "show_layers", "valid_ep", "valid_tp"]

Rule = Callable[[Case], Iterable[Violation]]
ROUNDS: tuple[tuple[Rule, ...], ...] = (
    COUNT_RULES,
    SHAPE_RULES,
    (*GROUP_RULES, *MODEL_RULES, *LIMIT_RULES),
    DEVICE_RULES,
    PLACE_RULES,
)


def check(layout: Layout, prices: Prices, limits: Limits | None = None) -> tuple[Violation, ...]:
    """Return every rule a layout breaks (empty: it is valid), as far as rules can be asked."""
    case = Case(layout=layout, prices=prices, limits=limits or Limits())
    found: list[Violation] = []
    for rules in ROUNDS:
        if rules is DEVICE_RULES and not is_placed(layout):
            try:
                case = replace(case, layout=place(layout, prices.cluster))
            except UsageError as error:
                return (*found, Violation(rule="devices exist", where="", message=str(error), unpriceable=True))
        for rule in rules:
            found.extend(rule(case))
        if any(violation.unpriceable for violation in found):
            break
    return tuple(found)


def show_layers(layout: Layout, prices: Prices) -> tuple[str, ...]:
    """Return, for each row, the decoder layers of its stages; E and L mark the embedding and the head (loss)."""
    return tuple(", ".join(_stage_words(layout, prices, row)) for row in range(len(layout.replicas)))


def _stage_words(layout: Layout, prices: Prices, row: int) -> Iterator[str]:
    for stage in layout.replicas[row].stages:
        kinds = [layer.kind for layer in prices.model.chain[stage.first_layer : stage.end_layer]]
        first = "E+" if "embedding" in kinds else ""
        last = "+L" if "head" in kinds else ""
        yield f"{first}{kinds.count('decoder')}{last}"
