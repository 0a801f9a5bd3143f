"""How many nodes of one device kind a model needs, and what more of them bring: time, money, days.

The smallest count is found by memory alone, with everything that saves it (`lightest`); each larger count gets the
best quick plan, so that its throughput and price can be put beside the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetplan.costs.prices import Prices, price
from hetplan.errors import InfeasibleError
from hetplan.search.grown import with_nodes
from hetplan.search.infeasible import diagnosis_text
from hetplan.search.infeasible_fixes import attempt, smallest
from hetplan.search.infeasible_rules import structural
from hetplan.search.lightest import fits
from hetplan.search.problem import build_problem
from hetplan.search.records import Candidate, SearchRequest
from hetplan.specs.workload import Recompute

SECONDS_PER_DAY = 86_400.0
MOST_NODES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a number of nodes does."""

    num_nodes: int
    num_devices: int
    candidate: Candidate | None
    """None: nothing fits."""

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput."""
        return self.candidate.estimate.tokens_per_s if self.candidate else None

    @property
    def tokens_per_device_s(self) -> float | None:
        """Throughput of one device."""
        return self.candidate.estimate.tokens_per_s / self.num_devices if self.candidate else None

    @property
    def recomputes(self) -> frozenset[Recompute]:
        """What the plan recomputes."""
        if self.candidate is None:
            return frozenset()
        return frozenset(stage.recompute for row in self.candidate.layout.replicas for stage in row.stages)

    def days(self, num_tokens: float) -> float | None:
        """Return the days it takes to train on `num_tokens`."""
        return num_tokens / self.tokens_per_s / SECONDS_PER_DAY if self.tokens_per_s else None

    def usd(self, num_tokens: float) -> float | None:
        """Return what training on `num_tokens` costs; None without prices."""
        found = self.candidate.estimate if self.candidate else None
        if found is None or found.usd_per_step is None:
            return None
        return found.usd_per_step * num_tokens / (found.tokens_per_s * found.step_s)


def smallest_count(prices: Prices, group: str, request: SearchRequest | None = None) -> int:
    """Return the smallest number of nodes of `group`, everything else as it is, on which some plan fits.

    Raises:
        InfeasibleError: no number of nodes is enough.
    """
    wanted = request or SearchRequest()

    def enough(count: int) -> bool:
        return fits(build_problem(_sized(prices, group, count), wanted.limits)) is not None

    found = smallest(enough, 0, MOST_NODES)
    if found is not None:
        return found
    reason = structural(build_problem(_sized(prices, group, MOST_NODES), wanted.limits))
    why = diagnosis_text(reason).split("\n")[0] if reason else "one layer is too large for a device"
    raise InfeasibleError(f"no number of nodes of group {group} makes {prices.model.name} fit: {why}")


def sizes(prices: Prices, group: str, counts: Iterable[int], request: SearchRequest | None = None) -> tuple[Size, ...]:
    """Return what each number of nodes of `group` does; more nodes may be left idle, so they never do worse."""
    wanted = request or SearchRequest()
    found: list[Size] = []
    best: Candidate | None = None
    for count in sorted(counts):
        sized = _sized(prices, group, count)
        best = min(
            (candidate for candidate in (best, attempt(sized, wanted)) if candidate is not None),
            key=lambda candidate: candidate.estimate.step_s,
            default=None,
        )
        found.append(
            Size(num_nodes=count, num_devices=sized.cluster.group(group).num_devices, candidate=best),
        )
    return tuple(found)


def doubling(first: int, most: int) -> tuple[int, ...]:
    """Return `first` and its doubles up to `most`: the counts of a table."""
    counts = []
    count = first
    while count <= most:
        counts.append(count)
        count *= 2
    return tuple(counts)


def _sized(prices: Prices, group: str, count: int) -> Prices:
    cluster = with_nodes(prices.cluster, group, count)
    return price(cluster, prices.model, prices.workload, prices.calibration)
