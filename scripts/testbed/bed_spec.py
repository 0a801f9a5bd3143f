"""A testbed file -> records, and the cluster file it stands for.

```yaml
hetplan: testbed/v1
name: three-speeds
throttle: pace                     # pace (default): ranks sleep; quota: a cgroup's CPU quota (root only)
groups:
  fast: {hosts: 1, devices: 2, speed: 0.5, rate: 10 Gbit/s}
  slow: {hosts: 1, speed: 0.2, rate: 100 Mbit/s, site: east}
line: {rate: 200 Mbit/s, delay: 20 ms}     # between the two sites, shared by all traffic; only with two sites
```
`speed` is the share of a core a device of the group has, `devices` how many a host has (default 1), `rate` what each
host's port lets through, each way. Hosts are called as in a cluster file: `fast-1`, `fast-2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetplan.errors import UsageError
from hetplan.specs.decode import read_document
from hetplan.units import quantity_text

Throttle = Literal["pace", "quota"]
THROTTLES: tuple[Throttle, ...] = ("pace", "quota")

CORE_FLOP_PER_S = 100e9
CORE_BYTES_PER_S = 30e9
CORE_WATTS = 10.0
"""Assumed nominal figures of one core; what counts is measured by `hetplan profile`."""
MEMORY_BYTES = 2 * 2**30
PORT_LATENCY_S = 100e-6
"""Assumed; measured by `hetplan profile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BedGroup:
    """Equal hosts."""

    name: str
    num_hosts: int
    num_devices: int
    """Of each host."""
    speed: float
    rate_bytes_per_s: float
    site: str

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names as a cluster file gives them."""
        return tuple(f"{self.name}-{number}" for number in range(1, self.num_hosts + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line between two sites."""

    rate_bytes_per_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """A testbed."""

    name: str
    throttle: Throttle
    groups: tuple[BedGroup, ...]
    line: Line | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites, in the order in which they appear."""
        return tuple(dict.fromkeys(group.site for group in self.groups))

    def hosts(self) -> Iterator[tuple[str, BedGroup]]:
        """Yield every host with its group."""
        for group in self.groups:
            for host in group.hosts:
                yield host, group

    def ranks(self) -> Iterator[tuple[str, int, BedGroup]]:
        """Yield every device in rank order: its host, its place there, its group."""
        for host, group in self.hosts():
            for slot in range(group.num_devices):
                yield host, slot, group


def read_bed(path: Path) -> Bed:
    """Return the testbed a file describes.

    Raises:
        SpecError: the file is not a valid testbed.
        UsageError: sites and line do not fit together.
    """
    root = read_document(path, "testbed")
    groups = []
    for name, fields in root.table("groups").items():
        groups.append(
            BedGroup(
                name=name,
                num_hosts=fields.integer("hosts", minimum=1, maximum=16, default=1),
                num_devices=fields.integer("devices", minimum=1, maximum=16, default=1),
                speed=fields.number("speed", minimum=0.01, maximum=1.0),
                rate_bytes_per_s=fields.quantity("rate", "bytes/s", positive=True),
                site=fields.text("site", default="main"),
            )
        )
        fields.finish()
    line = None
    if root.has("line"):
        fields = root.fields("line")
        line = Line(
            rate_bytes_per_s=fields.quantity("rate", "bytes/s", positive=True), delay_s=fields.quantity("delay", "s")
        )
        fields.finish()
    bed = Bed(
        name=root.text("name"),
        throttle=root.choice("throttle", THROTTLES, default="pace"),
        groups=tuple(groups),
        line=line,
    )
    root.finish()
    if len(bed.sites) != (2 if line else 1):
        raise UsageError(f"{path}: a line joins two sites, and two sites need a line; found {', '.join(bed.sites)}")
    return bed


def cluster_of(bed: Bed) -> str:
    """Return the cluster file a testbed stands for."""
    return "\n".join(_cluster_lines(bed)) + "\n"


def _cluster_lines(bed: Bed) -> Iterator[str]:
    yield "hetplan: cluster/v1"
    yield f"name: {bed.name}"
    yield "devices:"
    for group in bed.groups:
        peak = quantity_text(CORE_FLOP_PER_S * group.speed, "flop/s")
        memory = quantity_text(CORE_BYTES_PER_S * group.speed, "bytes/s")
        rate = quantity_text(CORE_BYTES_PER_S, "bytes/s")
        yield f"  {group.name}-core:"
        yield f"    memory: {quantity_text(MEMORY_BYTES, 'bytes')}"
        yield f"    memory_bandwidth: {memory}"
        yield f"    peak: {{fp32: {peak}}}"
        yield f"    pcie_bandwidth: {rate}"
        yield f"    tdp: {quantity_text(CORE_WATTS * group.speed, 'W')}"
        yield "    features: [flash_attention]"
        yield "    vendor: cpu"
    yield "groups:"
    for group in bed.groups:
        yield (
            f"  {group.name}: {{device: {group.name}-core, nodes: {group.num_hosts},"
            f" devices_per_node: {group.num_devices}, site: {group.site}}}"
        )
    networks = list(_networks(bed))
    if networks:
        yield "networks:"
        yield from networks


def _networks(bed: Bed) -> Iterator[str]:
    """Yield, for each site and each rate of a port there, the network of all that are at least as fast."""
    for site in bed.sites:
        inside = [group for group in bed.groups if group.site == site]
        for rate in sorted({group.rate_bytes_per_s for group in inside}, reverse=True):
            joined = [group for group in inside if group.rate_bytes_per_s >= rate]
            if sum(group.num_hosts for group in joined) > 1:
                name = f"{site}-{rate * 8 / 1e6:.0f}m"
                yield _network(name, joined, rate, PORT_LATENCY_S)
    if bed.line is not None:
        slowest = min([bed.line.rate_bytes_per_s, *(group.rate_bytes_per_s for group in bed.groups)])
        yield _network("line", list(bed.groups), slowest, bed.line.delay_s, shared=", shared: true")


def _network(name: str, joined: list[BedGroup], rate: float, latency_s: float, shared: str = "") -> str:
    joins = ", ".join(group.name for group in joined)
    return (
        f"  {name}: {{joins: [{joins}], kind: ethernet, bandwidth: {quantity_text(rate, 'bytes/s')},"
        f" latency: {quantity_text(latency_s, 's')}{shared}}}"
    )
