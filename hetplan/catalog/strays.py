"""Names in a calibration file that nothing answers to: constants under them would be ignored without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetplan.catalog.devices import device_names
from hetplan.catalog.load import calibration_text_of
from hetplan.specs.calibration import ANY_NETWORK
from hetplan.specs.cluster import Cluster
from hetplan.specs.decode import document_from_text
from hetplan.units import hint


def stray_names(calibration: str | Path, cluster: Cluster) -> tuple[str, ...]:
    """Return one located sentence for each device that neither the cluster nor the catalog has, and each network that
    the cluster has not.

    A calibration may hold devices of the catalog that this cluster lacks: files are shared between clusters.
    """
    return tuple(_strays(calibration, cluster))


def _strays(calibration: str | Path, cluster: Cluster) -> Iterator[str]:
    root = document_from_text(calibration_text_of(calibration), str(calibration), "calibration")
    own = [group.device.name for group in cluster.groups]
    joined = [network.name for network in cluster.networks]
    sections = (
        ("devices", {*own, *device_names()}, own, "no device of the cluster or the catalog"),
        ("networks", {*joined, ANY_NETWORK}, joined, f"no network of {cluster.name}"),
    )
    for section, known, near, words in sections:
        if not root.has(section):
            continue
        table = root.fields(section)
        for name in table.names():
            if name not in known:
                found = hint(name, near) or hint(name, sorted(known))
                yield str(table.error(f"{words} has this name: its constants are not used{found}", name))
