"""Tables of lengths: one row a sample, as CSV or JSON lines.

CSV: a header `text,image,..`; `text` is a number of tokens, every other column a modality whose cell lists the tokens
of each item, separated by blanks (empty: none). JSON lines: `{"text": 120, "image": [576, 576]}`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from hetplan.errors import Location, SpecError
from hetplan.specs.data import Row
from hetplan.specs.nodes import read_bytes
from hetplan.units import show

TABLE_ENDINGS = (".csv", ".jsonl")
MOST_ROWS = 5_000_000
MOST_TOKENS = 100_000_000


def read_lengths(path: Path) -> tuple[Row, ...]:
    """Return the rows of a table.

    Raises:
        SpecError: the file cannot be read, or a line is not what its kind demands.
    """
    text = read_bytes(path).decode("utf-8", errors="replace")
    rows = _json_rows(text, str(path)) if path.suffix == ".jsonl" else _csv_rows(text, str(path))
    if not rows:
        raise SpecError("there is no sample in this table", location=Location(file=str(path), line=1, column=1))
    return tuple(rows)


def lengths_text(rows: Sequence[Row]) -> str:
    """Return rows as CSV that `read_lengths` reads back unchanged."""
    names = list(dict.fromkeys(name for row in rows for name in row.items))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["text", *names])
    for row in rows:
        writer.writerow([row.text, *(" ".join(map(str, row.items.get(name, ()))) for name in names)])
    return out.getvalue()


def _csv_rows(text: str, file_name: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(reader, [])]
    if "text" not in header or len(set(header)) != len(header) or "" in header:
        where = Location(file=file_name, line=1, column=1)
        raise SpecError("the header of a table of lengths is `text` and a name for each modality", location=where)
    rows = []
    for cells in reader:
        where = Location(file=file_name, line=reader.line_num, column=1)
        if not cells:
            continue
        if len(cells) != len(header):
            raise SpecError(f"{len(cells)} cells under {len(header)} names", location=where)
        items = {
            name: tuple(_count(word, where) for word in cell.split())
            for name, cell in zip(header, cells, strict=True)
            if name != "text" and cell.strip()
        }
        rows.append(Row(text=_count(cells[header.index("text")].strip(), where), items=items))
    return rows


def _json_rows(text: str, file_name: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = Location(file=file_name, line=number, column=1)
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise SpecError("this line is no JSON", location=where) from None
        if not isinstance(entry, dict) or "text" not in entry:
            raise SpecError('a line is like {"text": 120, "image": [576]}', location=where)
        items = {}
        for name, sizes in entry.items():
            if name != "text":
                listed = sizes if isinstance(sizes, list) else [sizes]
                items[name] = tuple(_count(size, where) for size in listed)
        rows.append(
            Row(text=_count(entry["text"], where), items={name: sizes for name, sizes in items.items() if sizes})
        )
    return rows


def _count(word: object, where: Location) -> int:
    if isinstance(word, str) and word.isascii() and word.isdigit() and len(word) <= len(str(MOST_TOKENS)):
        word = int(word)
    if isinstance(word, bool) or not isinstance(word, int) or not 0 <= word <= MOST_TOKENS:
        raise SpecError(f"{show(str(word))} is no number of tokens", location=where)
    return word
