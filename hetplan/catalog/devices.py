"""Accelerators that ship with hetplan, each number with its source.

A device is found by its name or an alias (what `nvidia-smi` and Kubernetes labels print), whole and regardless of
case; blanks, `_` and `-` are the same. Nothing is matched by a part of its name: an `L40S` is no `L4`.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from hetplan.errors import SpecError
from hetplan.specs.cluster import Device, Feature, Precision
from hetplan.specs.decode import Fields, read_document
from hetplan.units import UnitKind, hint, parse_quantity, show

_FOLDER = Path(__file__).parent / "devices"
_FILES = ("nvidia_datacenter", "nvidia_workstation", "amd", "others")
_PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_FEATURES: tuple[Feature, ...] = get_args(Feature)
_RECALLED = "recalled: read in no source, to be verified"
_MAX_WORD = 60
"""Characters of a wrong name that are compared with the right ones."""


class _Sources:
    """The numbers of one device; remembers the source of each."""

    def __init__(self, keys: dict[str, str]) -> None:
        self._keys = keys
        self.read: dict[str, str] = {}

    def take(self, fields: Fields, key: str, kind: UnitKind, name: str) -> float:
        """Return the number at `key` and keep its source under `name`."""
        value, *sources = fields.texts(key)
        if not sources:
            raise fields.error("expected a number followed by its source", key)
        self.read[name] = "; ".join(self._keys.get(source, source) for source in sources)
        return parse_quantity(value, kind)


def find_device(name: str) -> Device:
    """Return the device called `name`, by name or alias.

    Raises:
        SpecError: there is none; the message names the nearest.
    """
    entry = _index().get(_key(name))
    if entry is None:
        raise SpecError(f"unknown device {show(name)}{_near(name)}")
    return _devices()[entry]


def device_names() -> tuple[str, ...]:
    """Names of all devices, in the order of the catalog."""
    return tuple(_devices())


@cache
def _devices() -> MappingProxyType[str, Device]:
    """All devices by name."""
    devices: dict[str, Device] = {}
    for file in _FILES:
        document = read_document(_FOLDER / f"{file}.yaml", "devices")
        keys = document.fields("sources")
        sources = {key: keys.text(key) for key in keys.names()} | {"recalled": _RECALLED}
        for name, fields in document.table("devices").items():
            devices[name] = _device(name, fields, _Sources(sources))
        document.finish()
    return MappingProxyType(devices)


@cache
def _index() -> MappingProxyType[str, str]:
    """Normalised name or alias -> name."""
    index: dict[str, str] = {}
    for device in _devices().values():
        for word in (device.name, *device.aliases):
            other = index.setdefault(_key(word), device.name)
            if other != device.name:
                raise SpecError(f"catalog: {show(word)} names both {other} and {device.name}")
    return MappingProxyType(index)


def _device(name: str, fields: Fields, numbers: _Sources) -> Device:
    """Decode one entry."""
    take = numbers.take
    peaks = fields.fields("peak")
    priced = fields.has("price")
    device = Device(
        name=name,
        vendor=fields.text("vendor"),
        memory_bytes=take(fields, "memory", "bytes", "memory_bytes"),
        usable_memory_bytes=take(fields, "usable_memory", "bytes", "usable_memory_bytes"),
        memory_bandwidth_bytes_per_s=take(fields, "memory_bandwidth", "bytes/s", "memory_bandwidth_bytes_per_s"),
        peak_flop_per_s={
            precision: take(peaks, precision, "flop/s", f"peak_flop_per_s.{precision}")
            for precision in _PRECISIONS
            if peaks.has(precision)
        },
        link_bandwidth_bytes_per_s=take(fields, "link_bandwidth", "bytes/s", "link_bandwidth_bytes_per_s"),
        pair_bandwidth_bytes_per_s=take(fields, "pair_bandwidth", "bytes/s", "pair_bandwidth_bytes_per_s"),
        pcie_bandwidth_bytes_per_s=take(fields, "pcie_bandwidth", "bytes/s", "pcie_bandwidth_bytes_per_s"),
        tdp_w=take(fields, "tdp", "W", "tdp_w"),
        features=_features(fields),
        usd_per_hour=take(fields, "price", "USD/h", "usd_per_hour") if priced else None,
        aliases=fields.texts("aliases", default=()),
        sources=numbers.read,
    )
    peaks.finish()
    fields.finish()
    return device


def _features(fields: Fields) -> frozenset[Feature]:
    """The features an entry lists."""
    listed = fields.texts("features")
    unknown = [feature for feature in listed if feature not in _FEATURES]
    if unknown:
        raise fields.error(f"unknown feature {show(unknown[0])}{hint(unknown[0], _FEATURES)}", "features")
    return frozenset(feature for feature in _FEATURES if feature in listed)


def _key(word: str) -> str:
    """The form in which names are compared."""
    return re.sub(r"[\s_-]+", "-", word.strip()).casefold()


def _near(word: str) -> str:
    """Suggest the names that begin with what was written, else the nearest one."""
    key = _key(word)
    longer = [name for name in _devices() if key and _key(name).startswith(f"{key}-")]
    if longer:
        return f"; did you mean {' or '.join(show(name) for name in longer)}?"
    close = get_close_matches(key[:_MAX_WORD], _index(), 1)
    return f"; did you mean {show(_index()[close[0]])}?" if close else ""
