"""What `rocm-smi --showtopo` prints: tables of weight, hops and link type between the accelerators of a node."""

from __future__ import annotations

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
