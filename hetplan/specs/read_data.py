"""Data files: `hetplan: data/v1`, or a bare table of lengths (`.csv`, `.jsonl`).

A mixture lists `sources:`; a data set names its table as `lengths:` (relative to the file).
"""

from __future__ import annotations

from pathlib import Path

from hetplan.specs.data import Constant, Data, Distribution, Histogram, Items, Lognormal, Packing, Source
from hetplan.specs.decode import Fields, document_from_text
from hetplan.specs.nodes import read_bytes
from hetplan.specs.read_lengths import TABLE_ENDINGS, read_lengths
from hetplan.units import escape

MAX_TOKENS = 100_000_000
_SHAPES = ("constant", "lognormal", "histogram")
_OWN_KEYS = ("name", "weight", "text")


def read_data(path: Path) -> Data:
    """Return what a data file, or a table of lengths, describes.

    Raises:
        SpecError: it cannot be read or is not valid.
    """
    if path.suffix in TABLE_ENDINGS:
        return Data(name=path.stem, rows=read_lengths(path))
    text = read_bytes(path).decode("utf-8", errors="replace")
    return data_from_text(text, escape(str(path)), path.parent)


def data_from_text(text: str, file_name: str, folder: Path = Path()) -> Data:
    """Return what the text of a data file describes; `folder`: where the tables it names lie.

    Raises:
        SpecError: the text is no valid data file.
    """
    root = document_from_text(text, file_name, "data")
    name = root.text("name", default=Path(file_name).stem)
    if root.has("sources") == root.has("lengths"):
        raise root.error("a data file has either 'sources:' or 'lengths:'")
    sources = tuple(_source(row, place) for place, row in enumerate(root.rows("sources", required=False)))
    if root.has("sources") and not sources:
        raise root.error("a mixture has at least one source", "sources")
    table = root.text("lengths") if root.has("lengths") else ""
    rows = read_lengths(folder / table) if table else ()
    packing = _packing(root.fields("packing")) if root.has("packing") else None
    reads = root.fields("reads", required=False)
    readers = {module: reads.text(module) for module in reads.names()}
    root.finish()
    return Data(name=name, sources=sources, rows=rows, packing=packing, table=table, reads=readers)


def _source(row: Fields, place: int) -> Source:
    name = row.text("name", default=f"source-{place + 1}")
    weight = row.number("weight", default=1.0, minimum=0.0)
    text = _distribution(row.fields("text"), least=1)
    items = {}
    for modality in row.names():
        if modality not in _OWN_KEYS:
            inside = row.fields(modality)
            count = _distribution(inside.fields("count"), least=0) if inside.has("count") else Constant(value=1)
            items[modality] = Items(count=count, tokens=_distribution(inside.fields("tokens"), least=1))
            inside.finish()
    row.finish()
    return Source(name=name, weight=weight, text=text, items=items)


def _distribution(fields: Fields, *, least: int) -> Distribution:
    shapes = [shape for shape in _SHAPES if fields.has(shape)]
    if len(shapes) != 1:
        raise fields.error(f"give exactly one of {', '.join(_SHAPES)}")
    found: Distribution
    if shapes[0] == "constant":
        found = Constant(value=fields.integer("constant", minimum=least, maximum=MAX_TOKENS))
    elif shapes[0] == "lognormal":
        found = _lognormal(fields.fields("lognormal"), least)
    else:
        found = _histogram(fields.fields("histogram"), least)
    fields.finish()
    return found


def _lognormal(fields: Fields, least: int) -> Lognormal:
    median = fields.number("median", minimum=1e-9, maximum=MAX_TOKENS)
    sigma = fields.number("sigma", minimum=0.0, maximum=10.0)
    lowest = fields.integer("least", default=least, minimum=least, maximum=MAX_TOKENS)
    most = fields.integer("most", default=1_000_000, minimum=max(1, lowest), maximum=MAX_TOKENS)
    fields.finish()
    return Lognormal(median=median, sigma=sigma, least=lowest, most=most)


def _histogram(fields: Fields, least: int) -> Histogram:
    values = fields.integers("values", minimum=least, maximum=MAX_TOKENS)
    weights = fields.integers("weights", default=(1,) * len(values), minimum=0)
    if not values or len(values) != len(weights):
        raise fields.error(f"{len(values)} values need as many weights, found {len(weights)}", "values")
    if sum(weights) == 0:
        raise fields.error("at least one weight is above zero", "weights")
    fields.finish()
    return Histogram(values=values, weights=tuple(float(weight) for weight in weights))


def _packing(fields: Fields) -> Packing:
    packing = Packing(
        tokens=fields.integer("tokens", minimum=1, maximum=MAX_TOKENS),
        attention=fields.choice("attention", ("document", "sequence"), default="document"),
        open_sequences=fields.integer("open_sequences", default=8, minimum=1, maximum=4096),
    )
    fields.finish()
    return packing
