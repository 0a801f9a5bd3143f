"""What a layout costs, as text: summary, where time goes, where memory goes, where the numbers come from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields

from hetplan.costs.records import MemoryUse
from hetplan.plan.records import Estimate, Layout, Proof, StageEstimate, TimeParts
from hetplan.report.layouts import Setting, headline, layout_table, shape_name
from hetplan.report.tables import bar, bullets, join_sections, pairs, percent, section, table
from hetplan.units import format_count, format_energy, format_seconds, format_usd

PART_WORDS: Mapping[str, str] = {
    "compute_s": "compute",
    "tp_s": "tensor parallel (tp)",
    "cp_s": "context parallel (cp)",
    "ep_s": "expert parallel (ep)",
    "pp_s": "between stages (pp)",
    "bubble_s": "bubble",
    "dp_s": "gradients, not hidden (dp)",
    "optimizer_s": "optimizer",
}

MEMORY_HEADS: Mapping[str, str] = {
    "weights_bytes": "weight",
    "gradients_bytes": "grad",
    "optimizer_bytes": "optim",
    "activations_bytes": "activ",
    "scores_bytes": "scores",
    "logits_bytes": "logits",
    "buffers_bytes": "buffer",
    "reserve_bytes": "reserve",
}
"""Components of a peak; score matrices are shown where attention materialises them."""
LEAST_SHOWN = 1e-6
"""Parts of a step below this share are rounding, or as good as none."""


def estimate_text(
    layout: Layout, estimate: Estimate, proof: Proof | None, setting: Setting, *, full: bool = False
) -> str:
    """Return everything `estimate` says of a layout; `full` shows every stage."""
    return join_sections(
        [
            headline(layout, setting),
            layout_table(layout, estimate, setting, full=full),
            summary(estimate, proof),
            time_table(estimate),
            section("Peak memory of a device in GiB, fullest stages first", memory_table(estimate, full=full)),
            section("Notes", bullets(origin_notes(estimate))),
        ]
    )


def summary(estimate: Estimate, proof: Proof | None = None) -> str:
    """Return step time, throughput, efficiency, money and energy, and how good the plan is proved to be."""
    usd = estimate.usd_per_step
    rows = [
        ("step time", format_seconds(estimate.step_s) + _error_text(estimate)),
        ("throughput", f"{format_count(estimate.tokens_per_s)} tokens/s"),
        ("MFU", percent(estimate.mfu)),
        ("cost", "unknown: not every group in use has a price" if usd is None else f"{format_usd(usd)} a step"),
        ("energy", f"{format_energy(estimate.joules_per_step)} a step"),
    ]
    if proof is not None:
        rows.append(("proof", proof_text(proof)))
    return pairs(rows)


def _error_text(estimate: Estimate) -> str:
    return f" (+- {percent(estimate.relative_error)})" if estimate.relative_error is not None else ""


def objective_value(value: float, objective: str) -> str:
    """Return a value of the objective in its unit."""
    if objective == "time":
        return format_seconds(value)
    return format_energy(value) if objective == "energy" else format_usd(value)


def proof_text(proof: Proof) -> str:
    """Return status, bound and gap in words."""
    if proof.bound <= 0:
        return f"{proof.status}: no bound yet"
    bound = objective_value(proof.bound, proof.objective)
    text = f"{proof.status}: no plan of this space is below {bound} (gap {percent(proof.gap)})"
    if 0 < proof.floor < proof.bound * (1 - 1e-6):
        text += f"; no mix of shapes below {objective_value(proof.floor, proof.objective)}"
    return text


def time_table(estimate: Estimate) -> str:
    """Return where a step's seconds go."""
    rows = [
        (
            PART_WORDS[name],
            format_seconds(seconds),
            percent(seconds / estimate.step_s),
            bar(seconds / estimate.step_s, 20),
        )
        for name, seconds in time_parts(estimate.parts)
        if seconds >= LEAST_SHOWN * estimate.step_s
    ]
    if estimate.dp_overlapped_s > 0:
        rows.append(("gradients, hidden", format_seconds(estimate.dp_overlapped_s), "", ""))
    return table(("part", "time", "share", ""), rows)


def time_parts(parts: TimeParts) -> list[tuple[str, float]]:
    """Return (field, seconds) of every part."""
    return [(field.name, getattr(parts, field.name)) for field in fields(parts)]


def memory_parts(use: MemoryUse) -> list[tuple[str, float]]:
    """Return (field, bytes) of every component."""
    return [(field.name, getattr(use, field.name)) for field in fields(use)]


def memory_table(estimate: Estimate, *, full: bool = False) -> str:
    """Return peak memory by component, the fullest stages first; `full` shows all."""
    most_rows = len(estimate.stages) if full else 12
    fullest = sorted(estimate.stages, key=lambda stage: -fill(stage))
    scored = any(stage.memory.scores_bytes for stage in estimate.stages)
    names = [name for name in MEMORY_HEADS if scored or name != "scores_bytes"]
    rows = [
        (
            f"{shape_name(stage.replica)}{stage.stage}",
            stage.group,
            *(_gib(getattr(stage.memory, name)) for name in names),
            _gib(stage.memory.total_bytes),
            _gib(stage.capacity_bytes),
        )
        for stage in fullest[:most_rows]
    ]
    headers = ("stage", "group", *(MEMORY_HEADS[name] for name in names), "sum", "of")
    more = [f"({len(fullest) - most_rows} emptier stages)"] if len(fullest) > most_rows else []
    return table(headers, [*rows, *more], shrink="group")


def fill(stage: StageEstimate) -> float:
    """Return a stage's peak memory over its capacity."""
    return stage.memory.total_bytes / stage.capacity_bytes


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def origin_notes(estimate: Estimate) -> list[str]:
    """Return one sentence for each origin of numbers."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, origin in sorted(estimate.origins.items()):
        names[origin].append(name)
    return [f"numbers {_origin_words(origin)}: {', '.join(found)}" for origin, found in sorted(names.items())]


def _origin_words(origin: str) -> str:
    return {"datasheet": "from datasheets", "assumed": "with assumed efficiencies (no calibration)"}.get(origin, origin)
