"""What samples are like: how long their text is, how many images (or clips) they hold and how long each of those is.

Lengths are tokens as the language model sees them, after any merging of patches; what an encoder works on follows from
the model. Data is a mixture of sources described by distributions, or the lengths of a real data set, a row a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AttentionWithin = Literal["document", "sequence"]
"""What a token of a packed sequence may look at: its own document only, or the whole sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Always the same."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """`median * exp(sigma * z)` with `z` standard normal, cut to `least` and `most`."""

    median: float
    sigma: float
    least: int = 0
    most: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Values `values[i]` with probability in proportion to `weights[i]`."""

    values: tuple[int, ...]
    weights: tuple[float, ...]


Distribution = Constant | Lognormal | Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Images (clips ..) of a sample: how many, and how many tokens each."""

    count: Distribution
    tokens: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One part of a mixture."""

    name: str
    weight: float
    text: Distribution
    items: Mapping[str, Items] = field(default_factory=dict)
    """Modality -> its items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample of a data set."""

    text: int
    items: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Modality -> tokens of each item."""

    @property
    def tokens(self) -> int:
        """Tokens the language model sees."""
        return self.text + sum(sum(sizes) for sizes in self.items.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Samples joined into sequences of at most `tokens` tokens, in the order they come."""

    tokens: int
    attention: AttentionWithin = "document"
    open_sequences: int = 8
    """Sequences a sample may still join; the oldest is closed when none has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What one training run reads: either sources or rows."""

    name: str
    sources: tuple[Source, ...] = ()
    rows: tuple[Row, ...] = ()
    packing: Packing | None = None
    table: str = ""
    """File of the rows, relative to the data file, where that names one."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Encoder module -> modality, where names do not say."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of everything but text, in order of appearance."""
        names = [name for source in self.sources for name in source.items]
        names += [name for row in self.rows for name in row.items]
        return tuple(dict.fromkeys(names))
