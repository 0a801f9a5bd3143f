"""Columns: replicas with a cut and a microbatch size, and the least seconds they need for `m` microbatches.

A column is a shape with a cut of the chain, a microbatch size and a range of microbatch counts over which its stages
hold the same numbers of microbatches. With `m` microbatches its pipeline cannot end before

    bound(m) = max over rows r of  head[r] + m * slope[r]

with the rows of `plan.bounds` (a rank's work, filling the pipeline, round trips, links), each followed by what the last
gradient must wait for (`exhaustive_table`). All of a rank's work is also followed by its own update. Rows hold for
every `m` of the range; fixed ranges of round trips are rounded to the safe side: at least `m / ahead` trips.

Array legend: S shapes, C cuts, V virtual stages, P ranks, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.search.exhaustive_shapes import Context, CountClass, Flags, Ints, Mesh, Shape
from hetplan.search.exhaustive_table import Condition, StageTable

NO_ROW_S = -1e300
LEAST_SLOPE_S = 1e-300
"""Stands for 0, so that rows without a slope divide like any other."""


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
    cuts: npt.NDArray[np.int16]
    modes: npt.NDArray[np.int8]
    head_s: Floats
    slope_s: Floats
    """Rows of the bound, those of the ranks first."""
    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    after_s: Floats
    """Stages, (columns, V), padded with 0."""
    hop_s: Floats
    """Boundaries, (columns, V - 1), padded with 0."""

    def __len__(self) -> int:
        return len(self.shape)

    def bound_s(self, rows: Ints, num_microbatches: Ints) -> Floats:
        """Return the least seconds columns `rows` need for that many microbatches each."""
        ends = self.head_s[rows] + np.asarray(num_microbatches)[..., None] * self.slope_s[rows]
        return np.asarray(ends.max(axis=-1))

    def most_microbatches(self, limit_s: float) -> Ints:
        """Return, for each column, the most microbatches whose bound does not pass `limit_s` (0: none)."""
        with np.errstate(over="ignore"):
            room = ((limit_s * (1 + 1e-12) - self.head_s) / self.slope_s).min(axis=1)
        most = np.clip(np.floor(room * (1 + 1e-12)), 0, self.end_m - 1).astype(np.int64)
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
    spare: tuple[int, ...]
    """Devices each shape leaves for replicas that may share its states."""

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
    after_s: Floats
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
    place = {condition: k for k, condition in enumerate(table.conditions)}
    condition = np.array([[place[Condition(held, spare)] for held in count_class.held] for spare in batch.spare])
    index = (option[:, None, :], condition[:, None, :], batch.cuts[None, :, :-1], batch.cuts[None, :, 1:])
    return _StageTimes(
        first_m=count_class.first_m,
        end_m=np.full((len(batch.shapes), len(batch.cuts)), count_class.end_m),
        forward_s=table.forward_s[index],
        backward_s=table.backward_s[index],
        input_s=table.input_s[index],
        after_s=table.after_s[index],
        mode=table.mode[index],
    )


def _columns(
    batch: ShapeBatch, microbatch: int, table: StageTable, times: _StageTimes, chosen: tuple[Flags, Context]
) -> Columns:
    keep, context = chosen
    shape, cut = np.nonzero(keep)
    option, cuts = batch.mesh_index()[shape], batch.cuts[cut]
    pp, num_stages = len(batch.shapes[0].meshes), batch.shapes[0].num_stages
    hop = np.zeros((len(shape), num_stages - 1))
    tie = np.zeros(len(shape))
    if pp > 1:
        hop = table.boundary_s[option[:, :-1], option[:, 1:], cuts[:, 1:-1]]
    if (num_stages - 1) % pp:
        tie = table.tie_s[option[:, 0], option[:, -1]]
    near = np.isfinite(hop).all(axis=1) & np.isfinite(tie)
    shape, cut, cuts, hop, tie = shape[near], cut[near], cuts[near], hop[near], tie[near]
    work = _Work(
        pp=pp,
        forward_s=times.forward_s[shape, cut],
        backward_s=times.backward_s[shape, cut],
        input_s=times.input_s[shape, cut],
        hop_s=hop,
        after_s=times.after_s[shape, cut] + tie[:, None] * _at_ends(num_stages),
    )
    rows = list(_rows(work, context))
    return Columns(
        shape=shape + batch.first_shape,
        microbatch=np.full(len(shape), microbatch),
        first_m=np.full(len(shape), times.first_m),
        end_m=times.end_m[shape, cut],
        used=batch.used()[shape],
        cuts=cuts.astype(np.int16),
        modes=times.mode[shape, cut].astype(np.int8),
        head_s=np.concatenate([head for head, _ in rows], axis=1),
        slope_s=np.maximum(np.concatenate([slope for _, slope in rows], axis=1), LEAST_SLOPE_S),
        forward_s=work.forward_s,
        backward_s=work.backward_s,
        input_s=work.input_s,
        after_s=work.after_s,
        hop_s=work.hop_s,
    )


def _at_ends(num_stages: int) -> Floats:
    ends = np.zeros(num_stages)
    ends[[0, -1]] = 1.0
    return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What the stages of columns take, (columns, V); `hop_s` (columns, V - 1)."""

    pp: int
    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    hop_s: Floats
    after_s: Floats

    def before(self, *passes_s: Floats) -> Floats:
        """Return the sum of passes and hops over the stages before each one, (columns, V)."""
        each = sum(one[:, :-1] + self.hop_s for one in passes_s)
        return np.concatenate([np.zeros((len(self.forward_s), 1)), np.cumsum(each, axis=1)], axis=1)

    def rank_s(self) -> Floats:
        """Return the seconds a rank works for each microbatch, (columns, P)."""
        count, num_stages = self.forward_s.shape
        both = (self.forward_s + self.backward_s).reshape(count, num_stages // self.pp, self.pp)
        return np.asarray(both.sum(axis=1))


def _rows(work: _Work, context: Context) -> Iterator[tuple[Floats, Floats]]:
    """Yield heads and slopes, the rows of the ranks first."""
    pp = work.pp
    after = work.after_s[:, :1]
    zero = np.zeros_like(after)
    own_after = (
        work.after_s if work.forward_s.shape[1] == pp else work.after_s * (np.arange(work.after_s.shape[1]) == 0)
    )
    yield work.before(work.forward_s)[:, :pp] + own_after[:, :pp], work.rank_s()
    journey = (work.forward_s + work.input_s).sum(axis=1, keepdims=True) + 2 * work.hop_s.sum(axis=1, keepdims=True)
    yield journey + after, zero
    yield journey - work.hop_s + after, work.hop_s
    around = work.before(work.forward_s, work.input_s)
    if context.schedule == "zero-bubble":
        weight = work.backward_s - work.input_s
        late = np.arange(1, pp + 1) * weight[:, :pp]
        yield around[:, :pp] - late + weight[:, :1] + after, work.rank_s()
        return
    yield around[:, :pp] + after, work.rank_s()
    if work.forward_s.shape[1] == pp:
        yield from _fill_rows(work, context, around, journey)


def _fill_rows(work: _Work, context: Context, around: Floats, journey: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Yield what one virtual stage a rank allows to say: `plan.bounds` names the rows and proves them."""
    after = work.after_s[:, :1]
    if context.schedule == "gpipe":
        slowest = [
            np.concatenate([one, work.hop_s], axis=1).max(axis=1, keepdims=True)
            for one in (work.forward_s, work.backward_s)
        ]
        slope = slowest[0] + slowest[1]
        yield journey - slope + after, slope
        return
    through = journey - around
    ahead = np.arange(work.pp, 0, -1)
    yield (
        around + through - ahead * work.forward_s - work.backward_s + after,
        work.forward_s + work.backward_s,
    )
    yield around + after, through / ahead


def concatenate(parts: Sequence[Columns]) -> Columns:
    """Return all columns in order, padded to the widest."""
    fill: dict[str, float] = {"cuts": -1, "modes": -1, "head_s": NO_ROW_S, "slope_s": LEAST_SLOPE_S}
    fill |= dict.fromkeys(("forward_s", "backward_s", "input_s", "after_s", "hop_s"), 0.0)
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
