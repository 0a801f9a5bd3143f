"""A Hugging Face `config.json`, field names as they are, into the operator form of `specs.model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetplan.specs.families import FAMILIES
from hetplan.specs.families.config import Config, Locate, quote
from hetplan.specs.model import Model
from hetplan.units import hint, show


def model_from_config(config: Mapping[str, Any], name: str, *, path: str = "", locate: Locate | None = None) -> Model:
    """Return the model a configuration describes.

    `path` leads to the configuration inside its file and `locate` finds a field there, for errors that point at it.
    Fields of the configuration that say nothing about shapes are ignored; `sources` of the result lists the sizes
    that were not stated and where their values come from.

    Raises: SpecError for an unknown `model_type`, and for a field that is missing, of the wrong type or out of range.
    """
    reader = Config(config, path=path, locate=locate)
    if not isinstance(config.get("model_type"), str):
        stated = f", not {quote(config['model_type'])}" if "model_type" in config else ""
        raise reader.error(f"must name the family of the model{stated}; known: {_known()}", "model_type")
    model_type: str = config["model_type"]
    family = FAMILIES.get(model_type)
    if family is None:
        near = hint(model_type, FAMILIES)
        raise reader.error(f"unknown model_type {show(model_type)}{near} (known: {_known()})", "model_type")
    model = family(reader, name)
    return replace(model, family=model_type, sources=dict(reader.defaulted), published=dict(config))


def _known() -> str:
    return ", ".join(sorted(FAMILIES))
