"""Placements of jobs of which only the traffic is known, as text, JSON document and file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hetplan.search.geo import GeoResult
from hetplan.specs.encode import scalar_text
from hetplan.specs.hostlist import hostlist_text
from hetplan.specs.model import Volumes
from hetplan.units import format_bytes, format_seconds


def placement_text(result: GeoResult, name: str, volumes: Volumes) -> str:
    """Return what was found, for people."""
    lines = [
        f"{name}: {volumes.stages} stages x {volumes.replicas} replicas on {_num_devices(result)} devices of"
        f" {len(result.classes)} kinds by where they are",
        f"{format_bytes(volumes.gradient_bytes)} of gradients a stage and device,"
        f" {format_bytes(volumes.activation_bytes)} of activations a boundary",
        "",
    ]
    at = 0
    for counts, same in groupby(result.stage_counts):
        length = len(list(same))
        stages = f"stage {at}" if length == 1 else f"stages {at}-{at + length - 1}"
        held = ", ".join(f"{count} of {result.classes[c][0]}.." for c, count in enumerate(counts) if count)
        lines.append(f"{stages:<14} {held}")
        at += length
    status = "proved optimal" if result.status == "optimal" else result.status
    lines += [
        "",
        f"traffic     {format_seconds(result.value_s)}",
        f"gradients   {format_seconds(result.exchange_s)}, the slowest exchange of a stage",
        f"activations {format_seconds(2 * result.path_s)}, forth and back along the slowest path",
        f"proof       {status}: no placement is below {format_seconds(result.bound_s)} (gap {result.gap:.1%});"
        f" effort {result.effort:.3g}",
    ]
    return "\n".join(lines)


def _num_devices(result: GeoResult) -> int:
    return sum(len(members) for members in result.classes)


def placement_document(result: GeoResult) -> dict[str, object]:
    """Return what was found, for programs."""
    return {
        "status": result.status,
        "objective": "traffic",
        "value": result.value_s,
        "bound": result.bound_s,
        "gap": result.gap,
        "exchange_s": result.exchange_s,
        "path_s": result.path_s,
        "effort": result.effort,
        "search_s": result.search_s,
        "classes": [list(members) for members in result.classes],
        "stage_counts": [list(counts) for counts in result.stage_counts],
        "pipelines": [list(chain) for chain in result.pipelines],
    }


def placement_file(result: GeoResult, cluster: tuple[str, str], model: tuple[str, str]) -> str:
    """Return the text of a placement file; inputs by name and hash."""
    lines = [
        "hetplan: placement/v1",
        f"cluster: {{name: {scalar_text(cluster[0])}, sha256: {scalar_text(cluster[1])}}}",
        f"model: {{name: {scalar_text(model[0])}, sha256: {scalar_text(model[1])}}}",
        f"traffic: {{value_s: {result.value_s!r}, exchange_s: {result.exchange_s!r}, path_s: {result.path_s!r}}}",
        f"proof: {{bound_s: {result.bound_s!r}, status: {result.status}}}",
        "stages:",
    ]
    for stage in zip(*result.pipelines, strict=True):
        lines.append(f"  - {{devices: {scalar_text(_hosts(stage))}}}")
    lines.append("pipelines:")
    lines += [f"  - [{', '.join(scalar_text(device) for device in chain)}]" for chain in result.pipelines]
    return "\n".join(lines) + "\n"


def _hosts(names: Sequence[str]) -> str:
    return hostlist_text(names) if all(":" not in name for name in names) else ",".join(names)
