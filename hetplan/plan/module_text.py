"""Module plans as YAML: `hetplan: module-plan/v1`. The same plan gives the same bytes, and reads back the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.plan.module_time import Assign
from hetplan.plan.modules import ModuleLayout, Placement
from hetplan.plan.records import Input
from hetplan.plan.text import mapping_lines
from hetplan.specs.decode import Fields, read_document
from hetplan.specs.workload import RECOMPUTES, SHARDINGS

KIND = "module-plan"
HEAD = f"hetplan: {KIND}/v1"
ASSIGNS: tuple[Assign, ...] = ("arrival", "balanced")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """A layout of modules with what it was made from and what was promised."""

    layout: ModuleLayout
    cluster: Input
    model: Input
    data: Input
    calibration: Input | None
    workload: Mapping[str, str | int | bool]
    assign: Assign
    num_draws: int
    seed: int
    step_s: float
    spread_s: float
    bound_s: float
    proved: bool


def module_plan_text(plan: ModulePlan) -> str:
    """Return the text of a module plan's file."""
    return f"{HEAD}\n" + "".join(f"{line}\n" for line in mapping_lines(module_plan_document(plan)))


def module_plan_document(plan: ModulePlan) -> dict[str, Any]:
    """Return a module plan as nested mappings."""
    document: dict[str, Any] = {
        name: {"name": source.name, "sha256": source.sha256}
        for name, source in (("cluster", plan.cluster), ("model", plan.model), ("data", plan.data))
    }
    if plan.calibration is not None:
        document["calibration"] = {"name": plan.calibration.name, "sha256": plan.calibration.sha256}
    document["workload"] = dict(plan.workload)
    document["draws"] = {"count": plan.num_draws, "seed": plan.seed, "assign": plan.assign}
    document["layout"] = {
        "num_microbatches": plan.layout.num_microbatches,
        "samples": plan.layout.samples,
        "sharding": plan.layout.sharding,
        "placements": [_placement(placement) for placement in plan.layout.placements],
    }
    document["estimate"] = {"step_s": plan.step_s, "spread_s": plan.spread_s}
    document["proof"] = {"bound_s": plan.bound_s, "status": "optimal" if plan.proved else "feasible"}
    return document


def _placement(placement: Placement) -> dict[str, Any]:
    row: dict[str, Any] = {"modules": ", ".join(placement.modules), "group": placement.group}
    for name in ("tp", "cp", "pp", "dp", "first_rank"):
        row[name] = getattr(placement, name)
    row["recompute"] = placement.recompute
    return row


def is_module_plan(path: Path) -> bool:
    """Return whether a file says it is a module plan."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline().strip() == HEAD
    except OSError:
        return False


def read_module_plan(path: Path) -> ModulePlan:
    """Return the plan in a file.

    Raises:
        SpecError: it cannot be read or is no module plan.
    """
    root = read_document(path, KIND)
    draws, proof, estimate = root.fields("draws"), root.fields("proof"), root.fields("estimate")
    workload = root.fields("workload")
    plan = ModulePlan(
        layout=_layout(root.fields("layout")),
        cluster=_input(root.fields("cluster")),
        model=_input(root.fields("model")),
        data=_input(root.fields("data")),
        calibration=_input(root.fields("calibration")) if root.has("calibration") else None,
        workload={name: _scalar(workload, name) for name in workload.names()},
        assign=draws.choice("assign", ASSIGNS),
        num_draws=draws.integer("count", minimum=1, maximum=100_000),
        seed=draws.integer("seed", minimum=0),
        step_s=estimate.number("step_s", minimum=0.0),
        spread_s=estimate.number("spread_s", minimum=0.0),
        bound_s=proof.number("bound_s", minimum=0.0),
        proved=proof.text("status", choices=("optimal", "feasible")) == "optimal",
    )
    for fields in (draws, proof, estimate, workload, root):
        fields.finish()
    return plan


def _scalar(fields: Fields, name: str) -> str | int | bool:
    value = fields.raw(name)
    if isinstance(value, str | int | bool):
        return value
    raise fields.error("expected a text, a whole number or a flag", name)


def _input(fields: Fields) -> Input:
    found = Input(name=fields.text("name"), sha256=fields.text("sha256"))
    fields.finish()
    return found


def _layout(fields: Fields) -> ModuleLayout:
    layout = ModuleLayout(
        placements=tuple(_read_placement(row) for row in fields.rows("placements")),
        num_microbatches=fields.integer("num_microbatches", minimum=1),
        samples=fields.integer("samples", minimum=1),
        sharding=fields.choice("sharding", SHARDINGS),
    )
    if not layout.placements:
        raise fields.error("a layout places at least one module", "placements")
    fields.finish()
    return layout


def _read_placement(row: Fields) -> Placement:
    tp, cp, pp, dp = (row.integer(name, minimum=1, maximum=1_000_000) for name in ("tp", "cp", "pp", "dp"))
    placement = Placement(
        modules=tuple(name.strip() for name in row.text("modules").split(",")),
        group=row.text("group"),
        first_rank=row.integer("first_rank", minimum=0),
        recompute=row.choice("recompute", RECOMPUTES),
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
    )
    row.finish()
    return placement
