"""What is left of clusters and plans, and what must move, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.load import load_model
from hetplan.costs.prices import Prices, price
from hetplan.errors import UsageError
from hetplan.plan.moves import CHECKPOINT, moves
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.plan.stages import whole_params
from hetplan.plan.survivors import carried_over, device_names, resized, without
from hetplan.specs.cluster import Cluster
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.workload import Workload

TEXT = """\
hetplan: cluster/v1
name: four
groups:
  a: {device: A100-SXM4-40GB, nodes: 'a[1-4]', devices_per_node: 2}
networks:
  eth: {joins: [a], kind: ethernet, bandwidth: 8 Gbit/s, latency: 0 us}
"""
CLUSTER = cluster_from_text(TEXT, "four.yaml", find_device)
MODEL, _ = load_model("gpt2")
LAYERS = len(MODEL.chain)
BYTES = 2 + 12
"""bf16 weights; fp32 master copy and two moments."""


def prices_of(cluster: Cluster) -> Prices:
    return price(cluster, MODEL, Workload(seq_len=256, global_batch=48), None)


def params(first: int, end: int) -> float:
    return float(whole_params(prices_of(CLUSTER))[0][first:end].sum())


def layout(copies: int, cuts: tuple[int, ...], tp: int = 1, sharding: str = "none") -> Layout:
    ends = (*cuts, LAYERS)
    stages = tuple(
        Stage(group="a", first_layer=first, end_layer=end, tp=tp) for first, end in zip((0, *cuts), ends, strict=True)
    )
    row = Replica(stages=stages, microbatch=1, num_microbatches=48 // copies, copies=copies)
    return place(Layout(replicas=(row,), sharding=sharding), CLUSTER)  # type: ignore[arg-type]


def test_without_keeps_names_and_drops_empty_groups() -> None:
    left = without(CLUSTER, ["a2", "a4:1"])
    assert device_names(left)["a"] == (("a", "a1", 0), ("a", "a1", 1), ("a", "a3", 0), ("a", "a3", 1), ("a", "a4", 0))
    with pytest.raises(UsageError, match="no node 'a9'"):
        without(CLUSTER, ["a9"])
    with pytest.raises(UsageError, match="no slot '2'"):
        without(CLUSTER, ["a1:2"])
    with pytest.raises(UsageError, match="nothing is left"):
        without(CLUSTER, ["a1", "a2", "a3", "a4"])


def test_a_layout_is_carried_to_other_indices_and_back() -> None:
    left = without(CLUSTER, ["a1"])
    on_rest = place(replace(layout(2, (6,)), replicas=(unplaced(layout(2, (6,))),)), left)
    back = carried_over(on_rest, left, CLUSTER)
    assert [stage.devices for stage in back.replicas[0].stages] == [((2, 4),), ((4, 6),)]
    assert carried_over(back, CLUSTER, left) == on_rest
    with pytest.raises(UsageError, match=r"2 devices it runs on are gone: a2 \(2\)"):
        carried_over(back, CLUSTER, without(CLUSTER, ["a2"]))


def unplaced(placed: Layout) -> Replica:
    (row,) = placed.replicas
    return replace(row, stages=tuple(replace(stage, devices=()) for stage in row.stages))


def test_lost_copies_leave_their_batch_to_the_others() -> None:
    old = layout(8, ())
    found = list(resized(old, CLUSTER, without(CLUSTER, ["a3"]), 48))
    assert found
    for left in found:
        assert (left.num_samples, left.num_devices) == (48, 6)
    kept = found[0].replicas[0].stages[0].devices
    assert kept == ((0, 6),)


def test_a_batch_that_does_not_divide_is_shared_as_evenly_as_it_goes() -> None:
    old = layout(8, ())
    (first, *_) = resized(old, CLUSTER, without(CLUSTER, ["a3", "a4:0"]), 48)
    assert sorted((row.num_microbatches, row.copies) for row in first.replicas) == [(9, 2), (10, 3)]


def test_nothing_moves_where_nothing_changes() -> None:
    for sharding in ("none", "optimizer", "full"):
        old = layout(4, (6,), sharding=sharding)
        found = moves((old, CLUSTER), (old, CLUSTER), prices_of(CLUSTER))
        assert (found.moves, found.moved_bytes, found.checkpoint_bytes, found.transfer_s) == ((), 0.0, 0.0, 0.0)


def test_one_layer_goes_to_its_new_stage_from_the_old_one() -> None:
    old, new = layout(4, (6,)), layout(4, (7,))
    found = moves((old, CLUSTER), (new, CLUSTER), prices_of(CLUSTER))
    (move,) = found.moves
    assert (move.first_layer, move.end_layer, move.num_devices) == (6, 7, 4)
    assert move.num_bytes == pytest.approx(4 * params(6, 7) * BYTES)
    needed = 4 * params(0, LAYERS) * BYTES
    assert found.kept_bytes == pytest.approx(needed - move.num_bytes)
    # Stage 0 is on nodes a1 and a2, stage 1 on a3 and a4: two devices a node receive over one NIC of 1 GB/s.
    link = prices_of(CLUSTER).link("a", "a")
    assert link is not None
    assert found.transfer_s == pytest.approx(2 * params(6, 7) * BYTES / link.bandwidth_bytes_per_s)


def test_wider_tp_needs_no_more_than_its_slice() -> None:
    old, new = layout(8, (), tp=1), layout(4, (), tp=2)
    found = moves((old, CLUSTER), (new, CLUSTER), prices_of(CLUSTER))
    assert found.moved_bytes == 0
    assert found.kept_bytes == pytest.approx(8 * params(0, LAYERS) / 2 * BYTES)
    back = moves((new, CLUSTER), (old, CLUSTER), prices_of(CLUSTER))
    assert back.moved_bytes == pytest.approx(8 * params(0, LAYERS) / 2 * BYTES)
    assert back.transfer_s == 0.0


def test_copies_survive_a_loss_and_shards_do_not() -> None:
    left = without(CLUSTER, ["a4"])
    for sharding, lost_bytes in (("none", 0.0), ("optimizer", 12.0), ("full", 14.0)):
        old = layout(8, (), sharding=sharding)
        row = replace(unplaced(layout(6, ())), copies=6, num_microbatches=8)
        new = place(replace(old, replicas=(row,)), left)
        found = moves((old, CLUSTER), (new, left), prices_of(left))
        assert found.checkpoint_bytes == pytest.approx(params(0, LAYERS) * lost_bytes * 2 / 8)
        assert all(move.sender in ("a", CHECKPOINT) for move in found.moves)
        held = params(0, LAYERS) * (14 * 6 if sharding == "none" else 2 * 6 + 12 if sharding == "optimizer" else 14)
        assert found.kept_bytes + found.moved_bytes + found.checkpoint_bytes == pytest.approx(held)


def test_the_only_holder_lost_means_a_checkpoint() -> None:
    old = layout(1, (3, 6, 9))
    left = without(CLUSTER, ["a2"])
    new = place(replace(old, replicas=(unplaced(old),)), left)
    found = moves((old, CLUSTER), (new, left), prices_of(left))
    assert found.checkpoint_bytes == pytest.approx(params(6, LAYERS) * BYTES)


def test_experts_move_by_their_own_slices() -> None:
    """Of Mixtral's experts a rank with ep 2 holds half; with ep 1 it needs the other half."""
    model, _ = load_model("mixtral-8x7b")
    prices = price(CLUSTER, model, Workload(seq_len=256, global_batch=48), None)
    dense_l, expert_l = whole_params(prices)
    assert expert_l.sum() > dense_l.sum()

    def with_ep(ep: int) -> Layout:
        stage = Stage(group="a", first_layer=0, end_layer=len(model.chain), dp=2, ep=ep)
        row = Replica(stages=(stage,), microbatch=2, num_microbatches=6, copies=4)
        return place(Layout(replicas=(row,)), CLUSTER)

    found = moves((with_ep(2), CLUSTER), (with_ep(1), CLUSTER), prices)
    assert found.moved_bytes == pytest.approx(8 * float(expert_l.sum()) / 2 * BYTES)
    assert found.kept_bytes == pytest.approx(8 * float(expert_l.sum() / 2 + dense_l.sum()) * BYTES)
    assert found.transfer_s == 0.0
    back = moves((with_ep(1), CLUSTER), (with_ep(2), CLUSTER), prices)
    assert back.moved_bytes == 0.0
