"""Names of the nodes a stage runs on, short enough for a table cell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from hetplan.specs.cluster import Group

_NUMBERED = re.compile(r"(.*?)(\d+)")

Ranges = Sequence[tuple[int, int]]


def nodes_of(group: Group, devices: Ranges) -> tuple[str, ...]:
    """Return the nodes that hold the devices of half-open `devices` ranges, counted over usable devices."""
    usable = list(_usable_devices(group)) if group.left_out else None
    indices: dict[int, None] = {}
    for first, end in devices:
        if usable is None:
            indices |= dict.fromkeys(range(first // group.devices_per_node, -(-end // group.devices_per_node)))
        else:
            indices |= dict.fromkeys(usable[first:end])
    return tuple(group.nodes[i] for i in indices if i < len(group.nodes))


def _usable_devices(group: Group) -> Iterator[int]:
    """Node index of each device that may be used, in order."""
    for node in range(len(group.nodes)):
        for slot in range(group.devices_per_node):
            if (node, slot) not in group.left_out:
                yield node


def hostlist(names: Iterable[str]) -> str:
    """Return names as a Slurm hostlist: runs of equally padded numbers after one stem become `stem[1-4]`."""
    return ",".join(_run_text(run) for run in _runs(names))


Numbered = tuple[str, str]


def _runs(names: Iterable[str]) -> Iterator[list[Numbered]]:
    run: list[Numbered] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        item = (match[1], match[2]) if match else (name, "")
        if run and not _follows(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _follows(before: Numbered, after: Numbered) -> bool:
    if not before[1] or not after[1] or before[0] != after[0]:
        return False
    padded_alike = len(before[1]) == len(after[1]) or not (before[1].startswith("0") or after[1].startswith("0"))
    return padded_alike and int(after[1]) == int(before[1]) + 1


def _run_text(run: list[Numbered]) -> str:
    stem, first = run[0]
    return f"{stem}{first}" if len(run) == 1 else f"{stem}[{first}-{run[-1][1]}]"
