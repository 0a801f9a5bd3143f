"""`hetplan data`: lengths of a data set's samples, written as a table or summed up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hetplan.cli.options import JsonFlag
from hetplan.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetplan.specs.data import Row

Action = Literal["lengths", "show"]


def data(
    action: Annotated[Action, typer.Argument(metavar="lengths|show", show_default=False)],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="lengths: conversations as JSON or JSON lines. show: a data file or a table of lengths.",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="lengths: write CSV here.")] = None,
    images: Annotated[
        Path | None, typer.Option("--images", metavar="DIR", help="Folder image paths are relative to.")
    ] = None,
    image_tokens: Annotated[
        int | None, typer.Option("--image-tokens", metavar="N", min=1, help="The same for every image.")
    ] = None,
    patch: Annotated[int, typer.Option("--patch", metavar="PX", min=1, help="Side of a patch.")] = 14,
    merge: Annotated[int, typer.Option("--merge", metavar="N", min=1, help="Patches a side that become a token.")] = 2,
    least_pixels: Annotated[
        int, typer.Option("--least-pixels", metavar="N", min=1, help="Smaller images are scaled up to this.")
    ] = 56 * 56,
    most_pixels: Annotated[
        int, typer.Option("--most-pixels", metavar="N", min=1, help="Larger images are scaled down to this.")
    ] = 14 * 14 * 4 * 1280,
    characters: Annotated[
        float, typer.Option("--characters-per-token", metavar="X", min=0.1, help="Of text that states no count.")
    ] = 4.0,
    as_json: JsonFlag = False,
) -> None:
    """Measure how long a data set's samples are, without a tokenizer and without decoding images."""
    from hetplan.cli.output import require_writable, show, show_json, write_whole
    from hetplan.specs.conversations import Counting, conversation_rows
    from hetplan.specs.read_lengths import lengths_text

    require_writable(out)
    if action == "show":
        document = _shown(file)
        show_json(document) if as_json else show(_text(document))
        return
    if least_pixels > most_pixels:
        raise UsageError(f"--least-pixels {least_pixels} is more than --most-pixels {most_pixels}")
    counting = Counting(
        characters_per_token=characters,
        image_tokens=image_tokens,
        patch=patch,
        merge=merge,
        least_pixels=least_pixels,
        most_pixels=most_pixels,
    )
    rows = conversation_rows(file, counting, images)
    if not rows:
        raise UsageError(f"{file} holds no sample")
    if out is None:
        show(lengths_text(rows))
        return
    write_whole(out, lengths_text(rows))
    document = _document(str(out), rows)
    show_json(document) if as_json else show(_text(document))


def _shown(file: Path) -> dict[str, Any]:
    """Return the figures of a data file's rows, or of samples drawn from its mixture."""
    from hetplan.catalog.load_data import load_data
    from hetplan.costs.samples import TOKENS, draw_samples

    found, _ = load_data(file)
    if found.rows and found.packing is None:
        return _document(str(file), found.rows)
    samples = draw_samples(found, 10_000, 0)
    kinds = {"text": samples.text_s, "all": samples.language_sf[:, TOKENS]}
    kinds |= {name: features[:, TOKENS] for name, features in samples.items_sf.items()}
    return {"name": str(file), "samples": 10_000, "drawn": True, "tokens": {k: _figures(v) for k, v in kinds.items()}}


def _document(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    modalities = dict.fromkeys(key for row in rows for key in row.items)
    kinds = {"text": [row.text for row in rows], "all": [row.tokens for row in rows]}
    kinds |= {key: [sum(row.items.get(key, ())) for row in rows] for key in modalities}
    tokens = {key: _figures(values) for key, values in kinds.items()}
    return {"name": name, "samples": len(rows), "drawn": False, "tokens": tokens}


def _figures(values: Any) -> dict[str, float]:
    import numpy as np

    numbers = np.asarray(values, dtype=np.float64)
    points = {"median": 50, "p90": 90, "p99": 99}
    figures = {name: float(np.percentile(numbers, point)) for name, point in points.items()}
    with_any = float((numbers > 0).mean())
    return {"mean": float(numbers.mean()), **figures, "most": float(numbers.max()), "with_any": with_any}


def _text(document: dict[str, Any]) -> str:
    from hetplan.report.tables import percent, table

    rows = [
        [
            kind,
            *(f"{figures[name]:,.0f}" for name in ("mean", "median", "p90", "p99", "most")),
            percent(figures["with_any"]),
        ]
        for kind, figures in document["tokens"].items()
    ]
    drawn = " drawn from the mixture" if document["drawn"] else ""
    head = f"{document['name']}: {document['samples']:,} samples{drawn}, tokens a sample"
    return f"{head}\n" + table(["tokens", "mean", "median", "p90", "p99", "most", "samples with any"], rows)
