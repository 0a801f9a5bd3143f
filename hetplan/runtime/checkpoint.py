"""Checkpoints that no layout can be read off: pieces of parameters with both moments, by name and box.

Each rank writes what it owns of its buckets into one file of raw numbers, with a table of what lies where and a
checksum for each entry. Everything goes into a hidden folder; when all ranks are done, rank 0 adds the index and
renames the folder, so a folder of the final name is always complete, whatever was killed when. Reading asks for boxes:
any rank of any layout puts its own together out of whatever pieces there are.

Why not torch.distributed.checkpoint: its tensors are sharded evenly along one dimension, while pieces here are boxes
that several unlike layouts cut, and shards of flat buckets are runs within those.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetplan.errors import RunError, UsageError
from hetplan.runtime.buckets import Bucket, Optimizer
from hetplan.runtime.parameters import Box
from hetplan.runtime.pieces import box_elements

KIND = "hetplan: checkpoint/v1"
INDEX = "index.json"
FIELDS = ("weight", "first_moment", "second_moment")
Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Samples read."""
    seed: int
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Part of one piece in one file."""

    file: str
    box: Box
    first: int
    """Of the piece's elements, in their order."""
    count: int
    offset: int
    crc32: int
    dtype: str


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"step-{step:08d}"


def complete_steps(root: Path) -> list[int]:
    """Return the steps of all complete checkpoints, ascending."""
    found = []
    for path in root.glob("step-*"):
        digits = path.name.removeprefix("step-")
        if digits.isdigit() and (path / INDEX).is_file():
            found.append(int(digits))
    return sorted(found)


class Writer:
    """Writes checkpoints of one rank's share of a run."""

    def __init__(self, root: Path, rank: int, meet: Callable[[], None]) -> None:
        self.root, self.rank, self._meet = root, rank, meet

    def write(self, optimizer: Optimizer, progress: Progress, keep: int) -> None:
        """Write this rank's share; rank 0 makes it a checkpoint once all have.

        Raises:
            RunError: it cannot be written.
        """
        final = folder_of(self.root, progress.step)
        hidden = self.root / f".{final.name}.part"
        try:
            if self.rank == 0:
                self.root.mkdir(parents=True, exist_ok=True)
                for stale in self.root.glob(".step-*.part"):
                    shutil.rmtree(stale, ignore_errors=True)
                hidden.mkdir()
            self._meet()
            self._write_share(hidden, optimizer)
            self._meet()
            if self.rank == 0:
                _seal(hidden, final, progress)
                for step in complete_steps(self.root)[:-keep]:
                    shutil.rmtree(folder_of(self.root, step), ignore_errors=True)
        except OSError as error:
            for own in hidden.glob(f"rank-{self.rank:05d}.*"):
                own.unlink(missing_ok=True)
            raise RunError(f"cannot write checkpoint {final}: {error.strerror or error}") from error

    def _write_share(self, folder: Path, optimizer: Optimizer) -> None:
        name = f"rank-{self.rank:05d}"
        rows, offset = [], 0
        with (folder / f"{name}.bin").open("wb") as file:
            for piece, first, values in _owned(optimizer):
                data = b"".join(np.ascontiguousarray(part).tobytes() for part in values)
                file.write(data)
                rows.append(
                    {
                        "name": piece[0],
                        "box": piece[1],
                        "first": first,
                        "count": len(values[0]),
                        "offset": offset,
                        "crc32": zlib.crc32(data),
                        "dtype": values[0].dtype.str,
                    }
                )
                offset += len(data)
            _to_disk(file)
        with (folder / f"{name}.json").open("w", encoding="utf-8") as table:
            json.dump({"entries": rows, "bytes": offset}, table)
            _to_disk(table)


def _owned(optimizer: Optimizer) -> Iterator[tuple[tuple[str, Box], int, tuple[Values, ...]]]:
    """Yield (name, box), first element and the three arrays of everything a rank owns."""
    for index, bucket in enumerate(optimizer.buckets):
        if not bucket.counts:
            continue
        have = bucket.shard
        arrays = [part.detach().cpu().numpy() for part in (bucket.master, *optimizer.states(index))]
        for place in bucket.places:
            low, high = max(have.start, place.first), min(have.stop, place.end)
            if low < high:
                cut = tuple(array[low - have.start : high - have.start] for array in arrays)
                yield (place.piece.name, place.piece.box), low - place.first, cut


def _seal(hidden: Path, final: Path, progress: Progress) -> None:
    """Make a folder of shares a checkpoint."""
    files = sorted(path.name for path in hidden.glob("rank-*.json"))
    document = {
        "kind": KIND,
        "step": progress.step,
        "samples": progress.samples,
        "seed": progress.seed,
        "model": progress.model,
        "files": files,
    }
    with (hidden / INDEX).open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        _to_disk(file)
    _sync_folder(hidden)
    before = final.parent / f".{final.name}.before.part"
    if final.exists():
        os.replace(final, before)
    os.replace(hidden, final)
    _sync_folder(final.parent)
    shutil.rmtree(before, ignore_errors=True)


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Reader:
    """A complete checkpoint, read piece by piece."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            document = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if document["kind"] != KIND:
                raise UsageError(f"{folder} is no checkpoint this version reads")
            self.progress = Progress(
                step=document["step"], samples=document["samples"], seed=document["seed"], model=document["model"]
            )
            self._entries = _entries(folder, document["files"])
        except OSError as error:
            raise UsageError(f"{folder} is no checkpoint: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"checkpoint {folder} is damaged: its index cannot be read ({error})") from error

    def restore(self, optimizer: Optimizer) -> None:
        """Set weights and moments of a rank's shards.

        Raises:
            RunError: the checkpoint is damaged, or of another model.
        """
        for index, bucket in enumerate(optimizer.buckets):
            shard = [torch.zeros_like(bucket.master) for _ in FIELDS]
            for low, high, values in self._shard(bucket):
                for target, source in zip(shard, values, strict=True):
                    target[low:high] = torch.from_numpy(source).to(target)
            bucket.master.copy_(shard[0])
            optimizer.restore(index, (shard[1], shard[2]), self.progress.step)

    def _shard(self, bucket: Bucket) -> Iterator[tuple[int, int, list[Values]]]:
        """Yield runs of a bucket's shard with their three arrays."""
        have = bucket.shard
        for place in bucket.places:
            low, high = max(have.start, place.first), min(have.stop, place.end)
            if low < high:
                whole = self.box(place.piece.name, place.piece.box)
                run = [array.reshape(-1)[low - place.first : high - place.first] for array in whole]
                yield low - have.start, high - have.start, run

    def box(self, name: str, box: Box) -> list[Values]:
        """Return weight and moments of one box of a parameter.

        Raises:
            RunError: a part of it is missing or damaged.
        """
        shape = [end - first for first, end in box]
        out = [np.zeros(shape) for _ in FIELDS]
        filled = np.zeros(shape, dtype=bool)
        for source, entries in self._entries.get(name, {}).items():
            common = _overlap(box, source)
            if common is None:
                continue
            into, outof = (_within(common, outer) for outer in (box, source))
            for target, values in zip(out, self._piece(source, entries), strict=True):
                target[into] = values[outof]
            filled[into] = True
        if not filled.all():
            raise RunError(f"checkpoint {self.folder} holds no {name} of this shape: it is of another model")
        return out

    def _piece(self, box: Box, entries: list[_Entry]) -> list[Values]:
        """Return the three arrays of a piece, put together out of its parts."""
        shape = [end - first for first, end in box]
        out = [np.zeros(box_elements(box)) for _ in FIELDS]
        missing = box_elements(box)
        for entry in entries:
            data = self._data(entry)
            for target, values in zip(out, data.reshape(len(FIELDS), -1), strict=True):
                target[entry.first : entry.first + entry.count] = values
            missing -= entry.count
        if missing:
            raise RunError(f"checkpoint {self.folder} is damaged: {missing} numbers are missing")
        return [array.reshape(shape) for array in out]

    def _data(self, entry: _Entry) -> Values:
        """Return the numbers of an entry, its checksum verified."""
        dtype = np.dtype(entry.dtype)
        size = len(FIELDS) * entry.count * dtype.itemsize
        path = self.folder / entry.file
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                data = file.read(size)
        except OSError as error:
            raise RunError(f"checkpoint {path} is damaged: {error.strerror or error}") from error
        if len(data) != size or zlib.crc32(data) != entry.crc32:
            raise RunError(f"checkpoint {path} is damaged: a checksum does not match; an older one may be whole")
        return np.frombuffer(data, dtype=dtype)


def _entries(folder: Path, files: list[str]) -> Mapping[str, Mapping[Box, list[_Entry]]]:
    found: dict[str, dict[Box, list[_Entry]]] = {}
    for name in files:
        table = json.loads((folder / name).read_text(encoding="utf-8"))
        for row in table["entries"]:
            box = tuple((side[0], side[1]) for side in row["box"])
            entry = _Entry(
                file=name.replace(".json", ".bin"),
                box=box,
                first=row["first"],
                count=row["count"],
                offset=row["offset"],
                crc32=row["crc32"],
                dtype=row["dtype"],
            )
            found.setdefault(row["name"], {}).setdefault(box, []).append(entry)
    return found


def _overlap(one: Box, other: Box) -> Box | None:
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(first < end for first, end in common) else None


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))
