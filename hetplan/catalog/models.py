"""Published models that ship with hetplan: one model file each in `models/`, with the source of its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetplan.errors import UsageError
from hetplan.specs.decode import read_document
from hetplan.specs.model import Model
from hetplan.specs.read_model import read_model
from hetplan.units import hint, show

_FOLDER = Path(__file__).parent / "models"


def model_names() -> tuple[str, ...]:
    """Return the names of all models in the catalog, sorted."""
    return tuple(sorted(path.name.removesuffix(".yaml") for path in _FOLDER.glob("*.yaml")))


def find_model_config(name: str) -> Mapping[str, Any]:
    """Return the Hugging Face fields of the model called `name`.

    Raises: UsageError when there is no such model, with the nearest name.
    """
    return read_document(_path(name), "model").fields("config").raw_mapping()


def find_model(name: str) -> Model:
    """Return the model called `name`.

    Raises: UsageError when there is no such model, with the nearest name.
    """
    return read_model(_path(name), find_model_config)


def _path(name: str) -> Path:
    names = model_names()
    key = name.strip().casefold()
    if key not in names:
        raise UsageError(f"unknown model {show(name)}{hint(name, names)} (`hetplan catalog models` lists all)")
    return _FOLDER / f"{key}.yaml"
