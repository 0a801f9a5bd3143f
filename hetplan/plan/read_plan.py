"""Plan YAML -> `Plan`, strictly: unknown keys, missing keys and values of the wrong kind are located errors."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TypeVar

from hetplan.costs.records import MemoryUse
from hetplan.plan.limits import ENGINES
from hetplan.plan.records import (
    SCHEDULES,
    Estimate,
    Input,
    Layout,
    Plan,
    Proof,
    Replica,
    Stage,
    StageEstimate,
    Status,
    TimeParts,
)
from hetplan.specs.decode import Fields, document_from_text, read_document
from hetplan.specs.read_workload import (
    ATTENTION_KERNELS,
    GRADIENT_PRECISIONS,
    MAX_GLOBAL_BATCH,
    MAX_SEQ_LEN,
    PRECISION_CHOICES,
)
from hetplan.specs.workload import RECOMPUTES, SHARDINGS

ORIGINS = ("measured", "fitted", "datasheet", "assumed")
OBJECTIVES = ("time", "cost", "energy", "cost-within-time", "devices")
STATUSES: tuple[Status, ...] = ("optimal", "feasible", "limit", "interrupted", "given")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,11})(?:-(0|[1-9][0-9]{0,11}))?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
MOST_COUNT = 10**9
Numbers = TypeVar("Numbers", TimeParts, MemoryUse)


def read_plan(path: Path) -> Plan:
    """Return the plan in a file.

    Raises:
        SpecError: the file is not a valid plan.
    """
    return _plan(read_document(path, "plan"))


def plan_from_text(text: str, file_name: str) -> Plan:
    """Return the plan a text holds; errors name `file_name`.

    Raises:
        SpecError: the text is not a valid plan.
    """
    return _plan(document_from_text(text, file_name, "plan"))


def _plan(root: Fields) -> Plan:
    plan = Plan(
        cluster=_input(root.fields("cluster")),
        model=_input(root.fields("model")),
        calibration=_input(root.fields("calibration")) if root.has("calibration") else None,
        workload=_workload(root.fields("workload")),
        layout=_layout(root.fields("layout")),
        estimate=_estimate(root.fields("estimate")),
        proof=_proof(root.fields("proof")) if root.has("proof") else None,
    )
    root.finish(known=("calibration", "proof"))
    _match_stages(root.fields("estimate"), plan)
    return plan


def _input(row: Fields) -> Input:
    name, digest = row.text("name"), row.text("sha256")
    if not _SHA256.fullmatch(digest):
        raise row.error("expected 64 lower-case hexadecimal digits", "sha256")
    row.finish()
    return Input(name=name, sha256=digest)


def _workload(row: Fields) -> dict[str, str | int | bool]:
    values: dict[str, str | int | bool] = {
        "seq_len": row.integer("seq_len", minimum=1, maximum=MAX_SEQ_LEN),
        "global_batch": row.integer("global_batch", minimum=1, maximum=MAX_GLOBAL_BATCH),
        "precision": row.text("precision", choices=[word for word in PRECISION_CHOICES if word != "auto"]),
    }
    if row.has("gradient_precision"):
        values["gradient_precision"] = row.text("gradient_precision", choices=GRADIENT_PRECISIONS)
    if row.has("attention"):
        values["attention"] = row.text("attention", choices=ATTENTION_KERNELS)
    if row.has("sequence_parallel"):
        values["sequence_parallel"] = row.flag("sequence_parallel")
    row.finish(known=("gradient_precision", "attention", "sequence_parallel"))
    return values


def _layout(row: Fields) -> Layout:
    layout = Layout(
        schedule=row.choice("schedule", SCHEDULES),
        sharding=row.choice("sharding", SHARDINGS),
        replicas=tuple(_replica(replica) for replica in row.rows("replicas")),
    )
    row.finish()
    if not layout.replicas:
        raise row.error("expected at least one replica", "replicas")
    return layout


def _replica(row: Fields) -> Replica:
    replica = Replica(
        copies=row.integer("copies", minimum=1, maximum=MOST_COUNT),
        microbatch=row.integer("microbatch", minimum=1, maximum=MOST_COUNT),
        num_microbatches=row.integer("num_microbatches", minimum=1, maximum=MOST_COUNT),
        vpp=row.integer("vpp", minimum=1, maximum=MOST_COUNT),
        stages=tuple(_stage(stage) for stage in row.rows("stages")),
    )
    row.finish()
    if not replica.stages or len(replica.stages) % replica.vpp:
        raise row.error(f"expected a positive multiple of vpp {replica.vpp} stages", "stages")
    return replica


def _stage(row: Fields) -> Stage:
    (layers,) = _ranges(row, "layers", most=1)
    stage = Stage(
        group=row.text("group"),
        first_layer=layers[0],
        end_layer=layers[1],
        tp=row.integer("tp", minimum=1, maximum=MOST_COUNT),
        cp=row.integer("cp", minimum=1, maximum=MOST_COUNT),
        dp=row.integer("dp", minimum=1, maximum=MOST_COUNT),
        ep=row.integer("ep", minimum=1, maximum=MOST_COUNT),
        recompute=row.choice("recompute", RECOMPUTES),
        devices=_ranges(row, "devices") if row.has("devices") else (),
    )
    row.finish(known=("devices",))
    return stage


def _ranges(row: Fields, key: str, most: int = 10**6) -> tuple[tuple[int, int], ...]:
    """Return inclusive ranges in words as half-open ones."""
    words = row.text(key).split(",")
    if len(words) > most:
        raise row.error(f"expected at most {most} ranges like 0-7, found {len(words)}", key)
    ranges = []
    for word in words:
        match = _RANGE.fullmatch(word)
        if match is None:
            raise row.error("expected ranges like 0-7,12", key)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise row.error(f"range {word} ends before it begins", key)
        ranges.append((first, last + 1))
    return tuple(ranges)


def _estimate(row: Fields) -> Estimate:
    origins = row.fields("origins")
    estimate = Estimate(
        step_s=row.number("step_s", minimum=0),
        parts=_numbers(row.fields("parts"), TimeParts),
        replica_s=_seconds(row, "replica_s"),
        dp_overlapped_s=row.number("dp_overlapped_s", minimum=0),
        tokens_per_s=row.number("tokens_per_s", minimum=0),
        mfu=row.number("mfu", minimum=0),
        usd_per_step=row.number("usd_per_step", minimum=0, default=None),
        joules_per_step=row.number("joules_per_step", minimum=0),
        stages=tuple(_stage_estimate(stage) for stage in row.rows("stages")),
        relative_error=row.number("relative_error", minimum=0, default=None),
        origins={name: origins.text(name, choices=ORIGINS) for name in origins.names()},
    )
    row.finish()
    return estimate


def _numbers(row: Fields, record: type[Numbers], *, minimum: float = -math.inf) -> Numbers:
    values = {
        field.name: row.number(field.name, minimum=minimum)
        for field in fields(record)
        if field.default is MISSING or row.has(field.name)
    }
    row.finish()
    return record(**values)


def _seconds(row: Fields, key: str) -> tuple[float, ...]:
    values = row.raw(key)
    if not isinstance(values, list):
        raise row.error("expected a list of numbers", key)
    seconds: list[float] = []
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise row.error("expected a number of seconds", key, index=index)
        seconds.append(float(value))
    return tuple(seconds)


def _stage_estimate(row: Fields) -> StageEstimate:
    stage = StageEstimate(
        replica=row.integer("replica", minimum=0),
        stage=row.integer("stage", minimum=0),
        group=row.text("group"),
        forward_s=row.number("forward_s", minimum=0),
        backward_s=row.number("backward_s", minimum=0),
        busy_s=row.number("busy_s", minimum=0),
        in_flight=row.integer("in_flight", minimum=0),
        capacity_bytes=row.number("capacity_bytes", minimum=0),
        memory=_numbers(row.fields("memory"), MemoryUse, minimum=0.0),
    )
    row.finish()
    return stage


def _match_stages(row: Fields, plan: Plan) -> None:
    """The estimate speaks of the layout's stages, in order."""
    expected = [(r, q) for r, replica in enumerate(plan.layout.replicas) for q in range(replica.pp)]
    found = [(stage.replica, stage.stage) for stage in plan.estimate.stages]
    if found != expected:
        raise row.error(f"expected the {len(expected)} stages of the layout in their order", "stages")
    if len(plan.estimate.replica_s) != len(plan.layout.replicas):
        raise row.error("expected one number a replica shape", "replica_s")


def _proof(row: Fields) -> Proof:
    proof = Proof(
        objective=row.text("objective", choices=OBJECTIVES),
        value=row.number("value"),
        bound=row.number("bound"),
        floor=row.number("floor", default=0.0),
        status=row.choice("status", STATUSES),
        effort=row.number("effort", minimum=0),
        engine=row.text("engine", choices=ENGINES),
    )
    row.finish()
    return proof
