"""Square tables of links between the devices of a node, as `nvidia-smi topo -m` and `rocm-smi --showtopo` print them.

A table is read whole or refused: each row must have one known word a device column, the columns must name the rows,
and what A says of B must be what B says of A.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetplan.specs.importers.facts import FabricFamily, SourceText, Wiring
from hetplan.units import show

_DEVICE = re.compile(r"(GPU|NIC|mlx\d_)(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMatrix:
    """Words between devices; `words[a][b]` as printed."""

    names: tuple[str, ...]
    words: Mapping[str, Mapping[str, str]]

    @property
    def gpus(self) -> tuple[str, ...]:
        """The accelerators among the devices."""
        return tuple(name for name in self.names if name.startswith("GPU"))


def read_matrix(
    source: SourceText, header_line: int, is_word: Callable[[str], bool], self_word: str
) -> tuple[LinkMatrix, int]:
    """Return the table whose header stands at `header_line` (from 1) and the line after its last row.

    Raises:
        SpecError: a row is missing, damaged, or contradicts another.
    """
    names = device_columns(source.lines[header_line - 1])
    rows: dict[str, tuple[int, list[str]]] = {}
    line = header_line
    for line, text in enumerate(source.lines[header_line:], header_line + 1):
        cells = text.split()
        if not cells or cells[0] not in names:
            break
        if cells[0] in rows:
            raise source.error(f"row {cells[0]} is already given at line {rows[cells[0]][0]}", line)
        rows[cells[0]] = (line, _row(source, line, cells, (names, self_word), is_word))
    missing = [name for name in names if name not in rows]
    if missing:
        raise source.error(
            f"the table has columns {names[0]} to {names[-1]} but no row for {', '.join(missing[:4])}", header_line
        )
    _require_symmetry(source, names, rows)
    words = {name: dict(zip(names, rows[name][1], strict=True)) for name in names}
    return LinkMatrix(names=names, words=words), line


def device_columns(header: str) -> tuple[str, ...]:
    """Return the leading words of a header that name devices."""
    names: list[str] = []
    for word in header.split():
        if not _DEVICE.fullmatch(word):
            break
        names.append(word)
    return tuple(names)


def _row(
    source: SourceText,
    line: int,
    cells: list[str],
    columns: tuple[tuple[str, ...], str],
    is_word: Callable[[str], bool],
) -> list[str]:
    names, self_word = columns
    words = cells[1 : 1 + len(names)]
    for column, word in enumerate(words):
        place = source.lines[line - 1].find(word) + 1
        if not is_word(word) and word != self_word:
            raise source.error(
                f"row {cells[0]}, column {names[column]}: {show(word)} is no link type; "
                "columns have run together or are missing",
                line,
                place,
            )
        if (word == self_word) != (names[column] == cells[0]):
            raise source.error(
                f"row {cells[0]} has {show(word)} under {names[column]}; columns have run together or are missing", line
            )
    if len(words) != len(names):
        raise source.error(f"row {cells[0]} has {len(words)} of {len(names)} columns", line)
    return words


def _require_symmetry(source: SourceText, names: tuple[str, ...], rows: Mapping[str, tuple[int, list[str]]]) -> None:
    for i, here in enumerate(names):
        for j in range(i):
            one, other = rows[here][1][j], rows[names[j]][1][i]
            if one != other:
                raise source.error(
                    f"{here} reaches {names[j]} by {one}, {names[j]} reaches {here} by {other}", rows[here][0]
                )


def wiring(matrix: LinkMatrix, family: FabricFamily, num_links: Callable[[str], int]) -> Wiring | None:
    """Return how the accelerators are joined, None of a single one; `num_links` counts the fast links of a word."""
    gpus = matrix.gpus
    if len(gpus) < 2:
        return None
    counts = {a: {b: num_links(matrix.words[a][b]) for b in gpus if b != a} for a in gpus}
    linked = [(a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :] if counts[a][b]]
    if not linked:
        return Wiring(family="none")
    is_full = all(all(row.values()) for row in counts.values())
    some = ", ".join(f"{a}-{b}" for a, b in linked[:16])
    rest = "" if len(linked) <= 16 else f" and {len(linked) - 16} more"
    return Wiring(
        family=family,
        links_of_pair=max(max(row.values()) for row in counts.values()),
        links_of_device=max(sum(row.values()) for row in counts.values()),
        is_full=is_full,
        note="" if is_full else f"only these pairs are joined by fast links: {some}{rest}; others meet over PCIe",
    )
