"""Logs of nccl-tests and tables of bandwidth by group size, fitted to a latency and a bandwidth.

A collective over `n` ranks takes ``t(S) = a + b S`` for a buffer of `S` bytes. `a` and `b` have the least sum of
squared relative errors over all sizes, so that eight bytes and a gigabyte weigh alike. nccl-tests' bus bandwidth is
``f S / t`` with ``f = 2 (n - 1) / n`` for an all-reduce and ``(n - 1) / n`` for an all-gather or reduce-scatter
(nccl-tests, doc/PERFORMANCE.md); the ratio of the two printed bandwidths therefore tells `n`. What one of `m` nodes
sends over its network in that time is ``f_m S`` with `m` in place of `n`, whichever algorithm ran.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hetplan.specs.importers.facts import SourceText, distinct
from hetplan.units import show

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
MOST_RANKS = 1_000_000
FEWEST_SIZES = 3
_RANK = re.compile(r"#\s*Rank\s+(\d+)\b.*? on\s+(\S+) device\s+\d+ \[[^\]]+\] (.+?)\s*$")
_NAME = re.compile(r"(all_reduce|all_gather|reduce_scatter)_perf")
_BANDWIDTH_KEY = re.compile(r"allreduce_size_(\d{1,6})_consec_([01])")
_FILE_NAME = re.compile(r"(\d{1,5})nodes?_(\d{1,4})gpus_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLog:
    """What one run of nccl-tests measured."""

    source: str
    collective: Collective
    num_ranks: int
    hosts: tuple[str, ...]
    """Empty: the log does not list its ranks."""
    products: tuple[str, ...]
    sizes_bytes: tuple[float, ...]
    times_s: tuple[float, ...]

    def factor(self, num: int) -> float:
        """Part of the buffer a rank (or node) of `num` sends."""
        return (2.0 if self.collective == "all_reduce" else 1.0) * (num - 1) / num


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A straight line through a log."""

    start_s: float
    """Seconds of an empty buffer."""
    s_per_byte: float
    relative_error: float
    """Root mean square over the sizes."""


def read_log(source: SourceText) -> CollectiveLog:
    """Return what an nccl-tests log measured, out of place.

    Raises:
        SpecError: a row is damaged, or neither collective nor ranks can be told.
    """
    header: list[str] | None = None
    rows: list[tuple[int, dict[str, str]]] = []
    ranks: dict[int, tuple[str, str]] = {}
    for line, text in enumerate(source.lines, 1):
        words = text.replace("#wrong", "wrong").strip().lstrip("#").split()
        if match := _RANK.match(text.strip()):
            ranks[int(match[1])] = (match[2], match[3])
        elif words[:2] == ["size", "count"]:
            header = words
        elif text.strip() and not text.lstrip().startswith("#"):
            if header is None:
                raise source.error(f"{show(text.strip())} stands before the header line '# size count ...'", line)
            if len(words) != len(header):
                raise source.error(f"expected {len(header)} cells, found {len(words)}", line)
            rows.append((line, dict(reversed(list(zip(header, words, strict=True))))))
    if len(rows) < FEWEST_SIZES:
        raise source.error(f"found {len(rows)} sizes; a latency and a bandwidth need at least {FEWEST_SIZES}")
    numbers = [_row(source, line, row) for line, row in rows]
    collective, num_ranks = _ranks(source, numbers, len(ranks))
    return CollectiveLog(
        source=source.name,
        collective=collective,
        num_ranks=num_ranks,
        hosts=distinct(host for host, _ in ranks.values()),
        products=distinct(product for _, product in ranks.values()),
        sizes_bytes=tuple(size for size, _, _, _ in numbers),
        times_s=tuple(time for _, time, _, _ in numbers),
    )


def _row(source: SourceText, line: int, row: Mapping[str, str]) -> tuple[float, float, float, float]:
    """Return bytes, seconds, algorithm and bus bandwidth of a row; the three must agree."""
    values = []
    for key in ("size", "time", "algbw", "busbw"):
        if not re.fullmatch(r"\d+(\.\d+)?", row.get(key, "")):
            raise source.error(f"{key} {show(row.get(key, ''))} is no number", line)
        values.append(float(row[key]))
    size, time_us, algbw, busbw = values
    if time_us <= 0:
        raise source.error("time must be above zero", line)
    real = size / time_us / 1e3
    if abs(real - algbw) > 0.02 * real + 0.011:
        raise source.error(f"{size:.0f} B in {time_us} us are {real:.2f} GB/s, the row says {algbw}", line)
    return size, time_us * 1e-6, algbw, busbw


def _ranks(
    source: SourceText, numbers: Sequence[tuple[float, float, float, float]], listed: int
) -> tuple[Collective, int]:
    """Tell collective and ranks from the ratio of bus and algorithm bandwidth at the largest size."""
    _, _, algbw, busbw = max(numbers)
    if algbw < 1.0:
        raise source.error("the largest size reaches less than 1 GB/s: too little to tell the number of ranks")
    named = _NAME.search(source.text)
    ratio = busbw / algbw
    collective: Collective = "all_reduce" if ratio > 1.01 else "all_gather"
    if named is not None:
        collective = next(word for word in ("all_reduce", "all_gather", "reduce_scatter") if word == named[1])
    if named is None and 0.99 <= ratio <= 1.01 and listed != 2:
        raise source.error("bus and algorithm bandwidth are equal: an all-reduce of two ranks, or another collective")
    scale = 2.0 if collective == "all_reduce" or (named is None and listed == 2 and ratio > 0.99) else 1.0
    if scale == 2.0:
        collective = "all_reduce"
    share = ratio / scale
    if not 0.4 < share < 1 - 0.5 / MOST_RANKS:
        raise source.error(f"bus bandwidth is {ratio:.3f} times algorithm bandwidth, which no {collective} has")
    found = round(1 / (1 - share))
    if listed and not abs(scale * (listed - 1) / listed - ratio) < 0.02:
        raise source.error(f"{listed} ranks are listed, but the bandwidths are those of {found}")
    return collective, listed or found


def fit(log: CollectiveLog) -> LinkFit:
    """Return the line through a log with the least squared relative errors, start and slope not below zero."""
    pairs = list(zip(log.sizes_bytes, log.times_s, strict=True))
    one = sum(1 / t**2 for _, t in pairs)
    size = sum(s / t**2 for s, t in pairs)
    square = sum((s / t) ** 2 for s, t in pairs)
    time = sum(1 / t for _, t in pairs)
    product = sum(s / t for s, t in pairs)
    determinant = one * square - size * size
    start = (time * square - product * size) / determinant if determinant > 0 else 0.0
    slope = (one * product - size * time) / determinant if determinant > 0 else 0.0
    if start < 0 or slope <= 0:
        start, slope = 0.0, product / square
    errors = [((start + slope * s) / t - 1) ** 2 for s, t in pairs]
    return LinkFit(start_s=start, s_per_byte=slope, relative_error=(sum(errors) / len(errors)) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBandwidths:
    """Bus bandwidth of all-reduces by group size, all groups running at once."""

    source: str
    nodes_and_devices: tuple[int, int] | None
    """Nodes and devices a node; None: neither the file nor its name says it."""
    consecutive: Mapping[int, float]
    """Ranks of a group side by side: size -> B/s."""
    strided: Mapping[int, float]
    """Ranks of a group as far apart as they can be."""


def read_group_bandwidths(source: SourceText) -> GroupBandwidths:
    """Return a table such as `{"allreduce_size_8_consec_1": 154.2}` (GB/s).

    Raises:
        SpecError: the file is no such table.
    """
    try:
        table = json.loads(source.text)
    except json.JSONDecodeError as error:
        raise source.error(f"not valid JSON: {error.msg}", error.lineno, error.colno) from None
    if not isinstance(table, dict) or not table:
        raise source.error("expected a table of bandwidths")
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for key, value in table.items():
        line = source.text.count("\n", 0, max(0, source.text.find(f'"{key}"'))) + 1
        match = _BANDWIDTH_KEY.fullmatch(key)
        if match is None:
            raise source.error(f"{show(key)} is not like allreduce_size_8_consec_1", line)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise source.error(f"{key} is no bandwidth in GB/s", line)
        found[int(match[2])][int(match[1])] = value * 1e9
    shape = _FILE_NAME.search(source.name)
    return GroupBandwidths(
        source=source.name,
        nodes_and_devices=(int(shape[1]), int(shape[2])) if shape else None,
        consecutive=found[1],
        strided=found[0],
    )
