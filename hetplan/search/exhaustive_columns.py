"""Columns: replicas with a cut and a microbatch size, and the least seconds they need for `m` microbatches.

A column is a shape with a cut of the chain, a microbatch size and a range of microbatch counts over which its stages
hold the same numbers of microbatches. With `m` microbatches its pipeline cannot end before

    bound(m) = max over rows r of  head[r] + m * slope[r]

with a row for every rank (what must pass before its first action, all its work, the way back of its last gradient),
one for every boundary (the whole journey of one microbatch, and `m - 1` more transfers over that line) and one for the
journey alone. A schedule that delays weight gradients ends a rank with work that nobody waits for, so its rank rows
have no way back.

Array legend: S shapes, C cuts, V virtual stages, P ranks, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from hetplan.costs.records import Floats
from hetplan.search.exhaustive_shapes import Context, CountClass, Flags, Ints, Mesh, Shape, StageTable

NO_ROW_S = -1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """One row a column; `cuts` and `modes` (index of the recomputation that starts the search) are padded with -1."""

    shape: Ints
    """Index into the shapes they were made from."""
    microbatch: Ints
    first_m: Ints
    end_m: Ints
    used: Ints
    """Devices of each group, (columns, G)."""
    cuts: Ints
    modes: Ints
    head_s: Floats
    slope_s: Floats

    def __len__(self) -> int:
        return len(self.shape)

    def take(self, rows: Ints) -> Columns:
        """Return the columns at `rows`."""
        return Columns(**{field.name: getattr(self, field.name)[rows] for field in fields(Columns)})

    def bound_s(self, rows: Ints, num_microbatches: Ints) -> Floats:
        """Return the least seconds columns `rows` need for that many microbatches each."""
        ends = self.head_s[rows] + np.asarray(num_microbatches)[..., None] * self.slope_s[rows]
        return np.asarray(ends.max(axis=-1))

    def most_microbatches(self, limit_s: float) -> Ints:
        """Return, for each column, the most microbatches whose bound does not pass `limit_s` (0: none)."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            room = np.floor((limit_s - self.head_s) / self.slope_s * (1 + 1e-12))
        room = np.where(self.slope_s > 0, room, np.where(self.head_s <= limit_s, np.inf, 0.0))
        most = np.clip(room.min(axis=1), 0, self.end_m - 1).astype(np.int64)
        return np.asarray(np.where(most >= self.first_m, most, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeBatch:
    """Shapes of equal numbers of ranks and virtual stages, cut alike."""

    shapes: tuple[Shape, ...]
    first_shape: int
    """Index of the first of them among all shapes."""
    cuts: Ints
    groups: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    """The stage table's options."""

    def mesh_index(self) -> Ints:
        """Return the option of every virtual stage, (S, V)."""
        place = {mesh: index for index, mesh in enumerate(self.meshes)}
        return np.array([[place[mesh] for mesh in shape.meshes] * shape.vpp for shape in self.shapes])

    def used(self) -> Ints:
        """Return devices of each group, (S, G)."""
        return np.array(
            [
                [sum(mesh.size for mesh in shape.meshes if mesh.group == group) for group in self.groups]
                for shape in self.shapes
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageTimes:
    """Least seconds of every stage of every (shape, cut) under one class of microbatch counts, arrays (S, C, V)."""

    first_m: int
    end_m: Ints
    """(S, C)."""
    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    mode: Ints

    @property
    def fits(self) -> Flags:
        """Where every stage fits, (S, C)."""
        return np.asarray((self.mode >= 0).all(axis=2))

    def same(self, other: _StageTimes) -> Flags:
        """Where both say the same, (S, C)."""
        equal = (self.mode == other.mode) & (self.forward_s == other.forward_s) & (self.backward_s == other.backward_s)
        return np.asarray(equal.all(axis=2))


def batch_columns(
    batch: ShapeBatch, microbatch: int, table: StageTable, classes: Sequence[CountClass], context: Context
) -> Columns:
    """Return the columns of a batch.

    Classes come from many microbatches to few; a class whose stage times are those of the class before widens it.
    """
    option = batch.mesh_index()
    before: _StageTimes | None = None
    parts: list[Columns] = []
    for count_class in classes:
        times = _stage_times(batch, option, table, count_class)
        if before is not None:
            same = times.same(before)
            times = replace(times, end_m=np.where(same, before.end_m, times.end_m))
            parts.append(_columns(batch, microbatch, table, before, (before.fits & ~same, context)))
        before = times
    if before is not None:
        parts.append(_columns(batch, microbatch, table, before, (before.fits, context)))
    return concatenate(parts)


def _stage_times(batch: ShapeBatch, option: Ints, table: StageTable, count_class: CountClass) -> _StageTimes:
    held = np.array([table.held.index(count) for count in count_class.held])
    index = (option[:, None, :], held[None, None, :], batch.cuts[None, :, :-1], batch.cuts[None, :, 1:])
    return _StageTimes(
        first_m=count_class.first_m,
        end_m=np.full((len(batch.shapes), len(batch.cuts)), count_class.end_m),
        forward_s=table.forward_s[index],
        backward_s=table.backward_s[index],
        input_s=table.input_s[index],
        mode=table.mode[index],
    )


def _columns(
    batch: ShapeBatch, microbatch: int, table: StageTable, times: _StageTimes, chosen: tuple[Flags, Context]
) -> Columns:
    keep, context = chosen
    shape, cut = np.nonzero(keep)
    option = batch.mesh_index()[shape]
    cuts = batch.cuts[cut]
    pp = len(batch.shapes[0].meshes)
    hop = table.boundary_s[option[:, :-1], option[:, 1:], cuts[:, 1:-1]]
    hop = hop if pp > 1 else np.zeros_like(hop)
    head, slope = _rows(pp, times.forward_s[keep], (times.backward_s[keep], times.input_s[keep]), hop, context)
    columns = Columns(
        shape=shape + batch.first_shape,
        microbatch=np.full(len(shape), microbatch),
        first_m=np.full(len(shape), times.first_m),
        end_m=times.end_m[keep],
        used=batch.used()[shape],
        cuts=cuts,
        modes=times.mode[keep],
        head_s=head,
        slope_s=slope,
    )
    return columns.take(np.flatnonzero(np.isfinite(hop).all(axis=1)))


def _rows(
    pp: int, forward_s: Floats, backwards_s: tuple[Floats, Floats], hop_s: Floats, context: Context
) -> tuple[Floats, Floats]:
    """Return heads and slopes, (columns, P + V - 1 + 1)."""
    backward_s, input_s = backwards_s
    count, num_stages = forward_s.shape
    zero = np.zeros((count, 1))
    out = np.concatenate([zero, np.cumsum(forward_s[:, :-1] + hop_s, axis=1)], axis=1)
    back = np.concatenate([zero, np.cumsum(input_s[:, :-1] + hop_s, axis=1)], axis=1)
    journey = (forward_s + input_s).sum(axis=1, keepdims=True) + 2 * hop_s.sum(axis=1, keepdims=True)
    waited_for = context.schedule != "zero-bubble"
    rank_head = (out + back if waited_for else out)[:, :pp]
    rank_slope = (forward_s + backward_s).reshape(count, num_stages // pp, pp).sum(axis=1)
    head = np.concatenate([rank_head, journey - hop_s, journey], axis=1)
    slope = np.concatenate([rank_slope, hop_s, zero], axis=1)
    return head, slope


def concatenate(parts: Sequence[Columns]) -> Columns:
    """Return all columns in order, padded to the widest."""
    fill = {"cuts": -1, "modes": -1, "head_s": NO_ROW_S, "slope_s": 0.0}
    arrays = {}
    for field in fields(Columns):
        pieces = [getattr(part, field.name) for part in parts]
        if field.name in fill:
            width = max(piece.shape[1] for piece in pieces)
            pieces = [
                np.pad(piece, ((0, 0), (0, width - piece.shape[1])), constant_values=fill[field.name])
                for piece in pieces
            ]
        arrays[field.name] = np.concatenate(pieces)
    return Columns(**arrays)
