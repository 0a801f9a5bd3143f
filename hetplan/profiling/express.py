"""A survey -> the calibration file and, for a machine nothing is known of, its device and cluster files.

Fractions are of nominal figures. A device of the catalog, or of the user's cluster file, brings its own; another one
gets what was measured: the best product as its peak, the faster of copying and elementwise work as its memory
bandwidth, a transfer between two ranks as its link. It is a device like any other from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from hetplan.profiling import fit
from hetplan.profiling.network_figures import Networks, network_constants
from hetplan.profiling.records import DeviceFigures, LayerFigure, LinkFigure, RankReport, Survey, Timing, TrafficFigure
from hetplan.specs.calibration import Calibration, DeviceConstants, NetworkConstants, Overlap
from hetplan.specs.cluster import Device, Feature, Precision
from hetplan.specs.layer_table import LayerRow, LayerTable
from hetplan.specs.model import Model

Record = TypeVar("Record", DeviceConstants, NetworkConstants)

WATTS_A_CORE = 10.0
"""Assumed draw of one busy core of a server CPU, with its share of the rest."""
IDLE_POWER_FRACTION = 0.3
"""Assumed, of a CPU."""


def pooled(survey: Survey) -> dict[str, tuple[RankReport, DeviceFigures]]:
    """Return, for each device kind, its first rank's report and the figures of all its ranks together."""
    found: dict[str, tuple[RankReport, DeviceFigures]] = {}
    for report in survey.ranks:
        name = report.machine.device
        if name not in found:
            found[name] = (report, report.figures)
            continue
        first, before = found[name]
        more = report.figures
        found[name] = (
            first,
            DeviceFigures(
                gemms=before.gemms + more.gemms,
                attentions=before.attentions + more.attentions,
                traffic=before.traffic + more.traffic,
                launch=before.launch,
                layers=before.layers + more.layers,
            ),
        )
    return found


def measured_device(report: RankReport, figures: DeviceFigures, inner: Sequence[LinkFigure], per_host: int) -> Device:
    """Return a definition of a device nothing is known of; `per_host` of them share the host's memory."""
    machine = report.machine
    peaks: dict[Precision, float] = {}
    for figure in figures.gemms:
        rate = _three(figure.flop / figure.timing.seconds)
        peaks[figure.precision] = max(rate, peaks.get(figure.precision, 0.0))
    copies = {f.name: f.num_bytes / f.timing.seconds for f in figures.traffic}
    elementwise = fit.traffic_rate(_elementwise(figures))
    sends = [figure for figure in inner if figure.kind == "send" and figure.together == 1]
    link = _three(1.0 / fit.fit_sends(sends).s_per_byte) if sends else 0.0
    features: set[Feature] = {"flash_attention"}
    if "bf16" in peaks:
        features.add("bf16")
    share = per_host if machine.kind == "cpu" else 1
    memory = math.floor(machine.memory_bytes / share / 2**20) * float(2**20)
    return Device(
        name=machine.device,
        vendor="cpu" if machine.kind == "cpu" else machine.kind,
        memory_bytes=memory,
        usable_memory_bytes=math.floor(0.9 * memory / 2**20) * float(2**20),
        memory_bandwidth_bytes_per_s=_three(max(copies["copy"], elementwise)),
        peak_flop_per_s=peaks,
        link_bandwidth_bytes_per_s=link,
        pair_bandwidth_bytes_per_s=link,
        pcie_bandwidth_bytes_per_s=_three(copies.get("host to device", copies["copy"])),
        tdp_w=WATTS_A_CORE * machine.threads if machine.kind == "cpu" else 300.0,
        features=frozenset(features),
        sources=dict.fromkeys(("peak", "memory_bandwidth", "link_bandwidth"), "measured"),
    )


def device_constants(
    device: Device, figures: DeviceFigures, inner: Sequence[LinkFigure], reserve_bytes: float
) -> DeviceConstants:
    """Return the constants of one device kind, as fractions of its nominal figures."""
    base = DeviceConstants()
    elementwise = fit.traffic_rate(_elementwise(figures))
    memory_fraction = _fraction(elementwise / device.memory_bandwidth_bytes_per_s)
    peaks = {str(name): peak for name, peak in device.peak_flop_per_s.items()}
    gemms = fit.fit_gemms(
        [figure for figure in figures.gemms if figure.precision in peaks],
        peaks,
        device.memory_bandwidth_bytes_per_s * memory_fraction,
    )
    update = fit.traffic_rate(f for f in figures.traffic if f.name == "optimizer")
    constants = replace(
        base,
        gemm_peak_fraction=gemms.fraction,
        gemm_half_flop=gemms.half_flop,
        misaligned_penalty=gemms.penalty,
        attention_fraction=fit.attention_fraction(figures.attentions, peaks, gemms.half_flop),
        memory_fraction=memory_fraction,
        update_fraction=update / elementwise,
        layer_overhead_s=_overhead_s(figures.launch),
        reserve_bytes=reserve_bytes,
        origin="measured",
    )
    if device.vendor == "cpu":
        constants = replace(constants, idle_power_fraction=IDLE_POWER_FRACTION, memory_overhead_fraction=0.0)
    return _with_links(constants, device, inner)


KERNELS_A_LAYER = 30
"""Assumed launches of one forward pass through a decoder layer; only where whole layers are not measured."""


def _overhead_s(launch: Timing | None) -> float:
    return KERNELS_A_LAYER * launch.seconds if launch else DeviceConstants().layer_overhead_s


def _with_links(constants: DeviceConstants, device: Device, inner: Sequence[LinkFigure]) -> DeviceConstants:
    sends = [figure for figure in inner if figure.kind == "send" and figure.together == 1]
    rings = [figure for figure in inner if figure.kind == "all_reduce"]
    if not sends or not rings:
        return constants
    send, ring = fit.fit_sends(sends), fit.fit_all_reduces(rings)
    changes: dict[str, Any] = {
        "link_latency_s": send.latency_s,
        "collective_latency_s": ring.latency_s,
        "collective_fraction": min(1.0, send.s_per_byte / ring.s_per_byte),
    }
    if device.pair_bandwidth_bytes_per_s > 0:
        changes["link_fraction"] = _fraction(1.0 / send.s_per_byte / device.pair_bandwidth_bytes_per_s)
    else:
        changes["pcie_fraction"] = _fraction(1.0 / send.s_per_byte / device.pcie_bandwidth_bytes_per_s)
    return replace(constants, **changes)


def layer_table(survey: Survey, model: Model) -> LayerTable | None:
    """Return the measured layers of all devices, ranks of one device averaged; None where none was measured."""
    rows: dict[tuple[str, str, int, int], list[LayerFigure]] = {}
    for report in survey.ranks:
        for figure in report.figures.layers:
            rows.setdefault((report.machine.device, figure.kind, figure.tp, figure.samples), []).append(figure)
    if not rows:
        return None
    update_s = {
        name: fit.geometric_mean([f.timing.seconds / f.num_bytes for f in figures.traffic if f.name == "optimizer"])
        for name, (_, figures) in pooled(survey).items()
    }
    table = [
        _layer_row(device, samples, figures, model, update_s[device])
        for (device, _, _, samples), figures in rows.items()
    ]
    return LayerTable(model=model.name, num_layers=len(model.chain), rows=tuple(table))


UPDATE_BYTES = 2 * 4 + 2 * 8 + 2 * 4
"""What the measured update moves for a parameter."""


def _layer_row(
    device: str, samples: int, figures: Sequence[LayerFigure], model: Model, update_s_per_byte: float
) -> LayerRow:
    kinds = [layer.kind for layer in model.chain]
    kind = figures[0].kind
    first = next(i for i, k in enumerate(kinds) if k == kind)
    end = next((i for i in range(first, len(kinds)) if kinds[i] != kind), len(kinds))
    return LayerRow(
        device=device,
        tp=figures[0].tp,
        microbatch=samples,
        first_layer=first,
        end_layer=end,
        forward_s=_four(sum(f.forward.seconds for f in figures) / len(figures)),
        backward_s=_four(sum(f.backward.seconds for f in figures) / len(figures)),
        update_s=_four(figures[0].params * UPDATE_BYTES * update_s_per_byte),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known besides the survey."""

    devices: Mapping[str, Device]
    """Nominal figures by the names the survey uses; others are defined by what was measured."""
    networks: Networks
    provenance: Mapping[str, str]


def calibration_of(survey: Survey, model: Model | None, known: Known) -> tuple[Calibration, dict[str, Device]]:
    """Return the calibration and the devices it speaks of."""
    devices: dict[str, Device] = {}
    constants: dict[str, DeviceConstants] = {}
    hosts = [report.machine.host for report in survey.ranks]
    for name, (report, figures) in pooled(survey).items():
        inner = _inside(survey, name)
        per_host = hosts.count(report.machine.host)
        devices[name] = known.devices.get(name) or measured_device(report, figures, inner, per_host)
        constants[name] = rounded(device_constants(devices[name], figures, inner, report.machine.reserve_bytes))
    calibration = Calibration(
        devices=constants,
        networks={name: rounded(c) for name, c in network_constants(survey, known.networks).items()},
        overlap=Overlap(gradients=0.0, gathers=False),
        provenance=known.provenance,
        layers=layer_table(survey, model) if model else None,
    )
    return calibration, devices


def _inside(survey: Survey, name: str) -> list[LinkFigure]:
    """Return the figures of links inside hosts of one device kind."""
    machines = [report.machine for report in survey.ranks]
    return [
        figure
        for figure in survey.links
        if len({machines[rank].host for rank in figure.ranks}) == 1 and machines[figure.ranks[0]].device == name
    ]


def _elementwise(figures: DeviceFigures) -> list[TrafficFigure]:
    return [f for f in figures.traffic if f.name.split()[0] in ("norm", "activation", "sum")]


def _fraction(value: float) -> float:
    return min(fit.LARGEST, max(fit.SMALLEST, value))


def rounded(record: Record) -> Record:
    """Return a record with four digits of each number: more would be noise."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    changes: dict[str, Any] = {name: _four(value) for name, value in values.items() if isinstance(value, float)}
    return replace(record, **changes)


def _four(value: float) -> float:
    return float(f"{value:.4g}")


def _three(value: float) -> float:
    """Round to three digits: a definition is no place for noise."""
    return float(f"{value:.3g}")
