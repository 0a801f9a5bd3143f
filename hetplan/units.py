"""Quantities with units: text a person writes <-> floats in base units, and floats -> text a person reads.

Base units are B, B/s, s, FLOP/s, W, USD/h and USD/B. `K M G T P E` are powers of 1000, `Ki Mi Gi Ti Pi` powers of
1024; a bit is 1/8 byte. A number without a unit is refused: there is no right guess between GB and GiB.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Literal

from hetplan.errors import UsageError

UnitKind = Literal["bytes", "bytes/s", "s", "flop", "flop/s", "W", "USD/h", "USD/B"]

_Factors = Mapping[str, Decimal]

_DECIMAL: _Factors = {p: Decimal(10) ** n for p, n in zip(("", *"kKMGTPE"), (0, 3, 3, 6, 9, 12, 15, 18), strict=True)}
_BINARY: _Factors = {f"{p}i": Decimal(1024) ** n for n, p in enumerate("KMGTP", start=1)}
_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?)\s*(.*)", re.DOTALL)
_NOT_A_NUMBER = re.compile(r"[+-]?\.?(nan|inf(inity)?)\b", re.IGNORECASE)
_MAX_TEXT = 64
_MAX_NAMES = 2000
"""Near matches are looked for among this many names, so that a message never takes long to make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The units of one kind of quantity, with the smallest non-zero and the largest value that makes sense."""

    what: str
    example: str
    units: _Factors
    smallest: float
    largest: float


def _byte_units(suffix: str = "") -> dict[str, Decimal]:
    """Decimal and binary multiples of a byte, each followed by `suffix`."""
    return {f"{prefix}B{suffix}": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()}


def _rate_units() -> dict[str, Decimal]:
    """Bytes and bits a second."""
    bits = {f"{prefix}bit/s": factor / 8 for prefix, factor in {**_DECIMAL, **_BINARY}.items()}
    bps = {f"{prefix}bps": factor / 8 for prefix, factor in _DECIMAL.items()}
    return _byte_units("/s") | bits | bps


def _flop_units(*names: str) -> dict[str, Decimal]:
    """Work, or work a second, under each of its usual names."""
    return {f"{prefix}{name}": factor for name in names for prefix, factor in _DECIMAL.items()}


_POWER_UNITS: _Factors = {"W": Decimal(1), "kW": Decimal(1000), "mW": Decimal("1e-3")}
_KINDS: Mapping[UnitKind, _Kind] = {
    "bytes": _Kind(what="a size", example="80 GiB", units=_byte_units(), smallest=1.0, largest=1e18),
    "bytes/s": _Kind(what="a bandwidth", example="200 Gbit/s", units=_rate_units(), smallest=1.0, largest=1e18),
    "s": _Kind(
        what="a time",
        example="5 us",
        units={
            "s": Decimal(1),
            "ms": Decimal("1e-3"),
            "us": Decimal("1e-6"),
            "µs": Decimal("1e-6"),
            "μs": Decimal("1e-6"),
            "ns": Decimal("1e-9"),
            "min": Decimal(60),
            "h": Decimal(3600),
        },
        smallest=1e-12,
        largest=1e10,
    ),
    "flop": _Kind(what="an amount of work", example="2 GFLOP", units=_flop_units("FLOP"), smallest=1.0, largest=1e30),
    "flop/s": _Kind(
        what="a speed",
        example="312 TFLOP/s",
        units=_flop_units("FLOP/s", "FLOPS", "FLOPs", "flop/s"),
        smallest=1.0,
        largest=1e21,
    ),
    "W": _Kind(what="a power", example="400 W", units=_POWER_UNITS, smallest=1e-3, largest=1e8),
    "USD/h": _Kind(what="a price", example="1.89 USD/h", units={"USD/h": Decimal(1)}, smallest=1e-9, largest=1e9),
    "USD/B": _Kind(
        what="a price of traffic",
        example="0.02 USD/GB",
        units={f"USD/{unit}": 1 / factor for unit, factor in _byte_units().items()},
        smallest=1e-24,
        largest=1.0,
    ),
}


def parse_quantity(text: str, kind: UnitKind) -> float:
    """Return `text` (`80 GiB`, `200 Gbit/s`, `5 us`) in the base unit of `kind`.

    Raises:
        UsageError: no number, no unit, a unit of another kind, a negative, non-finite or senseless value.
    """
    spec = _KINDS[kind]
    wanted = f"expected {spec.what} such as '{spec.example}'"
    text = text.strip()
    if len(text) > _MAX_TEXT:
        raise UsageError(f"{wanted}, found {len(text)} characters")
    match = _NUMBER.fullmatch(text)
    if _NOT_A_NUMBER.match(text):
        raise UsageError(f"{wanted}, found {show(text)}, which is not a finite number")
    if match is None:
        raise UsageError(f"{wanted}, found {show(text)}")
    number, unit = match.groups()
    if not unit:
        raise UsageError(f"{wanted}, found {show(number)} without a unit")
    if unit not in spec.units:
        raise UsageError(f"{wanted}, found the unit {show(unit)}{_unit_hint(unit, spec)}")
    value = _base(number, spec.units[unit])
    _refuse_senseless(value, text, spec)
    return value


def _base(number: str, factor: Decimal) -> float:
    """The float nearest to `number * factor`, so that `15 us` is exactly 15e-6."""
    return float(Decimal(number) * factor)


def _refuse_senseless(value: float, text: str, spec: _Kind) -> None:
    """Raise for what no datasheet can say."""
    if value < 0:
        raise UsageError(f"{spec.what} cannot be negative, found {show(text)}")
    if not value <= spec.largest:
        raise UsageError(f"{show(text)} is too large for {spec.what}")
    if 0 < value < spec.smallest:
        raise UsageError(f"{show(text)} is too small for {spec.what}")


def _unit_hint(unit: str, spec: _Kind) -> str:
    """Name the unit that was probably meant, or the ones there are."""
    same_letters = [known for known in spec.units if known.lower() == unit.lower()]
    if "B/s" in spec.units and re.fullmatch(r"[kKMGTP]b(/s)?", unit):
        return f"; write '{unit[0]}bit/s' or '{unit[0]}B/s'"
    close = same_letters or difflib.get_close_matches(unit, spec.units, 1, 0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def quantity_text(value: float, kind: UnitKind) -> str:
    """Return the shortest text that `parse_quantity` turns back into exactly `value`, without an exponent if it can."""
    texts = [
        f"{number} {unit}"
        for unit, factor in _KINDS[kind].units.items()
        if unit.isascii()
        for number in _number_texts(float(Decimal(value) / factor))
        if _base(number, factor) == value
    ]
    return min(texts, key=lambda text: ("e" in text.split()[0], len(text)))


def _number_texts(value: float) -> set[str]:
    """`value` in 12 digits and in all, without the `.0` of whole numbers."""
    exact = (float(f"{value:.12g}"), value)
    return {str(int(each)) if each.is_integer() and abs(each) < 1e15 else repr(each) for each in exact}


def show(value: str, limit: int = 60) -> str:
    """Return `value` quoted for a message: one line, control characters escaped, cut after `limit` characters."""
    text = escape(value[: limit + 1])
    return "'" + (text if len(text) <= limit else text[: limit - 3] + "...") + "'"


def hint(word: str, known: Iterable[str], *, nearness: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or nothing when none is near (1: equal)."""
    if len(word) > _MAX_TEXT:
        return ""
    names = [name for name in islice(known, _MAX_NAMES) if len(name) <= _MAX_TEXT]
    same_letters = [name for name in names if name.casefold() == word.casefold()]
    close = same_letters or difflib.get_close_matches(word, names, 1, nearness)
    return f"; did you mean {show(close[0])}?" if close else ""


def escape(value: str) -> str:
    """Return `value` with everything unprintable escaped, so that it stays on one line."""
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in value)


def format_bytes(num_bytes: float) -> str:
    """`79.15 GiB`, `512 MiB`, `12 B`."""
    size = abs(num_bytes)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = float(_BINARY[unit[:2]])
        if size >= factor and not (unit == "TiB" and size < 10 * factor):
            return f"{_significant(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`1.234 s`, `12.3 ms`, `5 us`, `3 min 20 s`, `2 h 05 min`."""
    size = abs(seconds)
    if size >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if size >= 120:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    if size >= 1 or size == 0:
        return f"{seconds:.4g} s"
    for unit, factor in (("ms", 1e-3), ("us", 1e-6)):
        if size >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def format_rate(bytes_per_s: float) -> str:
    """`25 GB/s`, in decimal units as datasheets write them."""
    return f"{_with_prefix(bytes_per_s)}B/s"


def format_bits(bytes_per_s: float) -> str:
    """`200 Gbit/s`, as network cards are sold."""
    return f"{_with_prefix(8 * bytes_per_s)}bit/s"


def format_flop_rate(flop_per_s: float) -> str:
    """`312 TFLOP/s`."""
    return f"{_with_prefix(flop_per_s)}FLOP/s"


def format_power(watts: float) -> str:
    """`400 W`, `6.5 kW`, `1.2 MW`."""
    return f"{_with_prefix(watts)}W"


def format_energy(joules: float) -> str:
    """`1.5 MJ`."""
    return f"{_with_prefix(joules)}J"


def format_usd(usd: float) -> str:
    """`$12.34`; amounts under a dollar keep three significant digits."""
    size = abs(usd)
    if size == 0 or size >= 1:
        return f"${usd:,.2f}"
    return f"${_significant(usd)}" if size >= 1e-4 else f"${usd:.2e}"


def format_count(count: float) -> str:
    """`1.31 M`, `175 G`: a plain number with a decimal prefix."""
    return _with_prefix(count).rstrip()


def _with_prefix(value: float) -> str:
    """Three significant digits, a space and a decimal prefix."""
    size = abs(value)
    for prefix in ("E", "P", "T", "G", "M", "k"):
        factor = float(_DECIMAL[prefix])
        if size >= factor * 0.9995:
            return f"{_significant(value / factor)} {prefix}"
    return f"{_significant(value)} "


def _significant(value: float) -> str:
    """Two decimals under 100, one above, none above 1000, zeros at the end dropped."""
    size = abs(value)
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 or size == 0 else 4
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
