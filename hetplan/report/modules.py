"""Layouts of modules as text and as documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.plan.module_time import Assign, ModuleEstimate
from hetplan.plan.modules import ModuleLayout
from hetplan.report.tables import bar, bullets, join_sections, pairs, percent, section, table
from hetplan.search.modules import ModuleResult
from hetplan.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another way to lay the same job out."""

    name: str
    step_s: float | None
    """None: nothing of this kind fits."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """What a search over modules is told about."""

    title: str
    result: ModuleResult
    rivals: tuple[Rival, ...]
    assign: Assign
    num_draws: int
    mean_tokens: float
    """Of a sample, at the language model."""
    origins: str


def module_search_text(report: ModuleReport) -> str:
    """Return the answer of a search over modules."""
    layout, estimate = report.result.layout, report.result.estimate
    head = (
        f"{report.title}\n{layout.num_microbatches} microbatches of {layout.samples} samples, "
        f"{layout.world_size} ranks, sharding {layout.sharding}"
    )
    return join_sections(
        [
            head,
            units_table(layout, estimate),
            pairs(_facts(report)),
            section("Compared with", _rivals(report)),
            section("Notes", bullets(_notes(report))),
        ]
    )


def units_table(layout: ModuleLayout, estimate: ModuleEstimate) -> str:
    """Return a row a unit."""
    rows = []
    for placement, unit in zip(layout.placements, estimate.units, strict=True):
        fullness = unit.memory_bytes / unit.capacity_bytes
        rows.append(
            [
                unit.name,
                placement.group,
                f"{placement.first_rank}-{placement.end_rank - 1}",
                str(placement.tp),
                str(placement.pp),
                str(placement.dp),
                "" if placement.recompute == "none" else placement.recompute,
                format_seconds(unit.stage_s),
                percent(unit.busy),
                f"{percent(fullness)} {bar(fullness, 6)}",
            ]
        )
    headers = ["modules", "group", "ranks", "tp", "pp", "dp", "recompute", "a microbatch", "busy", "memory"]
    return table(headers, rows, shrink="modules")


def _facts(report: ModuleReport) -> list[tuple[str, str]]:
    result, estimate = report.result, report.result.estimate
    tokens = result.layout.num_samples * report.mean_tokens / estimate.step_s
    status = "optimal: no layout of this space is faster" if result.proved else "feasible"
    skew = max((unit.stage_s / unit.mean_stage_s - 1 for unit in estimate.units if unit.mean_stage_s > 0), default=0.0)
    return [
        (
            "step time",
            f"{format_seconds(estimate.step_s)} on average, {format_seconds(estimate.spread_s)} from batch to batch",
        ),
        ("throughput", f"{tokens:,.0f} tokens/s"),
        ("skew", f"{percent(skew)} more for the slowest shard than for the mean one"),
        ("proof", f"{status}; bound {format_seconds(result.bound_s)} (gap {percent(result.gap)})"),
    ]


def _rivals(report: ModuleReport) -> str:
    own_s = report.result.estimate.step_s
    rows = [["this plan", format_seconds(own_s), "1.00x", ""]]
    for rival in report.rivals:
        if rival.step_s is None:
            rows.append([rival.name, "-", "", rival.note])
        else:
            rows.append([rival.name, format_seconds(rival.step_s), f"{rival.step_s / own_s:.2f}x", rival.note])
    return table(["plan", "step time", "over this plan", "of it"], rows, shrink="of it")


def _notes(report: ModuleReport) -> Sequence[str]:
    result = report.result
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(result.dropped.items()))
    how = (
        "in the order they come" if report.assign == "arrival" else "balanced (as hetplan.balance does within percents)"
    )
    notes = [
        f"space searched: {result.space}; {result.priced} priced",
        f"mean of {report.num_draws} batches drawn from the data; samples go to shards {how}",
        report.origins,
    ]
    return [*notes, f"left out: {dropped}"] if dropped else notes


def module_document(report: ModuleReport, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the answer as a JSON document."""
    result, estimate = report.result, report.result.estimate
    return {
        "status": "optimal" if result.proved else "feasible",
        "step_s": estimate.step_s,
        "spread_s": estimate.spread_s,
        "standard_error_s": estimate.standard_error_s,
        "bound_s": result.bound_s,
        "gap": result.gap,
        "units": [
            {
                "modules": list(placement.modules),
                "stage_s": unit.stage_s,
                "mean_stage_s": unit.mean_stage_s,
                "busy": unit.busy,
                "boundary_s": unit.boundary_s,
                "ending_s": unit.ending_s,
                "peak_bytes": unit.memory_bytes,
                "capacity_bytes": unit.capacity_bytes,
            }
            for placement, unit in zip(result.layout.placements, estimate.units, strict=True)
        ],
        "comparison": [{"name": rival.name, "step_s": rival.step_s, "note": rival.note} for rival in report.rivals],
        "dropped": result.dropped,
        "space": result.space,
        "plan": plan,
    }
