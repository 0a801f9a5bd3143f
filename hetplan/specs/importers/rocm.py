"""What `rocm-smi --showtopo` and `amd-smi topology` print: tables of weight, hops and link type between devices."""

from __future__ import annotations

import re
from dataclasses import replace

from hetplan.specs.importers.facts import Cards, Facts, NodeSheet, SourceText
from hetplan.specs.importers.link_matrix import device_columns, read_matrix, wiring

_TITLE = "Link Type between two GPUs"
_LINKS = frozenset({"XGMI", "PCIE"})


def read_showtopo(source: SourceText) -> Facts:
    """Return how a node is wired.

    Raises:
        SpecError: the table of link types is missing or damaged.
    """
    lines = source.lines
    title = next((line for line, text in enumerate(lines, 1) if _TITLE in text), None)
    if title is None:
        raise source.error(f"found no table '{_TITLE}'")
    header = next((n for n in range(title + 1, min(title + 5, len(lines) + 1)) if device_columns(lines[n - 1])), None)
    if header is None:
        raise source.error(f"the table '{_TITLE}' has no header", title)
    matrix, _ = read_matrix(source, header, _LINKS.__contains__, "0")
    links = wiring(matrix, "xgmi", lambda word: int(word == "XGMI"))
    return Facts(sheets=(NodeSheet(source=source.name, cards=(Cards(count=len(matrix.gpus)),), wiring=links),))


_AMD_TITLE = "LINK TYPE TABLE"
_ADDRESS = re.compile(r"\b[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d\b")


def read_amd_topology(source: SourceText) -> Facts:
    """Return how a node is wired, by `amd-smi topology`, which names devices by their PCI address.

    Raises:
        SpecError: the table of link types is missing or damaged.
    """
    lines = source.lines
    title = next((line for line, text in enumerate(lines, 1) if text.strip().startswith(_AMD_TITLE)), None)
    header = next((n for n in range((title or 0) + 1, len(lines) + 1) if _ADDRESS.search(lines[n - 1])), None)
    if title is None or header is None:
        raise source.error(f"found no table '{_AMD_TITLE}'", title or 1)
    addresses = _ADDRESS.findall(lines[header - 1])
    number = {address: f"GPU{i}" for i, address in enumerate(addresses)}
    named = [_ADDRESS.sub(lambda match: number.get(match[0], match[0]), line) for line in lines]
    matrix, _ = read_matrix(replace(source, text="\n".join(named)), header, _LINKS.__contains__, "SELF")
    links = wiring(matrix, "xgmi", lambda word: int(word == "XGMI"))
    return Facts(sheets=(NodeSheet(source=source.name, cards=(Cards(count=len(matrix.gpus)),), wiring=links),))
