"""Nested mappings as YAML texts, for files that other programs read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hetplan.emit.shell import FILL_IN
from hetplan.specs.encode import scalar_text

__all__ = ["FILL_IN", "yaml_text"]


def yaml_text(value: Mapping[str, Any]) -> str:
    """Return nested mappings and lists as YAML, lists of scalars on one line."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Mapping[str, Any]) -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield f"{key}:"
            yield from (f"  {line}" for line in _lines(item))
        elif isinstance(item, list) and any(isinstance(part, Mapping) for part in item):
            yield f"{key}:"
            for part in item:
                yield from _item(part)
        elif isinstance(item, list) and any(isinstance(part, list) for part in item):
            yield f"{key}:"
            yield from (f"  - [{', '.join(map(scalar_text, part))}]" for part in item)
        elif isinstance(item, list):
            yield f"{key}: [{', '.join(scalar_text(part) for part in item)}]"
        else:
            yield f"{key}: {_scalar(item)}"


def _item(part: Any) -> Iterator[str]:
    if not isinstance(part, Mapping):
        yield f"  - {scalar_text(part)}"
        return
    for i, line in enumerate(_lines(part)):
        yield f"  {'  ' if i else '- '}{line}"


def _scalar(item: Any) -> str:
    if isinstance(item, Mapping):
        return "{}"
    if isinstance(item, str) and "\n" in item:
        return "|\n" + "\n".join(f"  {line}".rstrip() for line in item.splitlines())
    return scalar_text(item)
