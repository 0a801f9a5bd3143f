"""Lengths of a local data set of conversations with images, without a tokenizer and without decoding an image.

A file is JSON (a list) or JSON lines. A sample holds `messages` (`role`, `content`: a text or a list of parts) or
`conversations` (`from`, `value`: LLaVA's form). Its text tokens are `num_tokens` where the sample says so, else its
characters over `characters_per_token`. Images are parts or entries of `image`/`images`; their pixels come from
`width` and `height` beside them, or from the head of the file they name.

Tokens of an image: a fixed number, or as Qwen2-VL's preprocessing does it (arXiv:2409.12191): each side is rounded to
a multiple of `patch * merge`, the whole is scaled to lie between the least and the most pixels, and every
`merge x merge` patches become one token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetplan.errors import Location, SpecError
from hetplan.specs.data import Row
from hetplan.specs.image_size import image_size
from hetplan.specs.nodes import read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """How text and images become tokens."""

    characters_per_token: float = 4.0
    """About what English takes in common tokenizers (assumed)."""
    image_tokens: int | None = None
    """The same for every image; None: by its size."""
    patch: int = 14
    merge: int = 2
    least_pixels: int = 56 * 56
    most_pixels: int = 14 * 14 * 4 * 1280
    """Qwen2-VL's bounds."""


def conversation_rows(path: Path, counting: Counting, images: Path | None = None) -> tuple[Row, ...]:
    """Return a row for every sample of the file; `images`: the folder image paths are relative to.

    Raises:
        SpecError: the file is no such data set, or the size of an image is not known.
    """
    folder = path.parent if images is None else images
    return tuple(_row(sample, counting, folder, where) for sample, where in _samples(path))


def image_tokens(width: int, height: int, counting: Counting) -> int:
    """Return the tokens one image of `width` x `height` pixels brings to the language model."""
    if counting.image_tokens is not None:
        return counting.image_tokens
    unit = counting.patch * counting.merge
    wide, high = (max(unit, round(side / unit) * unit) for side in (width, height))
    if wide * high > counting.most_pixels:
        shrink = math.sqrt(width * height / counting.most_pixels)
        wide, high = (max(unit, math.floor(side / shrink / unit) * unit) for side in (width, height))
    elif wide * high < counting.least_pixels:
        grow = math.sqrt(counting.least_pixels / (width * height))
        wide, high = (math.ceil(side * grow / unit) * unit for side in (width, height))
    return (wide // unit) * (high // unit)


def _samples(path: Path) -> Iterator[tuple[Mapping[str, Any], Location]]:
    text = read_bytes(path).decode("utf-8", errors="replace")
    start = Location(file=str(path), line=1, column=1)
    entries: Iterable[tuple[str, Location]]
    if text.lstrip().startswith("["):
        whole = _parsed(text, start)
        for entry in whole if isinstance(whole, list) else ():
            yield _mapping(entry, start), start
        return
    entries = ((line, Location(file=str(path), line=i, column=1)) for i, line in enumerate(text.splitlines(), 1))
    for line, where in entries:
        if line.strip():
            yield _mapping(_parsed(line, where), where), where


def _parsed(text: str, where: Location) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise SpecError("this is no JSON", location=where) from None


def _mapping(entry: object, where: Location) -> Mapping[str, Any]:
    if not isinstance(entry, dict) or not {"messages", "conversations"} & entry.keys():
        raise SpecError("a sample has 'messages' or 'conversations'", location=where)
    return entry


def _row(sample: Mapping[str, Any], counting: Counting, folder: Path, where: Location) -> Row:
    parts = list(_parts(sample))
    stated = sample.get("num_tokens")
    characters = sum(len(text) for text, _ in parts)
    text = stated if isinstance(stated, int) else max(1, math.ceil(characters / counting.characters_per_token))
    pictures = [picture for _, picture in parts if picture is not None]
    beside = sample.get("images", sample.get("image"))
    if not pictures and beside is not None:
        pictures = list(beside) if isinstance(beside, list) else [beside]
        pictures = [_with_size(picture, sample) for picture in pictures]
    sizes = [_pixels(picture, folder, where, needed=counting.image_tokens is None) for picture in pictures]
    tokens = tuple(image_tokens(width, height, counting) for width, height in sizes)
    return Row(text=text, items={"image": tokens} if tokens else {})


def _parts(sample: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (text, image or None) of everything said."""
    for turn in sample.get("messages", sample.get("conversations")) or ():
        said = turn.get("content", turn.get("value", "")) if isinstance(turn, dict) else ""
        for part in said if isinstance(said, list) else [said]:
            if isinstance(part, str):
                yield part.replace("<image>", ""), None
            elif isinstance(part, dict) and "image" in str(part.get("type", "")):
                yield "", part
            elif isinstance(part, dict):
                yield str(part.get("text", "")), None


def _with_size(picture: object, sample: Mapping[str, Any]) -> object:
    """Return a path together with the size its sample states."""
    if isinstance(picture, str) and {"width", "height"} <= sample.keys():
        return {"image": picture, "width": sample["width"], "height": sample["height"]}
    return picture


def _pixels(picture: object, folder: Path, where: Location, *, needed: bool) -> tuple[int, int]:
    if not needed:
        return 1, 1
    found = picture if isinstance(picture, dict) else {"image": picture}
    width, height = found.get("width"), found.get("height")
    if isinstance(width, int) and isinstance(height, int) and min(width, height) > 0:
        return width, height
    name = found.get("image", found.get("path", found.get("image_url")))
    size = image_size(folder / name) if isinstance(name, str) and "://" not in name else None
    if size is None:
        raise SpecError(
            f"the size of image {str(name)[:80]!r} is not known: give 'width' and 'height', a readable"
            " PNG, JPEG, GIF or WebP file, or a fixed --image-tokens",
            location=where,
        )
    return size
