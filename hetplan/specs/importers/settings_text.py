"""Settings of a trainer, and a Hugging Face configuration, as YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetplan.specs.encode import scalar_text
from hetplan.specs.importers.facts import Catalog
from hetplan.specs.importers.layout_settings import LayoutSettings


def settings_text(settings: LayoutSettings, counts: Sequence[int] | None, vpp: int) -> str:
    """Return settings as a `layout/v1` document: degrees, batch and decoder layers of each virtual stage."""
    return "\n".join(_lines(settings, counts, vpp)) + "\n"


def _lines(settings: LayoutSettings, counts: Sequence[int] | None, vpp: int) -> Iterator[str]:
    yield f"# Imported from {settings.source}. With --cluster and --model it becomes a plan."
    yield "hetplan: layout/v1"
    yield f"trainer: {settings.trainer}"
    if settings.pipelines:
        yield "replicas:"
        for pipeline in settings.pipelines:
            yield f"  - tp: {list(pipeline.tp)}"
            yield f"    layers_per_stage: {list(pipeline.layers)}"
            yield from _batch(pipeline.num_samples, "samples", "    ")
            yield from _batch(pipeline.num_microbatches, "num_microbatches", "    ")
    elif settings.meshes:
        yield f"meshes: {list(settings.meshes)}  # tp, cp, ep, dp, pp of each"
        if settings.device_types:
            yield f"device_types: [{', '.join(scalar_text(word) for word in settings.device_types)}]"
    else:
        yield from (f"{name}: {getattr(settings, name)}" for name in ("tp", "pp", "cp", "ep"))
        yield f"vpp: {vpp}"
        if settings.dp is not None:
            yield f"dp: {settings.dp}"
    if counts is not None:
        yield f"layers_per_stage: {list(counts)}"
    elif not settings.pipelines:
        yield "# QUESTION: how many layers has the model? Without it the layers of each stage are not known"
    for name in ("micro_batch", "global_batch", "seq_len"):
        yield from _batch(getattr(settings, name), name, "")
    yield f"recompute: {settings.recompute}"
    yield f"sharding: {settings.sharding}"
    if settings.schedule is not None:
        yield f"schedule: {settings.schedule}"


def _batch(value: int | None, name: str, indent: str) -> Iterator[str]:
    if value is not None and value > 0:
        yield f"{indent}{name}: {value}"


def model_text(name: str, config: Mapping[str, Any], source: str) -> str:
    """Return a model file that holds a Hugging Face configuration as it is."""
    lines = [f"# Imported from {source}.", "hetplan: model/v1", f"name: {scalar_text(name)}", "config:"]
    lines.extend(f"  {scalar_text(key)}: {json.dumps(value)}" for key, value in config.items())
    return "\n".join(lines) + "\n"


def device_names_of(catalog: Catalog, groups: Mapping[str, str]) -> dict[str, str]:
    """Return, for each group, the name of its device and everything else the device is called."""
    names = {}
    for group, device_name in groups.items():
        device = catalog.device(device_name)
        names[group] = " ".join([device_name, *(device.aliases if device else ())])
    return names
