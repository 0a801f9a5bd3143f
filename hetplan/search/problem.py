"""The search problem in numbers: which meshes a stage may run on, and what every span of layers costs on each.

This is the one file of the pattern search that rounds: microbatch counts are rounded down in bounds (never more
samples than fit below a step time), device counts are whole.

Legend of array suffixes: `m` meshes, `r` recompute modes, `l` layers, `ll` spans (first, end), `g` groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, Holders, ShardDegrees, StageOption
from hetplan.errors import CalibrationError
from hetplan.plan.limits import Limits
from hetplan.plan.placement import places_of
from hetplan.plan.rules_model import valid_tp
from hetplan.specs.model import Experts
from hetplan.specs.workload import Recompute, Sharding

MANY_RANKS = 1 << 20
"""Shard degree that stands for 'as many ranks as one likes': leaves shared-out states next to no memory."""
LARGEST_MICROBATCH = 32
SMALL_DIVISOR = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One way to run a stage, whatever its layers: a mesh shape on a group."""

    group: int
    name: str
    tp: int
    cp: int
    dp: int
    ep: int

    @property
    def size(self) -> int:
        """Devices."""
        return self.tp * self.cp * self.dp

    def option(self, microbatch: int, recompute: Recompute) -> StageOption:
        """Return the cost model's name for it."""
        return StageOption(
            group=self.name,
            tp=self.tp,
            cp=self.cp,
            dp=self.dp,
            ep=self.ep,
            samples=microbatch // self.dp,
            recompute=recompute,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the pattern search decides over."""

    prices: Prices
    limits: Limits
    meshes: tuple[Mesh, ...]
    devices_g: tuple[int, ...]
    domain_g: tuple[int, ...]
    """Devices of the largest fast-link domain of each group."""
    microbatches: tuple[int, ...]
    batch: int
    dropped: dict[str, int]
    """Reason -> meshes or groups left out."""
    seconds_memo: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    """Microbatch -> forward and backward seconds, (meshes, modes, layers)."""
    memory_memo: dict[tuple[StageOption, Sharding, int], tuple[Floats, Floats]] = field(default_factory=dict)
    """Option, sharding and its degree -> the part of a device each span takes; shared among problems of one cluster."""
    pace_memo: dict[tuple[Sharding, int, int | None], dict[int, tuple[float, float, float]]] = field(
        default_factory=dict
    )
    """How a step ends -> mesh -> seconds a parameter (see `after.Ending`)."""

    @property
    def num_layers(self) -> int:
        """Layers of the chain."""
        return len(self.prices.model.chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Costs of every span on every mesh at one microbatch size under one sharding."""

    microbatch: int
    sharding: Sharding
    recomputes: tuple[Recompute, ...]
    usable_m: np.ndarray
    """Meshes on which at least one layer fits."""
    forward_mrl: Floats
    backward_mrl: Floats
    prefix_mrl: Floats
    """Forward and backward seconds of the layers before each, shape (meshes, modes, layers + 1)."""
    fixed_mrll: Floats
    flight_mrll: Floats
    """Bytes a span takes: fixed + microbatches in flight x flight, as a fraction of the device's memory."""
    near_mm: Floats
    far_mm: Floats
    """Seconds one microbatch takes from mesh to mesh, inside a fast-link domain and across nodes."""
    unit_m: Floats
    """Seconds of the cheapest layer kind that repeats (a decoder), fastest mode."""
    weight_l: Floats
    """Layers in units of `unit_m`: no mesh runs layer l faster than unit_m * weight_l."""
    fit_memo: dict[int, np.ndarray] = field(default_factory=dict)
    most_memo: dict[int, np.ndarray] = field(default_factory=dict)
    """Microbatches held -> most layers of a kind on a stage."""
    block_memo: dict[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    """What bounds ask of these tables (see `block_costs` and `patterns.most_layers`)."""

    def furthest_fit(self, held: int) -> np.ndarray:
        """Return the end of the longest span from each layer that fits with `held` microbatches, (m, r, l + 1)."""
        if held not in self.fit_memo:
            fits = self.fixed_mrll + held * self.flight_mrll <= 1.0
            num = fits.shape[-1]
            ends = np.arange(num)
            inside = fits & (ends[None, :] > ends[:, None])
            self.fit_memo[held] = np.max(np.where(inside, ends, 0), axis=-1)
        return self.fit_memo[held]


def build_problem(prices: Prices, limits: Limits, known: Problem | None = None) -> Problem:
    """Return the search problem; meshes and groups that cannot be used are counted in `dropped`.

    `known`: a problem of the same prices under other limits, whose costs need not be worked out again.
    """
    dropped: dict[str, int] = {}
    places = places_of(prices)
    devices, domains, meshes = [], [], []
    for index, group in enumerate(prices.cluster.groups):
        _, sizes = np.unique(places[group.name].domain_d, return_counts=True)
        devices.append(group.num_devices)
        domains.append(int(sizes.max(initial=0)))
        reason = _unusable(prices, limits, group.name)
        if reason:
            dropped[reason] = dropped.get(reason, 0) + 1
            continue
        meshes.extend(_group_meshes(prices, limits, (index, group.name), (devices[-1], domains[-1])))
    return Problem(
        prices=prices,
        limits=limits,
        meshes=tuple(meshes),
        devices_g=tuple(devices),
        domain_g=tuple(domains),
        microbatches=microbatch_sizes(prices.workload.global_batch, limits),
        batch=prices.workload.global_batch,
        dropped=dropped,
        memory_memo={} if known is None else known.memory_memo,
    )


def _unusable(prices: Prices, limits: Limits, group: str) -> str:
    if group in limits.exclude:
        return f"group {group} excluded by request"
    try:
        prices.peak_flop_per_s(group)
    except CalibrationError as error:
        return str(error)
    return ""


def _group_meshes(prices: Prices, limits: Limits, group: tuple[int, str], room: tuple[int, int]) -> list[Mesh]:
    index, name = group
    num_devices, domain = room
    largest_tp = domain if limits.tp_within_node else num_devices
    tps = [
        tp
        for tp in valid_tp(prices.model)
        if tp <= largest_tp and (tp in limits.tp if limits.tp is not None else _packs_well(tp, domain))
    ]
    found = []
    for tp, cp, (dp, ep) in product(tps, limits.cp, _expert_meshes(prices, limits)):
        mesh = Mesh(group=index, name=name, tp=tp, cp=cp, dp=dp, ep=ep)
        if mesh.size <= num_devices and prices.workload.seq_len % (2 * cp if cp > 1 else 1) == 0:
            found.append(mesh)
    return found


def _packs_well(tp: int, domain: int) -> bool:
    """Return whether tp groups leave less than a quarter of a domain idle."""
    return tp > domain or (domain // tp) * tp > 0.75 * domain


def _expert_meshes(prices: Prices, limits: Limits) -> list[tuple[int, int]]:
    """Return (dp, ep) pairs: the user's dp, widened to what each expert degree needs."""
    experts = {o.num_experts for layer in prices.model.chain for o in layer.operators if isinstance(o, Experts)}
    if not experts:
        return [(dp, 1) for dp in limits.stage_dp]
    degrees = [ep for ep in (1, 2, 4, 8, 16, 32, 64) if all(count % ep == 0 for count in experts)]
    chosen = [ep for ep in degrees if limits.ep is None or ep in limits.ep]
    return sorted({(max(dp, ep), ep) for dp in limits.stage_dp for ep in chosen if max(dp, ep) % ep == 0})


def microbatch_sizes(global_batch: int, limits: Limits) -> tuple[int, ...]:
    """Return the microbatch sizes the search tries: the user's, else powers of two.

    Where few of these divide the batch, its small divisors are tried as well.
    """
    if limits.microbatch is not None:
        return tuple(sorted({size for size in limits.microbatch if 1 <= size <= global_batch}))
    largest = LARGEST_MICROBATCH * max(limits.stage_dp)
    powers = {size for size in (2**k for k in range(20)) if size <= min(global_batch, largest)}
    divisors = {d for d in range(1, SMALL_DIVISOR + 1) if global_batch % d == 0}
    return tuple(sorted(powers if global_batch % 8 == 0 else powers | divisors))


def travelling(problem: Problem, tables: Tables, ranks: int) -> Tables:
    """Return the tables with weights (full sharding) and gradients that travel with every microbatch.

    They travel among `ranks` data-parallel ranks, in the best place these can be.
    """
    forward, backward = tables.forward_mrl.copy(), tables.backward_mrl.copy()
    beside = np.maximum if problem.prices.calibration.overlap.gathers else np.add
    for m in np.flatnonzero(np.isfinite(forward).any(axis=(1, 2))).tolist():
        gather_l, reduce_l = _travel(problem, tables.microbatch, m, ranks)
        gather_l = gather_l if tables.sharding == "full" else np.zeros_like(gather_l)
        forward[m] = beside(forward[m], gather_l[None, :])
        backward[m] = beside(backward[m], (gather_l + reduce_l)[None, :])
    total = forward + backward
    unit_m, weight_l = _units(total.min(axis=1))
    return replace(
        tables,
        forward_mrl=forward,
        backward_mrl=backward,
        prefix_mrl=np.concatenate([np.zeros((*total.shape[:2], 1)), np.cumsum(total, axis=2)], axis=2),
        unit_m=unit_m,
        weight_l=weight_l,
        block_memo={},
    )


def build_tables(problem: Problem, microbatch: int, sharding: Sharding, degree: int, ranks: int = 1) -> Tables | None:
    """Return the cost tables of one microbatch size, or None where no mesh can run it.

    `degree`: data-parallel ranks that share states, for memory (`MANY_RANKS` for bounds). `ranks`: those among which
    sharded weights or gradients travel, for seconds.
    """
    tables = _resting(problem, microbatch, sharding, degree)
    if tables is None or ranks == 1 or sharding not in ("gradients", "full"):
        return tables
    return travelling(problem, tables, ranks)


def _resting(problem: Problem, microbatch: int, sharding: Sharding, degree: int) -> Tables | None:
    prices, recomputes = problem.prices, problem.limits.recompute
    able = [
        m
        for m, mesh in enumerate(problem.meshes)
        if microbatch % mesh.dp == 0 and any(prices.covers(mesh.option(microbatch, mode)) for mode in recomputes)
    ]
    if not able:
        return None
    num_m, num_r, num_l = len(problem.meshes), len(recomputes), problem.num_layers
    forward, backward = (seconds.copy() for seconds in _seconds(problem, microbatch, able))
    fixed = np.full((num_m, num_r, num_l + 1, num_l + 1), np.inf)
    flight = np.zeros((num_m, num_r, num_l + 1, num_l + 1))
    for m, mode in product(able, range(num_r)):
        key = (problem.meshes[m].option(microbatch, recomputes[mode]), sharding, degree)
        fixed[m, mode], flight[m, mode] = problem.memory_memo.get(key) or _parts(prices, *key)
        problem.memory_memo[key] = fixed[m, mode], flight[m, mode]
    total = forward + backward
    prefix = np.concatenate([np.zeros((num_m, num_r, 1)), np.cumsum(total, axis=2)], axis=2)
    near, far = _transfers(problem, microbatch, able)
    smallest = np.array([[fixed[m, :, i, i + 1] + flight[m, :, i, i + 1] for i in range(num_l)] for m in range(num_m)])
    unit_m, weight_l = _units(total.min(axis=1))
    return Tables(
        microbatch=microbatch,
        sharding=sharding,
        recomputes=recomputes,
        usable_m=np.any(smallest <= 1.0, axis=(1, 2)),
        forward_mrl=forward,
        backward_mrl=backward,
        prefix_mrl=prefix,
        fixed_mrll=fixed,
        flight_mrll=flight,
        near_mm=near,
        far_mm=far,
        unit_m=unit_m,
        weight_l=weight_l,
    )


def _parts(prices: Prices, option: StageOption, sharding: Sharding, degree: int) -> tuple[Floats, Floats]:
    """Return the part of the device each span takes, fixed and for each microbatch in flight, (layers + 1) squared."""
    capacity = prices.capacity_bytes(option.group)
    base, per_flight = prices.memory_matrices(option, sharding, ShardDegrees(dense=degree, expert=degree))
    return base / capacity, per_flight / capacity


def _seconds(problem: Problem, microbatch: int, able: list[int]) -> tuple[Floats, Floats]:
    """Return forward and backward seconds with communication, (meshes, modes, layers)."""
    if microbatch not in problem.seconds_memo:
        recomputes = problem.limits.recompute
        options = [problem.meshes[m].option(microbatch, mode) for m in able for mode in recomputes]
        costs = problem.prices.kept_table(options)
        shape = (len(problem.meshes), len(recomputes), problem.num_layers)
        forward, backward = np.full(shape, np.inf), np.full(shape, np.inf)
        forward[able] = costs.forward_total_s.reshape(len(able), *shape[1:])
        backward[able] = costs.backward_total_s.reshape(len(able), *shape[1:])
        problem.seconds_memo[microbatch] = (forward, backward)
    return problem.seconds_memo[microbatch]


def _travel(problem: Problem, microbatch: int, m: int, ranks: int) -> tuple[Floats, Floats]:
    """Return seconds to gather each layer's weights and to reduce-scatter its gradients, at their best place."""
    mesh = problem.meshes[m]
    option = mesh.option(microbatch, problem.limits.recompute[0])
    packed = max(1, problem.domain_g[mesh.group] // mesh.tp)
    found = [
        problem.prices.gathers_s(
            option, (Holders(group=mesh.name, num_ranks=ranks, ranks_per_node=min(near, ranks), tp=mesh.tp),)
        )
        for near in {1, packed}
    ]
    return np.minimum.reduce([g for g, _ in found]), np.minimum.reduce([r for _, r in found])


def _transfers(problem: Problem, microbatch: int, able: list[int]) -> tuple[Floats, Floats]:
    """Return seconds from mesh to mesh, near and far; the narrowest layer's, so that no boundary is cheaper."""
    chain = problem.prices.model.chain
    widths = [(layer.tokens_per_sample or problem.prices.workload.seq_len) * layer.width for layer in chain[:-1]]
    layer = int(np.argmin(widths)) if widths else 0
    shape = (len(problem.meshes), len(problem.meshes))
    near, far = np.full(shape, np.inf), np.full(shape, np.inf)
    options = {m: problem.meshes[m].option(microbatch, problem.limits.recompute[0]) for m in able}
    hosts = {group.name: frozenset(group.nodes) for group in problem.prices.cluster.groups}
    for a, b in product(able, able):
        far[a, b] = problem.prices.boundary_s(options[a], options[b], layer, same_node=False)
        if hosts[options[a].group] & hosts[options[b].group]:
            near[a, b] = problem.prices.boundary_s(options[a], options[b], layer, same_node=True)
    near = np.minimum(near, far)
    return near, far


def _units(best_ml: Floats) -> tuple[Floats, Floats]:
    """Return a unit of seconds for each mesh and layer weights so that unit x weight never exceeds a layer's time."""
    finite = np.all(np.isfinite(best_ml), axis=1)
    unit = np.median(best_ml, axis=1)
    ratios = best_ml[finite] / unit[finite, None]
    return unit, ratios.min(axis=0)
