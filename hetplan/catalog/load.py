"""Spec files and catalog names -> records, each with what identifies the content they came from.

The hash of a file is that of what it says (`specs.content`): comments and layout have no part in it. A table's is the
SHA-256 of its bytes with line ends as `\\n`. Where a file names others (tables of pairs, a configuration) it is the
SHA-256 of the hex digests of all of them, one a line, the file itself first and the others in the order they are named:
a change in any of them changes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model, find_model_config
from hetplan.errors import UsageError
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster
from hetplan.specs.content import content_sha256
from hetplan.specs.decode import document_from_text
from hetplan.specs.model import Model
from hetplan.specs.nodes import nodes_from_bytes, read_bytes
from hetplan.specs.read_calibration import calibration_from_text
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.read_model import model_from_text
from hetplan.specs.read_workload import WorkloadFields, workload_fields_from_text
from hetplan.units import hint, show

_MODELS = Path(__file__).parent / "models"
_CALIBRATIONS = Path(__file__).parent / "calibrations"
_FILE_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a record was read from."""

    name: str
    """Path as given, or catalog name."""
    sha256: str


def load_cluster(path: str | Path) -> tuple[Cluster, Source]:
    """Return the cluster a file describes.

    Raises:
        SpecError: the file cannot be read or is no valid cluster.
    """
    data, text = _read(Path(path))
    cluster = cluster_from_text(text, str(path), find_device, Path(path).parent)
    return cluster, _source(str(path), [_digest(data, str(path)), *map(_table_digest, _pairs_files(text, Path(path)))])


def load_model(name_or_path: str | Path) -> tuple[Model, Source]:
    """Return a model of the catalog, or the one a model file or a Hugging Face `config.json` describes.

    What ends like a file, holds a path separator or exists as a file is a path; anything else is a name.

    Raises:
        SpecError: the file cannot be read or is no valid model.
        UsageError: the catalog has no such model.
    """
    path = Path(name_or_path)
    if not is_path(str(name_or_path)) and not path.is_file():
        return _catalog_model(str(name_or_path))
    data, text = _read(path)
    model = model_from_text(text, path, find_model_config)
    return model, _source(str(name_or_path), [_digest(data, str(path)), *map(_file_digest, _config_files(text, path))])


def cluster_files(path: str | Path) -> tuple[Path, ...]:
    """Return a valid cluster file and the tables of pairs it names."""
    return (Path(path), *_pairs_files(_read(Path(path))[1], Path(path)))


def model_files(name_or_path: str | Path) -> tuple[Path, ...]:
    """Return a valid model file and a configuration of its own that it names; nothing for a catalog name."""
    path = Path(name_or_path)
    if not is_path(str(name_or_path)) and not path.is_file():
        return ()
    own = [other for other in _config_files(_read(path)[1], path) if _MODELS not in other.parents]
    return (path, *own)


def load_workload_file(path: str | Path) -> WorkloadFields:
    """Return what a workload file says; what is missing is left to the caller.

    Raises:
        SpecError: the file cannot be read or is no valid workload.
    """
    return workload_fields_from_text(_read(Path(path))[1], str(path))


def load_calibration(path: str | Path) -> tuple[Calibration, Source]:
    """Return the calibration a file holds, or one that ships with hetplan, by name.

    Raises:
        SpecError: the file cannot be read or is no valid calibration.
        UsageError: none of this name ships with hetplan.
    """
    data, text = _read(_calibration_path(path))
    return calibration_from_text(text, str(path)), _source(str(path), [_digest(data, str(path))])


def calibration_text_of(path: str | Path) -> str:
    """Return the text `load_calibration` reads.

    Raises:
        SpecError: the file cannot be read.
        UsageError: none of this name ships with hetplan.
    """
    return _read(_calibration_path(path))[1]


def _calibration_path(path: str | Path) -> Path:
    file = Path(path)
    return file if is_path(str(path)) or file.is_file() else _calibration_file(str(path))


def calibration_names() -> tuple[str, ...]:
    """Return the names of all calibrations that ship with hetplan, sorted."""
    return tuple(sorted(path.name.removesuffix(".yaml") for path in _CALIBRATIONS.glob("*.yaml")))


def _calibration_file(name: str) -> Path:
    """The file of a calibration that ships with hetplan."""
    known = calibration_names()
    if name.strip().casefold() not in known:
        raise UsageError(f"there is no file {show(name)}, and no calibration of that name ships{hint(name, known)}")
    return _CALIBRATIONS / f"{name.strip().casefold()}.yaml"


def _catalog_model(name: str) -> tuple[Model, Source]:
    """Return a model that ships with hetplan."""
    try:
        model = find_model(name)
    except UsageError as error:
        raise UsageError(f"{error}, and there is no file {show(name)}") from None
    return model, _source(model.name, [_file_digest(_model_file(name))])


def _model_file(name: str) -> Path:
    """The file of a catalog model."""
    return _MODELS / f"{name.strip().casefold()}.yaml"


def _read(path: Path) -> tuple[bytes, str]:
    """Return a file's bytes, read once (it may be a pipe), and their text."""
    data = read_bytes(path)
    try:
        return data, data.decode("utf-8")
    except UnicodeDecodeError:
        nodes_from_bytes(data, str(path))
        raise


def is_path(text: str) -> bool:
    """Whether `text` can only mean a file."""
    return text.endswith(_FILE_ENDINGS) or "/" in text or os.sep in text


def _pairs_files(text: str, path: Path) -> list[Path]:
    """The tables of pairs a valid cluster file names."""
    if "pairs" not in text:
        return []
    networks = document_from_text(text, str(path), "cluster").table("networks", required=False)
    return [path.parent / fields.text("pairs") for fields in networks.values() if fields.has("pairs")]


def _config_files(text: str, path: Path) -> list[Path]:
    """The configuration a valid model file names."""
    fields = document_from_text(text, str(path), "")
    if not fields.has("hetplan") or not fields.has("config") or fields.is_mapping("config"):
        return []
    reference = fields.text("config")
    return [path.parent / reference if is_path(reference) else _model_file(reference)]


def source_of_files(name: str, path: Path, others: Iterable[Path]) -> Source:
    """Identify what a document or table says together with what the files it names say.

    Raises:
        SpecError: one of them cannot be read.
    """
    return _source(name, [_file_digest(path), *map(_file_digest, others)])


def _source(name: str, digests: Sequence[str]) -> Source:
    """Identify a file by its hash and those of the files it names."""
    if len(digests) == 1:
        return Source(name=name, sha256=digests[0])
    return Source(name=name, sha256=sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest())


def _file_digest(path: Path) -> str:
    """The hash of a file that the name alone tells to be a document or a table."""
    is_document = path.name.endswith(_FILE_ENDINGS)
    return _digest(read_bytes(path), str(path)) if is_document else _table_digest(path)


def _digest(data: bytes, name: str) -> str:
    """The hash of what a document says."""
    return content_sha256(nodes_from_bytes(data, name))


def _table_digest(path: Path) -> str:
    """SHA-256 of a table's bytes with line ends as `\\n`."""
    return sha256(read_bytes(path).replace(b"\r\n", b"\n")).hexdigest()
