"""Samples drawn from a description of data, and what each module of a model has to do for them.

Three numbers a sample and module decide its cost: how many items there are (each starts anew), how many tokens, and the
sum of the squares of the items' tokens, which attention grows with. A language model sees one item, the whole sample;
an encoder sees each image apart, `tokens at the language model x merge` long, where `merge` is how many of its tokens
the modules behind it join into one.

Suffixes: `_s` samples, `_f` the three features; `_sf` both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.errors import UsageError
from hetplan.specs.data import Constant, Data, Distribution, Histogram, Items, Lognormal, Packing, Row, Source
from hetplan.specs.model import Model, Module

Ints = npt.NDArray[np.int64]
ITEMS, TOKENS, SQUARES = 0, 1, 2
NUM_FEATURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Drawn samples."""

    text_s: Floats
    """Tokens of text."""
    items_sf: Mapping[str, Floats]
    """Modality -> items, their tokens and squared tokens, at the language model."""
    language_sf: Floats
    """Documents, tokens and squared tokens of the language model; packing changes these only."""

    @property
    def num_samples(self) -> int:
        """Samples (packed sequences where samples are packed)."""
        return len(self.text_s)


def draw_samples(data: Data, count: int, seed: int) -> Samples:
    """Return `count` samples: rows drawn with equal chances, or samples of the mixture; packed where `data` says so."""
    random = np.random.default_rng(seed)
    if data.packing is None:
        return _plain(data, count, random)
    found = _plain(data, count, random)
    mean = max(1.0, float(found.language_sf[:, TOKENS].mean()))
    packed = packed_samples(found, data.packing)
    while packed.num_samples < count:
        more = int((count - packed.num_samples + 8) * data.packing.tokens / mean) + 64
        found = _joined([found, _plain(data, more, random)])
        packed = packed_samples(found, data.packing)
    return _taken(packed, np.arange(count))


def _plain(data: Data, count: int, random: np.random.Generator) -> Samples:
    if data.rows:
        return rows_as_samples([data.rows[i] for i in random.integers(len(data.rows), size=count)], data.modalities)
    weights = np.array([source.weight for source in data.sources])
    if weights.sum() <= 0:
        raise UsageError("the weights of a mixture's sources sum to 0")
    which = random.choice(len(data.sources), size=count, p=weights / weights.sum())
    text_s = np.zeros(count)
    items_sf = {name: np.zeros((count, NUM_FEATURES)) for name in data.modalities}
    for place, source in enumerate(data.sources):
        members = np.flatnonzero(which == place)
        text_s[members] = _values(source.text, len(members), random)
        for name, features in _source_items(source, len(members), random).items():
            items_sf[name][members] = features
    return _samples(text_s, items_sf)


def _source_items(source: Source, count: int, random: np.random.Generator) -> dict[str, Floats]:
    return {name: _item_features(items, count, random) for name, items in source.items.items()}


def _item_features(items: Items, count: int, random: np.random.Generator) -> Floats:
    num_s = _values(items.count, count, random).astype(np.int64)
    owner = np.repeat(np.arange(count), num_s)
    tokens = _values(items.tokens, int(num_s.sum()), random)
    sums = [num_s, np.bincount(owner, tokens, count), np.bincount(owner, tokens**2, count)]
    return np.stack([np.asarray(values, dtype=np.float64) for values in sums], axis=1)


def _values(distribution: Distribution, count: int, random: np.random.Generator) -> Floats:
    match distribution:
        case Constant():
            return np.full(count, float(distribution.value))
        case Lognormal():
            values = distribution.median * np.exp(distribution.sigma * random.standard_normal(count))
            return np.clip(np.round(values), distribution.least, distribution.most)
        case Histogram():
            weights = np.asarray(distribution.weights)
            return random.choice(np.asarray(distribution.values, dtype=np.float64), count, p=weights / weights.sum())


def rows_as_samples(rows: Sequence[Row], modalities: Sequence[str]) -> Samples:
    """Return the samples of rows, in their order."""
    items_sf = {name: np.array([_row_features(row, name) for row in rows]) for name in modalities}
    return _samples(np.array([float(row.text) for row in rows]), items_sf)


def _row_features(row: Row, name: str) -> tuple[float, float, float]:
    sizes = row.items.get(name, ())
    return float(len(sizes)), float(sum(sizes)), float(sum(size * size for size in sizes))


def _samples(text_s: Floats, items_sf: Mapping[str, Floats]) -> Samples:
    tokens_s = text_s + sum((features[:, TOKENS] for features in items_sf.values()), np.zeros(len(text_s)))
    language = np.stack([np.ones(len(text_s)), tokens_s, tokens_s**2], axis=1)
    return Samples(text_s=text_s, items_sf=items_sf, language_sf=language)


def _joined(parts: Sequence[Samples]) -> Samples:
    names = parts[0].items_sf
    return _samples(
        np.concatenate([part.text_s for part in parts]),
        {name: np.concatenate([part.items_sf[name] for part in parts]) for name in names},
    )


def _taken(samples: Samples, members: Ints) -> Samples:
    return Samples(
        text_s=samples.text_s[members],
        items_sf={name: features[members] for name, features in samples.items_sf.items()},
        language_sf=samples.language_sf[members],
    )


def packed_samples(samples: Samples, packing: Packing) -> Samples:
    """Return sequences: each sample joins the first open one with room (the longest are cut to the sequence)."""
    sequence_s = _sequences(np.minimum(samples.language_sf[:, TOKENS], packing.tokens), packing)
    count = int(sequence_s.max()) + 1

    def summed(features: Floats) -> Floats:
        columns = [np.bincount(sequence_s, column, count) for column in features.T]
        return np.stack(columns, axis=1)

    language = summed(np.minimum(samples.language_sf, [np.inf, packing.tokens, packing.tokens**2]))
    if packing.attention == "sequence":
        language[:, SQUARES] = language[:, TOKENS] ** 2
    return Samples(
        text_s=np.asarray(np.bincount(sequence_s, samples.text_s, count), dtype=np.float64),
        items_sf={name: summed(features) for name, features in samples.items_sf.items()},
        language_sf=language,
    )


def _sequences(tokens_s: Floats, packing: Packing) -> Ints:
    """Return the sequence each sample joins."""
    found = np.empty(len(tokens_s), dtype=np.int64)
    rooms: list[tuple[int, float]] = []
    count = 0
    for i, tokens in enumerate(tokens_s.tolist()):
        place = next((k for k, (_, room) in enumerate(rooms) if room >= tokens), None)
        if place is None:
            rooms.append((count, float(packing.tokens)))
            count += 1
            rooms = rooms[-packing.open_sequences :]
            place = len(rooms) - 1
        number, room = rooms[place]
        rooms[place] = (number, room - tokens)
        found[i] = number
    return found


def is_language(module: Module) -> bool:
    """Return whether a module works on the whole sample."""
    return any(layer.kind in ("head", "decoder") for layer in module.layers)


def module_features(model: Model, data: Data, samples: Samples) -> dict[str, Floats]:
    """Return what every module has to do for each sample, shape (samples, features).

    Raises:
        UsageError: an encoder reads no modality of the data, or it is not clear which.
    """
    found = {}
    for module in model.modules:
        if is_language(module):
            found[module.name] = samples.language_sf
            continue
        modality = modality_of(model, data, module)
        merge = _merge(model, module)
        features = samples.items_sf.get(modality, np.zeros((samples.num_samples, NUM_FEATURES)))
        found[module.name] = features * np.array([1.0, merge, merge**2])
    return found


def modality_of(model: Model, data: Data, module: Module) -> str:
    """Return the modality a module reads: as `reads` says, of its name, of the module before it, or the only one.

    Raises:
        UsageError: none of these tells.
    """
    names = [module.name]
    while before := [sender for sender, receiver in model.edges if receiver == names[-1] and sender not in names]:
        names.append(before[0])
    for name in names:
        if name in data.reads:
            return data.reads[name]
        if name in data.modalities:
            return name
    if len(data.modalities) <= 1:
        return data.modalities[0] if data.modalities else module.name
    raise UsageError(
        f"module {module.name!r} could read {', '.join(data.modalities)}: say which in the data file,"
        f" `reads: {{{module.name}: {data.modalities[0]}}}`"
    )


def _merge(model: Model, module: Module) -> float:
    """Return how many tokens of `module` become one at the language model."""
    by_name = {one.name: one for one in model.modules}
    last = module
    while behind := [receiver for sender, receiver in model.edges if sender == last.name]:
        if is_language(by_name[behind[0]]):
            break
        last = by_name[behind[0]]
    own, out = module.layers[-1].tokens_per_sample, last.layers[-1].tokens_per_sample
    return own / out if own and out else 1.0
