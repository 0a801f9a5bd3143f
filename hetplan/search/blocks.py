"""A bound on the step time of patterns over all their cuts, from how many layers each block holds.

Where the chain is divided between the blocks of a pattern is tried everywhere it matters; inside a block only what
every division of its layers among its stages has in common is used. Write, for a block whose first stage is number k: X
its seconds for one microbatch, P those of the blocks before, W all of them, C the transfers, tau its busiest stage, E
what its stages must still do once the backward pass has left the block. Under 1F1B with m microbatches and p stages,
Z = T - W - C is at least

    V      (W - P) + (m - 1 - p + k) tau + E     blocks whose stages hold fewer than m microbatches
    head   (m - 1) beta tau                      blocks whose stages hold all m
    tail   (sum of the last m - 1 stages) + E    m <= p; a stage before them takes at most Z / ((m - 1) beta)
    pace   m tau - (W - P) - C                   any block; stages one after the other ask for more (below)

V: between its first and its last microbatch the busiest stage waits for one journey through the stages behind it and
works m - 1 - (p - s) of its own periods; it lies behind k by at most the stages that are no busier.

E: a stage ends with A (`after`), a seconds for each decoder layer, while the backward pass runs on through the stages
before it, b seconds for each of their layers. So with layers n_0, n_1 ... on the stages of a block E is at least the
largest a n_s - b (n_0 + ... + n_s-1), least when each stage holds 1 + b / a times what the one before does; and at
least a (q - (c - 1) nu) for q layers on c stages of at most nu. Tied tables hold the first and the last stage up.

Pace: stage s works m t_s after the forward passes of the stages before it and before their backward passes, so
n_0 + ... + n_s-1 + m n_s layers at most; with the first f stages at nu layers that asks for at least
f nu + (q - f nu) / (1 - (1 - 1 / m) ^ (c - f)), for any f.

A smaller busiest stage nu makes V less and E and pace more: the bound is the least over nu of the largest, nu being
told apart layer by layer near the least there can be.

Divisions of all patterns lie one after the other in flat arrays; `owner` says whose each is.

Legend: S patterns, K blocks, N divisions, M meshes, L layers, R recompute modes, H classes of microbatches held.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.search.after import Ending
from hetplan.search.block_costs import HELD, BlockCosts, block_costs
from hetplan.search.patterns import MOST_HELD, Ints
from hetplan.search.problem import Problem, Tables

TURNS = 4
"""Sizes of the busiest stage told apart: the least, some more, and all beyond."""
MOST_DIVISIONS = 200_000
"""Divisions looked at in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Patterns with the microbatches they run, arrays (S,) or (S, K); all have K blocks."""

    mesh: Ints
    count: Ints
    comm_s: Floats
    num_microbatches: Ints
    limit_s: Floats
    """Step times from here on need not be told apart."""

    def take(self, rows: Ints) -> Shapes:
        """Return the patterns at `rows`."""
        return Shapes(
            mesh=self.mesh[rows],
            count=self.count[rows],
            comm_s=self.comm_s[rows],
            num_microbatches=self.num_microbatches[rows],
            limit_s=self.limit_s[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBounds:
    """The least bound of each pattern, and the division it comes from."""

    step_s: Floats
    """At most the pattern's limit, (S,)."""
    ends: Ints
    """End layer of each block, (S, K); -1 where nothing is below the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block of every division, (N,)."""

    stages: Ints
    first: Ints
    fewest: Ints
    """Decoder layers on the stage that holds most, at least."""
    decoders: Ints
    seconds: Floats
    backward_s: Floats
    """Both with what recompute must add."""
    layer_s: Floats
    ending_s: Floats
    """A of a decoder layer."""
    least_ending_s: Floats
    """E whatever the division of the block's layers."""
    gather_s: Floats
    """Seconds to gather a decoder layer."""
    hidden_s: Floats
    """Of the gradients' reduction, what a longer backward pass may hide."""
    beta: Floats


class BlockBounder:
    """Bounds patterns under one table of costs and one ending."""

    def __init__(self, problem: Problem, tables: Tables, ending: Ending) -> None:
        self._costs: BlockCosts = block_costs(problem, tables, ending)

    def bounds(self, shapes: Shapes) -> BlockBounds:
        """Return the bounds of all patterns."""
        num = len(shapes.comm_s)
        step_s = np.where(np.isfinite(shapes.limit_s), shapes.limit_s, np.inf)
        ends = np.full(shapes.mesh.shape, -1, dtype=np.int64)
        at = 0
        while at < num:
            some = np.arange(at, min(num, at + max(1, self._batch(shapes))))
            part = shapes.take(some)
            rooms = Rooms(self._costs, part)
            owner, edges = _divisions(self._costs, part, rooms)
            at += len(some)
            if not len(owner):
                continue
            seconds = _Divided((self._costs, rooms), part, owner, edges).step_s()
            order = np.lexsort((seconds, owner))
            found, first = np.unique(owner[order], return_index=True)
            best = order[first]
            rows = some[found]
            better = seconds[best] < step_s[rows]
            step_s[rows[better]] = seconds[best[better]]
            ends[rows[better]] = np.stack([edge[best[better]] for edge in edges[1:]], axis=1)
        return BlockBounds(step_s=step_s, ends=ends)

    def divisions_below(self, shapes: Shapes) -> Ints:
        """Return the block ends of every division of one pattern below its limit, best bound first, (D, K)."""
        rooms = Rooms(self._costs, shapes)
        owner, edges = _divisions(self._costs, shapes, rooms)
        if not len(owner):
            return np.zeros((0, shapes.mesh.shape[1]), dtype=np.int64)
        seconds = _Divided((self._costs, rooms), shapes, owner, edges).step_s()
        order = np.argsort(seconds, kind="stable")
        order = order[seconds[order] < shapes.limit_s[0]]
        return np.stack([edge[order] for edge in edges[1:]], axis=1)

    def _batch(self, shapes: Shapes) -> int:
        cuts = shapes.mesh.shape[1] - 1
        known = 0.25 if np.isfinite(shapes.limit_s).all() else 1.0
        return int(MOST_DIVISIONS / max(1.0, known * (self._costs.forward.shape[1] - 1) ** cuts / max(1, cuts)))


def _divisions(costs: BlockCosts, shapes: Shapes, rooms: Rooms) -> tuple[Ints, list[Ints]]:
    """Return whose each division is, and its K + 1 edges: all that neither memory nor the limit rules out."""
    decoders, num = costs.decoders, costs.forward.shape[1] - 1
    room = _room(costs, shapes, rooms)
    count, total = shapes.count, int(decoders[-1])
    owner = np.arange(len(shapes.comm_s))
    start = np.zeros(len(owner), dtype=np.int64)
    edges = [start]
    for k in range(shapes.mesh.shape[1] - 1):
        later, stages_later = room[:, k + 1 :].sum(axis=1)[owner], count[:, k + 1 :].sum(axis=1)[owner]
        low = np.maximum(edges[-1] + count[owner, k], np.searchsorted(decoders, total - later, side="left"))
        high = np.searchsorted(decoders, decoders[edges[-1]] + room[owner, k], side="right") - 1
        high = np.minimum(high, num - stages_later)
        many = np.maximum(high - low + 1, 0)
        index = np.repeat(np.arange(len(owner)), many)
        value = np.arange(len(index)) - np.repeat(np.cumsum(many) - many, many) + low[index]
        owner, edges = owner[index], [*(edge[index] for edge in edges), value]
    fits = total - decoders[edges[-1]] <= room[owner, -1]
    owner, edges = owner[fits], [edge[fits] for edge in edges]
    return owner, [*edges, np.full(len(owner), num)]


def _room(costs: BlockCosts, shapes: Shapes, rooms: Rooms) -> Ints:
    """Return the most decoder layers each block can hold within memory and the limit, (S, K)."""
    m = shapes.num_microbatches[:, None]
    most = rooms.whole
    each = m * costs.layer_s[shapes.mesh] + costs.ending_s[shapes.mesh]
    with np.errstate(divide="ignore", invalid="ignore"):
        within = np.floor(shapes.limit_s[:, None] / each * (1 + 1e-9))
    return np.asarray(np.where(shapes.count * within < most, shapes.count * within, most).astype(np.int64))


class _Divided:
    """The bound of every division."""

    def __init__(self, known: tuple[BlockCosts, Rooms], shapes: Shapes, owner: Ints, edges: list[Ints]) -> None:
        costs, rooms = known
        self.p = shapes.count.sum(axis=1)[owner]
        self.m = shapes.num_microbatches[owner]
        self.comm_s = shapes.comm_s[owner]
        ties_s = costs.ties_s(shapes.mesh, shapes.count)
        self.front_s = costs.front_s(shapes.mesh, shapes.count, ties_s)[owner]
        """What the first stage ends with beside its decoder layers."""
        self.tied_s = costs.tied_s(shapes.mesh, ties_s)[owner]
        first = np.cumsum(shapes.count, axis=1) - shapes.count
        self.blocks = [
            _block(costs, rooms, (owner, k), (edges[k], edges[k + 1]), (shapes.mesh, shapes.count, first))
            for k in range(len(edges) - 1)
        ]
        nothing = np.zeros(len(owner))
        before, backward = [nothing], [nothing]
        for block in self.blocks:
            before.append(before[-1] + block.seconds)
            backward.append(backward[-1] + block.backward_s)
        self.work = before[-1]
        self.before, self.backward_before = before[:-1], backward[:-1]

    def step_s(self) -> Floats:
        """Return the bound, (N,)."""
        nothing = np.zeros_like(self.work)
        loops = [self._loop_s(k, block.fewest) for k, block in enumerate(self.blocks)]
        front = [self.front_s, *([nothing] * (len(self.blocks) - 1))]
        endings = [np.maximum(self._ending_s(k, front[k]), 0.0) for k in range(len(self.blocks))]
        rest = self._tail_s(np.maximum.reduce([nothing, *endings]))
        for k in range(len(self.blocks)):
            others = np.maximum.reduce([nothing, *(loop for j, loop in enumerate(loops) if j != k)])
            after = np.maximum.reduce([nothing, *(ending for j, ending in enumerate(endings) if j != k)])
            ahead = np.maximum.reduce([nothing, *endings[:k]])
            rest = np.maximum(rest, self._least_rest_s(k, (others, after, ahead)))
        return np.asarray(np.where(self._fits(), self.work + self.comm_s + rest, np.inf))

    def _fits(self) -> npt.NDArray[np.bool_]:
        return np.asarray(np.all([block.fewest >= 0 for block in self.blocks], axis=0))

    def _least_rest_s(self, k: int, around: tuple[Floats, Floats, Floats]) -> Floats:
        """Return the least of Z over the most layers nu a stage of block k holds: a few, and all beyond."""
        block = self.blocks[k]
        best = np.full(len(self.work), np.inf)
        for more in range(TURNS):
            nu = block.fewest + more
            last = more == TURNS - 1
            best = np.minimum(best, self._rest_s(k, nu, around, beyond=last))
        return best

    def _rest_s(self, k: int, nu: Ints, around: tuple[Floats, Floats, Floats], *, beyond: bool) -> Floats:
        block = self.blocks[k]
        others, after, ahead = around
        a, later = block.ending_s, block.stages - 1
        smallest = np.zeros_like(block.decoders) if beyond else np.maximum(block.decoders - later * nu, 0)
        ending = self._ending_s(k, a * smallest + (self.front_s if k == 0 else 0.0))
        if k == len(self.blocks) - 1:
            ending = np.maximum(ending, np.where(self.tied_s > 0, self.tied_s + block.gather_s * smallest, 0.0))
        free = np.maximum(others, self._loop_s(k, nu)) + np.maximum(after, ending)
        tied = np.maximum(self._head_s(k, nu), self._pace_s(k, nu, beyond=beyond)) + ahead
        own = self.before[k] - self.backward_before[k] + nu * (self.m * block.layer_s + a) - block.hidden_s
        return np.asarray(np.maximum.reduce([free, tied, own - self.work - self.comm_s]))

    def _loops(self, block: _Block) -> npt.NDArray[np.bool_]:
        return np.asarray(self.p - block.first <= self.m - 1)

    def _tau_s(self, k: int, nu: Ints) -> Floats:
        block = self.blocks[k]
        return np.maximum(block.seconds / block.stages, nu * block.layer_s)

    def _v_s(self, k: int, nu: Ints) -> Floats:
        periods = self.m - 1 - self.p + self.blocks[k].first
        return np.asarray(self.work - self.before[k] + periods * self._tau_s(k, nu))

    def _loop_s(self, k: int, nu: Ints) -> Floats:
        """Return V without E; nothing where some stage of the block holds all microbatches."""
        return np.where(self._loops(self.blocks[k]), self._v_s(k, nu), 0.0)

    def _head_s(self, k: int, nu: Ints) -> Floats:
        """Return head, or the lesser of V and head where the block has stages of both kinds."""
        block = self.blocks[k]
        head = (self.m - 1) * block.beta * self._tau_s(k, nu)
        all_head = self.p - (block.first + block.stages - 1) > self.m - 1
        mixed = np.minimum(head, self._v_s(k, nu))
        return np.where(self._loops(block), 0.0, np.where(all_head, head, mixed))

    def _pace_s(self, k: int, nu: Ints, *, beyond: bool) -> Floats:
        """Return pace: the stages of a block one after the other, the first `full` of them with nu layers at most."""
        block = self.blocks[k]
        q, c, keep = block.decoders, block.stages, 1 - 1 / self.m
        least = self.m * self._tau_s(k, nu)
        for full in (np.zeros_like(c),) if beyond else (np.zeros_like(c), c // 2, c - 1):
            layers = full * nu + (q - full * nu) / (1 - keep ** (c - full))
            least = np.maximum(least, layers * block.layer_s)
        return np.asarray(least - (self.work - self.before[k]) - self.comm_s)

    def _ending_s(self, k: int, first_s: Floats | float = 0.0) -> Floats:
        """Return E less the backward pass of the blocks before and its transfers, at most half of C.

        `first_s`: what the block's first stage ends with at least.
        """
        block, half = self.blocks[k], self.comm_s / 2
        somewhere = block.least_ending_s - np.where((block.stages > 1) | (k > 0), half, 0.0)
        first = first_s - (half if k else 0.0)
        return np.asarray(np.maximum(somewhere, first) - self.backward_before[k] - block.hidden_s)

    def _tail_s(self, after: Floats) -> Floats:
        seconds, divisor = after + self.work, np.ones_like(after)
        periods = np.maximum(self.m - 1, 1)
        for block in self.blocks:
            heads = np.clip(self.p - (self.m - 1) - block.first, 0, block.stages)
            divisor = divisor + heads / np.maximum(periods * block.beta, 1e-300)
        return np.where((self.m > 1) & (self.m <= self.p), seconds / divisor, 0.0)


class Rooms:
    """How many decoder layers the stages of blocks have memory for: fewer the more microbatches a stage holds."""

    def __init__(self, costs: BlockCosts, shapes: Shapes) -> None:
        p = shapes.count.sum(axis=1)[:, None]
        ahead = np.broadcast_to(p - np.cumsum(shapes.count, axis=1) + shapes.count, shapes.count.shape)
        m = np.broadcast_to(shapes.num_microbatches[:, None], shapes.count.shape)
        # Held by the first stage and by the last; stages between hold one less than the one before.
        parts = shapes.mesh, shapes.count, np.minimum(ahead, MOST_HELD), np.minimum(m, MOST_HELD)
        sizes = tuple(int(part.max(initial=0)) + 1 for part in parts)
        kinds, kind = np.unique(np.ravel_multi_index(parts, sizes), return_inverse=True)
        self.kind = kind.reshape(shapes.count.shape)
        mesh, count, first, most = np.unravel_index(kinds, sizes)
        layers = np.arange(costs.forward.shape[1])
        room = np.zeros((len(kinds), len(layers)), dtype=np.int64)
        for s in range(int(count.max(initial=0))):
            there = np.flatnonzero(count > s)
            held = held_class(np.clip(np.minimum(first[there] - s, most[there]), 1, MOST_HELD))
            room[there] += np.minimum(layers[None, :], costs.most[held, mesh[there]][:, None])
        self.held_last = held_class(np.clip(np.minimum(ahead - shapes.count + 1, m), 1, MOST_HELD))
        self.room = room
        """Layers all stages hold together when none holds more than so many, (kinds, L + 1)."""

    @property
    def whole(self) -> Ints:
        """Layers each block has memory for, (S, K)."""
        return np.asarray(self.room[self.kind, -1])

    def fewest(self, kind: Ints, decoders: Ints) -> Ints:
        """Return the layers on the stage that holds most, at least; -1 where memory does not suffice."""
        width = self.room.shape[1]
        step = int(self.room.max(initial=0)) + 2
        flat = (self.room + np.arange(len(self.room))[:, None] * step).ravel()
        found = np.searchsorted(flat, decoders + kind * step, side="left") - kind * width
        return np.asarray(np.where(found < width, found, -1))


def held_class(held: Ints) -> Ints:
    """Return the class of so many microbatches held."""
    return np.asarray(np.searchsorted(HELD, held, side="right") - 1)


def _block(
    costs: BlockCosts, rooms: Rooms, at: tuple[Ints, int], span: tuple[Ints, Ints], table: tuple[Ints, Ints, Ints]
) -> _Block:
    owner, k = at
    mesh, stages, first = (values[owner, k] for values in table)
    begin, end = span
    held = rooms.held_last[owner, k]
    q = costs.decoders[end] - costs.decoders[begin]
    forward = costs.forward[mesh, end] - costs.forward[mesh, begin]
    backward = costs.backward[mesh, end] - costs.backward[mesh, begin]
    fewest = rooms.fewest(rooms.kind[owner, k], q)
    mean = -(-q // stages)
    low, high = costs.added_s[held, mesh, q // stages], costs.added_s[held, mesh, mean]
    extra = stages * (low + (high - low) * ((q % stages) / stages))
    layer_s = costs.layer_s[mesh] + costs.layer_extra_s[held, mesh, np.maximum(fewest, 0)]
    a, b = costs.ending_s[mesh], costs.layer_backward_s[mesh]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = b / a
        share_first = np.where(ratio > 1e-9, ratio / ((1 + ratio) ** stages - 1), 1.0 / stages)
    return _Block(
        stages=stages,
        first=first,
        fewest=fewest,
        decoders=q,
        seconds=forward + backward + extra,
        backward_s=backward + extra,
        layer_s=layer_s,
        ending_s=a,
        least_ending_s=np.where(a > 0, a * q * share_first, 0.0),
        gather_s=costs.gather_s[mesh],
        hidden_s=costs.hidden * extra + costs.lost_s[mesh, end] - costs.lost_s[mesh, begin],
        beta=costs.beta[mesh],
    )
