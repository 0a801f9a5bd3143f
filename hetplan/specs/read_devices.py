"""The `devices:` section of a cluster file: new kinds of device, or changes to what a datasheet says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hetplan.errors import HetplanError
from hetplan.specs.cluster import Device, Feature, Precision
from hetplan.specs.decode import Fields
from hetplan.units import format_bytes, show

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8")
FEATURES: tuple[Feature, ...] = ("bf16", "fp8", "flash_attention")
MAX_NAME = 64


def read_devices(fields: Fields, find_device: Callable[[str], Device]) -> dict[str, Device]:
    """Return the devices a file defines, by name; one may build on those above it with `like`.

    A name the catalog knows needs no `like`: what is written replaces what its datasheet says.

    Raises:
        SpecError: a definition is incomplete or contradicts itself.
    """
    devices: dict[str, Device] = {}
    for name in fields.names():
        entry = fields.fields(name)
        if len(name) > MAX_NAME or not name.isprintable() or not name:
            raise entry.error(f"{show(name)} is not a device name")
        base = _base(name, entry, devices, find_device)
        device = _new_device(name, entry) if base is None else _changed_device(name, base, entry)
        _check(device, entry)
        entry.finish()
        devices[name] = device
    return devices


def _base(name: str, entry: Fields, devices: dict[str, Device], find_device: Callable[[str], Device]) -> Device | None:
    """The device a definition builds on, None for an entirely new one."""
    like = entry.text("like", default=None)
    if like is not None and like in devices:
        return devices[like]
    try:
        return find_device(name if like is None else like)
    except HetplanError as error:
        if like is None:
            return None
        raise entry.error(str(error), "like") from None


def _new_device(name: str, entry: Fields) -> Device:
    """Decode a definition that stands alone."""
    memory = entry.quantity("memory", "bytes", positive=True)
    peaks = _peaks(entry.fields("peak"))
    link = entry.quantity("link_bandwidth", "bytes/s", default=0.0)
    return Device(
        name=name,
        vendor=entry.text("vendor", default="unknown"),
        memory_bytes=memory,
        usable_memory_bytes=entry.quantity("usable_memory", "bytes", default=memory, positive=True),
        memory_bandwidth_bytes_per_s=entry.quantity("memory_bandwidth", "bytes/s", positive=True),
        peak_flop_per_s=peaks,
        link_bandwidth_bytes_per_s=link,
        pair_bandwidth_bytes_per_s=entry.quantity("pair_bandwidth", "bytes/s", default=link),
        pcie_bandwidth_bytes_per_s=entry.quantity("pcie_bandwidth", "bytes/s", positive=True),
        tdp_w=entry.quantity("tdp", "W", positive=True),
        features=_features(entry, _implied_features(peaks)),
        usd_per_hour=entry.quantity("price", "USD/h", default=None),
        sources=dict.fromkeys(entry.names(), "cluster file"),
    )


def _changed_device(name: str, base: Device, entry: Fields) -> Device:
    """Decode a definition that changes another; the usable part of a changed memory keeps its share."""
    memory = entry.quantity("memory", "bytes", default=base.memory_bytes, positive=True)
    usable = base.usable_memory_bytes * (memory / base.memory_bytes)
    link = entry.quantity("link_bandwidth", "bytes/s", default=base.link_bandwidth_bytes_per_s)
    pair = (
        min(link, base.pair_bandwidth_bytes_per_s) if entry.has("link_bandwidth") else base.pair_bandwidth_bytes_per_s
    )
    peaks = dict(base.peak_flop_per_s) | _peaks(entry.fields("peak", required=False))
    return replace(
        base,
        name=name,
        vendor=entry.text("vendor", default=base.vendor),
        memory_bytes=memory,
        usable_memory_bytes=entry.quantity("usable_memory", "bytes", default=usable, positive=True),
        memory_bandwidth_bytes_per_s=entry.quantity(
            "memory_bandwidth", "bytes/s", default=base.memory_bandwidth_bytes_per_s, positive=True
        ),
        peak_flop_per_s=peaks,
        link_bandwidth_bytes_per_s=link,
        pair_bandwidth_bytes_per_s=entry.quantity("pair_bandwidth", "bytes/s", default=pair),
        pcie_bandwidth_bytes_per_s=entry.quantity(
            "pcie_bandwidth", "bytes/s", default=base.pcie_bandwidth_bytes_per_s, positive=True
        ),
        tdp_w=entry.quantity("tdp", "W", default=base.tdp_w, positive=True),
        features=_features(entry, base.features),
        usd_per_hour=entry.quantity("price", "USD/h", default=base.usd_per_hour),
        aliases=(),
        sources=dict(base.sources) | dict.fromkeys(entry.names(), "cluster file"),
    )


def _peaks(fields: Fields) -> dict[Precision, float]:
    """Dense peaks by precision."""
    peaks = {
        precision: fields.quantity(precision, "flop/s", positive=True)
        for precision in PRECISIONS
        if fields.quantity(precision, "flop/s", default=None) is not None
    }
    fields.finish()
    return peaks


def _implied_features(peaks: dict[Precision, float]) -> frozenset[Feature]:
    """What a device with these peaks can do; fused attention is assumed where bf16 is (Ampere and later)."""
    features: set[Feature] = set()
    if "bf16" in peaks:
        features.update(("bf16", "flash_attention"))
    if "fp8" in peaks:
        features.add("fp8")
    return frozenset(features)


def _features(entry: Fields, default: frozenset[Feature]) -> frozenset[Feature]:
    """The features written, or the default."""
    written = entry.texts("features", default=None)
    if written is None:
        return default
    features: set[Feature] = set()
    for text in written:
        known = next((feature for feature in FEATURES if feature == text), None)
        if known is None:
            raise entry.error(f"{show(text)} is not one of {', '.join(FEATURES)}", "features")
        features.add(known)
    return frozenset(features)


def _check(device: Device, entry: Fields) -> None:
    """Refuse what contradicts itself."""
    if not device.peak_flop_per_s:
        raise entry.error(f"expected a peak for at least one of {', '.join(PRECISIONS)}", "peak")
    for feature in ("bf16", "fp8"):
        if feature in device.features and feature not in device.peak_flop_per_s:
            raise entry.error(f"feature '{feature}' needs a peak for {feature}", "features")
    if device.usable_memory_bytes > device.memory_bytes:
        more = f"{format_bytes(device.usable_memory_bytes)} is more than the {format_bytes(device.memory_bytes)}"
        raise entry.error(f"{more} the device has", "usable_memory")
    if 0 < device.link_bandwidth_bytes_per_s < device.pair_bandwidth_bytes_per_s:
        raise entry.error("a pair of devices cannot have more than all links together", "pair_bandwidth")
