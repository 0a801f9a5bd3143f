"""Seconds a microbatch's activations take from one stage to the next.

Every rank of the sending mesh sends its own part at the same time: its samples (dp), its part of the sequence (cp) and
`1 / tp` of that, since the tp ranks hold equal slices (sequence parallelism) or one copy each of which every rank
sends a slice and the receivers gather it (the scatter/gather optimisation of Narayanan 2021, arXiv:2104.04473). The
slower end counts:

* one host: pairs of ranks, as many as the smaller mesh has, each at the rate of one pair of devices;
* a network: a mesh has its share of its nodes' NICs, `mesh size / devices per node` nodes' worth, one NIC at least;
* a shared line: the line.
"""

from __future__ import annotations

import math

from hetplan.costs.collectives import reduce_scatter_s, ring_inside
from hetplan.costs.links import Link, inside_link, link_between, pcie_link
from hetplan.costs.records import StageOption
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster
from hetplan.specs.workload import Workload


class Boundaries:
    """Prices transfers between stages; remembers links."""

    def __init__(self, cluster: Cluster, workload: Workload, calibration: Calibration) -> None:
        self._cluster = cluster
        self._groups = {group.name: group for group in cluster.groups}
        self._workload = workload
        self._calibration = calibration
        self._links: dict[tuple[str, str], Link | None] = {}
        self._host_links: dict[tuple[str, str], Link] = {}

    def link(self, first: str, second: str) -> Link | None:
        """Return the link between nodes of two groups."""
        if (first, second) not in self._links:
            self._links[first, second] = link_between(self._cluster, first, second, self._calibration)
        return self._links[first, second]

    def seconds(self, sender: StageOption, receiver: StageOption, sample_bytes: float, *, same_node: bool) -> float:
        """Return the seconds for activations of `sample_bytes` a sample; infinite where nothing joins the groups."""
        num_bytes = sample_bytes * sender.samples * sender.dp
        if same_node:
            link: Link | None = self._host_link(sender, receiver)
            rate = link.bandwidth_bytes_per_s * min(sender.mesh_size, receiver.mesh_size) if link else 0.0
        else:
            link = self.link(sender.group, receiver.group)
            rate = min(self._end_rate(sender, link), self._end_rate(receiver, link)) if link else 0.0
        if link is None:
            return math.inf
        return link.latency_s + num_bytes / rate + self._gather_s(receiver, num_bytes)

    def _host_link(self, sender: StageOption, receiver: StageOption) -> Link:
        key = (sender.group, receiver.group)
        if key not in self._host_links:
            first, second = self._groups[sender.group], self._groups[receiver.group]
            if first is second:
                self._host_links[key] = inside_link(first, 2, self._calibration)
            else:
                self._host_links[key] = pcie_link(first, second, self._calibration)
        return self._host_links[key]

    def _end_rate(self, option: StageOption, link: Link) -> float:
        if link.shared or not link.network:
            return link.bandwidth_bytes_per_s
        nodes = option.mesh_size / self._groups[option.group].devices_per_node
        return max(link.nic_bytes_per_s, link.bandwidth_bytes_per_s * nodes)

    def _gather_s(self, receiver: StageOption, num_bytes: float) -> float:
        """Return the gather of slices over the receiver's tp group, needed without sequence parallelism only."""
        if self._workload.sequence_parallel or receiver.tp == 1:
            return 0.0
        group = self._groups[receiver.group]
        ring = ring_inside(self._cluster, group, self._calibration, num_ranks=receiver.tp, stride=1)
        return reduce_scatter_s(num_bytes / (receiver.dp * receiver.cp), ring)
