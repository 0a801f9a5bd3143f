"""Measured layers as other planners' profilers store them: JSON told by its keys.

* **Metis** (Um 2024, ATC; `DeviceType.A100_tp2_bs4.json`, or `mbs4_tmp2.json` in a folder of the device's name):
  `layer_compute_total_ms` holds both passes of a layer together; a third is taken as forward, as two products of three
  belong to the backward pass. `layer_memory_total_mb` is a layer's whole memory: of two microbatches of one tp the
  difference is what a sample keeps, the rest are states. Parameters are stored in bytes, here taken as fp32.
* **Galvatron** (Miao 2023, VLDB): `computation_profiling*.json` holds forward ms a sample at tp 1 (`layertype_0`, or by
  `_bsz<n>`; `layertype_other` is what is no block), backward counts twice that; `memory_profiling*.json` MB by tp.
  The profile says neither device nor layers: both must be told. Rows are made for tp 1 and microbatches 1 to 8, since
  it states time in proportion to samples.
* **Sailor** (Strati 2025, SOSP): seconds by model, device, microbatch, tp and layer (`profiles_tmp.json`), or the same
  of one device from the microbatch on (`profiles/MODEL/DEVICE/profile.json`); sizes by model, tp and layer; fits of
  links by zone, device and count at both ends, or by device and count inside a node.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from hetplan.specs.importers.facts import SourceText
from hetplan.specs.importers.layer_times import Profile, SizeRow, TimeRow
from hetplan.specs.layer_table import LinkCurve, LinkEnd
from hetplan.specs.model import LayerKind

MIB = 1 << 20
FORWARD_SHARE = 1 / 3
"""One product forward, two backward."""
PARAM_BYTES = 4
SAMPLES = (1, 2, 4, 8)
_METIS = (re.compile(r"DeviceType\.(.+)_tp(\d+)_bs(\d+)\.json"), re.compile(r"mbs(\d+)_tmp(\d+)\.json"))
_TYPE = re.compile(r"layertype_(\d+|other)(?:_bsz(\d+))?(?:_seq\d+)?")


def read_profile(source: SourceText, device: str | None, count: int | None) -> Profile:
    """Return what a JSON profile says; `device` and `count` (layers) tell what it leaves out.

    Raises:
        SpecError: it is of no known kind, or a figure is missing.
    """
    try:
        root = json.loads(source.text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise source.error(f"the file is not JSON: {error}") from None
    if not isinstance(root, dict):
        raise source.error("expected a JSON object")
    try:
        found = _told(source, root, device, count)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise source.error(f"the profile is not complete: {type(error).__name__} {error}") from None
    if found is None:
        raise source.error("expected a profile of Metis, Galvatron or Sailor")
    return replace(found, sources=(source.name,))


def _told(source: SourceText, root: dict[str, Any], device: str | None, count: int | None) -> Profile | None:
    if "execution_time" in root:
        return _metis(source, root, device)
    if any(_TYPE.fullmatch(key) for key in root):
        return _galvatron(source, root, device, count)
    if _is_fit(_leaf(root)):
        return _sailor_links(root)
    if all(key.isdigit() for key in root):
        place = PurePath(source.name)
        return Profile(times=tuple(_by_size(root, place.parent.parent.name, device or place.parent.name)))
    return _sailor(root)


def _metis(source: SourceText, root: Mapping[str, Any], device: str | None) -> Profile:
    place = PurePath(source.name)
    first, second = (pattern.fullmatch(place.name) for pattern in _METIS)
    if first:
        name, tp, samples = first[1], int(first[2]), int(first[3])
    elif second:
        name, tp, samples = place.parent.name, int(second[2]), int(second[1])
    else:
        raise source.error("expected a name like DeviceType.A100_tp1_bs4.json, which says device, tp and microbatch")
    times, model = root["execution_time"], root.get("model", {})
    passes_s = [_positive(value) * 1e-3 for value in times["layer_compute_total_ms"]]
    held = [_positive(value) * MIB for value in root.get("execution_memory", {}).get("layer_memory_total_mb", [])]
    params = [
        _positive(value) / PARAM_BYTES for value in model.get("parameters", {}).get("parameters_per_layer_bytes", [])
    ]
    update_s = float(times.get("optimizer_time_ms", 0.0)) * 1e-3
    rows = []
    for layer, both_s in enumerate(passes_s):
        share = params[layer] / sum(params) if params else 1 / len(passes_s)
        rows.append(
            TimeRow(
                model=str(model.get("model_name", "")),
                device=device or name,
                microbatch=samples,
                tp=tp,
                layer=layer,
                kind=_end_kind(layer, len(passes_s)),
                forward_s=both_s * FORWARD_SHARE,
                backward_s=both_s * (1 - FORWARD_SHARE),
                update_s=update_s * share,
                params=params[layer] if params else None,
                states_bytes=held[layer] if held else None,
            )
        )
    return Profile(times=tuple(rows))


def _positive(value: Any) -> float:
    number = float(value)
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(value)
    return number


def _end_kind(layer: int, count: int) -> LayerKind:
    return "embedding" if layer == 0 else "head" if layer == count - 1 else "decoder"


def settle_memory(profile: Profile) -> Profile:
    """Return Metis rows with whole memory told apart into states and what a microbatch keeps.

    A layer's memory `states + samples * kept` is known at several microbatches of one device and tp; the least two
    tell both. Where there is but one, all of it counts as states, and a remark says so.
    """
    whole: dict[tuple[str, str, int, int], dict[int, float]] = {}
    for row in profile.times:
        if row.states_bytes is not None and row.saved_bytes is None:
            whole.setdefault((row.model, row.device, row.tp, row.layer), {})[row.microbatch] = row.states_bytes
    times, alone = [], set()
    for row in profile.times:
        sizes = whole.get((row.model, row.device, row.tp, row.layer))
        if row.states_bytes is None or row.saved_bytes is not None or sizes is None:
            times.append(row)
            continue
        if len(sizes) < 2:
            alone.add(f"{row.device}, tp {row.tp}")
            times.append(_with_memory(row, row.states_bytes, 0.0))
            continue
        low, high = sorted(sizes)[:2]
        kept = max(0.0, (sizes[high] - sizes[low]) / (high - low))
        times.append(_with_memory(row, max(0.0, sizes[low] - kept * low), kept * row.microbatch))
    notes = tuple(f"{name}: one microbatch was measured, all its memory counts as states" for name in sorted(alone))
    return Profile(
        times=tuple(times),
        sizes=profile.sizes,
        between=profile.between,
        inside=profile.inside,
        sources=profile.sources,
        notes=profile.notes + notes,
    )


def _with_memory(row: TimeRow, states_bytes: float, saved_bytes: float) -> TimeRow:
    return TimeRow(
        model=row.model,
        device=row.device,
        microbatch=row.microbatch,
        tp=row.tp,
        layer=row.layer,
        kind=row.kind,
        forward_s=row.forward_s,
        backward_s=row.backward_s,
        update_s=row.update_s,
        params=row.params,
        states_bytes=states_bytes,
        saved_bytes=saved_bytes,
    )


def _galvatron(source: SourceText, root: Mapping[str, Any], device: str | None, count: int | None) -> Profile:
    if count is None:
        raise source.error("a Galvatron profile does not say how many layers there are: --set count=N")
    if any(isinstance(value, dict) for value in root.values()):
        return Profile(sizes=tuple(_galvatron_sizes(root, count)))
    if device is None:
        raise source.error("a Galvatron profile does not say which device it is of: --device NAME")
    blocks = _galvatron_ms(root, "0")
    other = _galvatron_ms(root, "other")
    rows = []
    for samples in sorted(set(SAMPLES) | set(blocks) - {0}):
        block_s = _at(blocks, samples) * samples * 1e-3
        other_s = _at(other, samples) * samples * 1e-3 if other else 0.0
        for layer in range(count):
            forward_s = block_s
            if other and layer in (0, count - 1):
                forward_s = other_s / 2
            rows.append(
                TimeRow(
                    model="",
                    device=device,
                    microbatch=samples,
                    tp=1,
                    layer=layer,
                    kind=_end_kind(layer, count) if other else "decoder",
                    forward_s=forward_s,
                    backward_s=2 * forward_s,
                )
            )
    notes = () if other else ("embedding and head were not measured: all layers are blocks",)
    return Profile(times=tuple(rows), notes=notes)


def _galvatron_ms(root: Mapping[str, Any], which: str) -> dict[int, float]:
    """Return forward ms a sample by microbatch (0: any)."""
    found = {}
    for key, value in root.items():
        match = _TYPE.fullmatch(key)
        if match and match[1] == which:
            found[int(match[2] or 0)] = _positive(value)
    return found


def _at(by_size: Mapping[int, float], samples: int) -> float:
    """Return ms a sample at a microbatch: as measured, else at the nearest measured one."""
    if samples in by_size:
        return by_size[samples]
    return by_size[min(by_size, key=lambda size: (abs(size - samples), size))]


def _galvatron_sizes(root: Mapping[str, Any], count: int) -> Iterator[SizeRow]:
    block = root["layertype_0"]
    if "parameter_size" not in block:
        block = block[max(block, key=int)]
    params = _positive(block["parameter_size"]) * MIB / PARAM_BYTES
    for tp, kept in block["tp_activation_per_bsz_dict"].items():
        if not str(tp).isdigit():
            continue
        for layer in range(count):
            yield SizeRow(
                model="", tp=int(tp), layer=layer, kind=None, params=params / int(tp), saved_bytes=_positive(kept) * MIB
            )


def _sailor(root: Mapping[str, Any]) -> Profile | None:
    """Return times by model and device, or sizes by model and tp."""
    times: list[TimeRow] = []
    sizes: list[SizeRow] = []
    for model, inner in root.items():
        for name, below in inner.items():
            if name.isdigit():
                sizes += _sailor_sizes(model, int(name), below)
            else:
                times += _by_size(below, model, name)
    return Profile(times=tuple(times), sizes=tuple(sizes)) if times or sizes else None


def _by_size(inner: Mapping[str, Any], model: str, device: str) -> Iterator[TimeRow]:
    for samples, by_tp in inner.items():
        for tp, layers in by_tp.items():
            for layer, figures in layers.items():
                forward_s, backward_s, update_s = map(_positive, figures)
                yield TimeRow(
                    model=model,
                    device=device,
                    microbatch=int(samples),
                    tp=int(tp),
                    layer=int(layer),
                    kind=_end_kind(int(layer), len(layers)),
                    forward_s=forward_s,
                    backward_s=backward_s,
                    update_s=update_s,
                )


def _leaf(value: Any) -> Any:
    """Return the first value below that is no mapping."""
    while isinstance(value, dict) and value:
        value = next(iter(value.values()))
    return value


def _is_fit(value: Any) -> bool:
    """Return whether a value is [[a, b, c], maximum], or a list of one such."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], list)


def _curve(value: Any) -> LinkCurve:
    coefficients, most = value[0] if len(value) == 1 else value
    return LinkCurve(
        coefficients=tuple(float(number) * 1e9 for number in coefficients), max_bytes_per_s=_positive(most)
    )


def _sailor_links(root: Mapping[str, Any]) -> Profile:
    """Return fits by zone, device and count at both ends, or by device and count inside a node."""
    inside: dict[tuple[str, int], LinkCurve] = {}
    between: dict[tuple[LinkEnd, LinkEnd], LinkCurve] = {}
    for zone, devices in root.items():
        for device, counts in devices.items():
            if device.isdigit():
                inside[zone, int(device)] = _curve(counts)
                continue
            for count, far in counts.items():
                sender = LinkEnd(device=device, site=zone, ranks=int(count))
                for receiver, curve in _far_ends(far):
                    between[sender, receiver] = curve
    return Profile(between=between, inside=inside)


def _far_ends(far: Mapping[str, Any]) -> Iterator[tuple[LinkEnd, LinkCurve]]:
    for zone, devices in far.items():
        for device, counts in devices.items():
            for count, value in counts.items():
                yield LinkEnd(device=device, site=zone, ranks=int(count)), _curve(value)


def _sailor_sizes(model: str, tp: int, layers: Mapping[str, Any]) -> Iterator[SizeRow]:
    for layer, figures in layers.items():
        yield SizeRow(
            model=model,
            tp=tp,
            layer=int(layer),
            kind=_end_kind(int(layer), len(layers)),
            params=_positive(figures["params_floats"]),
            saved_bytes=_positive(figures["act_mem_bytes"]),
            output_floats=_positive(figures["act_output_floats"]),
        )


def is_json(source: SourceText) -> bool:
    """Return whether a file looks like JSON."""
    return source.text.lstrip().startswith("{")
