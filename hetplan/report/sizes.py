"""Numbers of nodes beside each other: what each brings, as text and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetplan.report.layouts import Setting, count_text
from hetplan.report.tables import bullets, join_sections, section, table
from hetplan.search.sizing import Size
from hetplan.units import format_count, format_seconds, format_usd

SHORT_SEARCH = "step times are of a short search among plans of one shape"


def size_text(group: str, sizes: Sequence[Size], tokens: float | None, setting: Setting) -> str:
    """Return the smallest number of nodes and the table of more."""
    least = sizes[0]
    workload = setting.workload
    head = (
        f"{setting.model.name} needs at least {count_text(least.num_nodes, 'node')} of group {group}"
        f" ({count_text(least.num_devices, 'device')})"
        f"\n{workload.precision}, {workload.global_batch:,} samples of {workload.seq_len:,} tokens a step"
    )
    headers = ("nodes", "devices", "step time", "tokens/s", "a device", "recompute", "days", "dollars")
    rows = [_cells(size, tokens) for size in sizes]
    return join_sections([head, table(headers, rows), section("Notes", bullets(_notes(group, setting)))])


def _notes(group: str, setting: Setting) -> list[str]:
    """Return what the numbers rest on."""
    notes = [f"{SHORT_SEARCH}; `hetplan search` on a cluster of that size may find a faster plan"]
    others = [other.name for other in setting.cluster.groups if other.name != group]
    if others:
        notes.append(f"plans may also use the rest of the cluster: {', '.join(others)}")
    return notes


def _cells(size: Size, tokens: float | None) -> tuple[str, ...]:
    if size.candidate is None:
        return (str(size.num_nodes), str(size.num_devices), "nothing found", "", "", "", "", "")
    days = size.days(tokens) if tokens is not None else None
    usd = size.usd(tokens) if tokens is not None else None
    return (
        str(size.num_nodes),
        str(size.num_devices),
        format_seconds(size.candidate.estimate.step_s),
        format_count(size.candidate.estimate.tokens_per_s),
        format_count(size.tokens_per_device_s or 0.0),
        "+".join(sorted(size.recomputes)),
        f"{days:,.1f}" if days is not None else "",
        format_usd(usd) if usd is not None else "",
    )


def size_document(group: str, sizes: Sequence[Size], tokens: float | None) -> dict[str, Any]:
    """Return the same as a document; what is not known is null."""
    return {
        "group": group,
        "smallest_nodes": sizes[0].num_nodes,
        "smallest_devices": sizes[0].num_devices,
        "tokens": tokens,
        "sizes": [
            {
                "nodes": size.num_nodes,
                "devices": size.num_devices,
                "step_s": size.candidate.estimate.step_s if size.candidate else None,
                "tokens_per_s": size.tokens_per_s,
                "tokens_per_device_s": size.tokens_per_device_s,
                "recompute": sorted(size.recomputes),
                "days": size.days(tokens) if tokens is not None else None,
                "usd": size.usd(tokens) if tokens is not None else None,
            }
            for size in sizes
        ],
    }
