"""Catalog entries as tables, as text with sources, and as JSON documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hetplan.catalog.networks import LinkGeneration
from hetplan.report.tables import join_sections, pairs, percent, section, table
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Device
from hetplan.specs.model import Layer, Model, layer_params, model_params
from hetplan.units import (
    format_bits,
    format_bytes,
    format_flop_rate,
    format_power,
    format_rate,
    format_seconds,
    format_usd,
)


def device_table(devices: Sequence[Device]) -> str:
    """Return one row a device."""
    rows = [
        (
            device.name,
            device.vendor,
            format_bytes(device.memory_bytes),
            format_rate(device.memory_bandwidth_bytes_per_s),
            _best_peak(device),
            format_rate(device.link_bandwidth_bytes_per_s) if device.link_bandwidth_bytes_per_s else "PCIe",
        )
        for device in devices
    ]
    return table(("device", "vendor", "memory", "bandwidth", "16-bit peak", "links"), rows)


def _best_peak(device: Device) -> str:
    """Return the 16-bit peak, else the highest there is, named."""
    peaks = device.peak_flop_per_s
    for precision in ("bf16", "fp16"):
        if precision in peaks:
            return format_flop_rate(peaks[precision])
    if not peaks:
        return "-"
    precision, peak = max(peaks.items(), key=lambda item: item[1])
    return f"{format_flop_rate(peak)} ({precision})"


def device_text(device: Device) -> str:
    """Return one device with the source of each number."""
    facts: list[tuple[str, str, str]] = [
        ("memory", format_bytes(device.memory_bytes), "memory_bytes"),
        ("usable memory", format_bytes(device.usable_memory_bytes), "usable_memory_bytes"),
        ("memory bandwidth", format_rate(device.memory_bandwidth_bytes_per_s), "memory_bandwidth_bytes_per_s"),
        *(
            (f"peak {precision}", format_flop_rate(peak), f"peak_flop_per_s.{precision}")
            for precision, peak in device.peak_flop_per_s.items()
        ),
        ("links, all", format_rate(device.link_bandwidth_bytes_per_s), "link_bandwidth_bytes_per_s"),
        ("links, a pair", format_rate(device.pair_bandwidth_bytes_per_s), "pair_bandwidth_bytes_per_s"),
        ("PCIe", format_rate(device.pcie_bandwidth_bytes_per_s), "pcie_bandwidth_bytes_per_s"),
        ("TDP", format_power(device.tdp_w), "tdp_w"),
    ]
    if device.usd_per_hour is not None:
        facts.append(("price", f"{format_usd(device.usd_per_hour)}/h", "usd_per_hour"))
    names = pairs(
        [
            ("name", device.name),
            ("vendor", device.vendor),
            ("aliases", ", ".join(device.aliases) or "none"),
            ("features", ", ".join(sorted(device.features)) or "none"),
        ]
    )
    sources = list(dict.fromkeys(device.sources[key] for _, _, key in facts if key in device.sources))
    rows = [
        (name, value, f"[{sources.index(device.sources[key]) + 1}]" if key in device.sources else "")
        for name, value, key in facts
    ]
    listed = "\n".join(f"[{i}] {source}" for i, source in enumerate(sources, start=1))
    return join_sections([names, table(("dense, one direction", "value", "source"), rows), listed])


def device_document(device: Device) -> dict[str, Any]:
    """Return every field of a device."""
    return {
        "name": device.name,
        "vendor": device.vendor,
        "aliases": list(device.aliases),
        "features": sorted(device.features),
        "memory_bytes": device.memory_bytes,
        "usable_memory_bytes": device.usable_memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "peak_flop_per_s": dict(device.peak_flop_per_s),
        "link_bandwidth_bytes_per_s": device.link_bandwidth_bytes_per_s,
        "pair_bandwidth_bytes_per_s": device.pair_bandwidth_bytes_per_s,
        "pcie_bandwidth_bytes_per_s": device.pcie_bandwidth_bytes_per_s,
        "tdp_w": device.tdp_w,
        "usd_per_hour": device.usd_per_hour,
        "sources": dict(device.sources),
    }


def link_table(links: Sequence[LinkGeneration], *, sourced: bool) -> str:
    """Return one row a link generation; `sourced` adds where its numbers come from."""
    rows = [(link.name, link.family, _link_rate(link), format_seconds(link.latency_s)) for link in links]
    lines = table(("link", "family", "bandwidth", "latency"), rows)
    if not sourced:
        return lines
    notes = [
        pairs([("bandwidth source", link.bandwidth_source), ("latency source", link.latency_source)]) for link in links
    ]
    return join_sections([lines, *notes])


def calibration_table(known: Mapping[str, Calibration]) -> str:
    """Return one row a calibration: how far off it was on runs left out, and what it was fitted on."""
    rows = [
        (name, percent(made.relative_error) if made.relative_error is not None else "?", _fitted_on(made))
        for name, made in known.items()
    ]
    return table(("calibration", "error", "fitted on"), rows) if rows else "none"


def _fitted_on(made: Calibration) -> str:
    return "; ".join(made.provenance[key] for key in ("fitted on", "source") if key in made.provenance)


def calibration_document(name: str, made: Calibration) -> dict[str, Any]:
    """Return what a calibration says of itself."""
    return {
        "name": name,
        "devices": sorted(made.devices),
        "relative_error": made.relative_error,
        "provenance": dict(made.provenance),
    }


def _link_rate(link: LinkGeneration) -> str:
    inside = link.family in ("pcie", "nvlink", "xgmi")
    return (format_rate if inside else format_bits)(link.bandwidth_bytes_per_s)


def link_document(link: LinkGeneration) -> dict[str, Any]:
    """Return every field of a link generation."""
    return {
        "name": link.name,
        "family": link.family,
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "latency_s": link.latency_s,
        "sources": {"bandwidth_bytes_per_s": link.bandwidth_source, "latency_s": link.latency_source},
    }


def model_table(models: Sequence[Model]) -> str:
    """Return one row a model."""
    rows = [
        (
            model.name,
            model.family,
            f"{model_params(model):,}",
            str(_count_kind(model, "decoder")),
            f"{model.max_seq_len:,}" if model.max_seq_len else "-",
        )
        for model in models
    ]
    return table(("model", "family", "parameters", "decoder layers", "longest sequence"), rows)


def model_text(model: Model) -> str:
    """Return one model, its modules and its layers."""
    facts = [
        ("name", model.name),
        ("family", model.family),
        ("parameters", f"{model_params(model):,}"),
        ("longest sequence", f"{model.max_seq_len:,} tokens" if model.max_seq_len else "not stated"),
        *((name or "source", source) for name, source in sorted(model.sources.items())),
    ]
    rows = [(module.name, *cells) for module in model.modules for cells in _layer_rows(module.layers)]
    return join_sections(
        [pairs(facts), section("Layers", table(("module", "layers", "count", "width", "parameters each"), rows))]
    )


def _layer_rows(layers: Sequence[Layer]) -> list[tuple[str, str, str, str]]:
    counts = Counter((layer.kind, layer.width, layer_params(layer)) for layer in layers)
    return [(kind, str(count), f"{width:,}", f"{params:,}") for (kind, width, params), count in counts.items()]


def model_document(model: Model) -> dict[str, Any]:
    """Return what is known of a model."""
    return {
        "name": model.name,
        "family": model.family,
        "parameters": model_params(model),
        "decoder_layers": _count_kind(model, "decoder"),
        "max_seq_len": model.max_seq_len,
        "modules": [
            {"name": module.name, "layers": dict(Counter(layer.kind for layer in module.layers))}
            for module in model.modules
        ],
        "sources": dict(model.sources),
    }


def _count_kind(model: Model, kind: str) -> int:
    return sum(layer.kind == kind for layer in model.chain)
