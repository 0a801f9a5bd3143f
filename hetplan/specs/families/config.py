"""Tolerant, typed reading of a published configuration: known fields are checked, unknown ones are left alone.

A field the configuration leaves out takes the value the `transformers` class of its family would give it, because
published files rely on that (LLaVA's `text_config` names four fields). `defaulted` lists those that were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hetplan.errors import Location, SpecError
from hetplan.units import show

Locate = Callable[[str], Location | None]
"""From the dotted path of a field to where it stands in the file it came from."""

MAX_SIZE = 100_000_000
"""Largest width, vocabulary or length taken (assumed: a hundred times any published one)."""
MAX_LAYERS = 10_000
"""Most layers, heads or experts taken (assumed: ten times any published model)."""


class Config:
    """One mapping of a configuration, with the path that leads to it."""

    __slots__ = ("_locate", "defaulted", "path", "values")

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        path: str = "",
        locate: Locate | None = None,
        defaulted: dict[str, str] | None = None,
    ) -> None:
        self.values = values
        self.path = path
        self._locate = locate
        self.defaulted: dict[str, str] = {} if defaulted is None else defaulted

    def where(self, key: str) -> str:
        """Return the dotted path of `key`."""
        return f"{self.path}.{key}" if self.path else key

    def error(self, message: str, key: str) -> SpecError:
        """Return an error that points at `key`."""
        where = self.where(key)
        return SpecError(message, path=where, location=self._locate(where) if self._locate else None)

    def key_of(self, *keys: str) -> str:
        """Return the first of some spellings that is present, else the first."""
        return next((key for key in keys if key in self.values), keys[0])

    def size(self, *keys: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        """Return a positive whole number; `keys` are spellings of one field.

        Raises: SpecError when it is missing without a default, or not such a number.
        """
        key = self.key_of(*keys)
        if key not in self.values:
            if default is None:
                raise self.error("this field is missing", key)
            self.defaulted[self.where(key)] = "not stated: the default of its transformers class"
            return default
        return self._whole(key, self.values[key], 1, limit)

    def optional_size(self, *keys: str, default: int | None = None, limit: int = MAX_SIZE) -> int | None:
        """Return a positive whole number, or None where the field is null; `default` where it is missing.

        Raises: SpecError when it is anything else.
        """
        key = self.key_of(*keys)
        value = self.values.get(key, default)
        return None if value is None else self._whole(key, value, 1, limit)

    def count(self, *keys: str, default: int = 0, limit: int = MAX_LAYERS) -> int:
        """Return a whole number of at least 0; null and missing mean `default`.

        Raises: SpecError when it is anything else.
        """
        key = self.key_of(*keys)
        value = self.values.get(key)
        return default if value is None else self._whole(key, value, 0, limit)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; null and missing mean `default`.

        Raises: SpecError when it is anything else.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"must be true or false, not {quote(value)}", key)
        return value

    def probability(self, *keys: str, default: float = 0.0) -> float:
        """Return a number from 0 to 1; null and missing mean `default`.

        Raises: SpecError when it is anything else.
        """
        key = self.key_of(*keys)
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.error(f"must be a number from 0 to 1, not {quote(value)}", key)
        return float(value)

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a text.

        Raises: SpecError when it is missing without a default, or not a text.
        """
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error("this field is missing", key)
            return default
        if not isinstance(value, str):
            raise self.error(f"must be a text, not {quote(value)}", key)
        return value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of texts; None where it is null or missing.

        Raises: SpecError when it is anything else.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(f"must be a list of texts, not {quote(value)}", key)
        return tuple(value)

    def indices(self, key: str, *, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return a list of whole numbers of at least 0; null and missing mean `default`.

        Raises: SpecError when it is anything else.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, list | tuple):
            raise self.error(f"must be a list of layer numbers, not {quote(value)}", key)
        return tuple(self._whole(key, item, 0, MAX_LAYERS) for item in value)

    def section(self, key: str) -> Config | None:
        """Return a mapping inside this one; None where it is null or missing.

        Raises: SpecError when it is not a mapping.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"must be a mapping, not {quote(value)}", key)
        return self.inside(key, value)

    def inside(self, key: str, values: Mapping[str, Any]) -> Config:
        """Return `values` as the mapping that stands at `key`."""
        return Config(values, path=self.where(key), locate=self._locate, defaulted=self.defaulted)

    def _whole(self, key: str, value: object, minimum: int, limit: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"must be a whole number, not {quote(value)}", key)
        if value < minimum:
            raise self.error(f"must be at least {minimum}, not {quote(value)}", key)
        if value > limit:
            raise self.error(f"must be at most {limit}, not {quote(value)}", key)
        return value


def quote(value: object) -> str:
    """Return a value as an error message quotes it: short and on one line, whatever it holds."""
    if isinstance(value, int) and not -(10**18) <= value <= 10**18:
        return "a number of more than 18 digits"
    if isinstance(value, str):
        return show(value, 40)
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else str(value).lower()
