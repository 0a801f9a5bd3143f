"""Tables of measured layers and links: CSV files told by their header.

| table | columns (either name); `_s`, `_ms` or `_us` says the unit |
|---|---|
| layer times | `device` or `gpu`; `microbatch` or `mbs`; `tp`; `layer`; `forward_s`/`fwd_s`, `backward_s`/`bwd_s`; optional `model`, `kind`, `update_s`, `params`, `states_bytes`, `saved_bytes` (of the microbatch) |
| layer sizes | `tp`; `layer`; `params` or `params_floats`; optional `model`, `kind`, `saved_bytes` or `act_mem_bytes_mb1` (of one sample), `output_floats` or `act_output_floats_mb1` |
| links between nodes | `send_gpu`, `recv_gpu`, `a`, `b`, `c`; optional `send_zone`, `recv_zone`, `send_gpus`, `recv_gpus`, `max_bw_Bps` |
| links inside nodes | `gpu`, `gpus`, `a`, `b`, `c`; optional `max_bw_Bps` |

The fits are `GB/s = a x^2 + b x + c` with `x = log2(bytes / 1e6)`. `kind` is embedding, transformer or head.
"""  # noqa: E501 - a table row cannot be broken

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from io import StringIO

from hetplan.errors import SpecError
from hetplan.specs.importers.facts import SourceText
from hetplan.specs.importers.layer_times import KIND_WORDS, Profile, SizeRow, TimeRow
from hetplan.specs.layer_table import ANY_SITE, LinkCurve, LinkEnd
from hetplan.specs.model import LayerKind
from hetplan.units import show

SECONDS = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6}
DEVICE = ("device", "gpu", "gpu_type")
MICROBATCH = ("microbatch", "mbs", "batch_size", "bs")
TP = ("tp", "tmp")
LAYER = ("layer", "layer_id")
PARAMS = ("params", "params_floats")
SAVED_SAMPLE = ("saved_bytes", "act_mem_bytes_mb1")
OUTPUT = ("output_floats", "act_output_floats_mb1")
Filters = Sequence[tuple[str, str]]


class _Line:
    """One row of a table, with words for what is wrong in it."""

    def __init__(self, source: SourceText, number: int, values: Mapping[str, str]) -> None:
        self._source = source
        self._number = number
        self._values = values

    def error(self, message: str) -> SpecError:
        """Return an error at this row."""
        return self._source.error(message, self._number)

    def text(self, names: Sequence[str]) -> str:
        """Return the first of some columns that is filled, empty where none is."""
        return next((value for name in names if (value := (self._values.get(name) or "").strip())), "")

    def number(self, names: Sequence[str]) -> float | None:
        """Return a number, None where no column is filled."""
        text = self.text(names)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.error(f"{names[0]}: {show(text)} is not a number")
        return value

    def amount(self, names: Sequence[str]) -> float | None:
        """Return a number that is not below 0."""
        value = self.number(names)
        if value is not None and value < 0:
            raise self.error(f"{names[0]}: {value} is below 0")
        return value

    def count(self, names: Sequence[str], minimum: int = 1) -> int:
        """Return a whole number."""
        value = self.number(names)
        if value is None or not value.is_integer() or value < minimum:
            raise self.error(f"{names[0]}: expected a whole number of at least {minimum}")
        return int(value)

    def seconds(self, names: Sequence[str]) -> float | None:
        """Return a time; the column's ending says its unit."""
        for suffix, factor in SECONDS.items():
            value = self.amount([name + suffix for name in names])
            if value is not None:
                return value * factor
        return None

    def kind(self) -> LayerKind | None:
        """Return the kind of layer, None where it is not said."""
        text = self.text(("kind",))
        if text and text.lower() not in KIND_WORDS:
            raise self.error(f"kind: {show(text)} is none of {', '.join(KIND_WORDS)}")
        return KIND_WORDS[text.lower()] if text else None


def read_table(source: SourceText, filters: Filters) -> Profile:
    """Return what a CSV file says; rows that do not meet every filter are left out.

    A filter on a value that no row of a table holds does not touch that table.

    Raises:
        SpecError: the header is of no known table, or a value is not usable.
    """
    reader = csv.DictReader(StringIO(source.text))
    columns = set(reader.fieldnames or ())
    rows = [
        (reader.line_num, {key: value or "" for key, value in row.items() if isinstance(key, str)}) for row in reader
    ]
    held = [(column, value) for column, value in filters if any(row.get(column) == value for _, row in rows)]
    lines = [_Line(source, number, row) for number, row in rows if all(row[column] == value for column, value in held)]
    found: Profile
    if {"send_gpu", "recv_gpu", "a", "b", "c"} <= columns:
        found = Profile(between=_fits(lines))
    elif {"gpus", "a", "b", "c"} <= columns and columns & set(DEVICE):
        found = Profile(inside={(line.text(DEVICE), line.count(("gpus",))): _curve(line) for line in lines})
    elif columns & {f"{name}{suffix}" for name in ("forward", "fwd") for suffix in SECONDS}:
        found = Profile(times=tuple(_time(line) for line in lines))
    elif columns & set(TP) and columns & set(LAYER) and columns & set(PARAMS):
        found = Profile(sizes=tuple(_size(line) for line in lines))
    else:
        raise source.error(
            "expected a table of layer times (device, microbatch, tp, layer, forward_s, backward_s), of layer sizes"
            " (tp, layer, params) or of link fits (send_gpu, recv_gpu, a, b, c)",
            1,
        )
    return Profile(
        times=found.times,
        sizes=found.sizes,
        between=found.between,
        inside=found.inside,
        sources=(source.name,),
    )


def _time(line: _Line) -> TimeRow:
    forward, backward = line.seconds(("forward", "fwd")), line.seconds(("backward", "bwd"))
    device = line.text(DEVICE)
    if not forward or backward is None or not device:
        raise line.error("a row of layer times needs a device, forward seconds above 0 and backward seconds")
    return TimeRow(
        model=line.text(("model",)),
        device=device,
        microbatch=line.count(MICROBATCH),
        tp=line.count(TP),
        layer=line.count(LAYER, minimum=0),
        kind=line.kind(),
        forward_s=forward,
        backward_s=backward,
        update_s=line.seconds(("update", "optimizer")) or 0.0,
        params=line.amount(PARAMS),
        states_bytes=line.amount(("states_bytes",)),
        saved_bytes=line.amount(("saved_bytes",)),
    )


def _size(line: _Line) -> SizeRow:
    params = line.amount(PARAMS)
    if params is None:
        raise line.error("a row of layer sizes needs params")
    return SizeRow(
        model=line.text(("model",)),
        tp=line.count(TP),
        layer=line.count(LAYER, minimum=0),
        kind=line.kind(),
        params=params,
        saved_bytes=line.amount(SAVED_SAMPLE),
        output_floats=line.amount(OUTPUT),
    )


def _fits(lines: Sequence[_Line]) -> dict[tuple[LinkEnd, LinkEnd], LinkCurve]:
    found: dict[tuple[LinkEnd, LinkEnd], LinkCurve] = {}
    for line in lines:
        ends, curve = _ends(line), _curve(line)
        if found.setdefault(ends, curve) != curve:
            raise line.error("this pair is there twice with another fit; choose rows with --where COLUMN=VALUE")
    return found


def _ends(line: _Line) -> tuple[LinkEnd, LinkEnd]:
    ends = []
    for way in ("send", "recv"):
        ranks = line.count((f"{way}_gpus",)) if line.text((f"{way}_gpus",)) else 1
        device = line.text((f"{way}_gpu",))
        if not device:
            raise line.error(f"{way}_gpu: a fit needs a device at both ends")
        ends.append(LinkEnd(device=device, site=line.text((f"{way}_zone",)) or ANY_SITE, ranks=ranks))
    return ends[0], ends[1]


def _curve(line: _Line) -> LinkCurve:
    numbers = [line.number((name,)) for name in ("a", "b", "c")]
    if any(number is None for number in numbers):
        raise line.error("a fit needs a, b and c")
    return LinkCurve(
        coefficients=tuple((number or 0.0) * 1e9 for number in numbers),
        max_bytes_per_s=line.amount(("max_bw_Bps",)),
    )
