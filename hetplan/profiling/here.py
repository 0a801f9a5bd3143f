"""A cluster file of the machines that were measured, so that a survey is all a search needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hetplan.profiling.network_figures import MEASURED_NETWORK, measured_line
from hetplan.profiling.records import Survey
from hetplan.specs.cluster import Device
from hetplan.specs.encode import scalar_text
from hetplan.specs.hostlist import is_node_name
from hetplan.units import quantity_text


def cluster_text(survey: Survey, devices: Mapping[str, Device], name: str) -> str:
    """Return the cluster file of all hosts of a survey; `devices` are those the catalog does not know."""
    return "\n".join(_lines(survey, devices, name)) + "\n"


def _lines(survey: Survey, devices: Mapping[str, Device], name: str) -> Iterator[str]:
    yield "hetplan: cluster/v1"
    yield f"name: {scalar_text(name)}"
    if devices:
        yield "devices:"
    for device in devices.values():
        yield f"  {scalar_text(device.name)}:"
        yield from (f"    {line}" for line in device_lines(device))
    groups = _groups(survey)
    yield "groups:"
    for group, (device_name, hosts, per_node) in groups.items():
        nodes = f"'{','.join(hosts)}'"
        yield f"  {group}: {{device: {scalar_text(device_name)}, nodes: {nodes}, devices_per_node: {per_node}}}"
    line = measured_line(survey)
    if line is not None:
        rate, latency = (
            quantity_text(_three(1.0 / line.s_per_byte), "bytes/s"),
            quantity_text(_three(line.latency_s), "s"),
        )
        joins = f"joins: [{', '.join(groups)}], kind: ethernet"
        yield "networks:"
        yield f"  {MEASURED_NETWORK}: {{{joins}, bandwidth: {rate}, latency: {latency}}}"


def device_lines(device: Device) -> Iterator[str]:
    """Yield the keys of a device definition."""
    for key, value in (
        ("memory", device.memory_bytes),
        ("usable_memory", device.usable_memory_bytes),
    ):
        yield f"{key}: {quantity_text(value, 'bytes')}"
    peaks = ", ".join(f"{p}: {quantity_text(rate, 'flop/s')}" for p, rate in device.peak_flop_per_s.items())
    yield f"memory_bandwidth: {quantity_text(device.memory_bandwidth_bytes_per_s, 'bytes/s')}"
    yield f"peak: {{{peaks}}}"
    yield f"link_bandwidth: {quantity_text(device.link_bandwidth_bytes_per_s, 'bytes/s')}"
    yield f"pair_bandwidth: {quantity_text(device.pair_bandwidth_bytes_per_s, 'bytes/s')}"
    yield f"pcie_bandwidth: {quantity_text(device.pcie_bandwidth_bytes_per_s, 'bytes/s')}"
    yield f"tdp: {quantity_text(device.tdp_w, 'W')}"
    yield f"features: [{', '.join(sorted(device.features))}]"
    yield f"vendor: {scalar_text(device.vendor)}"


def _groups(survey: Survey) -> dict[str, tuple[str, list[str], int]]:
    """Return group name -> (device, hosts, devices a host): hosts with the same device and number of ranks."""
    ranks_of: dict[str, list[str]] = {}
    for report in survey.ranks:
        ranks_of.setdefault(report.machine.host, []).append(report.machine.device)
    alike: dict[tuple[str, int], list[str]] = {}
    for host, names in ranks_of.items():
        for name in dict.fromkeys(names):
            alike.setdefault((name, names.count(name)), []).append(host)
    found: dict[str, tuple[str, list[str], int]] = {}
    for (name, per_node), hosts in alike.items():
        kind = next(r.machine.kind for r in survey.ranks if r.machine.device == name)
        group = kind if kind not in found else f"{kind}-{len(found) + 1}"
        found[group] = (name, [_node(host) for host in hosts], per_node)
    return found


def _node(host: str) -> str:
    return host if is_node_name(host) else "node-" + "".join(c if c.isalnum() else "-" for c in host)


def _three(value: float) -> float:
    return float(f"{value:.3g}")
