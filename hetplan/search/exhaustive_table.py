"""What a stage costs at least, whatever the rest of the plan is: seconds, memory, and what must follow its gradients.

Stage times are the least any recomputation that fits in memory allows, so bounds made of them hold for every choice of
recomputation. A layer is *shared* when several data-parallel ranks hold it: always where a plan has several replicas,
else where its mesh splits samples or sequences. Sharing costs at least a ring of two ranks over the fastest link the
group has (Q bytes of the whole layer, tp slices side by side):

    half pass >= Q / 2 * s_per_byte,   all-reduce >= Q * s_per_byte

Once a stage's gradients are complete, at most `overlap.gradients` of its last backward pass can have hidden their
reduction; then comes the optimizer, then the gather of updated weights that are shared out.

How many ranks share a stage's states is known for a replica alone; else as many as the devices it leaves could hold.

Array legend: O mesh options, K conditions, N layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hetplan.costs.links import Link, crossing_bytes_per_s, inside_link, link_between, pcie_link
from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, Holders, LayerCosts, ShardDegrees
from hetplan.plan.placement import places_of
from hetplan.plan.rules_model import degree_errors
from hetplan.plan.stages import tied_tables, whole_params
from hetplan.search.exhaustive_shapes import Context, Flags, Ints, Mesh
from hetplan.specs.model import Module
from hetplan.specs.workload import Recompute

LENIENT = 1.0 + 1e-9
"""Memory filters forgive this much rounding; the exact check decides."""

UNREACHABLE_S = 1e30
"""Seconds a byte takes where no link leads; finite, so that nothing times it is nothing."""


class Condition(NamedTuple):
    """What memory depends on besides the stage."""

    held: int
    """Microbatches whose activations it holds."""
    spare: int
    """Devices left for other replicas that may share its states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Least seconds of every span on every mesh, and the first recomputation that fits, by condition.

    Shapes: `forward_s`, `backward_s`, `input_s`, `after_s` (O, K, N + 1, N + 1), infinite where nothing fits; `mode`
    alike, -1 where nothing fits; `boundary_s` (O, O, N + 1), seconds from a stage that ends before layer `j`; `tie_s`
    (O, O), seconds a table tied between the first and the last mesh takes to add up. `input_s` is the part of a
    backward pass the previous stage waits for when the schedule splits it, else `backward_s`; `after_s` what follows
    the last gradient.
    """

    conditions: tuple[Condition, ...]
    forward_s: Floats
    backward_s: Floats
    input_s: Floats
    after_s: Floats
    mode: Ints
    boundary_s: Floats
    tie_s: Floats


def stage_table(
    prices: Prices, meshes: Sequence[Mesh], microbatch: int, context: Context, conditions: Sequence[Condition]
) -> StageTable:
    """Return what every span of layers costs on every mesh at least."""
    num_layers = len(prices.model.chain)
    shape = (len(meshes), len(conditions), num_layers + 1, num_layers + 1)
    forward, backward, inward, after = (np.full(shape, np.inf) for _ in range(4))
    mode = np.full(shape, -1, dtype=np.int64)
    for o, mesh in enumerate(meshes):
        possible = _divisible(prices, mesh.tp)
        for r, recompute in reversed(list(enumerate(context.recomputes))):
            option = mesh.option(microbatch, recompute)
            if not prices.covers(option):
                continue
            room = prices.capacity_bytes(mesh.group) * LENIENT
            spans = [_spans(part) for part in _passes(prices, mesh, context, prices.layers(option))]
            finite = possible & np.isfinite(sum(spans))
            for k, (held, spare) in enumerate(conditions):
                degrees = most_degrees(mesh, spare)
                fixed, per_microbatch = prices.memory_matrices(option, context.sharding, degrees)
                fits = finite & (fixed + held * per_microbatch <= room)
                for table, seconds in zip((forward, backward, inward), spans, strict=True):
                    table[o, k] = np.where(fits, np.minimum(seconds, table[o, k]), table[o, k])
                mode[o, k] = np.where(fits, r, mode[o, k])
        update_ks = [_optimizer(prices, mesh, context, spare) for _, spare in conditions]
        after[o] = np.stack(update_ks) + _after(prices, mesh, context, (backward[o], inward[o]))
    return StageTable(
        conditions=tuple(conditions),
        forward_s=forward,
        backward_s=backward,
        input_s=inward,
        after_s=after,
        mode=mode,
        boundary_s=_boundaries(prices, meshes, microbatch, context.recomputes[0]),
        tie_s=_ties(prices, meshes),
    )


def is_shared(mesh: Mesh, context: Context) -> bool:
    """Return whether several data-parallel ranks hold the layers of a mesh."""
    return not context.alone or mesh.dp * mesh.cp > 1


def most_degrees(mesh: Mesh, spare: int) -> ShardDegrees:
    """Return the most ranks that could share a stage's states when `spare` devices are left for other replicas."""
    own, others = mesh.dp * mesh.cp, spare // mesh.tp
    return ShardDegrees(dense=own + others, expert=max(1, own // mesh.ep + others // mesh.ep))


def _passes(prices: Prices, mesh: Mesh, context: Context, costs: LayerCosts) -> tuple[Floats, Floats, Floats]:
    """Return forward, backward and the part of backward another stage waits for, layer by layer."""
    forward_l, backward_l = costs.forward_total_s, costs.backward_total_s
    if is_shared(mesh, context) and context.sharding in ("gradients", "full"):
        half_l = (costs.params + costs.expert_params) * mesh.tp * s_per_byte(prices, mesh) / 2
        gather_l = half_l * prices.workload.weight_bytes if context.sharding == "full" else np.zeros_like(half_l)
        beside = np.maximum if prices.calibration.overlap.gathers else np.add
        forward_l = beside(forward_l, gather_l)
        backward_l = beside(backward_l, gather_l + half_l * prices.workload.gradient_bytes)
    late_l = costs.weight_gradient_s if context.schedule == "zero-bubble" else np.zeros_like(backward_l)
    return forward_l, backward_l, backward_l - late_l


def s_per_byte(prices: Prices, mesh: Mesh) -> float:
    """Return the least seconds a byte of a whole layer takes past the fastest link of a mesh's group."""
    cluster, known = prices.cluster, prices.calibration
    group = cluster.group(mesh.group)
    domain = group.devices_per_node * group.domain_nodes
    rates = [inside_link(group, ranks, known).bandwidth_bytes_per_s for ranks in range(2, domain + 1)]
    for other in cluster.groups:
        link: Link | None = link_between(cluster, group.name, other.name, known)
        if link is not None:
            rings = max(1, min(mesh.tp, group.devices_per_node))
            rates.append(crossing_bytes_per_s(link, group, rings=rings, ranks=domain))
        if other is not group and not set(group.nodes).isdisjoint(other.nodes):
            rates.append(pcie_link(group, other, known).bandwidth_bytes_per_s)
    return 1.0 / (max(rates) * mesh.tp) if rates else UNREACHABLE_S


def _after(prices: Prices, mesh: Mesh, context: Context, passes_s: tuple[Floats, Floats]) -> Floats:
    """Return the traffic that follows the last gradient of every span, (K, N + 1, N + 1)."""
    backward_s, input_s = passes_s
    if not is_shared(mesh, context) or context.sharding == "full":
        return np.zeros_like(backward_s)
    dense_l, _ = whole_params(prices)
    per_param_s = s_per_byte(prices, mesh)
    workload = prices.workload
    reduce_s = _spans(dense_l) * per_param_s * workload.gradient_bytes
    gather_s = _spans(dense_l) * per_param_s * workload.weight_bytes / 2
    if context.sharding == "none":
        gather_s = 0.0 * gather_s
    else:
        reduce_s = reduce_s / 2 if context.sharding == "optimizer" else 0.0 * reduce_s
    with np.errstate(invalid="ignore"):
        last_s = backward_s - input_s if context.schedule == "zero-bubble" else backward_s
        exposed_s = np.maximum(0.0, reduce_s - prices.calibration.overlap.gradients * last_s)
    return np.asarray(np.nan_to_num(exposed_s) + gather_s)


def _optimizer(prices: Prices, mesh: Mesh, context: Context, spare: int) -> Floats:
    """Return the least seconds of the optimizer on every span, (N + 1, N + 1)."""
    costs = prices.table([mesh.option(mesh.dp, context.recomputes[0])])
    degrees = ShardDegrees() if context.sharding == "none" else most_degrees(mesh, spare)
    each_l = costs.params[0] / degrees.dense + costs.expert_params[0] / degrees.expert
    seconds_l = np.array([prices.optimizer_s(mesh.group, float(params)) for params in each_l])
    return _spans(seconds_l)


def _ties(prices: Prices, meshes: Sequence[Mesh]) -> Floats:
    """Return the seconds a table tied between the chain's ends takes to add up over two meshes."""
    last = len(prices.model.chain) - 1
    seconds = np.zeros((len(meshes), len(meshes)))
    for table, head, params in tied_tables(prices):
        if (table, head) != (0, last):
            continue
        for o, first in enumerate(meshes):
            for q, second in enumerate(meshes):
                pair = tuple(
                    Holders(group=mesh.group, num_ranks=1, ranks_per_node=1, tp=mesh.tp) for mesh in (first, second)
                )
                seconds[o, q] += prices.sync(float(params), pair, "none").reduce_s
    return seconds


def _divisible(prices: Prices, tp: int) -> Flags:
    """Return which spans tp can cut: an embedding or a head alone takes degrees that decoder layers do not."""
    alone = [replace(prices.model, modules=(Module(name=layer.name, layers=(layer,)),)) for layer in prices.model.chain]
    refused_l = np.array([float(bool(degree_errors(model, tp=tp))) for model in alone])
    return np.asarray(_spans(refused_l) == 0)


def _spans(seconds_l: Floats) -> Floats:
    """Return the sum over layers `i` to `j - 1` at [i, j], 0 where j <= i."""
    count = len(seconds_l)
    sums = np.zeros((count + 1, count + 1))
    sums[:count, 1:] = np.cumsum(np.triu(np.broadcast_to(seconds_l, (count, count))), axis=1)
    return np.triu(sums, k=1)


def _boundaries(prices: Prices, meshes: Sequence[Mesh], microbatch: int, recompute: Recompute) -> Floats:
    num_layers = len(prices.model.chain)
    options = [mesh.option(microbatch, recompute) for mesh in meshes]
    seconds = np.zeros((len(meshes), len(meshes), num_layers + 1))
    for o, sender in enumerate(options):
        for q, receiver in enumerate(options):
            ways = _ways(prices, meshes[o], meshes[q])
            for layer in range(num_layers - 1):
                found = (prices.boundary_s(sender, receiver, layer, same_node=near) for near in ways)
                seconds[o, q, layer + 1] = min(found, default=np.inf)
    return seconds


def _ways(prices: Prices, sender: Mesh, receiver: Mesh) -> tuple[bool, ...]:
    """Return whether two meshes can lie near each other (in one domain), apart, both, or not exist at once."""
    places = places_of(prices)
    first, second = (places[mesh.group].domain_d for mesh in (sender, receiver))
    if sender.group == receiver.group:
        needed = 2 if sender.size == receiver.size else sender.size + receiver.size
        near = int(np.unique(first, return_counts=True)[1].max()) >= needed
    else:
        near = bool(np.isin(first, second).any())
    apart = len(np.unique(np.concatenate([first, second]))) > 1
    return tuple(way for way, possible in ((True, near), (False, apart)) if possible)
