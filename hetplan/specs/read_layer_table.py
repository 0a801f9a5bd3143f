"""The `layers:` and `links:` sections of a calibration file <-> `LayerTable` and `LinkFits`.

```yaml
layers:
  model: OPT-350
  count: 26                       # layers of the chain, embedding and head included
  bytes_per_param: 24 B           # weights, gradients, optimizer states and copies
  reserve: {1: 2 GB, 2: 3 GB}     # memory held besides, by the least tp it holds for
  update: stage                   # the update of a stage is what its first layer states (default: layer)
  rows:
    - {device: A100-40, tp: 1, microbatch: 1, layers: 1-24, forward: 2.3 ms, backward: 5.9 ms, update: 2.9 ms,
       params: 12596224, saved: 360726528 B}
links:
  bucket: 500 MB                  # gradients travel in pieces of this size
  curves:
    c1: {polynomial: "-0.0024 0.14 1.1", most: 2.4 GB/s}   # GB/s, highest power of log2(bytes / 1e6) first
  between: ["A100-40@zone-a x1 -> V100-16@zone-a x2: c1"]  # device@site xranks; without @site: any site
  inside: ["A100-40 x4: c1"]
```
`layers: 1-24` counts from 0 and holds both ends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from hetplan.specs.encode import scalar_text
from hetplan.specs.fields import Fields
from hetplan.specs.layer_table import ANY_SITE, LayerRow, LayerTable, LinkCurve, LinkEnd, LinkFits, UpdateScope
from hetplan.units import quantity_text

SCOPES: tuple[UpdateScope, ...] = ("layer", "stage")
MOST_LAYERS = 10_000
MOST_DEGREE = 65_536
_SPAN = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_END = re.compile(r"([^@]+?)(?:@(.+?))? x(\d{1,5})")


def read_layers(fields: Fields) -> LayerTable | None:
    """Return the table of a `layers:` section; None where there is none.

    Raises: SpecError for a value that makes no sense, a row twice, or layers that are not there.
    """
    if not fields.names():
        return None
    count = fields.integer("count", minimum=1, maximum=MOST_LAYERS)
    table = LayerTable(
        model=fields.text("model"),
        num_layers=count,
        rows=tuple(_row(row, count) for row in fields.rows("rows")),
        bytes_per_param=fields.quantity("bytes_per_param", "bytes", default=None),
        reserve_bytes=_reserve(fields.fields("reserve", required=False)),
        update_scope=fields.choice("update", SCOPES, default="layer"),
    )
    fields.finish()
    seen: set[tuple[str, int, int, int]] = set()
    for row in table.rows:
        for layer in range(row.first_layer, row.end_layer):
            key = (row.device, row.tp, row.microbatch, layer)
            if key in seen:
                raise fields.error(f"layer {layer} of {row.device}, tp {row.tp}, is there twice", "rows")
            seen.add(key)
    return table


def _row(fields: Fields, count: int) -> LayerRow:
    found = _SPAN.fullmatch(fields.text("layers") if fields.is_text("layers") else str(fields.raw("layers")))
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if last < first or last >= count:
        raise fields.error(f"expected layers of 0 to {count - 1}, as in 1-{count - 1}", "layers")
    params = fields.number("params", default=None, minimum=0.0, maximum=1e15)
    row = LayerRow(
        device=fields.text("device"),
        tp=fields.integer("tp", minimum=1, maximum=MOST_DEGREE),
        microbatch=fields.integer("microbatch", minimum=1, maximum=MOST_DEGREE),
        first_layer=first,
        end_layer=last + 1,
        forward_s=fields.quantity("forward", "s", positive=True),
        backward_s=fields.quantity("backward", "s"),
        update_s=fields.quantity("update", "s", default=0.0),
        params=params,
        states_bytes=fields.quantity("states", "bytes", default=None),
        saved_bytes=fields.quantity("saved", "bytes", default=None),
    )
    fields.finish()
    return row


def _reserve(fields: Fields) -> dict[int, float]:
    found: dict[int, float] = {}
    for name in fields.names():
        if not name.isdigit() or not 1 <= int(name) <= MOST_DEGREE:
            raise fields.error("expected a tp degree", name)
        found[int(name)] = fields.quantity(name, "bytes")
    return found


def read_links(fields: Fields) -> LinkFits | None:
    """Return the fits of a `links:` section; None where there is none.

    Raises: SpecError for a place or curve that is not well formed or not there.
    """
    if not fields.names():
        return None
    curves = {name: _curve(each) for name, each in fields.table("curves").items()}
    between: dict[tuple[LinkEnd, LinkEnd], LinkCurve] = {}
    for index, text in enumerate(fields.texts("between", default=())):
        pair, curve = _named(fields, ("between", index), text, curves)
        first, arrow, second = pair.partition(" -> ")
        if not arrow:
            raise fields.error("expected 'DEVICE@SITE xN -> DEVICE@SITE xN: CURVE'", "between", index=index)
        between[_end(fields, ("between", index), first), _end(fields, ("between", index), second)] = curve
    inside: dict[tuple[str, int], LinkCurve] = {}
    for index, text in enumerate(fields.texts("inside", default=())):
        place, curve = _named(fields, ("inside", index), text, curves)
        end = _end(fields, ("inside", index), place)
        inside[end.device, end.ranks] = curve
    fits = LinkFits(
        between=between, inside=inside, bucket_bytes=fields.quantity("bucket", "bytes", default=None, positive=True)
    )
    fields.finish()
    return fits


def _curve(fields: Fields) -> LinkCurve:
    words = fields.text("polynomial").split()
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if not numbers or not all(map(math.isfinite, numbers)):
        raise fields.error("expected numbers in GB/s, highest power first", "polynomial")
    curve = LinkCurve(
        coefficients=tuple(number * 1e9 for number in numbers),
        max_bytes_per_s=fields.quantity("most", "bytes/s", default=None, positive=True),
    )
    fields.finish()
    return curve


def _named(fields: Fields, at: tuple[str, int], text: str, curves: Mapping[str, LinkCurve]) -> tuple[str, LinkCurve]:
    place, _, name = text.rpartition(": ")
    if name not in curves:
        raise fields.error(f"expected the name of a curve after ': ' ({', '.join(curves)})", at[0], index=at[1])
    return place, curves[name]


def _end(fields: Fields, at: tuple[str, int], text: str) -> LinkEnd:
    found = _END.fullmatch(text.strip())
    if not found or int(found[3]) < 1:
        raise fields.error("expected 'DEVICE@SITE xN'", at[0], index=at[1])
    return LinkEnd(device=found[1], site=found[2] or ANY_SITE, ranks=int(found[3]))


def layer_lines(table: LayerTable) -> Iterator[str]:
    """Yield the lines `read_layers` turns back into a table."""
    yield "layers:"
    yield f"  model: {scalar_text(table.model)}"
    yield f"  count: {table.num_layers}"
    if table.bytes_per_param is not None:
        yield f"  bytes_per_param: {quantity_text(table.bytes_per_param, 'bytes')}"
    if table.reserve_bytes:
        parts = (f"{tp}: {quantity_text(value, 'bytes')}" for tp, value in sorted(table.reserve_bytes.items()))
        yield f"  reserve: {{{', '.join(parts)}}}"
    if table.update_scope != "layer":
        yield f"  update: {table.update_scope}"
    yield "  rows:"
    for row in table.rows:
        yield f"    - {{{', '.join(_row_parts(row))}}}"


def _row_parts(row: LayerRow) -> Iterator[str]:
    last = row.end_layer - 1
    yield f"device: {scalar_text(row.device)}"
    yield f"tp: {row.tp}"
    yield f"microbatch: {row.microbatch}"
    yield f"layers: {row.first_layer}" + (f"-{last}" if last > row.first_layer else "")
    yield f"forward: {quantity_text(row.forward_s, 's')}"
    yield f"backward: {quantity_text(row.backward_s, 's')}"
    if row.update_s:
        yield f"update: {quantity_text(row.update_s, 's')}"
    if row.params is not None:
        yield f"params: {row.params:.17g}"
    for name, value in (("states", row.states_bytes), ("saved", row.saved_bytes)):
        if value is not None:
            yield f"{name}: {quantity_text(value, 'bytes')}"


def link_lines(fits: LinkFits) -> Iterator[str]:
    """Yield the lines `read_links` turns back into fits."""
    curves = {curve: f"c{n}" for n, curve in enumerate(dict.fromkeys([*fits.between.values(), *fits.inside.values()]))}
    yield "links:"
    if fits.bucket_bytes is not None:
        yield f"  bucket: {quantity_text(fits.bucket_bytes, 'bytes')}"
    yield "  curves:"
    for curve, name in curves.items():
        numbers = " ".join(gigabytes_text(value) for value in curve.coefficients)
        most = curve.max_bytes_per_s
        limit = "" if most is None else f", most: {quantity_text(most, 'bytes/s')}"
        yield f'    {name}: {{polynomial: "{numbers}"{limit}}}'
    if fits.between:
        yield "  between:"
    for (sender, receiver), curve in fits.between.items():
        yield f'    - "{_end_text(sender)} -> {_end_text(receiver)}: {curves[curve]}"'
    if fits.inside:
        yield "  inside:"
    for (device, ranks), curve in fits.inside.items():
        yield f'    - "{device} x{ranks}: {curves[curve]}"'


def gigabytes_text(value: float) -> str:
    """Return bytes a second as a number of GB/s that comes back as the same float."""
    for digits in (12, 15, 16, 17):
        text = f"{value / 1e9:.{digits}g}"
        if float(text) * 1e9 == value:
            return text
    return repr(value / 1e9)


def _end_text(end: LinkEnd) -> str:
    site = "" if end.site == ANY_SITE else f"@{end.site}"
    return f"{end.device}{site} x{end.ranks}"
