"""Why nothing fits, in words."""

from __future__ import annotations

from collections.abc import Mapping

from hetplan.search.problem import Problem
from hetplan.search.records import SearchRequest


def explain_infeasible(problem: Problem, request: SearchRequest, dropped: Mapping[str, int]) -> str:
    """Return the binding constraint, how far off it is, and the smallest change that helps."""
    reasons = ", ".join(f"{reason} ({count}x)" for reason, count in dropped.items())
    return f"no plan fits {problem.batch} samples on {sum(problem.devices_g)} devices; refused: {reasons}"
