"""Cluster YAML -> `Cluster`: groups of equal nodes, the networks that join them, and what must hold between them.

Devices are named; `find_device` turns a name into its datasheet, and a `devices:` section of the file adds to or
overrides datasheets before groups look at them (`read_devices`). Networks are read by `read_networks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hetplan.errors import HetplanError, UsageError
from hetplan.specs.cluster import Cluster, Device, Group, Host
from hetplan.specs.connected import require_connected
from hetplan.specs.decode import Fields, document_from_text, read_document
from hetplan.specs.hostlist import expand_hostlist, is_node_name
from hetplan.specs.read_devices import read_devices
from hetplan.specs.read_networks import read_networks
from hetplan.units import format_bytes, hint, show

MAX_DEVICES = 10_000_000
MAX_NODES = 2_000_000
MAX_GROUPS = 5_000
MAX_DEVICES_PER_NODE = 1024
MAX_NAME = 64

FindDevice = Callable[[str], Device]
"""Name -> datasheet; raises a HetplanError for an unknown name."""


def read_cluster(path: Path, find_device: FindDevice) -> Cluster:
    """Return the cluster a file describes.

    Raises:
        SpecError: the file is not a valid cluster.
    """
    return _cluster(read_document(path, "cluster"), find_device, path.parent)


def cluster_from_text(text: str, file_name: str, find_device: FindDevice, base: Path | None = None) -> Cluster:
    """Return the cluster `text` describes; files it names are looked up in `base`.

    Raises:
        SpecError: the text is not a valid cluster, or names a file while `base` is None.
    """
    return _cluster(document_from_text(text, file_name, "cluster"), find_device, base)


def _cluster(root: Fields, find_device: FindDevice, base: Path | None) -> Cluster:
    """Decode the root mapping and check what holds across groups and networks."""
    name = _name(root, "name")
    devices = read_devices(root.fields("devices", required=False), find_device)

    def find(device: str) -> Device:
        return devices[device] if device in devices else _find_or_hint(device, devices, find_device)

    table = root.table("groups")
    if not table:
        raise root.error("a cluster needs at least one group", "groups")
    if len(table) > MAX_GROUPS:
        raise root.error(f"the cluster has {len(table):,} groups; at most {MAX_GROUPS:,}", "groups")
    groups = _groups(table, find)
    networks = read_networks(root.table("networks", required=False), groups, base)
    root.finish()
    _check_shared_hosts(groups, table)
    require_connected(groups, networks, table)
    return Cluster(name=name, groups=groups, networks=networks)


def _find_or_hint(device: str, devices: Mapping[str, Device], find_device: FindDevice) -> Device:
    """Ask the catalog; an unknown name may be a misspelt inline definition."""
    try:
        return find_device(device)
    except HetplanError as error:
        near = hint(device, devices)
        raise UsageError(f"unknown device {show(device)}{near}" if near else _bare(error)) from None


def _groups(table: Mapping[str, Fields], find: FindDevice) -> tuple[Group, ...]:
    """Decode all groups, stopping as soon as there are too many devices."""
    groups: list[Group] = []
    num_nodes = num_devices = 0
    for name, fields in table.items():
        group = _group(name, fields, find)
        num_nodes += len(group.nodes)
        num_devices += len(group.nodes) * group.devices_per_node
        if num_devices > MAX_DEVICES:
            raise fields.error(f"the cluster has more than {MAX_DEVICES:,} devices", "nodes")
        if num_nodes > MAX_NODES:
            raise fields.error(f"the cluster has more than {MAX_NODES:,} nodes", "nodes")
        groups.append(group)
    return tuple(groups)


def _group(name: str, fields: Fields, find: FindDevice) -> Group:
    """Decode one group."""
    _check_name(name, fields)
    device_name = fields.text("device")
    try:
        device = find(device_name)
    except HetplanError as error:
        raise fields.error(str(error), "device") from None
    nodes = _nodes(name, fields)
    per_node = fields.integer("devices_per_node", minimum=1, maximum=MAX_DEVICES_PER_NODE)
    group = Group(
        name=name,
        device=device,
        nodes=nodes,
        devices_per_node=per_node,
        site=_name(fields, "site", default="main"),
        usable_memory_bytes=_usable_memory(fields, device),
        speed=fields.number("speed", default=1.0, minimum=0.01, maximum=100.0),
        usd_per_device_hour=fields.quantity("price", "USD/h", default=device.usd_per_hour),
        power_w=fields.quantity("power_limit", "W", default=None, positive=True),
        domain_nodes=fields.integer("domain_nodes", default=1, minimum=1, maximum=len(nodes)),
        host=_host(fields.fields("host", required=False)),
        left_out=_left_out(fields, nodes, per_node),
    )
    fields.finish()
    return group


def _bare(error: HetplanError) -> str:
    """The message of an error, on one line."""
    return " ".join(str(error).split())


def _check_name(name: str, fields: Fields) -> None:
    """Refuse a group name that cannot start a node name or stand in a plan."""
    if not is_node_name(name) or len(name) > MAX_NAME:
        message = f"{show(name)} is not a group name; at most {MAX_NAME} letters, digits, '.', '_' and '-' make one"
        raise fields.error(message)


def _name(fields: Fields, key: str, *, default: str | None = None) -> str:
    """Return a short printable text."""
    text = fields.text(key) if default is None else fields.text(key, default=default)
    if len(text) > MAX_NAME or not text.isprintable() or text != text.strip():
        raise fields.error(f"expected at most {MAX_NAME} printable characters, found {show(text)}", key)
    return text


def _nodes(name: str, fields: Fields) -> tuple[str, ...]:
    """Names of a group's nodes, written as a count or a hostlist."""
    if not fields.is_text("nodes"):
        count = fields.integer("nodes", minimum=1, maximum=MAX_NODES)
        return tuple(f"{name}-{number}" for number in range(1, count + 1))
    text = fields.text("nodes")
    try:
        return expand_hostlist(text)
    except HetplanError as error:
        raise fields.error(f"expected a count or a hostlist: {error}", "nodes") from None


def _usable_memory(fields: Fields, device: Device) -> float:
    """Memory a device of the group offers."""
    usable = fields.quantity("usable_memory", "bytes", default=device.usable_memory_bytes, positive=True)
    if usable > device.memory_bytes:
        limit = f"{device.name} has {format_bytes(device.memory_bytes)}"
        raise fields.error(f"{format_bytes(usable)} is more than the device's memory; {limit}", "usable_memory")
    return usable


def _host(fields: Fields) -> Host:
    """Decode what a node has besides its accelerators."""
    host = Host(
        memory_bytes=fields.quantity("memory", "bytes", default=None, positive=True),
        cores=fields.integer("cores", default=None, minimum=1, maximum=100_000),
        nvme_bandwidth_bytes_per_s=fields.quantity("nvme_bandwidth", "bytes/s", default=None, positive=True),
        pcie_bandwidth_bytes_per_s=fields.quantity("pcie_bandwidth", "bytes/s", default=None, positive=True),
    )
    fields.finish()
    return host


def _left_out(fields: Fields, nodes: tuple[str, ...], per_node: int) -> frozenset[tuple[int, int]]:
    """(node index, slot) of the devices `leave_out` names as `node` or `node:slot`."""
    entries = fields.texts("leave_out", default=())
    if not entries:
        return frozenset()
    index_of = {node: index for index, node in enumerate(nodes)}
    left_out: set[tuple[int, int]] = set()
    for position, entry in enumerate(entries):
        node, colon, slot = entry.partition(":")
        if node not in index_of:
            raise fields.error(f"the group has no node {show(node)}{hint(node, nodes)}", "leave_out", index=position)
        if not colon:
            left_out.update((index_of[node], number) for number in range(per_node))
            continue
        if not slot.isascii() or not slot.isdigit() or len(slot) > 6 or int(slot) >= per_node:
            raise fields.error(f"slot {show(slot)} is not one of 0 to {per_node - 1}", "leave_out", index=position)
        left_out.add((index_of[node], int(slot)))
    if len(left_out) == len(nodes) * per_node:
        raise fields.error("every device of the group is left out; remove the group instead", "leave_out")
    return frozenset(left_out)


def _check_shared_hosts(groups: tuple[Group, ...], table: Mapping[str, Fields]) -> None:
    """Refuse groups that share a host and disagree about where or what it is."""
    first_on: dict[str, Group] = {}
    for group in groups:
        for node in group.nodes:
            other = first_on.setdefault(node, group)
            if other.site != group.site:
                message = f"node {show(node)} is at site {show(other.site)} in group '{other.name}'"
                raise table[group.name].error(message, "site")
            if Host() not in (other.host, group.host) and other.host != group.host:
                message = f"node {show(node)} has another host in group '{other.name}'; write it once"
                raise table[group.name].error(message, "host")
