"""What a survey found, told to a person or as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hetplan.profiling.network_figures import sharing_notes
from hetplan.profiling.records import STEADY_SPREAD, DeviceFigures, LinkFigure, Survey, Timing
from hetplan.report.tables import table
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Device
from hetplan.units import format_bytes, format_flop_rate, format_rate, format_seconds

MOST_UNSTEADY = 4


def story(survey: Survey, calibration: Calibration, devices: Mapping[str, Device]) -> str:
    """Return what was measured: devices, layers, links, and what did not keep still."""
    parts = [_devices(survey, calibration, devices)]
    if calibration.layers is not None:
        parts.append(_layers(calibration))
    if survey.links:
        parts.append(_links(survey))
    parts.append(_spread(survey))
    return "\n\n".join(part for part in parts if part)


def _devices(survey: Survey, calibration: Calibration, devices: Mapping[str, Device]) -> str:
    rows = []
    for name, device in devices.items():
        constants = calibration.devices[name]
        peak = max(device.peak_flop_per_s.values())
        rows.append(
            (
                name,
                str(sum(report.machine.device == name for report in survey.ranks)),
                format_flop_rate(peak),
                f"{constants.gemm_peak_fraction:.0%}",
                f"{constants.attention_fraction:.0%}",
                format_rate(device.memory_bandwidth_bytes_per_s * constants.memory_fraction),
                format_bytes(device.memory_bytes),
            )
        )
    return table(("device", "ranks", "peak", "products", "attention", "elementwise", "memory"), rows)


def _layers(calibration: Calibration) -> str:
    rows = [
        (
            row.device,
            f"{row.first_layer}-{row.end_layer - 1}" if row.end_layer - row.first_layer > 1 else str(row.first_layer),
            str(row.tp),
            str(row.microbatch),
            format_seconds(row.forward_s),
            format_seconds(row.backward_s),
        )
        for row in (calibration.layers.rows if calibration.layers else ())
    ]
    return table(("device", "layers", "tp", "microbatch", "forward", "backward"), rows)


def _links(survey: Survey) -> str:
    rows = []
    for figure in survey.links:
        hosts = dict.fromkeys(survey.ranks[rank].machine.host for rank in figure.ranks)
        rows.append(
            (
                figure.kind.replace("_", "-"),
                ", ".join(hosts) + (f" ({len(figure.ranks)} ranks)" if len(figure.ranks) > 2 else ""),
                format_bytes(figure.num_bytes),
                format_seconds(figure.timing.seconds),
                format_rate(figure.num_bytes / figure.timing.seconds),
                f"{figure.timing.spread:.0%}" + (f", {figure.together} at once" if figure.together > 1 else ""),
            )
        )
    return table(("link", "between", "message", "time", "rate", "spread"), rows)


def _spread(survey: Survey) -> str:
    lines = [f"spread of the repetitions: {spread_note(survey)}"]
    lines.extend(sharing_notes(survey))
    return "\n".join(lines)


def spread_note(survey: Survey) -> str:
    """Return how far the repetitions of all figures lie apart, in one sentence."""
    timings = dict(named_timings(survey))
    spreads = sorted(timing.spread for timing in timings.values())
    unsteady = [name for name, timing in timings.items() if not timing.is_steady]
    note = f"median {spreads[len(spreads) // 2]:.1%} of {len(spreads)} figures"
    if not unsteady:
        return f"{note}, none above {STEADY_SPREAD:.0%}"
    names = ", ".join(unsteady[:MOST_UNSTEADY])
    more = f" and {len(unsteady) - MOST_UNSTEADY} more" if len(unsteady) > MOST_UNSTEADY else ""
    return f"{note}, {len(unsteady)} above {STEADY_SPREAD:.0%}: {names}{more}"


def named_timings(survey: Survey) -> Iterator[tuple[str, Timing]]:
    """Yield every figure's name and timing."""
    for rank, report in enumerate(survey.ranks):
        for name, timing in _device_timings(report.figures):
            yield f"rank {rank} {name}", timing
    for figure in survey.links:
        yield _link_name(figure), figure.timing


def _device_timings(figures: DeviceFigures) -> Iterator[tuple[str, Timing]]:
    for gemm in figures.gemms:
        yield f"product {gemm.rows} x {gemm.inputs} x {gemm.outputs} {gemm.precision}", gemm.timing
    for attention in figures.attentions:
        size = f"{attention.samples} x {attention.heads} x {attention.seq_len} x {attention.head_dim}"
        yield f"attention {size} {attention.way}", attention.timing
    for moved in figures.traffic:
        yield moved.name, moved.timing
    if figures.launch is not None:
        yield "launch", figures.launch
    for layer in figures.layers:
        name = f"{layer.kind} tp {layer.tp} microbatch {layer.samples}"
        yield f"{name} forward", layer.forward
        yield f"{name} backward", layer.backward


def _link_name(figure: LinkFigure) -> str:
    ranks = "-".join(map(str, figure.ranks))
    beside = f" {figure.together} at once" if figure.together > 1 else ""
    return f"{figure.kind.replace('_', '-')} {ranks} {format_bytes(figure.num_bytes)}{beside}"


def document(survey: Survey, calibration: str) -> dict[str, Any]:
    """Return every figure, and the calibration's text, as one document."""
    return {
        "calibration": calibration,
        "figures": [
            {"name": name, "seconds": timing.seconds, "spread": timing.spread, "repeats": timing.repeats}
            for name, timing in named_timings(survey)
        ],
        "ranks": [
            {
                "host": report.machine.host,
                "device": report.machine.device,
                "threads": report.machine.threads,
                "seconds": report.seconds,
            }
            for report in survey.ranks
        ],
    }
