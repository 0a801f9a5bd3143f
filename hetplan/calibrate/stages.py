"""Which layers and devices the stages of a run have, from degrees and from what its notes say about uneven cuts.

Decoder layers are divided evenly. Where they do not divide, the embedding and the head count as a layer each (the
first and last stage hold one decoder layer fewer), and where that does not divide either, the first stages take what
is left over. Notes may state the cut itself:

* `layer boundaries [0, 7, 14, 20, 30] over 30 ... units (0-1 embed, 2-25 blocks, ...)`: cuts in units;
* `stage0:16L[GH-96/tp4]; stage1:18L[...]` or `layers [3, 5, 5]`: units of each stage, embedding and head included;
  brackets name the device of each replica there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from hetplan.calibrate.hardware import device_called, parts_of
from hetplan.calibrate.runs import Run
from hetplan.errors import UsageError

_STAGE = re.compile(r"stage\d+:(\d+)L\[([^\]]*)\]")
_LISTED = re.compile(r"layers \[([\d, ]+)\] \((\d+)/(\d+) units")
_BOUNDARIES = re.compile(r"layer boundaries \[([\d, ]+)\].*?(\d+)-(\d+) blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Decoder layers of each virtual stage, and the device of each stage of each replica where notes name them."""

    decoders: tuple[int, ...]
    devices: tuple[tuple[str, ...], ...] = ()
    """Entry a replica: its stages' catalog devices; empty: in the order of the cluster."""


def cut_of(run: Run, num_layers: int, num_stages: int) -> Cut:
    """Return how a run cuts its layers into virtual stages.

    Raises:
        UsageError: the notes name a cut that does not fit.
    """
    stated = _BOUNDARIES.search(run.notes)
    if stated:
        units = _numbers(stated.group(1))
        return Cut(decoders=_decoders_of_units(units, int(stated.group(2)), int(stated.group(3)) + 1))
    named = _STAGE.findall(run.notes)
    if named:
        return _named_stages(run, named, num_layers)
    listed = _LISTED.search(run.notes)
    if listed and sum(_numbers(listed.group(1))) == num_layers + 2:
        return Cut(decoders=_without_edges(_numbers(listed.group(1))))
    return Cut(decoders=even_cut(num_layers, num_stages))


def even_cut(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return decoder layers a stage where nothing is stated."""
    each, left = divmod(num_layers, num_stages)
    if not left:
        return (each,) * num_stages
    if (num_layers + 2) % num_stages == 0:
        return _without_edges(((num_layers + 2) // num_stages,) * num_stages)
    return tuple(each + (stage < left) for stage in range(num_stages))


def _without_edges(units: tuple[int, ...]) -> tuple[int, ...]:
    """Return units a stage less the embedding on the first and the head on the last."""
    counts = list(units)
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _decoders_of_units(units: tuple[int, ...], first: int, end: int) -> tuple[int, ...]:
    places = [min(max(unit, first), end) - first for unit in units]
    return tuple(b - a for a, b in pairwise(places))


def _named_stages(run: Run, named: list[tuple[str, str]], num_layers: int) -> Cut:
    units = tuple(int(count) for count, _ in named)
    if sum(units) != num_layers + 2:
        raise UsageError(f"stages of {units} units do not make {num_layers} layers, embedding and head")
    kinds = parts_of(run)
    if len(kinds) == 1:
        return Cut(decoders=_without_edges(units))
    stages = [[device_called(word.split("/")[0].strip()).name for word in names.split(",")] for _, names in named]
    return Cut(decoders=_without_edges(units), devices=tuple(zip(*stages, strict=True)))
