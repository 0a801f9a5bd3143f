"""Uneven sequence shards and heads on unlike devices: how a long sequence is divided over ranks that differ.

Ranks form groups. Within a group every rank holds a run of tokens for everything but attention, and some heads of the
whole group's tokens for attention; an all-to-all changes between the two (head parallelism). Between groups keys and
values travel in a ring (context parallelism). One layer, both passes, with `s[i]` tokens and `h[i]` of `H` heads on
rank `i`, `S[g]` the tokens of group `g` and `S` all of them:

    linear    = max over i of  linear[i] s[i]
    attention = max over i of  square[i] S S[g(i)] h[i] / H          (causal halves are dealt out evenly along the ring)
    exchange  = max over ranks and nodes of what leaves them over their links, 1 - h[i] / H of s[i] tokens' q, k, v, out
    ring      = keys and values of S - S[g] tokens, three times (forward; they and their gradients backward), over the
                slowest edge; what attention does not hide counts
    layer     = linear + attention + exchange + max(0, ring - attention)

Heads are given in units that grouped queries share with their key/value head. For a grouping, with heads in the ratio
of speeds, the least `linear + attention` is a one-dimensional convex problem in the linear time (how many tokens each
group can take under both is a minimum of two lines), solved by golden section; tokens and head units are then rounded
to integers so that the largest load grows least, and the layer is priced again as rounded. Groupings are runs of
ranks of one node, whole nodes, or all ranks; the best is the answer. Even shards are the same with equal `s` and `h`.
Gradients and the update are the same under every division and left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.costs.links import inside_link, link_between
from hetplan.costs.modules import ModulePrices
from hetplan.costs.records import Floats
from hetplan.costs.samples import Ints, is_language
from hetplan.errors import InfeasibleError, UsageError
from hetplan.specs.model import Attention

GOLDEN_STEPS = 60
EXCHANGES = 2
"""All-to-alls of q, k, v and out go once forward and once backward."""
RING_PASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """A division of one sequence."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group, in the order of the ring."""
    tokens: tuple[int, ...]
    """Of each rank; they sum to the sequence."""
    heads: tuple[int, ...]
    """Query heads of each rank; they sum to the head count within every group."""
    linear_s: float
    attention_s: float
    exchange_s: float
    ring_s: float
    """What attention does not hide."""

    @property
    def module_s(self) -> float:
        """Seconds of the whole module, both passes."""
        return self.linear_s + self.attention_s + self.exchange_s + self.ring_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """The ranks and what a module costs on each; `_i` one entry a rank."""

    group_i: tuple[str, ...]
    node_i: tuple[str, ...]
    linear_i: Floats
    square_i: Floats
    cap_i: Floats
    """Tokens whose activations fit."""
    seq_len: int
    heads: int
    unit: int
    """Query heads a key/value head serves."""
    exchange_bytes: float
    """Per token, all layers, both passes."""
    ring_bytes: float


def uneven_shards(prices: ModulePrices, seq_len: int, *, recompute_full: bool = True) -> Shards:
    """Return the best division found.

    Raises:
        InfeasibleError: the sequence's activations do not fit the devices.
    """
    ranks = _ranks(prices, seq_len, recompute_full=recompute_full)
    found = [_divide(prices, ranks, groups) for groups in _groupings(ranks)]
    return min((one for one in found if one is not None), key=lambda one: one.module_s)


def even_shards(prices: ModulePrices, seq_len: int, *, recompute_full: bool = True) -> Shards:
    """Return the best division with equal shards and heads on every rank.

    Raises:
        UsageError: no grouping divides sequence and heads evenly.
    """
    ranks = _ranks(prices, seq_len, recompute_full=recompute_full)
    count = len(ranks.group_i)
    found = []
    for groups in _groupings(ranks):
        if seq_len % count == 0 and all((ranks.heads // ranks.unit) % len(group) == 0 for group in groups):
            heads = np.zeros(count, dtype=np.int64)
            for group in groups:
                heads[list(group)] = ranks.heads // len(group)
            found.append(_priced(prices, ranks, groups, np.full(count, seq_len // count), heads))
    if not found:
        raise UsageError(f"{seq_len} tokens and {ranks.heads} heads divide evenly over no grouping of {count} ranks")
    return min(found, key=lambda one: one.module_s)


def _ranks(prices: ModulePrices, seq_len: int, *, recompute_full: bool) -> _Ranks:
    cluster, workload = prices.prices.cluster, prices.prices.workload
    module = next(module for module in prices.prices.model.modules if is_language(module))
    attentions = [one for layer in module.layers for one in layer.operators if isinstance(one, Attention)]
    if not attentions:
        raise UsageError(f"module {module.name!r} has no attention to divide")
    first = attentions[0]
    group_i, node_i, linear, square, caps = [], [], [], [], []
    for group in cluster.groups:
        costs = prices.costs(module.name, group.name, 1, "full" if recompute_full else "none")
        states = costs.params * (workload.weight_bytes + workload.gradient_bytes + workload.optimizer_bytes)
        room = group.usable_memory_bytes - (states + costs.frozen_params * workload.weight_bytes) / cluster_size(prices)
        per_token = costs.saved_bytes.per_token + costs.logits_bytes.per_token
        for place in range(group.num_devices):
            group_i.append(group.name)
            node_i.append(group.nodes[min(place // group.devices_per_node, len(group.nodes) - 1)])
            linear.append(costs.forward.per_token + costs.backward.per_token)
            square.append(costs.forward.per_square + costs.backward.per_square)
            caps.append(max(0.0, room / per_token))
    if sum(math.floor(cap) for cap in caps) < seq_len:
        raise InfeasibleError(f"{seq_len} tokens do not fit: the devices hold {sum(map(math.floor, caps))} in all")
    widths = sum(
        2 * a.num_heads * a.qk_head_dim + a.num_kv_heads * (a.qk_head_dim + a.value_head_dim) for a in attentions
    )
    kv_widths = sum(a.num_kv_heads * (a.qk_head_dim + a.value_head_dim) for a in attentions)
    return _Ranks(
        group_i=tuple(group_i),
        node_i=tuple(node_i),
        linear_i=np.array(linear),
        square_i=np.array(square),
        cap_i=np.floor(np.array(caps)),
        seq_len=seq_len,
        heads=first.num_heads,
        unit=first.num_heads // first.num_kv_heads,
        exchange_bytes=float(EXCHANGES * widths * workload.activation_bytes),
        ring_bytes=float(RING_PASSES * kv_widths * workload.activation_bytes),
    )


def cluster_size(prices: ModulePrices) -> int:
    """Return all devices of the cluster: over how many states are shared out."""
    return sum(group.num_devices for group in prices.prices.cluster.groups)


def _groupings(ranks: _Ranks) -> list[tuple[tuple[int, ...], ...]]:
    """Return groupings: runs of 1, 2, 4 .. ranks within nodes, whole nodes, and all ranks together."""
    nodes: dict[str, list[int]] = {}
    for i, node in enumerate(ranks.node_i):
        nodes.setdefault(node, []).append(i)
    widest = max(len(members) for members in nodes.values())
    found: dict[tuple[tuple[int, ...], ...], None] = {}
    for width in (2**k for k in range(widest.bit_length() + 1)):
        groups = []
        for members in nodes.values():
            groups += [tuple(members[at : at + width]) for at in range(0, len(members), width)]
        found.setdefault(tuple(groups))
    found.setdefault((tuple(range(len(ranks.node_i))),))
    units = ranks.heads // ranks.unit
    return [groups for groups in found if max(len(group) for group in groups) <= units]


def _divide(prices: ModulePrices, ranks: _Ranks, groups: tuple[tuple[int, ...], ...]) -> Shards | None:
    """Return the rounded best of one grouping; None where memory leaves too few tokens."""
    units = ranks.heads // ranks.unit
    heads = np.zeros(len(ranks.group_i), dtype=np.int64)
    pace_g = np.zeros(len(groups))
    for g, group in enumerate(groups):
        members = list(group)
        share = _shared_out(1.0 / ranks.square_i[members], units, np.full(len(members), float(units)))
        heads[members] = share * ranks.unit
        pace_g[g] = float((ranks.square_i[members] * share / units).max()) * ranks.seq_len
    speed_i = 1.0 / ranks.linear_i
    low = ranks.seq_len / float(speed_i.sum())
    best = _golden(lambda linear_s: _least_attention(ranks, groups, pace_g, linear_s) + linear_s, low, 50 * low)
    attention_s = _least_attention(ranks, groups, pace_g, best)
    want_i = np.zeros(len(ranks.group_i))
    for g, group in enumerate(groups):
        members = list(group)
        most_i = np.minimum(best * speed_i[members], ranks.cap_i[members])
        limit = attention_s / pace_g[g] if pace_g[g] > 0 else math.inf
        want_i[members] = most_i * min(1.0, limit / max(float(most_i.sum()), 1e-300))
    if not np.isfinite(attention_s) or want_i.sum() < ranks.seq_len * (1 - 1e-6):
        return None
    tokens = _shared_out(want_i, ranks.seq_len, ranks.cap_i)
    return _priced(prices, ranks, groups, tokens, heads)


def _least_attention(ranks: _Ranks, groups: Sequence[tuple[int, ...]], pace_g: Floats, linear_s: float) -> float:
    """Return the least attention time with which the groups take the whole sequence within `linear_s`."""
    most_g = np.array(
        [float(np.minimum(linear_s / ranks.linear_i[list(g)], ranks.cap_i[list(g)]).sum()) for g in groups]
    )
    if most_g.sum() < ranks.seq_len * (1 - 1e-9):
        return math.inf
    low, high = 0.0, float((most_g * pace_g).max())
    for _ in range(60):
        middle = (low + high) / 2
        enough = float(np.minimum(most_g, middle / pace_g).sum()) >= ranks.seq_len * (1 - 1e-9)
        low, high = (low, middle) if enough else (middle, high)
    return high


def _golden(value: Callable[[float], float], low: float, high: float) -> float:
    """Return about where a convex function of one number, infinite below some point, is least."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(GOLDEN_STEPS):
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        at_first, at_second = value(first), value(second)
        if math.isinf(at_first) or at_second < at_first:
            low = first
        else:
            high = second
    return high


def _shared_out(want_i: Floats, total: int, cap_i: Floats) -> Ints:
    """Return integers that sum to `total`, in the ratio of `want_i`, so that the largest ratio to it is least."""
    pace_i = np.where(want_i > 0, want_i / max(float(want_i.sum()), 1e-300) * total, 0.0)
    given = np.minimum(np.floor(pace_i), cap_i).astype(np.int64)
    heap = [((given[i] + 1) / max(pace_i[i], 1e-9), i) for i in range(len(pace_i)) if given[i] < cap_i[i]]
    heapq.heapify(heap)
    for _ in range(total - int(given.sum())):
        _, i = heapq.heappop(heap)
        given[i] += 1
        if given[i] < cap_i[i]:
            heapq.heappush(heap, ((given[i] + 1) / max(pace_i[i], 1e-9), i))
    return given


def _priced(
    prices: ModulePrices,
    ranks: _Ranks,
    groups: tuple[tuple[int, ...], ...],
    tokens: Ints,
    heads: Ints,
) -> Shards:
    """Return a division with its seconds."""
    attention_s = 0.0
    for group in groups:
        members = list(group)
        held = float(tokens[members].sum()) * ranks.seq_len
        attention_s = max(attention_s, float((ranks.square_i[members] * heads[members]).max()) / ranks.heads * held)
    ring_s = _ring_s(prices, ranks, groups, tokens)
    return Shards(
        groups=groups,
        tokens=tuple(int(count) for count in tokens),
        heads=tuple(int(count) for count in heads),
        linear_s=float((ranks.linear_i * tokens).max()),
        attention_s=attention_s,
        exchange_s=max(_exchange_s(prices, ranks, group, tokens, heads) for group in groups),
        ring_s=max(0.0, ring_s - attention_s),
    )


def _exchange_s(
    prices: ModulePrices,
    ranks: _Ranks,
    group: tuple[int, ...],
    tokens: Ints,
    heads: Ints,
) -> float:
    """Return the all-to-alls of one group: the slowest rank inside its node, and the slowest node's NICs."""
    if len(group) == 1:
        return 0.0
    nodes: dict[str, list[int]] = {}
    for i in group:
        nodes.setdefault(ranks.node_i[i], []).append(i)
    slowest = 0.0
    for members in nodes.values():
        inside = inside_link(
            prices.prices.cluster.group(ranks.group_i[members[0]]), max(2, len(members)), prices.prices.calibration
        )
        own_heads = int(heads[members].sum())
        for i in members:
            stays = own_heads - int(heads[i])
            moved = ranks.exchange_bytes * float(tokens[i]) * stays / ranks.heads
            slowest = max(slowest, moved / inside.bandwidth_bytes_per_s)
        if len(nodes) > 1:
            leaves = ranks.exchange_bytes * float(tokens[members].sum()) * (1 - own_heads / ranks.heads)
            slowest = max(slowest, leaves / _leaving(prices, ranks, members[0], group))
    return slowest


def _leaving(prices: ModulePrices, ranks: _Ranks, member: int, group: Sequence[int]) -> float:
    """Return the bytes a second a node sends to the others of a group: its slowest link to one of them."""
    own = ranks.group_i[member]
    rates = []
    for other in dict.fromkeys(ranks.group_i[i] for i in group if ranks.node_i[i] != ranks.node_i[member]):
        link = link_between(prices.prices.cluster, own, other, prices.prices.calibration)
        rates.append(link.bandwidth_bytes_per_s if link is not None else 1e-300)
    return min(rates)


def _ring_s(
    prices: ModulePrices,
    ranks: _Ranks,
    groups: tuple[tuple[int, ...], ...],
    tokens: Ints,
) -> float:
    """Return the seconds keys and values take once around the ring, over its slowest edge."""
    if len(groups) == 1:
        return 0.0
    slowest = 0.0
    for g, group in enumerate(groups):
        behind = groups[(g + 1) % len(groups)]
        passed = ranks.ring_bytes * float(ranks.seq_len - int(tokens[list(behind)].sum()))
        if ranks.node_i[group[0]] == ranks.node_i[behind[0]]:
            cluster_group = prices.prices.cluster.group(ranks.group_i[group[0]])
            rate = inside_link(cluster_group, 2, prices.prices.calibration).bandwidth_bytes_per_s * len(group)
        else:
            rate = _leaving(prices, ranks, group[0], behind)
        slowest = max(slowest, passed / rate)
    return slowest
