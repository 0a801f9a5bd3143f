"""Plans as YAML: the same plan gives the same bytes; `read_plan` gives the same plan back.

Mappings and lists that hold only scalars take one line, so a plan for ten thousand devices has a row a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetplan.plan.document import plan_document
from hetplan.plan.read_plan import plan_from_text, read_plan
from hetplan.plan.records import Plan
from hetplan.specs.encode import scalar_text

__all__ = ["plan_from_text", "plan_text", "read_plan"]


def plan_text(plan: Plan) -> str:
    """Return the text of a plan's file."""
    return "hetplan: plan/v1\n" + "".join(f"{line}\n" for line in mapping_lines(plan_document(plan)))


def mapping_lines(mapping: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a nested mapping."""
    for key, value in mapping.items():
        name = scalar_text(key)
        if _fits_a_line(value):
            yield f"{name}: {_flow(value)}"
        elif isinstance(value, dict):
            yield f"{name}:"
            yield from (f"  {line}" for line in mapping_lines(value))
        else:
            yield f"{name}:"
            yield from (f"  {line}" for item in value for line in _item_lines(item))


def _item_lines(item: Any) -> Iterator[str]:
    if _fits_a_line(item):
        yield f"- {_flow(item)}"
        return
    for index, line in enumerate(mapping_lines(item)):
        yield f"{'  ' if index else '- '}{line}"


def _fits_a_line(value: Any) -> bool:
    """Whether a value is a scalar, a list of scalars, or a mapping that holds at most one level of mappings."""
    if isinstance(value, dict):
        return all(_is_flat(item) for item in value.values())
    return _is_flat(value) or (isinstance(value, list) and all(not isinstance(item, dict | list) for item in value))


def _is_flat(value: Any) -> bool:
    if isinstance(value, dict):
        return all(not isinstance(item, dict | list) for item in value.values())
    return not isinstance(value, list)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar_text(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return scalar_text(value)
