"""Reading of model files: `hetplan: model/v1`, or a bare Hugging Face `config.json`.

A model file states its shape in one of four ways:

- `config:` a catalog name, a path to a `config.json` (relative to the model file), or the Hugging Face fields as a
  mapping; `overrides:` replaces fields of it, mappings inside it field by field;
- `modules:` plain transformers given by their sizes, for published models of which no configuration exists;
- `layers:` the sizes of single layers, for chains whose seconds come from measured layers;
- `volumes:` the traffic of a job, to be laid over places far apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetplan.errors import HetplanError, Location, UsageError
from hetplan.specs.decode import Fields, document_from_text, read_document
from hetplan.specs.importers.hugging_face import model_from_config
from hetplan.specs.model import Model
from hetplan.specs.read_layers import read_layers, read_volumes
from hetplan.specs.read_modules import read_modules
from hetplan.specs.training import parse_rule, with_training
from hetplan.units import show

FindConfig = Callable[[str], Mapping[str, Any]]
"""From a catalog name to its configuration; raises a HetplanError for an unknown name."""
_KIND = "model"


def read_model(path: Path, find_config: FindConfig) -> Model:
    """Return the model a file describes; `find_config` looks names up in the catalog.

    Raises: SpecError when the file cannot be read or is no model.
    """
    return _model(read_document(path, ""), path, find_config)


def model_from_text(text: str, path: Path, find_config: FindConfig) -> Model:
    """Return the model `text` describes, as if it stood in the file at `path`.

    Raises: SpecError when it is no model.
    """
    return _model(document_from_text(text, str(path), ""), path, find_config)


def _model(fields: Fields, path: Path, find_config: FindConfig) -> Model:
    if not fields.has("hetplan"):
        return model_from_config(
            fields.raw_mapping(), _bare_name(path), locate=_locator(fields, None, fields.location())
        )
    _expect_kind(fields)
    name = fields.text("name", default=path.stem)
    source = fields.text("source", default=None)
    if sum(fields.has(way) for way in ("config", "modules", "layers", "volumes")) != 1:
        raise fields.error("a model file has either 'config:' or 'modules:' (or 'layers:', 'volumes:')")
    if fields.has("config"):
        model = _configured(fields, name, path, find_config)
    elif fields.has("volumes"):
        model = read_volumes(fields, name)
    else:
        model = read_modules(fields, name) if fields.has("modules") else read_layers(fields, name)
    model = _trained(fields, model)
    fields.finish()
    return model if source is None else replace(model, sources={"source": source, **model.sources})


def _trained(fields: Fields, model: Model) -> Model:
    """Return the model with its modules trained as `train:` says (`vision: frozen`, `language: lora(16)`)."""
    if not fields.has("train"):
        return model
    rules = fields.fields("train")
    try:
        found = with_training(model, {name: parse_rule(rules.text(name)) for name in rules.names()})
    except UsageError as error:
        raise fields.error(str(error), "train") from None
    rules.finish()
    return found


def _expect_kind(fields: Fields) -> None:
    kind = fields.text("hetplan")
    if kind != f"{_KIND}/v1":
        raise fields.error(f"this file is {show(kind)}, expected '{_KIND}/v1'", "hetplan")


def _configured(fields: Fields, name: str, path: Path, find_config: FindConfig) -> Model:
    """Return the model of a file with `config:`, with `overrides:` laid over it."""
    overrides = fields.fields("overrides", required=False)
    values, found = _config(fields, path, find_config)
    locate = _locator(found, overrides, fields.location("config"))
    return model_from_config(_merged(values, overrides.raw_mapping()), name, locate=locate)


def _config(fields: Fields, path: Path, find_config: FindConfig) -> tuple[Mapping[str, Any], Fields | None]:
    """Return the configuration and, where it stands in a file, that file's mapping."""
    if fields.is_mapping("config"):
        inside = fields.fields("config")
        return inside.raw_mapping(), inside
    reference = fields.text("config")
    if _is_path(reference):
        other = read_document(path.parent / reference, "")
        if other.has("hetplan"):
            raise fields.error("must be a Hugging Face configuration, not a model file", "config")
        return other.raw_mapping(), other
    try:
        return find_config(reference), None
    except HetplanError as error:
        raise fields.error(str(error), "config") from None


def _is_path(reference: str) -> bool:
    return reference.endswith((".json", ".yaml", ".yml")) or "/" in reference or os.sep in reference


def _bare_name(path: Path) -> str:
    """Return `llama` for `llama.config.json` and the folder's name for a plain `config.json`."""
    stem = path.name.removesuffix(".json").removesuffix(".yaml").removesuffix(".yml")
    stem = stem.removesuffix(".config")
    return path.resolve().parent.name if stem == "config" else stem


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `overrides` laid over them, mappings field by field."""
    merged = dict(values)
    for key, value in overrides.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _locator(found: Fields | None, overrides: Fields | None, fallback: Location) -> Callable[[str], Location]:
    """Return a function from a dotted path to where that field stands, in `overrides` before `found`.

    A field that stands in neither is placed at the mapping of `found` that should hold it, else at `fallback`.
    """

    def locate(path: str) -> Location:
        *outer, key = path.split(".")
        for place in (overrides, found):
            inner = _inside(place, outer)
            if inner is not None and inner.has(key):
                return inner.location(key)
        inner = _inside(found, outer)
        return fallback if inner is None else inner.location()

    return locate


def _inside(fields: Fields | None, keys: list[str]) -> Fields | None:
    """Return the mapping `keys` lead to, if there is one."""
    for key in keys:
        if fields is None or not fields.is_mapping(key):
            return None
        fields = fields.fields(key)
    return fields
