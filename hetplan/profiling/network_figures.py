"""Figures between hosts -> constants of the cluster file's networks.

Where a cluster file names the networks, a pair of hosts is put down to the network that the cost model would have them
use, and its constants are relative to what the file says. Without one, all hosts are joined by one network of their
own (`MEASURED_NETWORK`), whose nominal bandwidth is what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetplan.costs.links import link_between
from hetplan.profiling import fit
from hetplan.profiling.records import LinkFigure, Survey
from hetplan.specs.calibration import Calibration, NetworkConstants
from hetplan.specs.cluster import Cluster

MEASURED_NETWORK = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """Who is where: the cluster file, and the group of each host."""

    cluster: Cluster | None = None
    group_of: Mapping[str, str] = field(default_factory=dict)
    """Host -> group of the cluster file."""


def network_constants(survey: Survey, networks: Networks) -> dict[str, NetworkConstants]:
    """Return the constants of every network that was measured."""
    found: dict[str, NetworkConstants] = {}
    for name, figures in _by_network(survey, networks).items():
        sends = [figure for figure in figures if figure.kind == "send" and figure.together == 1]
        rings = [figure for figure in figures if figure.kind == "all_reduce"]
        if not sends:
            continue
        line = fit.fit_sends(sends)
        nominal = _nominal(survey, networks, sends[0])
        constants = NetworkConstants(
            bandwidth_fraction=min(fit.LARGEST, 1.0 / line.s_per_byte / nominal) if nominal else 1.0,
            latency_s=line.latency_s,
            origin="measured",
        )
        if rings:
            ring = fit.fit_all_reduces(rings)
            constants = NetworkConstants(
                bandwidth_fraction=constants.bandwidth_fraction,
                latency_s=constants.latency_s,
                collective_fraction=min(1.0, line.s_per_byte / ring.s_per_byte),
                collective_latency_s=ring.latency_s,
                origin="measured",
            )
        found[name] = constants
    return found


def measured_line(survey: Survey) -> fit.Line | None:
    """Return the line of all transfers between hosts; None where there are none."""
    sends = [f for f in _between(survey) if f.kind == "send" and f.together == 1]
    return fit.fit_sends(sends) if sends else None


def sharing_notes(survey: Survey) -> tuple[str, ...]:
    """Return what transfers side by side lose against one alone, a sentence each."""
    notes = []
    alone = {(f.ranks, f.num_bytes): f.timing.seconds for f in survey.links if f.kind == "send" and f.together == 1}
    largest: dict[tuple[int, ...], LinkFigure] = {}
    for figure in survey.links:
        if figure.together > 1 and (figure.ranks, figure.num_bytes) in alone:
            largest[figure.ranks] = figure
    for ranks, figure in largest.items():
        hosts = [survey.ranks[rank].machine.host for rank in ranks]
        factor = figure.timing.seconds / alone[ranks, figure.num_bytes]
        where = f"inside {hosts[0]}" if hosts[0] == hosts[1] else f"{hosts[0]} to {hosts[1]}"
        notes.append(f"{where}: {factor:.2f} times as long beside another transfer")
    return tuple(notes)


def _between(survey: Survey) -> list[LinkFigure]:
    hosts = [report.machine.host for report in survey.ranks]
    return [figure for figure in survey.links if len({hosts[rank] for rank in figure.ranks}) > 1]


def _by_network(survey: Survey, networks: Networks) -> dict[str, list[LinkFigure]]:
    found: dict[str, list[LinkFigure]] = {}
    for figure in _between(survey):
        name = _slowest(survey, networks, figure.ranks)
        if name is not None:
            found.setdefault(name, []).append(figure)
    return found


def _slowest(survey: Survey, networks: Networks, ranks: Sequence[int]) -> str | None:
    """Return the slowest network a set of ranks crosses; None where the cluster file joins them with none."""
    if networks.cluster is None:
        return MEASURED_NETWORK
    groups = [networks.group_of.get(survey.ranks[rank].machine.host, "") for rank in ranks]
    known = {group.name for group in networks.cluster.groups}
    links = [
        link_between(networks.cluster, first, second, Calibration())
        for i, first in enumerate(groups)
        for second in groups[i + 1 :]
        if first in known and second in known
    ]
    joined = [link for link in links if link is not None and link.network]
    return min(joined, key=lambda link: link.nic_bytes_per_s).network if joined else None


def _nominal(survey: Survey, networks: Networks, figure: LinkFigure) -> float | None:
    """Return what the cluster file gives one transfer between two hosts, oversubscription included."""
    if networks.cluster is None:
        return None
    first, second = (networks.group_of[survey.ranks[rank].machine.host] for rank in figure.ranks[:2])
    plain = Calibration(networks={n.name: NetworkConstants(bandwidth_fraction=1.0) for n in networks.cluster.networks})
    link = link_between(networks.cluster, first, second, plain)
    return link.nic_bytes_per_s if link else None
