"""`hetplan import layer-times` and `layer-model`: measured layers and links of other tools' profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.cli.options import one_of
from hetplan.errors import UsageError

if TYPE_CHECKING:
    from hetplan.specs.importers.layer_times import Profile, Settings

KEYS = ("count", "bytes_per_param", "reserve", "update", "pipeline", "gradients", "bucket")
KINDS = ("layer-times", "layer-model")


def layer_text(
    kind: str,
    paths: Sequence[str],
    choices: tuple[Sequence[str], Sequence[str]],
    names: tuple[str | None, str | None],
    seq_len: int | None,
) -> str:
    """Return the calibration (`layer-times`) or model (`layer-model`) some profiles give.

    `choices`: texts of --where and --set; `names`: the model's and the device's.

    Raises:
        SpecError: a file is damaged or of no known kind.
        UsageError: an option makes no sense, or the files contradict each other.
    """
    from hetplan.cli.output import remark
    from hetplan.specs.importers.layer_times import layer_calibration, layer_model_text
    from hetplan.specs.read_calibration import calibration_text

    where, given = choices
    model, device = names
    settings = _settings(given)
    profile = _profile(paths, where, device, settings)
    if kind == "layer-model":
        if seq_len is None:
            raise UsageError("layer-model needs --seq-len: what leaves a layer is divided by it")
        return layer_model_text(profile, settings, model, seq_len)
    found = layer_calibration(profile, settings, model)
    for note in found.notes:
        remark(f"note: {note}")
    return calibration_text(found.calibration)


def _profile(paths: Sequence[str], where: Sequence[str], device: str | None, settings: Settings) -> Profile:
    from hetplan.specs.importers.facts import read_source
    from hetplan.specs.importers.layer_times import together
    from hetplan.specs.importers.layer_times_csv import read_table
    from hetplan.specs.importers.layer_times_json import is_json, read_profile, settle_memory

    filters = [_pair(text, "--where") for text in where]
    profiles = []
    for path in paths:
        source = read_source(Path(path))
        profiles.append(
            read_profile(source, device, settings.count) if is_json(source) else read_table(source, filters)
        )
    return settle_memory(together(profiles))


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"{option}: expected NAME=VALUE, found {text!r}")
    return key.strip(), value.strip()


def _settings(given: Sequence[str]) -> Settings:
    from hetplan.specs.importers.layer_times import Settings
    from hetplan.specs.read_calibration import PIPELINES
    from hetplan.specs.read_layer_table import SCOPES
    from hetplan.units import parse_quantity

    values: dict[str, str] = {}
    for text in given:
        key, value = _pair(text, "--set")
        values[one_of(key, "--set", KEYS)] = value
    per_param, bucket = values.get("bytes_per_param"), values.get("bucket")
    return Settings(
        count=int(_number(values["count"], "count", 1, 10_000)) if "count" in values else None,
        bytes_per_param=None if per_param is None else parse_quantity(per_param, "bytes"),
        reserve_bytes=_reserve(values["reserve"]) if "reserve" in values else {},
        update=one_of(values.get("update", "layer"), "--set update", SCOPES),
        pipeline=one_of(values.get("pipeline", "exact"), "--set pipeline", PIPELINES),
        hidden=_number(values["gradients"], "gradients", 0, 1) if "gradients" in values else None,
        bucket_bytes=None if bucket is None else parse_quantity(bucket, "bytes"),
    )


def _number(text: str, key: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"--set {key}: {text!r} is not a number") from None
    if not least <= value <= most:
        raise UsageError(f"--set {key}: expected {least} to {most}, found {text}")
    return value


def _reserve(text: str) -> dict[int, float]:
    """Return `1:2 GB,2:3 GB` as bytes by the least tp they hold for."""
    from hetplan.units import parse_quantity

    found = {}
    for part in text.split(","):
        tp, colon, value = part.partition(":")
        if not colon or not tp.strip().isdigit():
            raise UsageError(f"--set reserve: expected TP:SIZE,... as in 1:2 GB,2:3 GB, found {part!r}")
        found[int(tp)] = parse_quantity(value.strip(), "bytes")
    return found
