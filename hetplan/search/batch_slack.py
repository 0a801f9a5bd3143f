"""Searches over several global batches: the one asked for and a few larger ones that divide better.

With equal shares, r replicas taking m samples at a time need a batch that r m divides. Of the batches from B to
(1 + slack) B only the smallest multiples ceil(B / rm) rm are worth a search: a larger multiple of the same rm adds
microbatches and nothing else. Those that open most pairs (r, m) come first, smaller ones at a tie; at most
`MOST_BATCHES` are searched. The answer has the least value of a step (seconds, where time is minimised), the smaller
batch at a tie; the bound is the least of theirs, and says nothing of batches that were not searched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hetplan.costs.prices import Prices, price
from hetplan.errors import EffortError, InfeasibleError, InterruptedSearchError
from hetplan.plan.records import Status
from hetplan.search.problem import microbatch_sizes
from hetplan.search.records import Progress, SearchRequest, SearchResult
from hetplan.search.solve import search

MOST_BATCHES = 8


def batches_within(batch: int, slack: float, replicas: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batches up to `slack` (a fraction) above `batch` that open a new count of replicas or microbatch.

    `batch` comes first, then those that open the most.
    """
    most = math.floor(batch * (1 + slack) + 1e-9)
    opened: Counter[int] = Counter()
    for step in (count * size for count in range(1, replicas + 1) for size in sizes):
        multiple = -(-batch // step) * step
        if batch < multiple <= most:
            opened[multiple] += 1
    return (batch, *sorted(opened, key=lambda own: (-opened[own], own)))


def search_batches(
    prices: Prices, request: SearchRequest, slack: float, progress: Callable[[Progress], None] | None = None
) -> SearchResult:
    """Return the best plan among those of the batch asked for and of larger ones; effort and time are shared.

    Raises:
        InfeasibleError: no batch has a valid plan.
        EffortError: the time limit passed before a plan was found.
        InterruptedSearchError: the user interrupted; `result` holds the best so far, if any.
    """
    asked = prices.workload.global_batch
    sizes = microbatch_sizes(asked, request.limits)
    replicas = request.limits.replicas or range(1, prices.cluster.num_devices + 1)
    there_are = batches_within(asked, slack, max(replicas), sizes)
    batches = there_are[:MOST_BATCHES]
    share = 1 / len(batches)
    limit_s = request.time_limit_s
    own = replace(request, effort=request.effort * share, time_limit_s=None if limit_s is None else limit_s * share)
    found: list[SearchResult] = []
    failed: InfeasibleError | EffortError | None = None
    cut = False
    for batch in batches:
        try:
            found.append(search(of_batch(prices, batch), own, progress))
        except InfeasibleError as error:
            failed = failed or error
        except EffortError as error:
            failed, cut = failed or error, True
        except InterruptedSearchError as error:
            found += [error.result] if isinstance(error.result, SearchResult) else []
            best = _best(found, batches, len(there_are), "interrupted") if found else None
            raise InterruptedSearchError("interrupted", best) from None
    if not found:
        raise failed or InfeasibleError("no batch has a valid plan")
    return _best(found, batches, len(there_are), _status(found, cut=cut))


def of_batch(prices: Prices, batch: int) -> Prices:
    """Return the prices of the same job with another global batch."""
    workload = prices.workload
    if batch == workload.global_batch:
        return prices
    return price(prices.cluster, prices.model, replace(workload, global_batch=batch), prices.calibration)


def _status(found: list[SearchResult], *, cut: bool) -> Status:
    statuses = {result.proof.status for result in found}
    if cut or "limit" in statuses:
        return "limit"
    return "optimal" if statuses == {"optimal"} else "feasible"


def _best(found: list[SearchResult], batches: tuple[int, ...], there_are: int, status: Status) -> SearchResult:
    best = min(found, key=lambda result: (result.proof.value, result.best.layout.num_samples))
    listed = ", ".join(f"{batch:,}" for batch in sorted(batches))
    left_out = f" (the {len(batches)} that open most, of {there_are:,})" if there_are > len(batches) else ""
    proof = replace(
        best.proof,
        bound=min(result.proof.bound for result in found),
        floor=min(result.proof.floor for result in found),
        status=status,
        effort=sum(result.proof.effort for result in found),
    )
    dropped: Counter[str] = Counter()
    for result in found:
        dropped.update(result.dropped)
    return replace(
        best,
        proof=proof,
        dropped=dict(dropped),
        space=f"global batches of {listed}{left_out}; {best.space}",
        search_s=sum(result.search_s for result in found),
        batches=batches,
    )
