"""What every node's environment says about its networks, and what only the user knows about them.

One rule above all: a process has one setting for all its process groups, so RDMA is switched on only where **one** RDMA
network joins every group of the job. Where the job spans kinds (InfiniBand here, RoCE there) every ring that leaves one
kind could be told to use adapters that do not talk to each other, so all use sockets on the network all share.
Interface and adapter names are never guessed: they are variables of `site.sh`, one a group, and each node's own file
may override them (adapters are often numbered differently from node to node).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetplan.emit.records import Component, Launched
from hetplan.emit.shell import SOURCED, comment, exports, variable
from hetplan.plan.rules import listed
from hetplan.specs.cluster import RDMA_KINDS, Cluster, Network

VERBS_KINDS = frozenset({"infiniband", "roce"})
"""RDMA kinds that NCCL drives itself, by adapter name; EFA and Slingshot come as plugins over libfabric."""
PROVIDERS = {"efa": "efa", "slingshot": "cxi"}
"""libfabric provider of each plugin kind (aws-ofi-nccl, Libfabric fi_cxi(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The networks a job runs over."""

    socket: Network | None
    """Network of rendezvous and sockets: one that joins most groups; None: one node, or no network."""
    rdma: Network | None
    """RDMA network that joins every group of the job; None: sockets."""
    unused: tuple[Network, ...]
    """RDMA networks of some groups only."""


def used_groups(launched: Launched) -> tuple[str, ...]:
    """Return the groups a job runs on, in the cluster's order."""
    used = {rank.group for rank in launched.engine.ranks}
    return tuple(group.name for group in launched.job.cluster.groups if group.name in used)


def fabric_of(cluster: Cluster, groups: Sequence[str], num_nodes: int) -> Fabric:
    """Return the networks for a job on some groups and as many nodes."""
    if num_nodes == 1:
        return Fabric(socket=None, rdma=None, unused=())
    wanted = set(groups)
    ours = [network for network in cluster.networks if wanted & set(network.joins)]
    rdma = [network for network in ours if network.kind in RDMA_KINDS]
    whole = [network for network in rdma if wanted <= set(network.joins)]
    best = max(whole, key=_node_bandwidth, default=None)
    return Fabric(
        socket=max(
            ours, key=lambda network: (len(wanted & set(network.joins)), network.kind == "ethernet"), default=None
        ),
        rdma=best,
        unused=() if best else tuple(rdma),
    )


def _node_bandwidth(network: Network) -> float:
    return network.bandwidth_bytes_per_s * network.nics_per_node


def fabric_notes(fabric: Fabric, groups: Sequence[str]) -> Iterator[str]:
    """Yield what the choice of networks means for the job."""
    if fabric.unused:
        names = listed(f"{network.name} ({network.kind}) joins {listed(network.joins)}" for network in fabric.unused)
        where = fabric.socket.name if fabric.socket else "none"
        yield (
            f"no RDMA network joins all of {listed(groups)}: {names}; NCCL uses sockets over network {where}: rings "
            "inside one kind run slower than the plan prices them, unless the engine gives them their own transport"
        )
    if fabric.socket is not None and not set(groups) <= set(fabric.socket.joins):
        yield f"no network joins all of {listed(groups)}: rendezvous needs addresses that every node can reach"


def site_questions(fabric: Fabric, groups: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield variables of the site that only the user knows, and how to find them out."""
    for group in groups:
        if fabric.socket is not None:
            name = fabric.socket.name if group in fabric.socket.joins else "that reaches the other nodes"
            yield variable("SOCKET_IFNAME", group), f"interface of group {group} on network {name} (`ip -brief link`)"
        if fabric.rdma is not None and fabric.rdma.kind in VERBS_KINDS:
            count = fabric.rdma.nics_per_node
            what = f"adapters of group {group} on network {fabric.rdma.name}, comma list of {count} (`ibv_devinfo -l`)"
            yield variable("IB_HCA", group), what
            if fabric.rdma.kind == "roce":
                yield variable("IB_GID_INDEX", group), f"GID index of RoCE v2 on group {group} (`show_gids`)"


def node_environment(fabric: Fabric, component: Component, node: str) -> str:
    """Return the environment file of one node."""
    group = component.groups[0]
    text = SOURCED + comment(
        f"Networks of node {node} (group {listed(component.groups)}). Names that differ on this node go here."
    )
    if fabric.socket is None and fabric.rdma is None:
        return text + comment("One node: NCCL finds the fast links itself.") + "export NCCL_IB_DISABLE=1\n"
    socket = f'"${variable("SOCKET_IFNAME", group)}"'
    values = {"NCCL_SOCKET_IFNAME": socket, "GLOO_SOCKET_IFNAME": socket, "TP_SOCKET_IFNAME": socket}
    text += exports(values)
    for network in fabric.unused:
        if group in network.joins:
            text += comment(f"{network.kind} network {network.name} joins {listed(network.joins)} only: not used.")
    if fabric.rdma is None:
        return text + exports({"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"})
    return text + exports(_rdma(fabric.rdma, group))


def _rdma(network: Network, group: str) -> dict[str, str]:
    if network.kind not in VERBS_KINDS:
        return {"FI_PROVIDER": PROVIDERS[network.kind]}
    values = {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": f'"=${variable("IB_HCA", group)}"'}
    if network.kind == "roce":
        values["NCCL_IB_GID_INDEX"] = f'"${variable("IB_GID_INDEX", group)}"'
    return values
