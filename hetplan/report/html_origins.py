"""Where the numbers of a page come from: files with their hashes, datasheets with their sources, constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from hetplan.costs.constants import constants_of
from hetplan.plan.records import Estimate, Input, Layout
from hetplan.report.html import Markup, joined, linked, table, tag
from hetplan.report.layouts import Setting
from hetplan.specs.calibration import Calibration, DeviceConstants
from hetplan.specs.cluster import Device, Group
from hetplan.specs.model import model_params
from hetplan.units import format_bytes, format_flop_rate, format_power, format_rate, format_usd

_FILE_KEYS = {
    "memory_bytes": "memory",
    "memory_bandwidth_bytes_per_s": "memory_bandwidth",
    "link_bandwidth_bytes_per_s": "link_bandwidth",
    "pair_bandwidth_bytes_per_s": "pair_bandwidth",
    "pcie_bandwidth_bytes_per_s": "pcie_bandwidth",
    "tdp_w": "tdp",
    "usd_per_hour": "price",
}
"""Field of a device -> its key in a cluster file."""

ORIGIN_WORDS = {
    "measured": "measured on this hardware",
    "fitted": "fitted to observed runs",
    "datasheet": "datasheet",
    "assumed": "assumed efficiencies, no calibration",
}


def origins(
    layout: Layout, estimate: Estimate, setting: Setting, inputs: Sequence[Input], calibration: Calibration
) -> Markup:
    """Return every input, and every number of a device that the plan uses, with where it comes from."""
    used = {stage.group for replica in layout.replicas for stage in replica.stages}
    groups: dict[str, Group] = {}
    for group in setting.cluster.groups:
        if group.name in used:
            groups.setdefault(group.device.name, group)
    return joined(
        [
            tag("h3", "Files"),
            table(("file", "sha256"), ((source.name, tag("code", source.sha256)) for source in inputs), class_="cards"),
            _model(setting),
            tag("h3", "Speeds"),
            table(("device or network", "numbers"), _origin_rows(estimate), class_="cards"),
            *(_device(group, setting, calibration) for group in groups.values()),
        ]
    )


def _origin_rows(estimate: Estimate) -> Iterator[tuple[str, str]]:
    for name, origin in sorted(estimate.origins.items()):
        words = ORIGIN_WORDS.get(origin, origin)
        yield name, tag("span", words, class_=f"origin {origin}", data_key=f"origins.{name}", data_value=origin)


def _model(setting: Setting) -> Markup:
    model = setting.model
    sources = [linked(f"{name}: {source}") for name, source in sorted(model.sources.items())]
    params = f"{model.name}: {model_params(model):,} parameters"
    return tag("p", joined([params, *sources], "; "), class_="note")


def _device(group: Group, setting: Setting, calibration: Calibration) -> Markup:
    device = group.device
    facts = list(_facts(device, setting.workload.precision))
    constants = constants_of(group, calibration)
    stated = [(_words(name), value, constants.origin) for name, value in _constants(constants)]
    provenance = calibration.provenance.get(device.name, "")
    return tag(
        "details",
        tag("summary", device.name, tag("small", " datasheet and constants")),
        table(("number", "value", "source"), facts, class_="cards"),
        tag("p", linked(provenance), class_="note") if provenance else "",
        table(("constant of the cost model", "value", "origin"), stated, class_="cards"),
    )


def _facts(device: Device, precision: str) -> Iterator[tuple[str, str, str]]:
    peaks = [
        (f"peak {name}", format_flop_rate(peak), f"peak_flop_per_s.{name}", "peak")
        for name, peak in device.peak_flop_per_s.items()
        if name in (precision, "bf16", "fp16")
    ]
    price = device.usd_per_hour
    plain = [
        ("memory", format_bytes(device.memory_bytes), "memory_bytes"),
        ("memory bandwidth", format_rate(device.memory_bandwidth_bytes_per_s), "memory_bandwidth_bytes_per_s"),
        ("links, all", format_rate(device.link_bandwidth_bytes_per_s), "link_bandwidth_bytes_per_s"),
        ("links, a pair", format_rate(device.pair_bandwidth_bytes_per_s), "pair_bandwidth_bytes_per_s"),
        ("PCIe", format_rate(device.pcie_bandwidth_bytes_per_s), "pcie_bandwidth_bytes_per_s"),
        ("TDP", format_power(device.tdp_w), "tdp_w"),
        *([("price", f"{format_usd(price)}/h", "usd_per_hour")] if price is not None else []),
    ]
    for name, value, key, file_key in [*peaks, *((*fact, _FILE_KEYS[fact[2]]) for fact in plain)]:
        source = device.sources.get(file_key) or device.sources.get(key) or "not stated"
        yield name, value, linked(source)


def _constants(constants: DeviceConstants) -> Iterator[tuple[str, str]]:
    for field in fields(constants):
        value = getattr(constants, field.name)
        if isinstance(value, float):
            yield field.name, f"{value:.4g}"


def _words(name: str) -> str:
    for suffix, unit in (("_flop", "FLOP"), ("_bytes", "B"), ("_s", "s")):
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')} ({unit})"
    return name.replace("_", " ")
