"""What a step of a module layout takes, over many batches drawn from the data.

For one drawn batch, global microbatch `j` keeps a stage of unit `u` busy for

    L[j, u] = share(pp) * max over the dp shards of the unit's forward and backward seconds for the shard's samples

(`share`: see `costs.modules`). Units with ranks of their own form a flow shop whose machines are all stages of all
units and the links between units,

    end[j, s] = max(end[j - 1, s], end[j, every s before it]) + L[j, unit of s]

the steady state and the fill of 1F1B with forward and backward of a microbatch taken as one piece. Units that share
their ranks take turns: those of one stage first do all their microbatches. Gradients then meet, each unit's among its
own ranks, and weights are updated; the slowest unit counts. The prediction is the mean over the draws, `E[max]` and not
the max of means, with its standard deviation; makespans are convex in `L`, so the same formulas at the mean `L` are a
lower bound (Jensen), which the search uses.

Samples go to shards in the order they come, or *balanced*: then a shard of a microbatch is taken to hold the mean, or
the largest sample of the batch where that is more; balancing by `hetplan.balance` is within a few percent of that.

Suffixes: `_d` draws, `_j` microbatches, `_b` samples of a batch, `_f` features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hetplan.costs.constants import constants_of
from hetplan.costs.modules import ModulePrices
from hetplan.costs.records import Floats, Holders, StageOption
from hetplan.costs.samples import TOKENS, is_language
from hetplan.plan.modules import ModuleLayout, Placement, unit_edges
from hetplan.specs.model import Module
from hetplan.specs.workload import Sharding

Assign = Literal["arrival", "balanced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Batches drawn from the data."""

    features_dbf: Mapping[str, Floats]
    """Module -> (draws, samples, features)."""
    assign: Assign = "arrival"

    @property
    def num_draws(self) -> int:
        """Batches."""
        return len(next(iter(self.features_dbf.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEstimate:
    """One unit of a layout."""

    name: str
    stage_s: float
    """Mean seconds a stage works on one global microbatch, the slowest shard of it."""
    mean_stage_s: float
    """The same for the mean shard: the difference is what skewed data costs."""
    busy: float
    """Part of the step in which its ranks work, the mean shard's work counted."""
    ending_s: float
    """Gradients that nothing hides, weight gathers and the update."""
    boundary_s: float
    """One microbatch's way to the units behind, and its gradient's way back."""
    memory_bytes: float
    capacity_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleEstimate:
    """What a layout costs."""

    step_s: float
    spread_s: float
    """Standard deviation from batch to batch."""
    standard_error_s: float
    """Of the mean, from the number of draws."""
    units: tuple[UnitEstimate, ...]
    step_d: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether every unit's peak fits its devices."""
        return all(unit.memory_bytes <= unit.capacity_bytes for unit in self.units)


def estimate_modules(layout: ModuleLayout, prices: ModulePrices, draws: Draws) -> ModuleEstimate:
    """Return what a valid layout costs."""
    clock = _Clock(layout, prices, draws)
    step_d = clock.steps()
    step_s = float(step_d.mean())
    units = tuple(clock.unit(u, step_s) for u in range(len(layout.placements)))
    spread = float(step_d.std(ddof=1)) if len(step_d) > 1 else 0.0
    return ModuleEstimate(
        step_s=step_s,
        spread_s=spread,
        standard_error_s=spread / len(step_d) ** 0.5,
        units=units,
        step_d=tuple(step_d.tolist()),
    )


def shard_features(features_dbf: Floats, num_microbatches: int, dp: int) -> Floats:
    """Return the sums of every shard, shape (draws, microbatches, dp, features)."""
    draws, samples, width = features_dbf.shape
    sums: Floats = features_dbf.reshape(draws, num_microbatches, dp, samples // (num_microbatches * dp), width).sum(
        axis=3
    )
    return sums


def busy_dj(placement: Placement, prices: ModulePrices, draws: Draws, num_microbatches: int) -> tuple[Floats, Floats]:
    """Return the seconds of one stage for the slowest and the mean shard, shape (draws, microbatches)."""
    whole: Floats = np.zeros(1)
    single: Floats = np.zeros(1)
    for name in placement.modules:
        features = shard_features(draws.features_dbf[name], num_microbatches, placement.dp)
        cost = prices.costs(name, placement.group, placement.tp_of(name), placement.recompute)
        whole = whole + cost.forward.at(features) + cost.backward.at(features)
        if draws.assign == "balanced":
            each = draws.features_dbf[name]
            single = single + cost.forward.at(each) + cost.backward.at(each)
    share = prices.share(placement.parts, placement.group, placement.recompute, placement.pp, placement.cut)
    mean_dj = whole.mean(axis=2) * share
    if draws.assign == "arrival":
        return whole.max(axis=2) * share, mean_dj
    level_d = np.maximum(whole.mean(axis=(1, 2)), single.max(axis=1)) * share
    return np.repeat(level_d[:, None], num_microbatches, axis=1), mean_dj


def exposed_s(placement: Placement, prices: ModulePrices, sharding: Sharding, stage_s: float) -> float:
    """Return the seconds a unit's gradients and update take that the last backward pass does not hide.

    The backward pass of the last microbatch is taken as half of the stage's `stage_s`.
    """
    costs = [prices.costs(name, placement.group, tp, placement.recompute) for name, tp in placement.parts]
    params = sum(cost.params for cost in costs) / placement.pp
    if params <= 0:
        return 0.0
    ranks = placement.dp * placement.cp
    group = prices.prices.cluster.group(placement.group)
    update_s = prices.prices.optimizer_s(placement.group, params / (1 if sharding == "none" else ranks))
    if ranks == 1:
        return update_s
    per_node = max(1, min(ranks, group.devices_per_node // placement.tp))
    holder = Holders(group=placement.group, num_ranks=ranks, ranks_per_node=per_node, tp=placement.tp)
    cost = prices.prices.sync(params * placement.tp, (holder,), sharding)
    hidden_s = prices.prices.calibration.overlap.gradients * stage_s / 2
    return max(0.0, cost.reduce_s - hidden_s) + cost.gather_s + update_s


class _Clock:
    """Times of one layout; works out what several answers need once."""

    def __init__(self, layout: ModuleLayout, prices: ModulePrices, draws: Draws) -> None:
        self._layout = layout
        self._prices = prices
        self._draws = draws
        units = tuple(placement.modules for placement in layout.placements)
        self._edges = unit_edges(prices.prices.model, units)
        self._busy = [busy_dj(p, prices, draws, layout.num_microbatches) for p in layout.placements]
        self._boundary = [self._boundary_s(u) for u in range(len(units))]

    def steps(self) -> Floats:
        """Return the seconds of a step, one a draw."""
        layout = self._layout
        turns = [u for u in range(len(layout.placements)) if self._takes_turns(u)]
        before_d = sum((self._busy[u][0].sum(axis=1) for u in turns), np.zeros(self._draws.num_draws))
        end_d = self._flow([u for u in range(len(layout.placements)) if u not in turns])
        return before_d + end_d + max(self._exposed_s(u) for u in range(len(layout.placements)))

    def _takes_turns(self, u: int) -> bool:
        """Whether a unit shares its ranks with a later one and does all its work before that."""
        own = self._layout.placements[u]
        return any(own.first_rank == other.first_rank for other in self._layout.placements[u + 1 :])

    def _flow(self, units: list[int]) -> Floats:
        """Return the end of the flow shop over the stages and links of `units`."""
        draws = self._draws.num_draws
        end: dict[tuple[int, int], Floats] = {}
        zero = np.zeros(draws)
        for j in range(self._layout.num_microbatches):
            ready: dict[int, Floats] = {}
            for u in units:
                seconds = self._busy[u][0][:, j]
                at = zero
                for sender, receiver in self._edges:
                    if receiver == u and sender in ready:
                        at = np.maximum(at, ready[sender])
                for stage in range(self._layout.placements[u].pp):
                    at = np.maximum(at, end.get((u, stage), zero)) + seconds
                    end[u, stage] = at
                if self._boundary[u] > 0:
                    at = np.maximum(at, end.get((u, -1), zero)) + self._boundary[u]
                    end[u, -1] = at
                ready[u] = at
        return np.maximum.reduce(list(end.values())) if end else zero

    def _exposed_s(self, u: int) -> float:
        stage_s = float(self._busy[u][0].mean())
        return exposed_s(self._layout.placements[u], self._prices, self._layout.sharding, stage_s)

    def _boundary_s(self, u: int) -> float:
        """Return the seconds one microbatch's output takes to the units behind, and its gradient back."""
        receivers = [b for a, b in self._edges if a == u]
        if not receivers:
            return 0.0
        placement = self._layout.placements[u]
        return max(self._transfer_s(placement, self._layout.placements[b]) for b in receivers)

    def _transfer_s(self, sender: Placement, receiver: Placement) -> float:
        prices = self._prices.prices
        module = self._prices.module(sender.modules[-1])
        chain = prices.model.chain
        layer = max(i for i, one in enumerate(chain) if one is module.layers[-1])
        mean = float(self._draws.features_dbf[module.name][..., TOKENS].mean())
        stated = prices.boundary_bytes(layer) / (module.layers[-1].width * prices.workload.activation_bytes)
        options = [
            StageOption(group=p.group, tp=p.tp, cp=p.cp, dp=p.dp, samples=max(1, self._layout.samples // p.dp))
            for p in (sender, receiver)
        ]
        together = sender.first_rank == receiver.first_rank
        one_way_s = prices.boundary_s(options[0], options[1], layer, same_node=together)
        back = 2.0 if _sends_back(module) else 1.0
        return back * one_way_s * mean / max(stated, 1.0)

    def unit(self, u: int, step_s: float) -> UnitEstimate:
        """Return what the estimate says of one unit."""
        placement = self._layout.placements[u]
        largest, mean = self._busy[u]
        return UnitEstimate(
            name=placement.name,
            stage_s=float(largest.mean()),
            mean_stage_s=float(mean.mean()),
            busy=min(1.0, float(mean.sum(axis=1).mean()) / step_s),
            ending_s=self._exposed_s(u),
            boundary_s=self._boundary[u],
            memory_bytes=self._memory_bytes(u),
            capacity_bytes=self._prices.prices.capacity_bytes(placement.group),
        )

    def _memory_bytes(self, u: int) -> float:
        """Return the peak of a unit's fullest rank in the mean batch: states, activations in flight, logits."""
        layout, placement = self._layout, self._layout.placements[u]
        workload = self._prices.prices.workload
        constants = constants_of(self._prices.prices.cluster.group(placement.group), self._prices.prices.calibration)
        states = saved = logits = 0.0
        for name, tp in placement.parts:
            cost = self._prices.costs(name, placement.group, tp, placement.recompute)
            shard = 1 if layout.sharding == "none" else placement.dp * placement.cp
            optimizer = workload.optimizer_bytes / shard
            states += cost.params * (workload.weight_bytes + workload.gradient_bytes + optimizer)
            states += cost.frozen_params * workload.weight_bytes
            features = shard_features(self._draws.features_dbf[name], layout.num_microbatches, placement.dp)
            saved += float(cost.saved_bytes.at(features).max(axis=2).mean())
            logits += float(cost.logits_bytes.at(features).max(axis=2).mean())
        in_flight = layout.num_microbatches if self._takes_turns(u) else min(layout.num_microbatches, self._depth(u))
        activations = in_flight * saved / placement.pp * (1 + constants.memory_overhead_fraction)
        return states / placement.pp + activations + logits + constants.reserve_bytes

    def _depth(self, u: int) -> int:
        """Return the stages from a unit's first to the end of the longest way behind it."""
        behind = [self._depth(b) for a, b in self._edges if a == u and not self._takes_turns(b)]
        return self._layout.placements[u].pp + max(behind, default=0)


def _sends_back(module: Module) -> bool:
    """Whether a gradient comes back into a module: something in it, or before it, trains."""
    return any(layer.gradients != "none" for layer in module.layers) or is_language(module)
