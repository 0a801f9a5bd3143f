"""The best quick plan at every point of a grid of clusters and workloads, and where more hardware stops paying.

Axes: nodes of a group, samples a step, tokens a sample, bandwidth of a network. Along an axis of nodes a point never
does worse than one with fewer nodes: the rest may be left idle. The marginal gain of a point is

    (throughput - throughput with the next fewer nodes) / (devices - devices there),

and adding pays while that is at least a share (`worth`) of what a device brought on average before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

from hetplan.costs.prices import Prices, price
from hetplan.errors import InfeasibleError, UsageError
from hetplan.search.grown import with_faster_network, with_nodes
from hetplan.search.infeasible_fixes import attempt
from hetplan.search.records import Candidate, SearchRequest

AxisKind = Literal["nodes", "global_batch", "seq_len", "bandwidth"]
MOST_POINTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One thing that varies, with its values in rising order."""

    kind: AxisKind
    values: tuple[float, ...]
    of: str = ""
    """Group or network; empty for what the workload says."""

    def __post_init__(self) -> None:
        if not self.values or list(self.values) != sorted(set(self.values)):
            raise UsageError(f"the values of {self.name} must rise")

    @property
    def name(self) -> str:
        """What varies, as a key: `nodes_a100`, `global_batch`."""
        return f"{self.kind}_{self.of}" if self.of else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cluster and workload, with the best quick plan there."""

    values: tuple[float, ...]
    """One an axis."""
    num_devices: int
    """Of the cluster, idle ones included."""
    candidate: Candidate | None
    """None: nothing fits."""
    marginal_tokens_per_s: float | None = None
    """Throughput each added device brings, against the next fewer nodes."""
    pays: bool | None = None
    """Whether that is worth it; None: there is nothing to compare with."""

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput."""
        return self.candidate.estimate.tokens_per_s if self.candidate else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Money; None without prices."""
        found = self.candidate.estimate if self.candidate else None
        if found is None or found.usd_per_step is None:
            return None
        return 1e6 * found.usd_per_step / (found.tokens_per_s * found.step_s)

    @property
    def joules_per_token(self) -> float | None:
        """Energy."""
        found = self.candidate.estimate if self.candidate else None
        return found.joules_per_step / (found.tokens_per_s * found.step_s) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All points, the last axis fastest."""

    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    worth: float

    @property
    def along(self) -> int | None:
        """The axis of nodes that marginal gains run along: the first one."""
        return next((i for i, axis in enumerate(self.axes) if axis.kind == "nodes"), None)

    def series(self, index: int) -> Iterator[tuple[tuple[float, ...], list[Point]]]:
        """Yield runs of points that differ in one axis only, with the values of the others."""
        runs: dict[tuple[float, ...], list[Point]] = {}
        for point in self.points:
            rest = (*point.values[:index], *point.values[index + 1 :])
            runs.setdefault(rest, []).append(point)
        yield from runs.items()


def sweep(
    prices: Prices,
    axes: Sequence[Axis],
    request: SearchRequest | None = None,
    *,
    worth: float = 0.5,
    tell: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Return the best quick plan at every point; `tell` hears how many are done.

    Raises:
        UsageError: there are too many points, or an axis cannot be varied.
    """
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_POINTS:
        raise UsageError(f"{count} points are too many (at most {MOST_POINTS}): give fewer values")
    found: dict[tuple[float, ...], Point] = {}
    for values in product(*(axis.values for axis in axes)):
        point = _point(_varied(prices, axes, values), values, request or SearchRequest())
        found[values] = _no_worse(point, [found[less] for less in _fewer_nodes(axes, values)])
        if tell is not None:
            tell(len(found), count)
    made = Sweep(axes=tuple(axes), points=tuple(found.values()), worth=worth)
    return replace(made, points=tuple(_with_gain(made, point, found) for point in made.points))


def _varied(prices: Prices, axes: Sequence[Axis], values: Sequence[float]) -> Prices:
    """Return the prices of a point."""
    cluster, workload = prices.cluster, prices.workload
    for axis, value in zip(axes, values, strict=True):
        if axis.kind == "nodes":
            cluster = with_nodes(cluster, axis.of, int(value))
        elif axis.kind == "bandwidth":
            network = next(network for network in cluster.networks if network.name == axis.of)
            cluster = with_faster_network(cluster, axis.of, value / network.bandwidth_bytes_per_s)
        elif axis.kind == "global_batch":
            workload = replace(workload, global_batch=int(value))
        else:
            workload = replace(workload, seq_len=int(value))
    return price(cluster, prices.model, workload, prices.calibration)


def _point(prices: Prices, values: tuple[float, ...], request: SearchRequest) -> Point:
    try:
        candidate = attempt(prices, request)
    except InfeasibleError:
        candidate = None
    return Point(values=values, num_devices=prices.cluster.num_devices, candidate=candidate)


def _fewer_nodes(axes: Sequence[Axis], values: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    """Yield the next smaller point along each axis of nodes."""
    for i, axis in enumerate(axes):
        place = axis.values.index(values[i])
        if axis.kind == "nodes" and place:
            yield (*values[:i], axis.values[place - 1], *values[i + 1 :])


def _no_worse(point: Point, smaller: Sequence[Point]) -> Point:
    """Return a point with the fastest plan of its own and of those with fewer nodes."""
    candidates = [each.candidate for each in (point, *smaller) if each.candidate is not None]
    best = min(candidates, key=lambda candidate: candidate.estimate.step_s, default=None)
    return replace(point, candidate=best)


def _with_gain(made: Sweep, point: Point, found: dict[tuple[float, ...], Point]) -> Point:
    index = made.along
    if index is None or point.tokens_per_s is None:
        return point
    axis = made.axes[index]
    place = axis.values.index(point.values[index])
    if place == 0:
        return point
    before = found[(*point.values[:index], axis.values[place - 1], *point.values[index + 1 :])]
    added = point.num_devices - before.num_devices
    if before.tokens_per_s is None or added <= 0:
        return point
    gain = (point.tokens_per_s - before.tokens_per_s) / added
    pays = gain >= made.worth * before.tokens_per_s / before.num_devices
    return replace(point, marginal_tokens_per_s=gain, pays=pays)


def last_paying(points: Sequence[Point]) -> Point | None:
    """Return the last point of a run of rising nodes before adding stops paying for the first time.

    None: it paid to the end, or nothing fits.
    """
    able = [point for point in points if point.candidate is not None]
    for before, point in pairwise(able):
        if point.pays is False:
            return before
    return None
