"""The `networks:` section of a cluster file, with the per-pair tables it names."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path

from hetplan.errors import HetplanError, Location, SpecError
from hetplan.specs.cluster import Group, Network, NetworkKind, PairLink
from hetplan.specs.decode import Fields
from hetplan.specs.nodes import read_bytes
from hetplan.units import UnitKind, escape, hint, parse_quantity, show

KINDS: tuple[NetworkKind, ...] = ("infiniband", "roce", "ethernet", "efa", "slingshot")
PAIR_COLUMNS = ("from", "to", "latency", "bandwidth")
MAX_NICS = 256
MAX_NAME = 64


def read_networks(table: Mapping[str, Fields], groups: Sequence[Group], base: Path | None) -> tuple[Network, ...]:
    """Return the networks a file defines; `base` is the folder of the tables they name.

    Raises:
        SpecError: a network joins what is no group, or a value or table is not usable.
    """
    return tuple(_network(name, fields, groups, base) for name, fields in table.items())


def _network(name: str, fields: Fields, groups: Sequence[Group], base: Path | None) -> Network:
    """Decode one network."""
    if len(name) > MAX_NAME or not name.isprintable() or not name.strip():
        raise fields.error(f"{show(name)} is not a network name")
    joins = _joins(fields, groups)
    network = Network(
        name=name,
        joins=joins,
        kind=fields.choice("kind", KINDS),
        bandwidth_bytes_per_s=fields.quantity("bandwidth", "bytes/s", positive=True),
        latency_s=fields.quantity("latency", "s"),
        nics_per_node=fields.integer("nics_per_node", default=1, minimum=1, maximum=MAX_NICS),
        oversubscription=fields.number("oversubscription", default=1.0, minimum=1.0, maximum=1000.0),
        shared=fields.flag("shared", default=False),
        usd_per_byte=fields.quantity("price", "USD/B", default=0.0),
        pairs=_pairs(fields, [group for group in groups if group.name in joins], base),
    )
    fields.finish()
    return network


def _joins(fields: Fields, groups: Sequence[Group]) -> tuple[str, ...]:
    """The groups a network joins."""
    known = {group.name for group in groups}
    joins = fields.texts("joins")
    if not joins:
        raise fields.error("expected at least one group, found none", "joins")
    seen: set[str] = set()
    for index, name in enumerate(joins):
        if name not in known:
            raise fields.error(f"unknown group {show(name)}{hint(name, sorted(known))}", "joins", index=index)
        if name in seen:
            raise fields.error(f"group {show(name)} is listed twice", "joins", index=index)
        seen.add(name)
    return joins


def _pairs(fields: Fields, groups: Sequence[Group], base: Path | None) -> dict[tuple[str, str], PairLink]:
    """The table a network names, with both orders of every pair."""
    file_name = fields.text("pairs", default=None)
    if file_name is None:
        return {}
    if base is None:
        raise fields.error("a table of pairs can only be read next to a cluster file", "pairs")
    path = base / file_name
    try:
        data = read_bytes(path)
    except SpecError as error:
        raise fields.error(str(error), "pairs") from None
    return _Pairs(str(path), _places(groups)).read(data)


def _places(groups: Sequence[Group]) -> frozenset[str]:
    """What a row may name: groups, sites and nodes."""
    names = {group.name for group in groups} | {group.site for group in groups}
    return frozenset(names.union(*(group.nodes for group in groups)))


class _Pairs:
    """Reads one table; errors name its file, line and column."""

    def __init__(self, file_name: str, places: frozenset[str]) -> None:
        self.file_name = escape(file_name)
        self.places = places
        self.line = 1
        self.row: list[str] = []

    def error(self, message: str, column: int = 0) -> SpecError:
        """An error at a cell of the current row."""
        start = 1 + sum(len(cell) + 1 for cell in self.row[:column])
        return SpecError(message, location=Location(file=self.file_name, line=self.line, column=start))

    def read(self, data: bytes) -> dict[tuple[str, str], PairLink]:
        """Return (place, place) -> link."""
        try:
            return self._links(self._rows(data.decode("utf-8-sig")))
        except UnicodeDecodeError as error:
            self.line = data.count(b"\n", 0, error.start) + 1
            raise self.error("the table is not UTF-8 text") from None
        except csv.Error as error:
            self.line += 1
            raise self.error(f"not valid CSV: {show(str(error))[1:-1]}") from None

    def _rows(self, text: str) -> Iterator[list[str]]:
        """The rows that are not blank, cells stripped; keeps `line` and `row` at the one in hand."""
        reader = csv.reader(StringIO(text, newline=""), strict=True)
        for row in reader:
            self.line, self.row = reader.line_num, row
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield cells

    def _links(self, rows: Iterable[list[str]]) -> dict[tuple[str, str], PairLink]:
        """Decode the header and all rows."""
        links: dict[tuple[str, str], PairLink] = {}
        given: dict[tuple[str, str], int] = {}
        header: list[str] | None = None
        for cells in rows:
            if header is None:
                header = self._header(cells)
                continue
            place, other, link = self._link(dict(zip(header, self._full(cells), strict=True)), header)
            if (place, other) in given:
                raise self.error(f"{show(place)} and {show(other)} are already given at line {given[place, other]}")
            links[place, other] = links[other, place] = link
            given[place, other] = given[other, place] = self.line
        if header is None:
            raise self.error(f"the table is empty; its header is '{','.join(PAIR_COLUMNS)}'")
        return links

    def _header(self, cells: list[str]) -> list[str]:
        """The columns in the order written."""
        if sorted(cells) != sorted(PAIR_COLUMNS):
            raise self.error(f"expected the header '{','.join(PAIR_COLUMNS)}', found {show(','.join(cells))}")
        return cells

    def _full(self, cells: list[str]) -> list[str]:
        """The cells of a complete row."""
        if len(cells) != len(PAIR_COLUMNS):
            raise self.error(f"expected {len(PAIR_COLUMNS)} cells, found {len(cells)}")
        return cells

    def _link(self, cells: Mapping[str, str], header: list[str]) -> tuple[str, str, PairLink]:
        """Decode one row."""
        for column in ("from", "to"):
            if cells[column] not in self.places:
                near = hint(cells[column], sorted(self.places))
                message = f"{show(cells[column])} is no group, site or node this network joins{near}"
                raise self.error(message, header.index(column))
        link = PairLink(
            latency_s=self._quantity(cells, header, "latency", "s"),
            bandwidth_bytes_per_s=self._quantity(cells, header, "bandwidth", "bytes/s"),
        )
        if link.bandwidth_bytes_per_s == 0:
            raise self.error("bandwidth must be above zero", header.index("bandwidth"))
        return cells["from"], cells["to"], link

    def _quantity(self, cells: Mapping[str, str], header: list[str], column: str, kind: UnitKind) -> float:
        """Decode a cell with a unit."""
        try:
            return parse_quantity(cells[column], kind)
        except HetplanError as error:
            raise self.error(f"{column}: {error}", header.index(column)) from None
