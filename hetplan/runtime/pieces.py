"""Which ranks share which part of which parameter: the gradient groups of a layout.

Replicas cut a parameter differently (tp 2 here, tp 3 there, experts over ep ranks elsewhere). Along each dimension all
holders' cuts together divide it into ranges; a *piece* is one cell of that grid, and the ranks whose box covers the
cell are its group. Pieces with the same group lie side by side in one *bucket* that is reduced at once. Tied tables,
layers that sit in unlike stages, replicated norms and routed experts are all this one rule.

With a loss that is the sum over tokens divided by the *global* number of tokens, the gradient of a piece is the plain
sum over its group whatever number and size of microbatches each replica takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetplan.runtime.parameters import Box, Held, model_parameters
from hetplan.runtime.ranks import Seat, Task, cut_of_seat
from hetplan.specs.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a parameter that all ranks of its group hold."""

    name: str
    box: Box
    decays: bool

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return box_elements(self.box)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Pieces that the same ranks hold; those that decay come first."""

    ranks: tuple[int, ...]
    layer: int
    """Of the chain, where buckets are kept apart by layer, else 0."""
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        """Elements of all pieces."""
        return sum(piece.num_elements for piece in self.pieces)

    @property
    def num_decaying(self) -> int:
        """Elements of the pieces weight decay applies to."""
        return sum(piece.num_elements for piece in self.pieces if piece.decays)


def box_elements(box: Box) -> int:
    """Return how many elements a box has."""
    count = 1
    for first, end in box:
        count *= end - first
    return count


def held_by(model: Model, task: Task, seat: Seat) -> dict[str, Held]:
    """Return the parameters a rank holds, by full name."""
    cut = cut_of_seat(task, seat)
    stages = task.replica(seat).stages
    found: dict[str, Held] = {}
    for number in task.virtual_stages(seat):
        for index in range(stages[number].first_layer, stages[number].end_layer):
            for held in model_parameters(model, index, cut):
                found.setdefault(held.name, held)
    return found


def bucket_plans(model: Model, task: Task, *, by_layer: bool) -> tuple[BucketPlan, ...]:
    """Return the buckets of a layout in the order in which every rank walks them."""
    holders: dict[str, list[tuple[int, Held]]] = {}
    for seat in task.seats:
        for name, held in held_by(model, task, seat).items():
            holders.setdefault(name, []).append((seat.rank, held))
    found: dict[tuple[tuple[int, ...], int], list[Piece]] = {}
    for name, rows in holders.items():
        layer = int(name.split(".")[1]) if by_layer else 0
        for piece, ranks in _pieces(name, rows):
            found.setdefault((ranks, layer), []).append(piece)
    return tuple(
        BucketPlan(ranks=ranks, layer=layer, pieces=tuple(sorted(pieces, key=lambda piece: not piece.decays)))
        for (ranks, layer), pieces in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    )


def _pieces(name: str, rows: list[tuple[int, Held]]) -> Iterable[tuple[Piece, tuple[int, ...]]]:
    """Yield the cells of the grid that all holders' cuts make, each with the ranks that hold it."""
    by_box: dict[Box, list[int]] = {}
    for rank, held in rows:
        by_box.setdefault(held.box, []).append(rank)
    decays = rows[0][1].decays
    dims = range(len(rows[0][1].shape))
    cuts = [sorted({edge for box in by_box for edge in box[dim]}) for dim in dims]
    for cell in itertools.product(*(itertools.pairwise(edges) for edges in cuts)):
        ranks = [rank for box, own in by_box.items() if covers(box, cell) for rank in own]
        if ranks:
            yield Piece(name=name, box=cell, decays=decays), tuple(sorted(ranks))


def covers(outer: Box, inner: Box) -> bool:
    """Return whether a box holds all of another."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def inside(piece: Box, box: Box) -> tuple[slice, ...]:
    """Return where a piece lies within a rank's box of the parameter."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(piece, box, strict=True))


def group_ranks(plans: Iterable[BucketPlan], axes: Mapping[str, Iterable[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return all sets of ranks that need a process group, in the order every rank makes them."""
    found = {plan.ranks for plan in plans}
    for groups in axes.values():
        found |= set(groups)
    return sorted(ranks for ranks in found if len(ranks) > 1)
