"""Cluster files of Sailor's scenarios: its cards, zones and dollars an hour."""

from __future__ import annotations

MEMORY_GIB = {
    "V100-16": 16,
    "A100-40": 40,
    "A100-80": 80,
    "GH-96": 96,
    "Titan-RTX": 24,
    "RTX-2080": 11,
    "RTX-3090": 24,
}
USD_PER_HOUR = {"A100-40": 3.673385, "V100-16": 2.859998, "GH-96": 11.06}
ZONE = "us-central1-a"
CENTRAL = ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f")


def cluster_text(name: str, groups: tuple[tuple[str, str, int], ...]) -> str:
    """Return a cluster file; nodes hold four devices."""
    devices = dict.fromkeys(device for device, _, _ in groups)
    lines = ["hetplan: cluster/v1", f"name: {name}", "devices:"]
    for device in devices:
        size = f"{MEMORY_GIB[device]} GiB"
        lines.append(f"  {device}: {{like: A100-SXM4-40GB, memory: {size}, usable_memory: {size}}}")
    lines.append("groups:")
    names = {}
    for device, zone, count in groups:
        names[device, zone] = f"{device}.{zone}".lower()
        price = f", price: {USD_PER_HOUR[device]} USD/h" if device in USD_PER_HOUR else ""
        lines.append(
            f"  {names[device, zone]}: {{device: {device}, nodes: {count // 4}, devices_per_node: 4,"
            f" site: {zone}{price}}}"
        )
    lines.append("networks:")
    zones = dict.fromkeys(zone for _, zone, _ in groups)
    for zone in zones:
        inside = ", ".join(own for (_, at), own in names.items() if at == zone)
        lines.append(f"  {zone}: {{joins: [{inside}], kind: ethernet, bandwidth: 16 Gbit/s, latency: 50 us}}")
    central = [own for (_, at), own in names.items() if at in CENTRAL]
    if len(zones) > 1:
        paid = "kind: ethernet, latency: 1 ms"
        lines.append(f"  region: {{joins: [{', '.join(central)}], {paid}, bandwidth: 15 Gbit/s, price: 0.01 USD/GB}}")
        lines.append(
            f"  wide: {{joins: [{', '.join(names.values())}], {paid}, bandwidth: 5 Gbit/s, price: 0.02 USD/GB}}"
        )
    return "\n".join(lines) + "\n"
