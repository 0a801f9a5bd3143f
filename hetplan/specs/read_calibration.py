"""Calibration YAML <-> `Calibration`.

```yaml
hetplan: calibration/v1
devices:
  A100-SXM4-80GB: {gemm_peak_fraction: 0.78, gemm_half: 2 GFLOP, layer_overhead: 20 us, origin: fitted}
networks:
  ib: {bandwidth_fraction: 0.85, latency: 5 us, origin: measured}
overlap: {gradients: 0.8, gathers: true, tp_fraction: 0.0}
relative_error: 0.08
provenance: {software: torch 2.8}
```
Every key is optional; what is missing keeps its assumed default. `layers:` and `links:` hold measured layers and links
(see `read_layer_table`). A network called `"*"` stands for every network that
is not named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hetplan.specs.calibration import (
    Calibration,
    DeviceConstants,
    NetworkConstants,
    Origin,
    Overlap,
    PipelineTiming,
)
from hetplan.specs.decode import Fields, document_from_text, read_document
from hetplan.specs.encode import scalar_text
from hetplan.specs.read_layer_table import layer_lines, link_lines, read_layers, read_links
from hetplan.units import UnitKind, quantity_text

ORIGINS: tuple[Origin, ...] = ("measured", "fitted", "datasheet", "assumed")
PIPELINES: tuple[PipelineTiming, ...] = ("exact", "lock-step", "blocking", "columns")
_TINY = 1e-6
"""Stands for "above zero" where a fraction divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """How one number of a record is written: with a unit, or as a fraction within bounds."""

    attribute: str
    unit: UnitKind | None = None
    minimum: float = 0.0
    maximum: float = 1.0

    @property
    def name(self) -> str:
        """The key in the file: the attribute without its unit."""
        for suffix in ("_flop", "_bytes", "_s") if self.unit else ():
            if self.attribute.endswith(suffix):
                return self.attribute.removesuffix(suffix)
        return self.attribute


DEVICE_KEYS = (
    _Key(attribute="gemm_peak_fraction", minimum=_TINY, maximum=1.5),
    _Key(attribute="fp8_fraction", minimum=_TINY, maximum=1.5),
    _Key(attribute="expert_fraction", minimum=_TINY, maximum=1.5),
    _Key(attribute="expert_overhead_s", unit="s"),
    _Key(attribute="exchange_fraction", minimum=_TINY, maximum=10.0),
    _Key(attribute="exchange_merged"),
    _Key(attribute="gemm_half_flop", unit="flop"),
    _Key(attribute="misaligned_penalty", maximum=0.49),
    _Key(attribute="attention_fraction", minimum=_TINY, maximum=1.5),
    _Key(attribute="memory_fraction", minimum=_TINY, maximum=1.5),
    _Key(attribute="layer_overhead_s", unit="s"),
    _Key(attribute="link_fraction", minimum=_TINY, maximum=1.5),
    _Key(attribute="pcie_fraction", minimum=_TINY, maximum=1.5),
    _Key(attribute="link_latency_s", unit="s"),
    _Key(attribute="collective_fraction", minimum=_TINY, maximum=10.0),
    _Key(attribute="collective_latency_s", unit="s"),
    _Key(attribute="update_fraction", minimum=_TINY, maximum=100.0),
    _Key(attribute="memory_overhead_fraction", minimum=-0.5),
    _Key(attribute="reserve_bytes", unit="bytes"),
    _Key(attribute="idle_power_fraction"),
)
NETWORK_KEYS = (
    _Key(attribute="bandwidth_fraction", minimum=_TINY, maximum=1.5),
    _Key(attribute="latency_s", unit="s"),
    _Key(attribute="collective_fraction", minimum=_TINY, maximum=10.0),
    _Key(attribute="collective_latency_s", unit="s"),
)
OVERLAP_KEYS = (_Key(attribute="gradients"), _Key(attribute="tp_fraction"), _Key(attribute="sends_block"))


def read_calibration(path: Path) -> Calibration:
    """Return the calibration a file holds.

    Raises:
        SpecError: the file is not a valid calibration.
    """
    return _calibration(read_document(path, "calibration"))


def calibration_from_text(text: str, file_name: str) -> Calibration:
    """Return the calibration `text` holds.

    Raises:
        SpecError: the text is not a valid calibration.
    """
    return _calibration(document_from_text(text, file_name, "calibration"))


def _calibration(root: Fields) -> Calibration:
    """Decode the root mapping."""
    provenance = root.fields("provenance", required=False)
    calibration = Calibration(
        devices={name: _device(fields) for name, fields in root.table("devices", required=False).items()},
        networks={name: _network(fields) for name, fields in root.table("networks", required=False).items()},
        overlap=_overlap(root.fields("overlap", required=False)),
        relative_error=root.number("relative_error", default=None, minimum=0.0, maximum=10.0),
        provenance={name: provenance.text(name) for name in provenance.names()},
        layers=read_layers(root.fields("layers", required=False)),
        links=read_links(root.fields("links", required=False)),
    )
    root.finish()
    return calibration


def _device(fields: Fields) -> DeviceConstants:
    """Decode the constants of one device kind."""
    values = _values(fields, DEVICE_KEYS)
    constants = replace(DeviceConstants(), origin=fields.choice("origin", ORIGINS, default="assumed"), **values)
    fields.finish()
    return constants


def _network(fields: Fields) -> NetworkConstants:
    """Decode the constants of one network."""
    values = _values(fields, NETWORK_KEYS)
    constants = replace(NetworkConstants(), origin=fields.choice("origin", ORIGINS, default="assumed"), **values)
    fields.finish()
    return constants


def _overlap(fields: Fields) -> Overlap:
    """Decode what hides behind what."""
    values = _values(fields, OVERLAP_KEYS)
    overlap = replace(
        Overlap(),
        gathers=fields.flag("gathers", default=Overlap().gathers),
        pipeline=fields.choice("pipeline", PIPELINES, default="exact"),
        **values,
    )
    fields.finish()
    return overlap


def _values(fields: Fields, keys: tuple[_Key, ...]) -> dict[str, float]:
    """The numbers that are written, by attribute."""
    values: dict[str, float] = {}
    for key in keys:
        if key.unit is not None:
            value = fields.quantity(key.name, key.unit, default=None)
        else:
            value = fields.number(key.name, default=None, minimum=key.minimum, maximum=key.maximum)
        if value is not None:
            values[key.attribute] = value
    return values


def calibration_text(calibration: Calibration) -> str:
    """Return the text `read_calibration` turns back into `calibration`; names in order, every constant written."""
    return "\n".join(_lines(calibration)) + "\n"


def _lines(calibration: Calibration) -> Iterator[str]:
    """The lines of a calibration file."""
    yield "hetplan: calibration/v1"
    sections = (("devices", calibration.devices, DEVICE_KEYS), ("networks", calibration.networks, NETWORK_KEYS))
    for title, records, keys in sections:
        if records:
            yield f"{title}:"
        for name in sorted(records):
            yield f"  {scalar_text(name)}:"
            yield from (f"    {line}" for line in _constants(records[name], keys))
            yield f"    origin: {records[name].origin}"
    yield "overlap:"
    yield from (f"  {line}" for line in _constants(calibration.overlap, OVERLAP_KEYS))
    yield f"  gathers: {scalar_text(calibration.overlap.gathers)}"
    if calibration.overlap.pipeline != "exact":
        yield f"  pipeline: {calibration.overlap.pipeline}"
    if calibration.relative_error is not None:
        yield f"relative_error: {scalar_text(calibration.relative_error)}"
    if calibration.provenance:
        yield "provenance:"
    for name, text in sorted(calibration.provenance.items()):
        yield f"  {scalar_text(name)}: {scalar_text(text)}"
    if calibration.layers is not None:
        yield from layer_lines(calibration.layers)
    if calibration.links is not None:
        yield from link_lines(calibration.links)


def _constants(record: DeviceConstants | NetworkConstants | Overlap, keys: tuple[_Key, ...]) -> Iterator[str]:
    """The numbers of one record, those it has."""
    for key in keys:
        value: float | None = getattr(record, key.attribute)
        if value is not None:
            text = scalar_text(value) if key.unit is None else quantity_text(value, key.unit)
            yield f"{key.name}: {text}"
