"""A global batch that may be larger: which batches are tried, and what the answer says of them."""

from __future__ import annotations

from dataclasses import replace

from tiny import device, llama_like

from hetplan.costs.prices import price
from hetplan.plan.limits import Limits
from hetplan.search.batch_slack import MOST_BATCHES, batches_within, search_batches
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.cluster import Cluster, Group
from hetplan.specs.workload import Workload

REQUEST = SearchRequest(
    limits=Limits(tp=(1,), recompute=("none",), sharding=("none",), microbatch=(1,), uniform_microbatches=True),
    compare=False,
)


def prices_of(batch: int):
    card = device("card", 3e14)
    group = Group(
        name="a", device=card, nodes=("a-1",), devices_per_node=5, site="here", usable_memory_bytes=card.memory_bytes
    )
    cluster = Cluster(name="five", groups=(group,), networks=())
    workload = Workload(global_batch=batch, seq_len=512, precision="bf16")
    return price(cluster, llama_like(4, width=512), workload)


def test_batches_are_the_smallest_multiples_within_the_slack() -> None:
    assert batches_within(1024, 0.006, 8, (1, 2)) == (1024, 1026, 1025, 1029, 1030)
    assert batches_within(1024, 0.0, 8, (1, 2)) == (1024,)


def test_every_batch_stays_within_the_slack_and_opens_a_divisor() -> None:
    for batch in batches_within(96, 0.1, 16, (1, 2, 4))[1:]:
        assert 96 < batch <= 105
        assert any(batch % step == 0 and 96 % step for step in range(1, 65))


def test_a_larger_batch_that_five_replicas_share_wins_by_step_time() -> None:
    exact = search(prices_of(64), REQUEST)
    found = search_batches(prices_of(64), REQUEST, 0.02)
    assert found.batches[0] == 64 and found.best.layout.num_samples == 65
    assert found.best.estimate.step_s < exact.best.estimate.step_s
    assert found.proof.bound <= found.proof.value
    assert "global batches of 64, 65" in found.space


def test_no_larger_batch_within_the_slack_is_the_plain_search() -> None:
    found = search_batches(prices_of(64), REQUEST, 0.001)
    plain = search(prices_of(64), REQUEST)
    assert found.batches == (64,)
    assert (found.best, found.proof) == (plain.best, plain.proof)


def test_many_batches_are_capped_and_said_to_be() -> None:
    found = search_batches(
        prices_of(64), replace(REQUEST, limits=replace(REQUEST.limits, microbatch=(1, 3, 7, 11))), 1.0
    )
    assert len(found.batches) == MOST_BATCHES
    assert f"the {MOST_BATCHES} that open most, of " in found.space
    assert found.proof.effort <= REQUEST.effort
