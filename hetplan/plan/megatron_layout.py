"""Megatron-LM's ways of saying which layers a pipeline stage holds: layout strings and first/last stage flags.

A layout string has one letter a layer, ``E`` embedding, ``t`` decoder, ``m`` multi-token prediction, ``L`` loss, and
``|`` between virtual stages in model order; ``x*3`` and ``(...)*3`` repeat, commas mean nothing: ``Et*3|(tt|)*29,m|L``.
Entry ``i`` runs on rank ``i % pp``, as in a plan (Megatron-LM docs, "pipeline parallel layout").

The flags give the first or the last rank a number of layers of its own (``--decoder-first-pipeline-num-layers``,
``--decoder-last-pipeline-num-layers``); the ranks between share the rest evenly. They name what that rank holds, not
what it holds more than others: 61 layers on 4 ranks with 13 on the last are 16, 16, 16, 13.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from hetplan.errors import UsageError
from hetplan.plan.cuts import balanced_cut
from hetplan.plan.rules import listed
from hetplan.specs.model import Model
from hetplan.units import show

MOST_LETTERS = 100_000
MTP_UNITS = 2
"""A multi-token prediction layer is a decoder layer and logits of its own."""
LOSS_UNITS = 1
_TOKEN = re.compile(r"\s*([EtmL|()]|\*\d{1,6}|,)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What one virtual stage holds."""

    num_decoders: int = 0
    num_mtp: int = 0
    has_embedding: bool = False
    has_loss: bool = False

    @property
    def letters(self) -> str:
        """The stage as a layout string, repeats written with ``*``."""
        words = [("E", int(self.has_embedding)), ("t", self.num_decoders), ("m", self.num_mtp), ("L", self.has_loss)]
        return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in words if count)


def parse_layout(text: str) -> tuple[StageLayers, ...]:
    """Return the virtual stages of a layout string, in model order; a stage may be empty.

    Raises:
        UsageError: the text is no layout string.
    """
    tokens = _tokens(text)
    letters, end = _sequence(tokens, 0, text, depth=0)
    if end != len(tokens):
        raise UsageError(f"layout {show(text)}: ')' without '('")
    return tuple(_stage(part, text) for part in letters.split("|"))


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    place = 0
    while place < len(text.rstrip()):
        match = _TOKEN.match(text, place)
        if match is None:
            raise UsageError(
                f"layout {show(text)}: {show(text[place:].strip()[:1])} is none of E, t, m, L, |, (, ), *n"
            )
        if match[1] != ",":
            tokens.append(match[1])
        place = match.end()
    return tokens


def _sequence(tokens: Sequence[str], place: int, text: str, *, depth: int) -> tuple[str, int]:
    """Return what tokens from `place` to the closing parenthesis (or the end) stand for, and where they end."""
    done, item = "", ""
    while place < len(tokens) and tokens[place] != ")":
        token = tokens[place]
        if token == "(":
            if depth > 50:
                raise UsageError(f"layout {show(text)}: too many parentheses inside each other")
            done, (item, place) = done + item, _sequence(tokens, place + 1, text, depth=depth + 1)
            if place >= len(tokens):
                raise UsageError(f"layout {show(text)}: '(' without ')'")
        elif token.startswith("*"):
            if not item:
                raise UsageError(f"layout {show(text)}: {token} has nothing to repeat")
            if len(item) * int(token[1:]) > MOST_LETTERS:
                raise UsageError(f"layout {show(text)}: more than {MOST_LETTERS} layers")
            done, item = done + item * int(token[1:]), ""
        else:
            done, item = done + item, token
        place += 1
    return done + item, place


def _stage(part: str, text: str) -> StageLayers:
    if not re.fullmatch(r"E?t*m*L?", part):
        raise UsageError(f"layout {show(text)}: stage {show(part)} must read E, then t, then m, then L")
    return StageLayers(
        num_decoders=part.count("t"), num_mtp=part.count("m"), has_embedding="E" in part, has_loss="L" in part
    )


def layout_text(stages: Sequence[StageLayers]) -> str:
    """Return the layout string of some stages; `parse_layout` reads it back."""
    words: list[str] = []
    last = len(stages) - 1
    for key, run in groupby(range(len(stages)), key=lambda i: stages[i].letters if i < last else None):
        count = len(list(run))
        if key is None:
            words.append(stages[last].letters)
        else:
            words.append(f"{key}|" if count == 1 else f"({key}|)*{count}")
    return "".join(words)


def decoder_counts(stages: Sequence[StageLayers], pp: int, vpp: int = 1) -> tuple[int, ...]:
    """Return decoder layers a virtual stage, after holding a layout to the degrees it is to run with.

    Raises:
        UsageError: it has another number of stages than pp x vpp, or no embedding first or loss last.
    """
    if len(stages) != pp * vpp:
        raise UsageError(
            f"the layout has {len(stages)} stages, pp {pp} x vpp {vpp} makes {pp * vpp}: "
            "it was written for other degrees; write it again, or leave it out"
        )
    if [stage.has_embedding for stage in stages].count(True) != 1 or not stages[0].has_embedding:
        raise UsageError("the layout must hold the embedding E once, on its first stage")
    if [stage.has_loss for stage in stages].count(True) != 1:
        raise UsageError("the layout must hold the loss L once")
    return tuple(stage.num_decoders for stage in stages)


def layout_of_cut(model: Model, cut: Sequence[int]) -> tuple[StageLayers, ...]:
    """Return the stages of a cut of the model's chain (stage starts and the end)."""
    kinds = [layer.kind for layer in model.chain]
    return tuple(
        StageLayers(
            num_decoders=kinds[first:end].count("decoder"),
            num_mtp=kinds[first:end].count("mtp"),
            has_embedding="embedding" in kinds[first:end],
            has_loss="head" in kinds[first:end],
        )
        for first, end in pairwise(cut)
    )


def cut_of_layout(model: Model, stages: Sequence[StageLayers]) -> tuple[int, ...]:
    """Return the cut of the model's chain that a layout stands for.

    Raises:
        UsageError: it does not hold every layer of the model once, or leaves a stage without any layer.
    """
    have = layout_of_cut(model, (0, len(model.chain)))[0]
    for name, wanted, found in (
        ("decoder", have.num_decoders, sum(stage.num_decoders for stage in stages)),
        ("multi-token prediction", have.num_mtp, sum(stage.num_mtp for stage in stages)),
    ):
        if wanted != found:
            raise UsageError(f"the layout holds {found} {name} layers, {model.name} has {wanted}")
    kinds = [layer.kind for layer in model.chain]
    cut, place = [0], 0
    for number, stage in enumerate(stages):
        wanted_kinds = {
            "embedding": kinds.count("embedding") if stage.has_embedding else 0,
            "decoder": stage.num_decoders,
            "mtp": stage.num_mtp,
            "head": kinds.count("head") if stage.has_loss else 0,
        }
        while place < len(kinds) and wanted_kinds.get(kinds[place], 1) > 0:
            wanted_kinds[kinds[place]] = wanted_kinds.get(kinds[place], 2) - 1
            place += 1
        if any(count > 0 for kind, count in wanted_kinds.items() if kind in ("decoder", "mtp")):
            raise UsageError(f"the layout puts layers of stage {number} out of the model's order")
        if place == cut[-1]:
            raise UsageError(f"stage {number} of the layout holds no layer")
        cut.append(place)
    if place != len(kinds):
        raise UsageError("the layout does not hold every layer of the model")
    return tuple(cut)


def generated_layout(num_decoders: int, num_mtp: int, pp: int, vpp: int = 1) -> tuple[StageLayers, ...]:
    """Return a layout for any degrees: decoder layers weigh 1, MTP layers 2, the loss 1, the embedding nothing.

    The fullest stage is as light as can be; among those the earlier stages hold more. MTP and loss go last.

    Raises:
        UsageError: there are more virtual stages than decoder layers and the loss could fill.
    """
    num_stages, tail = pp * vpp, num_mtp * MTP_UNITS + LOSS_UNITS
    if num_decoders + 1 < num_stages:
        raise UsageError(f"{num_decoders} decoder layers and the loss cannot fill {num_stages} stages")
    weights = np.array([1.0] * num_decoders + [float(tail)])
    cut = balanced_cut([weights] * num_stages)
    last = len(cut) - 2
    return tuple(
        StageLayers(
            num_decoders=end - first - (1 if stage == last else 0),
            num_mtp=num_mtp if stage == last else 0,
            has_embedding=stage == 0,
            has_loss=stage == last,
        )
        for stage, (first, end) in enumerate(pairwise(cut))
    )


def flag_counts(num_layers: int, pp: int, *, first: int | None = None, last: int | None = None) -> tuple[int, ...]:
    """Return the decoder layers of each rank for first/last stage flags, as Megatron-LM divides them.

    Raises:
        UsageError: the flags cannot hold with this pp, or the ranks between cannot share the rest evenly.
    """
    for name, count in (("first", first), ("last", last)):
        if count is None:
            continue
        if pp == 1 and count != num_layers:
            raise UsageError(
                f"{name} ({count}) != num_layers ({num_layers}) at pp 1: the only stage holds every layer; "
                f"without an error the model would silently have {count}"
            )
        if not 0 <= count <= num_layers:
            raise UsageError(f"the {name} stage cannot hold {count} of {num_layers} layers")
    if pp == 1:
        return (num_layers,)
    given = [count for count in (first, last) if count is not None]
    between, left = pp - len(given), num_layers - sum(given)
    if left < 0 or (between == 0 and left):
        raise UsageError(f"stages of {listed(given)} layers do not make {num_layers}")
    if between and (left % between or left == 0):
        raise UsageError(f"{left} layers cannot be shared evenly by {between} stages; {_nearest_flags(num_layers, pp)}")
    each = left // between if between else 0
    middle = (each,) * between
    return ((first,) if first is not None else ()) + middle + ((last,) if last is not None else ())


def _nearest_flags(num_layers: int, pp: int) -> str:
    """Return the flag values that leave the ranks between an even share, nearest to the mean."""
    each = -(-num_layers // pp)
    options = [(abs(k - each), k, num_layers - k * (pp - 1)) for k in range(1, num_layers)]
    _, share, rest = min(option for option in options if option[2] > 0)
    return f"{share} each and {rest} on the first or last stage would"


def accounted_counts(num_layers: int, pp: int, *, embedding: bool, loss: bool) -> tuple[int, ...]:
    """Return the decoder layers of each rank where embedding or loss count as a layer each.

    (``--account-for-embedding-in-pipeline-split``, ``--account-for-loss-in-pipeline-split``.)

    Raises:
        UsageError: the sum is no multiple of pp.
    """
    total = num_layers + embedding + loss
    if total % pp:
        raise UsageError(f"{total} layers (embedding and loss counted as asked) are no multiple of pp {pp}")
    counts = [total // pp] * pp
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def by_rank(counts: Sequence[int], pp: int) -> tuple[int, ...]:
    """Return layers a rank from layers a virtual stage."""
    return tuple(sum(counts[rank::pp]) for rank in range(pp))
