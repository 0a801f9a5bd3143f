"""What `nvidia-smi` prints: `topo -m`, `nvlink --status`, `-q` and `--query-gpu=... --format=csv`."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetplan.errors import HetplanError
from hetplan.specs.importers.facts import Cards, Facts, Nic, NodeSheet, SourceText, distinct
from hetplan.specs.importers.link_matrix import LinkMatrix, device_columns, read_matrix, wiring
from hetplan.units import UnitKind, parse_quantity, show

_NVLINK = re.compile(r"NV(\d{1,3})")
_WORDS = frozenset({"SYS", "NODE", "PHB", "PXB", "PIX"})
_GPU_LINE = re.compile(r"GPU (\d+): (.+?) \(UUID: .*\)")
_LINK_LINE = re.compile(r"\s+Link (\d+): (.+)")
_NIC_LINE = re.compile(r"\s*(NIC\d+): (\S+)")
_FIELD = re.compile(r"^(\s*)(\S.*?)\s*: (.*\S)\s*$")
_NEAR = frozenset({"PIX", "PXB", "PHB", "NODE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One device, in the order printed."""

    product: str
    memory_bytes: float | None = None
    power_limit_w: float | None = None
    link_bandwidth_bytes_per_s: float | None = None


def read_topo(source: SourceText) -> Facts:
    """Return how `nvidia-smi topo -m` says a node is wired.

    Raises:
        SpecError: the table is damaged.
    """
    header = next(
        (line for line, text in enumerate(source.lines, 1) if "GPU0" in device_columns(text)),
        None,
    )
    if header is None:
        raise source.error("found no header line that starts with GPU0")
    matrix, end = read_matrix(source, header, _is_link, "X")
    links = wiring(matrix, "nvlink", _num_links)
    aliases = {m[1]: m[2] for text in source.lines[end - 1 :] if (m := _NIC_LINE.fullmatch(text))}
    ports = [name for name in matrix.names if name not in matrix.gpus]
    far = [name for name in ports if not any(matrix.words[name][gpu] in _NEAR for gpu in matrix.gpus)]
    remarks = tuple(f"{aliases.get(name, name)} is on no accelerator's side of the host" for name in far)
    sheet = NodeSheet(
        source=source.name,
        cards=(Cards(count=len(matrix.gpus)),),
        wiring=links,
        nics=tuple(Nic(name=aliases.get(name, name)) for name in ports) if ports else None,
    )
    return Facts(sheets=(sheet,), remarks=remarks if _has_near(matrix, ports) else ())


def _has_near(matrix: LinkMatrix, ports: Sequence[str]) -> bool:
    return any(matrix.words[port][gpu] in _NEAR for port in ports for gpu in matrix.gpus)


def _is_link(word: str) -> bool:
    return word in _WORDS or _NVLINK.fullmatch(word) is not None


def _num_links(word: str) -> int:
    match = _NVLINK.fullmatch(word)
    return int(match[1]) if match else 0


def read_nvlink_status(source: SourceText) -> Facts:
    """Return products and fast-link bandwidth of `nvidia-smi nvlink --status`.

    Raises:
        SpecError: a line is none of those the tool prints, or devices are missing.
    """
    products: list[str] = []
    rates: list[float] = []
    for line, text in enumerate(source.lines, 1):
        if not text.strip():
            continue
        if gpu := _GPU_LINE.fullmatch(text.strip()):
            if int(gpu[1]) != len(products):
                raise source.error(f"GPU {gpu[1]} where GPU {len(products)} was expected", line)
            products.append(gpu[2])
            rates.append(0.0)
        elif (link := _LINK_LINE.fullmatch(text)) and products:
            rates[-1] += 0.0 if link[2] == "<inactive>" else quantity(source, line, link[2], "bytes/s")
        elif not (products and "inactive" in text.lower()):
            raise source.error(f"{show(text.strip())} is neither a GPU nor a link of one", line)
    cards = [Card(product=p, link_bandwidth_bytes_per_s=r) for p, r in zip(products, rates, strict=True)]
    return Facts(sheets=(NodeSheet(source=source.name, cards=counted(source, cards)),))


def read_query(source: SourceText) -> Facts:
    """Return the devices of a `--query-gpu=...,name,... --format=csv` table.

    Raises:
        SpecError: the table has no `name` column, or a row does not suit its header.
    """
    try:
        table = list(csv.reader(source.lines))
    except csv.Error as error:
        raise source.error(f"not valid CSV: {error}") from None
    rows = [(n, [c.strip() for c in row]) for n, row in enumerate(table, 1) if row]
    if not rows:
        raise source.error("the file is empty")
    header = [re.sub(r"\s*\[.*\]$", "", cell) for cell in rows[0][1]]
    units = [m[1] if (m := re.search(r"\[(.*)\]$", cell)) else "" for cell in rows[0][1]]
    name = next((header.index(key) for key in ("name", "gpu_name") if key in header), None)
    if name is None:
        raise source.error(f"the header {show(','.join(header))} has no column 'name'")
    if len(rows) == 1:
        raise source.error("the table lists no device")
    cards = []
    for line, cells in rows[1:]:
        if len(cells) != len(header):
            raise source.error(f"expected {len(header)} cells, found {len(cells)}", line)
        row = dict(zip(header, zip(cells, units, strict=True), strict=True))
        refuse_mig(source, line, row.get("mig.mode.current", ("", ""))[0])
        cards.append(
            Card(
                product=cells[name],
                memory_bytes=_cell(source, line, row.get("memory.total"), "bytes"),
                power_limit_w=_cell(source, line, row.get("power.limit"), "W"),
            )
        )
    return Facts(sheets=(NodeSheet(source=source.name, cards=counted(source, cards)),))


def _cell(source: SourceText, line: int, cell: tuple[str, str] | None, kind: UnitKind) -> float | None:
    """Return a cell's quantity; its unit stands in it or, with `nounits`, in the header."""
    if cell is None or cell[0].strip("[]") in ("N/A", "Not Supported", "Unknown Error"):
        return None
    text, unit = cell
    return quantity(source, line, f"{text} {unit}" if re.fullmatch(r"[\d.]+", text) else text, kind)


def read_full_query(source: SourceText) -> Facts:
    """Return the devices of `nvidia-smi -q`.

    Raises:
        SpecError: fewer devices are described than are attached, or a number cannot be read.
    """
    attached: tuple[int, int] | None = None
    cards: list[dict[str, str]] = []
    section = ""
    for line, text in enumerate(source.lines, 1):
        if re.fullmatch(r"GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d", text.strip()):
            cards.append({"line": str(line)})
        elif match := _FIELD.fullmatch(text):
            if match[2] == "Attached GPUs" and match[3].isdigit():
                attached = (int(match[3]), line)
            elif cards:
                _take(cards[-1], section, match[2], match[3])
        elif text.strip():
            section = text.strip()
    if attached is None or attached[0] != len(cards):
        wanted = "no number of attached GPUs" if attached is None else f"{attached[0]} attached GPUs"
        raise source.error(f"{wanted} but {len(cards)} described: the text is cut", attached[1] if attached else 1)
    return Facts(sheets=(NodeSheet(source=source.name, cards=counted(source, [_full(source, c) for c in cards])),))


_WANTED = {
    ("", "Product Name"): "product",
    ("FB Memory Usage", "Total"): "memory",
    ("MIG Mode", "Current"): "mig",
    ("GPU Power Readings", "Current Power Limit"): "power",
    ("Power Readings", "Power Limit"): "power",
}


def _take(card: dict[str, str], section: str, key: str, value: str) -> None:
    name = _WANTED.get((section, key)) or _WANTED.get(("", key))
    if name is not None:
        card.setdefault(name, value)


def _full(source: SourceText, card: Mapping[str, str]) -> Card:
    line = int(card["line"])
    if "product" not in card:
        raise source.error("this GPU has no 'Product Name'", line)
    refuse_mig(source, line, card.get("mig", ""))
    return Card(
        product=card["product"],
        memory_bytes=_cell(source, line, (card["memory"], "") if "memory" in card else None, "bytes"),
        power_limit_w=_cell(source, line, (card["power"], "") if "power" in card else None, "W"),
    )


def refuse_mig(source: SourceText, line: int, mode: str) -> None:
    """Refuse a device that is cut into instances.

    Raises:
        SpecError: it is.
    """
    if mode == "Enabled":
        raise source.error("MIG is enabled on this GPU; instances of a part of a GPU cannot be planned with", line)


def quantity(source: SourceText, line: int, text: str, kind: UnitKind) -> float:
    """Return a printed quantity.

    Raises:
        SpecError: it is none.
    """
    try:
        return parse_quantity(text, kind)
    except HetplanError as error:
        raise source.error(str(error), line) from None


def counted(source: SourceText, cards: Sequence[Card]) -> tuple[Cards, ...]:
    """Return equal devices together; of numbers that differ among equal products the smallest holds for all."""
    if not cards:
        raise source.error("the text describes no GPU")
    counts = Counter(card.product for card in cards)
    return tuple(
        Cards(
            product=product,
            count=counts[product],
            usable_memory_bytes=_least(c.memory_bytes for c in cards if c.product == product),
            power_limit_w=_least(c.power_limit_w for c in cards if c.product == product),
            link_bandwidth_bytes_per_s=_least(c.link_bandwidth_bytes_per_s for c in cards if c.product == product),
        )
        for product in distinct(card.product for card in cards)
    )


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
