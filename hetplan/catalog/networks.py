"""Generations of links: what one lane group, port or line carries in one direction, and how long a message takes.

For writing cluster files and for checking them: a cluster file states its own numbers, which are those of the place
it describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from hetplan.errors import SpecError
from hetplan.specs.decode import Fields, read_document
from hetplan.units import UnitKind, hint, parse_quantity, show

LinkFamily = Literal["pcie", "nvlink", "xgmi", "infiniband", "roce", "ethernet", "efa", "slingshot", "wan"]

_FILE = Path(__file__).parent / "networks.yaml"
_FAMILIES: tuple[LinkFamily, ...] = get_args(LinkFamily)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGeneration:
    """One generation of a link; the bandwidth is nominal and of one direction."""

    name: str
    family: LinkFamily
    bandwidth_bytes_per_s: float
    """Of a device's links together (nvlink, xgmi), a x16 slot (pcie), a port (networks) or one line (wan)."""
    latency_s: float
    bandwidth_source: str
    latency_source: str


def find_link(name: str) -> LinkGeneration:
    """Return the generation called `name`, whole and regardless of case.

    Raises:
        SpecError: there is none; the message names the nearest.
    """
    for link in _links().values():
        if link.name.casefold() == name.casefold():
            return link
    raise SpecError(f"unknown link {show(name)}{hint(name, _links())}")


def link_names() -> tuple[str, ...]:
    """Names of all generations, in the order of the catalog."""
    return tuple(_links())


@cache
def _links() -> MappingProxyType[str, LinkGeneration]:
    """All generations by name."""
    document = read_document(_FILE, "networks")
    keys = document.fields("sources")
    sources = {key: keys.text(key) for key in keys.names()}
    links = {name: _link(name, fields, sources) for name, fields in document.table("links").items()}
    document.finish()
    return MappingProxyType(links)


def _link(name: str, fields: Fields, sources: dict[str, str]) -> LinkGeneration:
    """Decode one entry."""
    bandwidth, bandwidth_source = _sourced(fields, "bandwidth", "bytes/s", sources)
    latency, latency_source = _sourced(fields, "latency", "s", sources)
    link = LinkGeneration(
        name=name,
        family=fields.choice("family", _FAMILIES),
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency,
        bandwidth_source=bandwidth_source,
        latency_source=latency_source,
    )
    fields.finish()
    return link


def _sourced(fields: Fields, key: str, kind: UnitKind, sources: dict[str, str]) -> tuple[float, str]:
    """Return a number and its source."""
    texts = fields.texts(key)
    if len(texts) != 2:
        raise fields.error("expected a number followed by its source", key)
    return parse_quantity(texts[0], kind), sources.get(texts[1], texts[1])
