"""Results as mappings for JSON; the keys are documented in the README and stay.

Times are seconds, memory bytes, money US dollars, energy joules; what is not known is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetplan.plan.records import Estimate, Proof
from hetplan.report.estimates import memory_parts, time_parts
from hetplan.report.searches import closer_than_error
from hetplan.search.records import Alternative, Candidate, SearchResult
from hetplan.simulate.records import Timeline

Document = dict[str, Any]


PLAN_HEADER = {"hetplan": "plan/v1"}


def estimate_document(estimate: Estimate, proof: Proof | None, plan: Mapping[str, Any]) -> Document:
    """Return what a plan costs and, where a search made it, how good it is proved to be."""
    timed = proof is not None and proof.objective == "time"
    return {
        "status": proof.status if proof is not None else "given",
        "step_s": estimate.step_s,
        "bound_s": finite(proof.bound) if proof is not None and timed else None,
        "gap": finite(proof.gap) if proof is not None else None,
        "search_s": None,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "usd_per_step": estimate.usd_per_step,
        "joules_per_step": estimate.joules_per_step,
        "peak_bytes": [stage.memory.total_bytes for stage in estimate.stages],
        "time_parts_s": {name.removesuffix("_s"): seconds for name, seconds in time_parts(estimate.parts)},
        "dp_overlapped_s": estimate.dp_overlapped_s,
        "relative_error": estimate.relative_error,
        "stages": [
            {
                "replica": stage.replica,
                "stage": stage.stage,
                "group": stage.group,
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "busy_s": stage.busy_s,
                "in_flight": stage.in_flight,
                "capacity_bytes": stage.capacity_bytes,
                "peak_bytes": stage.memory.total_bytes,
                "memory_bytes": {name.removesuffix("_bytes"): size for name, size in memory_parts(stage.memory)},
            }
            for stage in estimate.stages
        ],
        "origins": dict(estimate.origins),
        "plan": PLAN_HEADER | dict(plan),
    }


def search_document(result: SearchResult, plan: Mapping[str, Any]) -> Document:
    """Return everything a search found."""
    document = estimate_document(result.best.estimate, result.proof, plan)
    document |= {
        "search_s": result.search_s,
        "objective": result.proof.objective,
        "value": result.proof.value,
        "bound": finite(result.proof.bound),
        "floor": finite(result.proof.floor),
        "effort": result.proof.effort,
        "engine": result.proof.engine,
        "space": result.space,
        "comparison": [_alternative(other) for other in result.alternatives],
        "hetero_efficiency": result.hetero_efficiency,
        "runners_up": [
            _candidate(other) | {"closer_than_error": closer_than_error(result.best, other)}
            for other in result.runners_up
        ],
        "dropped": dict(result.dropped),
    }
    if result.batches:
        document["global_batch"] = {
            "asked": result.batches[0],
            "plan": result.best.layout.num_samples,
            "searched": sorted(result.batches),
        }
    return document


def _alternative(other: Alternative) -> Document:
    costs = _candidate(other.candidate) if other.candidate is not None else None
    return {"name": other.name, "reason": other.reason, "costs": costs}


def _candidate(candidate: Candidate) -> Document:
    estimate = candidate.estimate
    return {
        "step_s": estimate.step_s,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "usd_per_step": estimate.usd_per_step,
        "joules_per_step": estimate.joules_per_step,
        "num_devices": candidate.layout.num_devices,
    }


def timeline_document(timeline: Timeline) -> Document:
    """Return what a simulation found; the timeline itself is the trace's."""
    return {
        "step_s": timeline.step_s,
        "estimated_s": timeline.estimated_s,
        "replica_s": list(timeline.replica_s),
        "waited_s": dict(timeline.waited_s),
        "copies": [{"simulated": simulated, "all": total} for simulated, total in timeline.copies],
        "notes": list(timeline.notes),
    }


def finite(value: float) -> float | None:
    """Return `value`, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None
