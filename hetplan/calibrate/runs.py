"""Observed training runs: one row is one measured quantity of one configuration.

Two forms are read. A CSV file with the columns `Run` names (any others are ignored, missing ones are empty), and a
JSON-lines log: every line is an object with some of these columns, later lines inherit what earlier ones said, and
every line that holds `step_s` (or `iter_time_s`) is one observed step; steps of one configuration are summarised by
their median, the first two (compilation, warm-up) left out where there are more than four.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Literal

from hetplan.errors import SpecError
from hetplan.specs.nodes import read_bytes

Kind = Literal["time", "memory", "feasible"]

MEMORY_UNITS = {"GiB": 2.0**30, "GB": 1e9, "MiB": 2.0**20, "bytes": 1.0}
WARM_UP_STEPS = 2
_KEYS = ("step_s", "iter_time_s", "step_time_s")
"""Names of a step's seconds in a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row, text as written; empty where nothing was published."""

    id: str = ""
    config_id: str = ""
    stratum: str = ""
    source: str = ""
    kind: str = ""
    tier: str = ""
    year: str = ""
    model: str = ""
    layers: str = ""
    hidden: str = ""
    ffn: str = ""
    heads: str = ""
    kv_heads: str = ""
    vocab: str = ""
    seq: str = ""
    device: str = ""
    n_devices: str = ""
    devices_per_node: str = ""
    intra_bw: str = ""
    inter_net: str = ""
    tp: str = ""
    pp: str = ""
    vpp: str = ""
    dp: str = ""
    cp: str = ""
    ep: str = ""
    micro_batch: str = ""
    global_batch: str = ""
    recompute: str = ""
    sharding: str = ""
    precision: str = ""
    schedule: str = ""
    measured_metric: str = ""
    measured_value: str = ""
    unit: str = ""
    iter_time_s: str = ""
    tokens_per_s_per_gpu: str = ""
    notes: str = ""

    @property
    def configuration(self) -> str:
        """What repeated measurements of one configuration share."""
        return self.config_id or self.id

    @property
    def release(self) -> str:
        """The software release its source names in brackets, such as `[26.04 ...]`."""
        found = re.search(r"\[(\d[\w.]*) ", self.source)
        return found.group(1) if found else ""

    @property
    def stack(self) -> str:
        """The system and software a row belongs to."""
        return self.stratum or self.source or "runs"

    def integer(self, column: str, default: int | None = None) -> int | None:
        """Return the whole number at the start of a column, `default` where there is none."""
        found = re.match(r"\s*(\d+)", str(getattr(self, column)))
        return int(found.group(1)) if found else default

    def step_s(self) -> float | None:
        """Return the observed seconds of a step, converted from a rate where only that is given."""
        seconds = number(self.iter_time_s)
        if seconds is not None:
            return seconds
        rate = number(self.tokens_per_s_per_gpu)
        batch, seq, devices = self.integer("global_batch"), self.integer("seq"), self.integer("n_devices")
        if rate and batch and seq and devices:
            return batch * seq / (rate * devices)
        return None

    def memory_bytes(self) -> float | None:
        """Return the observed peak of one device."""
        value = number(self.measured_value)
        unit = self.unit.split(" ")[0].rstrip(",")
        return None if value is None or unit not in MEMORY_UNITS else value * MEMORY_UNITS[unit]


COLUMNS = frozenset(field.name for field in fields(Run))


def number(text: str) -> float | None:
    """Return the number a cell holds, None where it holds none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def read_runs(path: Path) -> tuple[Run, ...]:
    """Return the runs of a CSV table or a JSON-lines log.

    Raises:
        SpecError: the file cannot be read, or is neither.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    rows = _log_rows(text, path) if text.lstrip().startswith("{") else _table_rows(text, path)
    runs = tuple(run_of(row, index) for index, row in enumerate(rows))
    if not runs:
        raise SpecError(f"{path}: holds no runs")
    return runs


def run_of(row: Mapping[str, object], index: int = 0) -> Run:
    """Return one row as a run; a row without an id is named by its place."""
    known = {name: "" if value is None else str(value) for name, value in row.items() if name in COLUMNS}
    run_id = known.get("id") or f"run-{index + 1}"
    return Run(**(known | {"id": run_id, "kind": known.get("kind") or "time"}))


def _table_rows(text: str, path: Path) -> list[dict[str, object]]:
    reader = csv.DictReader(io.StringIO(text))
    names = set(reader.fieldnames or ())
    if not {"device", "global_batch"} <= names:
        raise SpecError(f"{path}: expected a CSV table with at least the columns device and global_batch")
    return [dict(row) for row in reader]


def _log_rows(text: str, path: Path) -> list[dict[str, object]]:
    state: dict[str, object] = {}
    observed: dict[str, tuple[dict[str, object], list[float]]] = {}
    for place, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        entry = _entry(line, path, place)
        state.update({name: value for name, value in entry.items() if name in COLUMNS and name != "iter_time_s"})
        seconds = next((number(str(entry[key])) for key in _KEYS if key in entry), None)
        if seconds is not None and seconds > 0:
            key = json.dumps(state, sort_keys=True, default=str)
            observed.setdefault(key, (dict(state), []))[1].append(seconds)
    return [row | {"iter_time_s": repr(steady(steps))} for row, steps in observed.values()]


def _entry(line: str, path: Path, place: int) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise SpecError(f"{path}:{place}: is not a JSON object") from None
    if not isinstance(entry, dict):
        raise SpecError(f"{path}:{place}: is not a JSON object")
    return entry


def steady(steps: Sequence[float]) -> float:
    """Return the median step, warm-up left out."""
    return median(steps[WARM_UP_STEPS:] if len(steps) > 2 * WARM_UP_STEPS else steps)


def by_configuration(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return runs that measured the same configuration together."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.configuration, []).append(run)
    return groups
