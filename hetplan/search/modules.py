"""The best layout of a model's modules on a cluster, given what the data is like.

Every unit (see `plan.modules`) takes a group, tp, pp and dp; units have ranks of their own, or all share all ranks
(then all but the last run on one stage each); the number of microbatches is any that divides the batch. For a number
`M` of microbatches, an option of a unit has `n` devices, the mean `L` of its stage's seconds and its ending `e`. With
disjoint units

    step >= sum over the longest way of (pp L) + (M - 1) max(L) + max(e)

because the makespan is convex in the seconds (see `plan.module_time`). All combinations are laid out by this bound;
they are priced by `estimate_modules` from the least bound up, until the next bound is no better than the best price:
then the best is proved best of its space. When `effort` prices are spent first, the next bound is what is proved.

Where combinations are too many to lay out, options that another beats in devices, seconds, fill and ending at once are
left out first; they cannot have the least bound, so the bound still holds, and the answer is marked as not proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from hetplan.costs.modules import ModulePrices
from hetplan.costs.records import Floats
from hetplan.costs.samples import is_language
from hetplan.errors import InfeasibleError
from hetplan.plan.module_time import Draws, ModuleEstimate, busy_dj, estimate_modules, exposed_s
from hetplan.plan.modules import ModuleLayout, Placement, check_modules, unit_edges, units_of
from hetplan.plan.rules_model import layers_tp
from hetplan.specs.cluster import Group
from hetplan.specs.workload import Recompute, Sharding

MOST_STAGES = 16
MOST_COMBINATIONS = 3_000_000
SLACK = 1 + 1e-9
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRequest:
    """What to search."""

    global_batch: int
    effort: int = 400
    """Layouts to price at most."""
    microbatches: tuple[int, ...] | None = None
    """Only these numbers; None: all that divide the batch."""
    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] = ("none", "full")
    sharding: Sharding = "optimizer"
    arrangement: tuple[str, ...] = ("disjoint", "colocated")
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResult:
    """The best layout found and what is proved about it."""

    layout: ModuleLayout
    estimate: ModuleEstimate
    bound_s: float
    proved: bool
    """Every layout of the space is at least as slow."""
    priced: int
    dropped: dict[str, int] = field(default_factory=dict)
    space: str = ""

    @property
    def gap(self) -> float:
        """(value - bound) / value."""
        return max(0.0, 1.0 - self.bound_s / self.estimate.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Options of one unit under one number of microbatches, side by side."""

    placements: tuple[Placement, ...]
    devices: Floats
    stage_s: Floats
    fill_s: Floats
    ending_s: Floats

    def taken(self, keep: Floats) -> _Options:
        index = np.flatnonzero(keep)
        return _Options(
            placements=tuple(self.placements[i] for i in index.tolist()),
            devices=self.devices[index],
            stage_s=self.stage_s[index],
            fill_s=self.fill_s[index],
            ending_s=self.ending_s[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    bound_s: float
    num_microbatches: int
    placements: tuple[Placement, ...]
    """Disjoint ones do not have their ranks yet."""
    colocated: bool = False


def search_modules(prices: ModulePrices, draws: Draws, request: ModuleRequest, *, joint: bool = False) -> ModuleResult:
    """Return the best layout of the space; `joint`: all modules as one chain on one grid, as plain pipelines do.

    Raises:
        InfeasibleError: none fits.
    """
    space = _Space(prices, draws, request, joint=joint)
    candidates = sorted(space.candidates(), key=lambda candidate: candidate.bound_s)
    best: tuple[ModuleLayout, ModuleEstimate] | None = None
    dropped: dict[str, int] = {}
    bound_s = candidates[0].bound_s if candidates else 0.0
    priced = 0
    for candidate in candidates:
        bound_s = candidate.bound_s
        if best is not None and (bound_s >= best[1].step_s * (1 - TOLERANCE) or priced >= request.effort):
            break
        layout = space.layout(candidate)
        broken = check_modules(layout, prices.prices.model, prices.prices.cluster)
        if broken:
            dropped[broken[0].rule] = dropped.get(broken[0].rule, 0) + 1
            continue
        estimate = estimate_modules(layout, prices, draws)
        priced += 1
        if not estimate.fits:
            dropped["memory"] = dropped.get("memory", 0) + 1
        elif best is None or estimate.step_s < best[1].step_s:
            best = (layout, estimate)
    else:
        bound_s = best[1].step_s if best is not None else bound_s
    if best is None:
        raise InfeasibleError(_why_none(dropped, len(candidates)))
    bound_s = min(best[1].step_s, space.cut_s, space.least_s if space.pruned else bound_s)
    return ModuleResult(
        layout=best[0],
        estimate=best[1],
        bound_s=bound_s,
        proved=bound_s >= best[1].step_s * (1 - TOLERANCE),
        priced=priced,
        dropped=dropped,
        space=space.words(len(candidates)),
    )


def _why_none(dropped: dict[str, int], count: int) -> str:
    if not count:
        return "no combination of grids fits the devices and divides the batch: widen the degrees or the batch"
    reasons = ", ".join(f"{reason} {times} times" for reason, times in sorted(dropped.items()))
    return f"none of {count} layouts fits ({reasons}): add devices, recompute, or shard more"


class _Space:
    """Options and their combinations."""

    def __init__(self, prices: ModulePrices, draws: Draws, request: ModuleRequest, *, joint: bool) -> None:
        self._prices = prices
        self._draws = draws
        self._request = request
        model = prices.prices.model
        self._units = (tuple(module.name for module in model.modules),) if joint else units_of(model)
        self._edges = unit_edges(model, self._units)
        self._groups = [group for group in prices.prices.cluster.groups if group.name not in request.exclude]
        self.pruned = False
        """Whether beaten options were left out."""
        self.least_s = np.inf
        """The least bound of all layouts."""
        self.cut_s = np.inf
        """No layout that was not kept has a bound below this."""

    def words(self, count: int) -> str:
        """Return the space in words."""
        kinds = " or ".join(self._request.arrangement)
        units = ", ".join("+".join(unit) for unit in self._units)
        counts = len(self._microbatches())
        return f"{count} layouts of {units}, {kinds}, one grid a unit, {counts} numbers of microbatches"

    def layout(self, candidate: _Candidate) -> ModuleLayout:
        """Return the layout of a candidate."""
        placements = candidate.placements if candidate.colocated else self._ranked(candidate.placements)
        return ModuleLayout(
            placements=placements,
            num_microbatches=candidate.num_microbatches,
            samples=self._request.global_batch // candidate.num_microbatches,
            sharding=self._request.sharding,
        )

    def _microbatches(self) -> list[int]:
        batch = self._request.global_batch
        wanted = self._request.microbatches
        return [m for m in range(1, batch + 1) if batch % m == 0 and (wanted is None or m in wanted)]

    def candidates(self) -> Iterator[_Candidate]:
        """Yield every combination with its bound."""
        for count in self._microbatches():
            options = [self._options(unit, count) for unit in self._units]
            if "disjoint" in self._request.arrangement and all(one.placements for one in options):
                yield from self._disjoint(options, count)
            if "colocated" in self._request.arrangement and len(self._units) > 1:
                yield from self._colocated(options, count)

    def _options(self, unit: tuple[str, ...], count: int) -> _Options:
        rows = [row for group in self._groups for row in self._rows(unit, group, count)]
        table = np.array([row[1:] for row in rows], dtype=np.float64).reshape(len(rows), 3)
        placements = tuple(row[0] for row in rows)
        return _Options(
            placements=placements,
            devices=np.array([float(placement.num_ranks) for placement in placements]),
            stage_s=table[:, 0],
            fill_s=table[:, 1],
            ending_s=table[:, 2],
        )

    def _rows(self, unit: tuple[str, ...], group: Group, count: int) -> Iterator[tuple[Placement, float, float, float]]:
        """Yield a placement with its stage, fill and ending seconds."""
        request, samples = self._request, self._request.global_batch // count
        layers = [layer for name in unit for layer in self._prices.module(name).layers]
        fast = group.devices_per_node * group.domain_nodes
        degrees = [tp for tp in layers_tp(layers) if tp <= fast and (request.tp is None or tp in request.tp)]
        stages = [pp for pp in request.pp or range(1, MOST_STAGES + 1) if pp <= len(layers)]
        for tp, recompute, dp in product(degrees, request.recompute, range(1, samples + 1)):
            if samples % dp or tp * dp > group.num_devices:
                continue
            one = Placement(modules=unit, group=group.name, tp=tp, dp=dp, recompute=recompute)
            alone_s = float(busy_dj(one, self._prices, self._draws, count)[0].mean())
            for pp in stages:
                if tp * dp * pp <= group.num_devices:
                    placement = replace(one, pp=pp)
                    stage_s = alone_s * self._prices.share(placement.parts, group.name, recompute, pp)
                    end_s = exposed_s(placement, self._prices, request.sharding, stage_s)
                    yield placement, stage_s, pp * stage_s, end_s

    def _disjoint(self, options: Sequence[_Options], count: int) -> Iterator[_Candidate]:
        if np.prod([float(len(one.placements)) for one in options]) > MOST_COMBINATIONS:
            options = [_unbeaten(one) for one in options]
            self.pruned = True
        shape = tuple(len(one.placements) for one in options)
        bound = self._bound(options, count)
        for group in self._groups:
            used: Floats = np.zeros(shape)
            for u, one in enumerate(options):
                here = np.array([placement.group == group.name for placement in one.placements])
                used = used + _along(one.devices * here, u, len(shape))
            bound = np.where(used <= group.num_devices, bound, np.inf)
        self.least_s = min(self.least_s, float(bound.min(initial=np.inf)))
        flat = bound.ravel()
        order = np.argsort(flat, kind="stable")[: 5 * self._request.effort]
        if len(order) < int(np.isfinite(flat).sum()):
            self.cut_s = min(self.cut_s, float(flat[order[-1]]))
        for place in order[np.isfinite(flat[order])].tolist():
            picks = np.unravel_index(place, shape)
            chosen = tuple(one.placements[int(i)] for one, i in zip(options, picks, strict=True))
            yield _Candidate(bound_s=float(flat[place]), num_microbatches=count, placements=chosen)

    def _bound(self, options: Sequence[_Options], count: int) -> Floats:
        """Return the bound of every combination, one axis a unit."""
        width = len(options)
        way: list[Floats] = []
        for u, one in enumerate(options):
            before = [way[a] for a, b in self._edges if b == u]
            start = before[0] if before else np.zeros((1,) * width)
            for other in before[1:]:
                start = np.maximum(start, other)
            way.append(start + _along(one.fill_s, u, width))
        longest, slowest = way[0], _along(options[0].stage_s, 0, width)
        end: Floats = _along(options[0].ending_s, 0, width)
        for u in range(1, width):
            longest = np.maximum(longest, way[u])
            slowest = np.maximum(slowest, _along(options[u].stage_s, u, width))
            end = np.maximum(end, _along(options[u].ending_s, u, width))
        shape = tuple(len(one.placements) for one in options)
        found: Floats = np.broadcast_to(longest + (count - 1) * slowest + end, shape)
        return found

    def _ranked(self, chosen: Sequence[Placement]) -> tuple[Placement, ...]:
        """Return placements with ranks of their own, the language model's first."""
        order = sorted(range(len(chosen)), key=lambda u: not self._is_language(chosen[u]))
        first: dict[int, int] = {}
        free = 0
        for u in order:
            first[u] = free
            free += chosen[u].num_ranks
        return tuple(replace(one, first_rank=first[u]) for u, one in enumerate(chosen))

    def _is_language(self, placement: Placement) -> bool:
        return any(is_language(self._prices.module(name)) for name in placement.modules)

    def _colocated(self, options: Sequence[_Options], count: int) -> Iterator[_Candidate]:
        """Yield layouts whose units share all ranks: the best options of each for every number of ranks."""
        found = []
        for group in self._groups:
            for num_ranks in sorted({float(n) for n in options[-1].devices}):
                picks = [_on(one, group.name, num_ranks, alone=u + 1 < len(options)) for u, one in enumerate(options)]
                found += [self._together(chosen, count) for chosen in product(*picks)]
        self.least_s = min([self.least_s, *(candidate.bound_s for candidate in found)])
        yield from found

    def _together(self, chosen: Sequence[tuple[Placement, float, float]], count: int) -> _Candidate:
        *turns, (_, last_s, _) = chosen
        fill_s = chosen[-1][0].pp * last_s
        bound = sum(count * stage_s for _, stage_s, _ in turns) + fill_s + (count - 1) * last_s
        bound += max(end_s for _, _, end_s in chosen)
        placements = tuple(one for one, _, _ in chosen)
        return _Candidate(bound_s=bound, num_microbatches=count, placements=placements, colocated=True)


def _along(values: Floats, axis: int, width: int) -> Floats:
    """Return values along one of `width` axes."""
    shape = [1] * width
    shape[axis] = len(values)
    return values.reshape(shape)


def _on(options: _Options, group: str, num_ranks: float, *, alone: bool) -> list[tuple[Placement, float, float]]:
    """Return the options on exactly so many ranks of a group; `alone`: on one stage only."""
    return [
        (placement, float(options.stage_s[i]), float(options.ending_s[i]))
        for i, placement in enumerate(options.placements)
        if placement.group == group and placement.num_ranks == num_ranks and (placement.pp == 1 or not alone)
    ]


def _unbeaten(options: _Options) -> _Options:
    """Return the options that no other of their group beats in devices, stage, fill and ending at once."""
    table = np.stack([options.devices, options.stage_s, options.fill_s, options.ending_s], axis=1)
    groups = np.array([hash(placement.group) for placement in options.placements])
    order = np.lexsort(table.T[::-1])
    kept: list[int] = []
    for i in order.tolist():
        rivals = [k for k in kept if groups[k] == groups[i]]
        if not rivals or not (table[rivals] <= table[i] * SLACK).all(axis=1).any():
            kept.append(i)
    keep = np.zeros(len(table))
    keep[kept] = 1.0
    return options.taken(keep)
