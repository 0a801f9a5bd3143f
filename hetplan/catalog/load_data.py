"""Data files -> `Data`, with what identifies the content they came from."""

from __future__ import annotations

from pathlib import Path

from hetplan.catalog.load import Source, source_of_files
from hetplan.specs.data import Data
from hetplan.specs.read_data import read_data


def load_data(path: str | Path) -> tuple[Data, Source]:
    """Return what a data file or a table of lengths describes.

    Raises:
        SpecError: it, or the table it names, cannot be read or is not valid.
    """
    data = read_data(Path(path))
    others = [Path(path).parent / data.table] if data.table else []
    return data, source_of_files(str(path), Path(path), others)
