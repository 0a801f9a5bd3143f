"""Measured layers of other tools -> a calibration with `layers:` and `links:`, and a model of the layers' sizes.

Files may be given in any number and order; each is told by its content (`layer_times_csv`, `layer_times_json`). What
they say is put together here:

* seconds by device, microbatch, tp and layer; a layer of which a file holds no row takes the row of its kind (profiles
  list one transformer layer for all of them); a combination with a kind missing is left out and said so;
* bytes and parameters by tp and layer, per sample, or per microbatch beside the seconds;
* bandwidth by message size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from hetplan.errors import UsageError
from hetplan.specs.calibration import Calibration, Overlap, PipelineTiming
from hetplan.specs.encode import scalar_text
from hetplan.specs.layer_table import LayerRow, LayerTable, LinkCurve, LinkEnd, LinkFits, UpdateScope
from hetplan.specs.model import LayerKind
from hetplan.units import hint

KIND_WORDS: Mapping[str, LayerKind] = {
    "embedding": "embedding",
    "embed": "embedding",
    "transformer": "decoder",
    "decoder": "decoder",
    "layer": "decoder",
    "block": "decoder",
    "encoder": "encoder",
    "head": "head",
    "lm_head": "head",
    "loss": "head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """One layer on one device at one microbatch and tp."""

    model: str
    device: str
    microbatch: int
    tp: int
    layer: int
    kind: LayerKind | None
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    params: float | None = None
    states_bytes: float | None = None
    saved_bytes: float | None = None
    """Of the whole microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """What one layer holds on one rank of a tp group."""

    model: str
    tp: int
    layer: int
    kind: LayerKind | None
    params: float
    saved_bytes: float | None = None
    """Of one sample."""
    output_floats: float | None = None
    """Elements of one sample that leave the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What some files say, put side by side."""

    times: tuple[TimeRow, ...] = ()
    sizes: tuple[SizeRow, ...] = ()
    between: Mapping[tuple[LinkEnd, LinkEnd], LinkCurve] = field(default_factory=dict)
    inside: Mapping[tuple[str, int], LinkCurve] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the files do not say."""

    count: int | None = None
    """Layers of the chain."""
    bytes_per_param: float | None = None
    reserve_bytes: Mapping[int, float] = field(default_factory=dict)
    update: UpdateScope = "layer"
    pipeline: PipelineTiming = "exact"
    hidden: float | None = None
    """Part of the last backward pass that hides gradient traffic; None: the assumed default."""
    bucket_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFindings:
    """A calibration and what was left out of it."""

    calibration: Calibration
    notes: tuple[str, ...]


def together(profiles: Sequence[Profile]) -> Profile:
    """Return all that several files say."""
    between: dict[tuple[LinkEnd, LinkEnd], LinkCurve] = {}
    inside: dict[tuple[str, int], LinkCurve] = {}
    for profile in profiles:
        between |= profile.between
        inside |= profile.inside
    return Profile(
        times=tuple(row for profile in profiles for row in profile.times),
        sizes=tuple(row for profile in profiles for row in profile.sizes),
        between=between,
        inside=inside,
        sources=tuple(source for profile in profiles for source in profile.sources),
        notes=tuple(note for profile in profiles for note in profile.notes),
    )


def layer_calibration(profile: Profile, settings: Settings, model: str | None) -> LayerFindings:
    """Return the calibration a profile gives.

    Raises:
        UsageError: the files hold no layer times nor links, several models, or one row twice with other numbers.
    """
    notes: list[str] = list(profile.notes)
    table = None
    if profile.times:
        table = _table(profile, settings, _model_name(profile, model), notes)
    elif not profile.between and not profile.inside:
        raise UsageError("the files hold neither layer times nor link fits")
    links = None
    if profile.between or profile.inside:
        links = LinkFits(between=profile.between, inside=profile.inside, bucket_bytes=settings.bucket_bytes)
    overlap = Overlap(pipeline=settings.pipeline)
    if settings.hidden is not None:
        overlap = Overlap(pipeline=settings.pipeline, gradients=settings.hidden)
    sources = ", ".join(dict.fromkeys(profile.sources))
    calibration = Calibration(overlap=overlap, provenance={"imported from": sources}, layers=table, links=links)
    return LayerFindings(calibration=calibration, notes=tuple(notes))


def _model_name(profile: Profile, wanted: str | None) -> str:
    names = sorted({row.model for row in profile.times} | {row.model for row in profile.sizes if not profile.times})
    if wanted is not None and wanted in names:
        return wanted
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is not None and names in ([""], []):
        return wanted
    problem = f"there is no model {wanted!r}" if wanted else f"there are {len(names)} models"
    raise UsageError(f"--name: {problem}{hint(wanted or '', names)}; the files hold {', '.join(names) or 'none'}")


def _of(model: str, rows: Iterable[TimeRow]) -> list[TimeRow]:
    return [row for row in rows if row.model in (model, "")]


def _table(profile: Profile, settings: Settings, model: str, notes: list[str]) -> LayerTable:
    times = _of(model, profile.times)
    stated = [row for row in profile.sizes if row.model in (model, "")]
    kinds = layer_kinds(times, stated, settings.count)
    sizes = _filled_sizes(stated, kinds)
    found: list[LayerRow] = []
    for (device, tp, microbatch), rows in _by_option(times).items():
        filled = _filled(rows, kinds)
        if isinstance(filled, str):
            notes.append(f"left out {device}, tp {tp}, microbatch {microbatch}: no {filled} was measured")
            continue
        layers = [_sized(row, sizes.get((tp, layer)), layer) for layer, row in enumerate(filled)]
        found += _runs(layers)
    if not found:
        raise UsageError(f"no device, tp and microbatch of {model} was measured for every kind of layer")
    return LayerTable(
        model=model,
        num_layers=len(kinds),
        rows=tuple(found),
        bytes_per_param=settings.bytes_per_param,
        reserve_bytes=settings.reserve_bytes,
        update_scope=settings.update,
    )


def _by_option(times: Sequence[TimeRow]) -> dict[tuple[str, int, int], dict[int, TimeRow]]:
    grouped: dict[tuple[str, int, int], dict[int, TimeRow]] = {}
    for row in times:
        layers = grouped.setdefault((row.device, row.tp, row.microbatch), {})
        if layers.setdefault(row.layer, row) != row:
            raise UsageError(
                f"layer {row.layer} of {row.device}, tp {row.tp}, microbatch {row.microbatch} is there twice with other"
                " numbers; choose rows with --where COLUMN=VALUE"
            )
    return dict(sorted(grouped.items()))


def layer_kinds(times: Sequence[TimeRow], sizes: Sequence[SizeRow], count: int | None) -> tuple[LayerKind, ...]:
    """Return the kind of each layer of the chain.

    Raises:
        UsageError: a row is of a layer beyond the stated count.
    """
    known: dict[int, LayerKind | None] = {row.layer: row.kind for row in times}
    known |= {row.layer: row.kind for row in sizes if row.kind is not None or row.layer not in known}
    total = count or max(known, default=-1) + 1
    if total < 1 or max(known, default=0) >= total:
        raise UsageError(f"count: the files speak of {max(known, default=-1) + 1} layers, not {total}")
    kinds: list[LayerKind] = []
    for layer in range(total):
        kind = known.get(layer)
        kinds.append(kind if kind is not None else "decoder")
    return tuple(kinds)


def _filled(rows: Mapping[int, TimeRow], kinds: Sequence[LayerKind]) -> list[TimeRow] | LayerKind:
    """Return a row for each layer, or the kind of which there is none."""
    of_kind: dict[LayerKind, TimeRow] = {}
    for layer in sorted(rows):
        of_kind[kinds[layer]] = rows[layer]
    filled = []
    for layer, kind in enumerate(kinds):
        row = rows.get(layer) or of_kind.get(kind)
        if row is None:
            return kind
        filled.append(row)
    return filled


def _filled_sizes(sizes: Sequence[SizeRow], kinds: Sequence[LayerKind]) -> dict[tuple[int, int], SizeRow]:
    """Return a row by tp and layer; layers of which there is none take the last row of their kind."""
    found: dict[tuple[int, int], SizeRow] = {}
    for tp in sorted({row.tp for row in sizes}):
        own = {row.layer: row for row in sizes if row.tp == tp}
        of_kind = {kinds[layer]: own[layer] for layer in sorted(own)}
        for layer, kind in enumerate(kinds):
            row = own.get(layer) or of_kind.get(kind)
            if row is not None:
                found[tp, layer] = row
    return found


def _sized(row: TimeRow, size: SizeRow | None, layer: int) -> LayerRow:
    saved = row.saved_bytes
    if saved is None and size is not None and size.saved_bytes is not None:
        saved = size.saved_bytes * row.microbatch
    return LayerRow(
        device=row.device,
        tp=row.tp,
        microbatch=row.microbatch,
        first_layer=layer,
        end_layer=layer + 1,
        forward_s=row.forward_s,
        backward_s=row.backward_s,
        update_s=row.update_s,
        params=row.params if row.params is not None or size is None else size.params,
        states_bytes=row.states_bytes,
        saved_bytes=saved,
    )


def _runs(layers: Sequence[LayerRow]) -> list[LayerRow]:
    """Return equal neighbours as one row."""

    def figures(row: LayerRow) -> tuple[float | None, ...]:
        return (row.forward_s, row.backward_s, row.update_s, row.params, row.states_bytes, row.saved_bytes)

    found = []
    for _, run in groupby(layers, key=figures):
        rows = list(run)
        first = rows[0]
        found.append(
            LayerRow(
                device=first.device,
                tp=first.tp,
                microbatch=first.microbatch,
                first_layer=first.first_layer,
                end_layer=rows[-1].end_layer,
                forward_s=first.forward_s,
                backward_s=first.backward_s,
                update_s=first.update_s,
                params=first.params,
                states_bytes=first.states_bytes,
                saved_bytes=first.saved_bytes,
            )
        )
    return found


def layer_model_text(profile: Profile, settings: Settings, model: str | None, seq_len: int) -> str:
    """Return a model file of the layers' sizes.

    Raises:
        UsageError: the files do not say how many parameters the layers have and what leaves them.
    """
    name = _model_name(profile, model)
    times = _of(name, profile.times)
    stated = [row for row in profile.sizes if row.model in (name, "")]
    kinds = layer_kinds(times, stated, settings.count)
    sizes = {layer: row for (tp, layer), row in _filled_sizes(stated, kinds).items() if tp == 1}
    cut_by = math.lcm(*{row.tp for row in times}, *{row.tp for row in stated})
    lines = ["hetplan: model/v1", f"name: {scalar_text(name)}", "layers:"]
    entries = []
    for layer, kind in enumerate(kinds):
        size = sizes.get(layer)
        if size is None or (size.output_floats is None and layer < len(kinds) - 1):
            raise UsageError(f"the files do not say how many parameters layer {layer} has at tp 1 and what leaves it")
        width = size.output_floats
        if layer == len(kinds) - 1:
            width = sizes[layer - 1].output_floats if layer else size.output_floats
        entries.append((kind, round(size.params), max(1, round((width or 1) / seq_len))))
    for (kind, params, width), run in groupby(entries):
        repeat = len(list(run))
        parts = [f"kind: {kind}", *([f"repeat: {repeat}"] if repeat > 1 else [])]
        lines.append(f"  - {{{', '.join([*parts, f'params: {params}', f'width: {width}', f'tp: {cut_by}'])}}}")
    return "\n".join(lines) + "\n"
