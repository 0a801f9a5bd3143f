"""A plan as plain mappings: the keys of its YAML file and of the `plan` that JSON results carry.

Times are seconds, sizes bytes, money US dollars, energy joules. `layers: 0-28` and `devices: 0-7,16-23` are inclusive
ranges; a key whose value is not known or not chosen is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from hetplan.costs.records import MemoryUse
from hetplan.plan.records import Estimate, Input, Layout, Plan, Proof, Replica, Stage, StageEstimate, TimeParts
from hetplan.specs.workload import Workload

Document = dict[str, Any]


def plan_document(plan: Plan) -> Document:
    """Return a plan as nested mappings, lists and scalars, in the order of its file."""
    document: Document = {"cluster": _input(plan.cluster), "model": _input(plan.model)}
    if plan.calibration is not None:
        document["calibration"] = _input(plan.calibration)
    document["workload"] = {f.name: plan.workload[f.name] for f in fields(Workload) if f.name in plan.workload}
    document["layout"] = layout_document(plan.layout)
    document["estimate"] = _estimate(plan.estimate)
    if plan.proof is not None:
        document["proof"] = _proof(plan.proof)
    return document


def layout_document(layout: Layout) -> Document:
    """Return a layout as nested mappings, lists and scalars."""
    return {
        "schedule": layout.schedule,
        "sharding": layout.sharding,
        "replicas": [_replica(replica) for replica in layout.replicas],
    }


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    """Return half-open ranges as words with inclusive ends: `0-7,12`."""
    return ",".join(f"{first}-{end - 1}" if end - first != 1 else str(first) for first, end in ranges)


def _input(source: Input) -> Document:
    return {"name": source.name, "sha256": source.sha256}


def _replica(replica: Replica) -> Document:
    return {
        "copies": replica.copies,
        "microbatch": replica.microbatch,
        "num_microbatches": replica.num_microbatches,
        "vpp": replica.vpp,
        "stages": [_stage(stage) for stage in replica.stages],
    }


def _stage(stage: Stage) -> Document:
    document: Document = {
        "group": stage.group,
        "layers": ranges_text([(stage.first_layer, stage.end_layer)]),
        "tp": stage.tp,
        "cp": stage.cp,
        "dp": stage.dp,
        "ep": stage.ep,
        "recompute": stage.recompute,
    }
    if stage.devices:
        document["devices"] = ranges_text(stage.devices)
    return document


def _estimate(estimate: Estimate) -> Document:
    document: Document = {
        "step_s": float(estimate.step_s),
        "parts": _numbers(estimate.parts),
        "replica_s": [float(seconds) for seconds in estimate.replica_s],
        "dp_overlapped_s": float(estimate.dp_overlapped_s),
        "tokens_per_s": float(estimate.tokens_per_s),
        "mfu": float(estimate.mfu),
    }
    if estimate.usd_per_step is not None:
        document["usd_per_step"] = float(estimate.usd_per_step)
    document["joules_per_step"] = float(estimate.joules_per_step)
    if estimate.relative_error is not None:
        document["relative_error"] = float(estimate.relative_error)
    document["origins"] = dict(sorted(estimate.origins.items()))
    document["stages"] = [_stage_estimate(stage) for stage in estimate.stages]
    return document


def _numbers(record: TimeParts | MemoryUse) -> Document:
    return {
        field.name: float(getattr(record, field.name))
        for field in fields(record)
        if getattr(record, field.name) != field.default
    }


def _stage_estimate(stage: StageEstimate) -> Document:
    return {
        "replica": stage.replica,
        "stage": stage.stage,
        "group": stage.group,
        "forward_s": float(stage.forward_s),
        "backward_s": float(stage.backward_s),
        "busy_s": float(stage.busy_s),
        "in_flight": int(stage.in_flight),
        "capacity_bytes": float(stage.capacity_bytes),
        "memory": _numbers(stage.memory),
    }


def _proof(proof: Proof) -> Document:
    return {
        "objective": proof.objective,
        "value": float(proof.value),
        "bound": float(proof.bound),
        "floor": float(proof.floor),
        "status": proof.status,
        "effort": float(proof.effort),
        "engine": proof.engine,
    }
