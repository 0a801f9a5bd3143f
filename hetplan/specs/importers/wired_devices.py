"""Where a node is wired otherwise than the datasheet of its device assumes.

Fast links carry the same in one direction from NVLink 2 to 4 (25 GB/s), 20 GB/s in NVLink 1 and 50 GB/s in NVLink 5;
the number of links times one of these is held against the datasheet's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetplan.specs.cluster import Device
from hetplan.specs.importers.facts import Catalog, Wiring
from hetplan.specs.importers.merge import DraftGroup
from hetplan.units import format_rate, quantity_text

NVLINK_BYTES_PER_S = (20e9, 25e9, 50e9)
ALIKE = 0.08
"""Reported rates include coding; the datasheets' are rounded (26.562 and 25 GB/s a link of NVLink 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """What to write over a datasheet, why, and what remains to be asked."""

    values: tuple[str, ...] = ()
    reason: str = ""
    questions: tuple[str, ...] = ()


def override_of(group: DraftGroup, catalog: Catalog) -> Override:
    """Return how a group's wiring differs from its device's datasheet."""
    cards, wiring = group.cards, group.sheet.wiring
    device = catalog.device(cards.product) if cards else None
    if device is None or cards is None:
        return Override(questions=(_words(wiring),)) if wiring is not None else Override()
    reported = cards.link_bandwidth_bytes_per_s
    if reported is not None:
        return _reported(device, reported)
    return _wired(device, wiring) if wiring is not None else Override()


def _words(wiring: Wiring) -> str:
    """What to ask about the links of a device that is not known."""
    if wiring.family == "none":
        return (
            "no two devices are joined by fast links; if the device's datasheet has some, write link_bandwidth: 0 B/s"
        )
    if not wiring.is_full:
        return f"{wiring.note}; what do they carry?"
    if wiring.family == "xgmi":
        return "every pair of devices is joined by xGMI; does the device's datasheet say so?"
    return f"every pair of devices is joined by {wiring.links_of_pair} NVLinks; does the device's datasheet say so?"


def _reported(device: Device, reported: float) -> Override:
    """Bandwidth of all links of a device, as the driver states it."""
    stated = device.link_bandwidth_bytes_per_s or device.pair_bandwidth_bytes_per_s
    if abs(reported - stated) <= ALIKE * max(reported, stated):
        return Override()
    key = "pair_bandwidth" if device.link_bandwidth_bytes_per_s == 0 else "link_bandwidth"
    values = [f"like: {device.name}", f"{key}: {quantity_text(reported, 'bytes/s')}"]
    if reported == 0:
        values[1:] = ["link_bandwidth: 0 B/s", "pair_bandwidth: 0 B/s"]
    reason = f"the driver reports {format_rate(reported)} of fast links, the datasheet says {format_rate(stated)}"
    return Override(values=tuple(values), reason=reason)


def _wired(device: Device, wiring: Wiring) -> Override:
    total, pair = device.link_bandwidth_bytes_per_s, device.pair_bandwidth_bytes_per_s
    if wiring.family == "none":
        if total == pair == 0:
            return Override()
        values = (f"like: {device.name}", "link_bandwidth: 0 B/s", "pair_bandwidth: 0 B/s")
        return Override(values=values, reason="no two devices are joined by fast links, though the datasheet has them")
    if not wiring.is_full:
        if total == 0 and pair > 0:
            return Override(questions=(f"{wiring.note}; are neighbours (0-1, 2-3, ...) the pairs?",))
        return Override(questions=(f"{wiring.note}; the datasheet's links are written, are they right?",))
    if wiring.family != "nvlink" or _as_stated(wiring, total or pair):
        return Override()
    counted = f"a pair is joined by {wiring.links_of_pair} NVLinks"
    return Override(questions=(f"{counted}, the datasheet has {format_rate(total or pair)}; write link_bandwidth?",))


def _as_stated(wiring: Wiring, stated: float) -> bool:
    counts = (wiring.links_of_pair, wiring.links_of_device)
    return any(abs(n * rate - stated) <= ALIKE * stated for n in counts for rate in NVLINK_BYTES_PER_S)
