"""Nodes as Slurm lists them: `sinfo` with a header, and `scontrol show node`.

Slurm counts memory in MiB. Its GRES name devices as the site chose to (`gpu:a100:8`), which may not say which product.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hetplan.errors import HetplanError
from hetplan.specs.hostlist import expand_hostlist
from hetplan.specs.importers.facts import Cards, Facts, NodeSheet, SourceText
from hetplan.units import show

MIB = 2.0**20
_GRES = re.compile(r"gpu(?::(?P<product>[\w.-]+))?:(?P<count>\d{1,4})(?:\([^)]*\))?")
UNUSABLE = re.compile(r"down|drain|fail|maint|power|not_responding|unknown|\*", re.IGNORECASE)
_COLUMNS: Mapping[str, str] = {
    "NODELIST": "nodes",
    "GRES": "gres",
    "MEMORY": "memory",
    "PARTITION": "partition",
    "STATE": "state",
    "CPUS": "cpus",
}


def read_sinfo(source: SourceText) -> Facts:
    """Return the nodes of a `sinfo` table that has a header with NODELIST.

    Raises:
        SpecError: a row does not suit the header.
    """
    rows = [(line, text.split()) for line, text in enumerate(source.lines, 1) if text.strip()]
    header = [_COLUMNS.get(word, word) for word in rows[0][1]] if rows else []
    if "nodes" not in header:
        raise source.error("the header has no column NODELIST")
    sheets: dict[str, NodeSheet] = {}
    for line, cells in rows[1:]:
        if len(cells) != len(header):
            raise source.error(f"expected {len(header)} words, found {len(cells)}", line)
        row = dict(zip(header, cells, strict=True))
        if row["nodes"] in ("", "n/a", "(null)"):
            continue
        for name in expand_nodes(source, line, row["nodes"]):
            sheets.setdefault(name, _sheet(source, line, name, row))
    if not sheets:
        raise source.error("the table lists no node")
    return Facts(sheets=tuple(sheets.values()))


def _sheet(source: SourceText, line: int, name: str, row: Mapping[str, str]) -> NodeSheet:
    memory = row.get("memory", "").rstrip("+")
    state = row.get("state", "")
    return NodeSheet(
        source=source.name,
        nodes=(name,),
        group=row["partition"].rstrip("*") if "partition" in row else None,
        cards=gres_cards(source, line, row["gres"]) if "gres" in row else None,
        host_memory_bytes=int(memory) * MIB if memory.isdigit() and int(memory) > 0 else None,
        unusable=state if UNUSABLE.search(state) else None,
    )


def expand_nodes(source: SourceText, line: int, text: str) -> tuple[str, ...]:
    """Return the nodes of a hostlist.

    Raises:
        SpecError: it is none.
    """
    try:
        return expand_hostlist(text)
    except HetplanError as error:
        raise source.error(str(error), line) from None


def gres_cards(source: SourceText, line: int, text: str) -> tuple[Cards, ...] | None:
    """Return the accelerators of a GRES text; none of `(null)`.

    Raises:
        SpecError: an entry for GPUs cannot be read.
    """
    if text in ("(null)", "N/A", ""):
        return ()
    words = re.findall(r"[^,(]+(?:\([^)]*\))?", text)
    cards = []
    for word in words:
        if not word.startswith("gpu"):
            continue
        match = _GRES.fullmatch(word)
        if match is None:
            raise source.error(f"{show(word)} in GRES is not like gpu:a100:8", line)
        cards.append(Cards(product=match["product"], count=int(match["count"])))
    return tuple(cards)


def read_scontrol(source: SourceText) -> Facts:
    """Return the nodes of `scontrol show node` (one-line records too).

    Raises:
        SpecError: text before the first node, a node without end, or a value that cannot be read.
    """
    records: list[tuple[int, dict[str, str]]] = []
    for line, text in enumerate(source.lines, 1):
        for word in text.split():
            key, equals, value = word.partition("=")
            if key == "NodeName" and equals:
                records.append((line, {"NodeName": value}))
            elif equals and records:
                records[-1][1].setdefault(key, value)
            elif equals:
                raise source.error(f"{show(word)} stands before any NodeName=", line)
    if not records:
        raise source.error("the text describes no node")
    return Facts(sheets=tuple(_record(source, line, record) for line, record in records))


def _record(source: SourceText, line: int, record: Mapping[str, str]) -> NodeSheet:
    for key in ("State", "RealMemory"):
        if key not in record:
            raise source.error(f"node {show(record['NodeName'])} has no {key}=: the text is cut", line)
    numbers = [_whole(source, line, record, key) for key in ("Sockets", "CoresPerSocket", "RealMemory")]
    sockets, cores, memory = numbers
    state = record["State"]
    partitions = record.get("Partitions", "").split(",")
    return NodeSheet(
        source=source.name,
        nodes=expand_nodes(source, line, record["NodeName"]),
        group=partitions[0] or None,
        cards=gres_cards(source, line, record["Gres"]) if "Gres" in record else None,
        cores=sockets * cores if sockets and cores else None,
        host_memory_bytes=memory * MIB if memory else None,
        unusable=state if UNUSABLE.search(state) else None,
    )


def _whole(source: SourceText, line: int, record: Mapping[str, str], key: str) -> int | None:
    text = record.get(key)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,12}", text):
        raise source.error(f"{key}={show(text)} is no whole number", line)
    return int(text)


_TABLE_COUNT = re.compile(r"(\d{1,4})\s*[x×]\s*(.+)")
_TABLE_MEMORY = re.compile(r"(.+?)\s+(\d{1,4})\s*(?:GB|GiB)(?:,.*)?")


def read_partition_table(source: SourceText) -> Facts:
    """Return the groups of a markdown table with columns such as partition, nodes, GPUs/node (`8 x A100 80 GB`).

    Raises:
        SpecError: a column is missing, or a row does not suit the header.
    """
    header: list[str] | None = None
    sheets: list[NodeSheet] = []
    remarks: list[str] = []
    for line, text in enumerate(source.lines, 1):
        if not text.lstrip().startswith("|"):
            continue
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if header is None:
            header = [_column(cell) for cell in cells]
            missing = [name for name in ("partition", "nodes", "gpus") if name not in header]
            if missing:
                raise source.error(f"the table has no column for {missing[0]}", line)
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            if len(cells) != len(header):
                raise source.error(f"expected {len(header)} cells, found {len(cells)}", line)
            row = dict(zip(header, cells, strict=True))
            sheets.append(_group(source, line, row, sheets))
            if extra := row["gpus"].partition(",")[2].strip():
                remarks.append(f"{sheets[-1].group}: {extra}")
    if not sheets:
        raise source.error("found no table of partitions")
    return Facts(sheets=tuple(sheets), remarks=tuple(remarks))


def _column(cell: str) -> str:
    words = cell.casefold()
    if "gpu" in words:
        return "gpus"
    if "core" in words:
        return "cores"
    return {"partition": "partition", "partitions": "partition", "name": "partition", "nodes": "nodes"}.get(words, cell)


def _group(source: SourceText, line: int, row: Mapping[str, str], before: Sequence[NodeSheet]) -> NodeSheet:
    name = "-".join(re.findall(r"[A-Za-z0-9_]+", row["partition"]))
    if not name or any(sheet.group == name for sheet in before):
        raise source.error(f"partition {show(row['partition'])} has no name of its own", line)
    if not re.fullmatch(r"[1-9]\d{0,6}", row["nodes"]):
        raise source.error(f"{show(row['nodes'])} is no number of nodes", line)
    match = _TABLE_COUNT.fullmatch(row["gpus"])
    if match is None:
        raise source.error(f"{show(row['gpus'])} is not like '8 x A100 80 GB'", line)
    product = _TABLE_MEMORY.fullmatch(match[2])
    cores = row.get("cores", "")
    return NodeSheet(
        source=source.name,
        group=name,
        num_nodes=int(row["nodes"]),
        cards=(
            Cards(
                count=int(match[1]),
                product=product[1] if product else match[2].partition(",")[0].strip(),
                stated_memory_bytes=int(product[2]) * 1e9 if product else None,
            ),
        ),
        cores=int(cores) if re.fullmatch(r"[1-9]\d{0,5}", cores) else None,
    )
