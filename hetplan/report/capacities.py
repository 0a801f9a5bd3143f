"""What devices hold of a model's weights, as text and as documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.costs.capacity import load_peak
from hetplan.plan.serving import ServingStage, Verdict
from hetplan.report.tables import bullets, join_sections, section, table
from hetplan.specs.model import Model
from hetplan.units import format_bytes


def verdict_text(model: Model, verdicts: Sequence[Verdict], fraction: float) -> str:
    """Return a line a candidate, and the reason of each."""
    rows = [
        (
            verdict.name,
            str(verdict.num_devices),
            f"{verdict.bits:g}",
            format_bytes(verdict.weights_bytes),
            format_bytes(verdict.capacity_bytes),
            "yes" if verdict.fits else "no",
        )
        for verdict in verdicts
    ]
    head = f"weights of {model.name}, at most {100 * fraction:.0f} % of memory"
    reasons = [f"{verdict.name}: {verdict.reason}" for verdict in verdicts]
    for bits in sorted({verdict.bits for verdict in verdicts}):
        peak = format_bytes(load_peak(model, bits, 1).peak_bytes)
        reasons.append(f"at {bits:g} bits a rank that loads the whole model before it keeps its part needs {peak}")
    return join_sections(
        [head, table(("group", "devices", "bits", "weights", "memory", "fits"), rows), section("Why", bullets(reasons))]
    )


def verdict_document(model: Model, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the same as a document."""
    return {
        "model": model.name,
        "candidates": [
            {
                "group": verdict.name,
                "devices": verdict.num_devices,
                "bits": verdict.bits,
                "weights_bytes": verdict.weights_bytes,
                "capacity_bytes": verdict.capacity_bytes,
                "left_bytes": verdict.left_bytes,
                "fits": verdict.fits,
                "reason": verdict.reason,
                "load_peak_bytes": load_peak(model, verdict.bits, verdict.num_devices).peak_bytes,
            }
            for verdict in verdicts
        ],
    }


def serving_text(model: Model, bits: float, groups: Sequence[str], stages: Sequence[ServingStage]) -> str:
    """Return what each stage holds."""
    rows = [
        (
            str(number),
            group,
            str(stage.num_decoders),
            format_bytes(stage.weights_bytes),
            format_bytes(stage.capacity_bytes),
        )
        for number, (group, stage) in enumerate(zip(groups, stages, strict=True))
    ]
    counts = ",".join(str(stage.num_decoders) for stage in stages)
    head = f"weights of {model.name} at {bits:g} bits on {len(stages)} stages: layers {counts}"
    peak = load_peak(model, bits, len(stages)).peak_bytes
    note = f"a rank that loads the whole model before it keeps its part needs {format_bytes(peak)}"
    return join_sections([head, table(("stage", "group", "layers", "weights", "of"), rows), bullets([note])])


def serving_document(
    model: Model, bits: float, groups: Sequence[str], stages: Sequence[ServingStage]
) -> dict[str, Any]:
    """Return the same as a document."""
    return {
        "model": model.name,
        "bits": bits,
        "load_peak_bytes": load_peak(model, bits, len(stages)).peak_bytes,
        "stages": [
            {
                "group": group,
                "layers": stage.num_decoders,
                "weights_bytes": stage.weights_bytes,
                "capacity_bytes": stage.capacity_bytes,
            }
            for group, stage in zip(groups, stages, strict=True)
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """One choice of unequal shares of a tensor-parallel group."""

    name: str
    ratios: tuple[int, ...]
    usable_bytes: float
    """Memory the group can use."""
    holds: bool
    """Whether the weights fit the part of that they may take."""
    error: str = ""
    """Why the model cannot be cut so; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """What a tensor-parallel group of unlike devices is to hold."""

    model: str
    bits: float
    weights_bytes: float
    fraction: float
    """Part of memory weights may take."""
    capacities: tuple[float, ...]


def ratio_text(what: SharedWeights, choices: Sequence[Shares]) -> str:
    """Return what each choice of shares uses of the devices' memory, and whether the weights fit."""
    total = format_bytes(sum(what.capacities))
    cells = [
        (
            choice.name,
            ":".join(map(str, choice.ratios)),
            format_bytes(choice.usable_bytes),
            total,
            "cannot be cut so" if choice.error else "yes" if choice.holds else "no",
        )
        for choice in choices
        if choice.name != "asked" or choice.ratios != choices[-1].ratios
    ]
    head = (
        f"one tp group of {len(what.capacities)} devices for {what.model}\n"
        f"{format_bytes(what.weights_bytes)} of weights at {what.bits:g} bits, at most {100 * what.fraction:.0f} % of"
        " what is usable"
    )
    errors = [f"{choice.name}: {choice.error}" for choice in choices if choice.error]
    return join_sections([head, table(("shares", "ratios", "usable", "of", "fits"), cells), bullets(errors)])


def ratio_document(what: SharedWeights, choices: Sequence[Shares]) -> dict[str, Any]:
    """Return the same as a document."""
    return {
        "capacity_bytes": sum(what.capacities),
        "bits": what.bits,
        "weights_bytes": what.weights_bytes,
        "shares": {
            choice.name: {
                "ratios": list(choice.ratios),
                "usable_bytes": choice.usable_bytes,
                "fits": choice.holds and not choice.error,
            }
            for choice in choices
        },
    }
