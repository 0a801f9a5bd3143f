"""Transfers and all-reduces over links whose bandwidth was fitted by message size.

A message of `n` bytes takes `n / bandwidth(n)` with `bandwidth(n) = sum_k c_k log2(n / 1e6)^k`, at most the measured
maximum; there is no latency apart, the fit holds it. Below the size where a fit stops being positive its time stays.

* **Between stages** every sample-parallel lane sends its whole microbatch over the link its tp group has to the next;
  where activations and gradients have fits of their own, the slower way stands for both.
* **All-reduce** over `n` ranks is a ring: `2 (n - 1)` messages of `bytes / n`, piece by piece of at most the bucket,
  at the pace of the slowest pair of neighbours. Ranks with tensor parallelism hold `1 / tp`; the least tp decides.

A fit is looked up by device kind, site and how many devices of a node take part: as asked, else for the next fewer,
else for the fewest there is; a site that is not named falls back on a fit that names none. A pair no fit speaks of is
out of reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from hetplan.costs.records import Holders, StageOption
from hetplan.specs.cluster import Cluster, Group
from hetplan.specs.layer_table import ANY_SITE, LinkCurve, LinkFits

_Place = tuple[str, str]


class FittedLinks:
    """Answers from one set of fits for the groups of one cluster."""

    def __init__(self, fits: LinkFits, cluster: Cluster) -> None:
        self._fits = fits
        self._groups = {group.name: group for group in cluster.groups}
        self._between: dict[tuple[_Place, _Place], dict[tuple[int, int], LinkCurve]] = {}
        for (first, second), curve in fits.between.items():
            a, b = (first.device, first.site), (second.device, second.site)
            self._between.setdefault((a, b), {})[first.ranks, second.ranks] = curve
        for (first, second), curve in fits.between.items():
            a, b = (first.device, first.site), (second.device, second.site)
            self._between.setdefault((b, a), {}).setdefault((second.ranks, first.ranks), curve)

    def transfer_s(self, sender: StageOption, receiver: StageOption, sample_bytes: float, *, same_node: bool) -> float:
        """Return the seconds of one microbatch's activations from stage to stage; infinite where no fit speaks."""
        first, second = self._groups[sender.group], self._groups[receiver.group]
        num_bytes = sample_bytes * sender.samples
        if same_node and first is second:
            curve = self._inside(first, min(first.devices_per_node, sender.tp + receiver.tp))
            if curve is not None:
                return message_s(curve, num_bytes)
        there_s = self._message_s(first, second, (sender.tp, receiver.tp), num_bytes)
        back_s = self._message_s(second, first, (receiver.tp, sender.tp), num_bytes)
        return max(there_s, back_s)

    def all_reduce_s(self, num_bytes: float, holders: Sequence[Holders]) -> float:
        """Return the seconds to add up `num_bytes` (before tp) over all holders."""
        num_ranks = sum(holder.num_ranks for holder in holders)
        if num_ranks <= 1 or num_bytes <= 0:
            return 0.0
        rank_bytes = num_bytes / min(holder.tp for holder in holders)
        return max(self._ring_s(rank_bytes, num_ranks, curve) for curve in self._hops(holders, num_ranks))

    def _hops(self, holders: Sequence[Holders], num_ranks: int) -> list[LinkCurve | None]:
        groups = [self._groups[holder.group] for holder in holders]
        if len(holders) == 1 and holders[0].ranks_per_node >= num_ranks:
            curve = self._inside(groups[0], min(groups[0].devices_per_node, num_ranks))
            if curve is not None:
                return [curve]
        hops = [self._curve(a, b, (1, 1)) for a, b in pairwise(groups)]
        own = [self._curve(g, g, (1, 1)) for g, h in zip(groups, holders, strict=True) if h.num_ranks > 1]
        return [*hops, *own]

    def _ring_s(self, rank_bytes: float, num_ranks: int, curve: LinkCurve | None) -> float:
        if curve is None:
            return math.inf
        piece = rank_bytes if self._fits.bucket_bytes is None else min(rank_bytes, self._fits.bucket_bytes)
        whole, rest = divmod(rank_bytes, piece)
        steps = 2 * (num_ranks - 1)
        last_s = message_s(curve, rest / num_ranks) if rest > 0 else 0.0
        return steps * (whole * message_s(curve, piece / num_ranks) + last_s)

    def _message_s(self, first: Group, second: Group, ranks: tuple[int, int], num_bytes: float) -> float:
        curve = self._curve(first, second, ranks)
        return math.inf if curve is None else message_s(curve, num_bytes)

    def _curve(self, first: Group, second: Group, ranks: tuple[int, int]) -> LinkCurve | None:
        wanted = (min(ranks[0], first.devices_per_node), min(ranks[1], second.devices_per_node))
        for sites in ((first.site, second.site), (ANY_SITE, ANY_SITE)):
            found = self._between.get(((first.device.name, sites[0]), (second.device.name, sites[1])))
            if found:
                return found[_nearest(found, wanted)]
        return None

    def _inside(self, group: Group, ranks: int) -> LinkCurve | None:
        counts = [count for device, count in self._fits.inside if device == group.device.name]
        if not counts:
            return None
        fewer = [count for count in counts if count <= ranks]
        return self._fits.inside[group.device.name, max(fewer) if fewer else min(counts)]


def _nearest(found: dict[tuple[int, int], LinkCurve], wanted: tuple[int, int]) -> tuple[int, int]:
    """Return the measured counts that stand for the wanted ones."""
    if wanted in found:
        return wanted
    fewer = [pair for pair in found if pair[0] <= wanted[0] and pair[1] <= wanted[1]]
    return max(fewer, key=lambda pair: (sum(pair), pair)) if fewer else min(found, key=lambda pair: (sum(pair), pair))


@lru_cache(maxsize=65536)
def message_s(curve: LinkCurve, num_bytes: float) -> float:
    """Return the seconds of one message."""
    if num_bytes <= 0:
        return 0.0
    size = num_bytes
    while (rate := _bandwidth(curve, size)) <= 0:
        size *= 2
        if size > 1e15:
            return math.inf
    return size / rate


def _bandwidth(curve: LinkCurve, num_bytes: float) -> float:
    x = math.log2(num_bytes / 1e6)
    rate = 0.0
    for coefficient in curve.coefficients:
        rate = rate * x + coefficient
    return rate if curve.max_bytes_per_s is None else min(rate, curve.max_bytes_per_s)
