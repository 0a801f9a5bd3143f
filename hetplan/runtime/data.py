"""Token files and the order in which a run reads them, which depends on the seed and on nothing of the layout.

A file of ``n`` tokens has ``W = (n - 1) // seq_len`` windows of ``seq_len`` tokens, each with the token behind it as
its last label. Epoch by epoch all windows are read once, in an order drawn anew: sample ``i`` is window
``P_e(i mod W)`` of epoch ``e = i // W`` with ``P_e`` a permutation computed point by point (a Feistel network walked
until it lands inside, Black and Rogaway 2002), so that a trillion tokens need no table. Files are mapped, never read
whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from hetplan.errors import RunError, UsageError

TokenKind = Literal["auto", "bytes", "uint16", "uint32"]
_DTYPES: dict[str, str] = {"bytes": "|u1", "uint16": "<u2", "uint32": "<u4"}
_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A mapped file of tokens, cut into windows."""

    path: Path
    tokens: npt.NDArray[np.unsignedinteger]
    seq_len: int
    vocab: int
    seed: int
    stamp: tuple[int, int]
    """Size and time of last change when it was opened."""

    @property
    def num_windows(self) -> int:
        """Samples of one epoch."""
        return (len(self.tokens) - 1) // self.seq_len

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of sample `index` of the run, ``seq_len + 1`` of them.

        Raises:
            UsageError: a token is not of the model's vocabulary.
        """
        epoch, place = divmod(index, self.num_windows)
        first = permuted(place, self.num_windows, self.seed + epoch) * self.seq_len
        found = self.tokens[first : first + self.seq_len + 1].astype(np.int64)
        if int(found.max()) >= self.vocab:
            raise UsageError(
                f"{self.path}: word {int(found.max())} near token {first} is not of the model's vocabulary "
                f"of {self.vocab}; is it the right file, and of the kind --tokens says?"
            )
        return found

    def samples(self, before: int) -> Callable[[int, int], torch.Tensor]:
        """Return a function from (first, count) to the samples that follow `before` others.

        Raises:
            RunError: the file is no longer the one that was opened: what is mapped may be anything.
        """
        if _stamp(self.path) != self.stamp:
            raise RunError(f"{self.path} has changed since the run began")

        def read(first: int, count: int) -> torch.Tensor:
            return torch.from_numpy(np.stack([self.sample(before + first + i) for i in range(count)]))

        return read


def open_tokens(path: Path, kind: TokenKind, seq_len: int, vocab: int, seed: int) -> TokenFile:
    """Return a token file, mapped.

    `auto` takes ``.bin`` files for uint16 where the vocabulary fits into it, else uint32, and others for bytes.

    Raises:
        UsageError: the file cannot be read, is too short, or its words do not divide.
    """
    if kind == "auto":
        kind = ("uint16" if vocab <= 2**16 else "uint32") if path.suffix == ".bin" else "bytes"
    dtype = np.dtype(_DTYPES[kind])
    try:
        found = path.stat()
        size, stamp = found.st_size, (found.st_size, found.st_mtime_ns)
        if size % dtype.itemsize:
            raise UsageError(f"{path}: {size} bytes are no whole number of {kind} tokens")
        if size // dtype.itemsize < seq_len + 1:
            raise UsageError(f"{path}: {size // dtype.itemsize} tokens are less than one sample of {seq_len + 1}")
        tokens = np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    return TokenFile(path=path, tokens=tokens, seq_len=seq_len, vocab=vocab, seed=seed, stamp=stamp)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def permuted(place: int, count: int, key: int) -> int:
    """Return where a permutation of `count` things, chosen by `key`, puts `place`."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = place
    while True:
        left, right = value >> half, value & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right, turn, key) & mask)
        value = left << half | right
        if value < count:
            return value


def _mixed(value: int, turn: int, key: int) -> int:
    word = zlib.crc32(f"{key}:{turn}:{value}".encode())
    return word ^ zlib.crc32(word.to_bytes(4, "little"), turn) << 16
