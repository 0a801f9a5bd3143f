"""Which ranks measure together, which shapes are measured, and how a launcher's ranks are recognised."""

from __future__ import annotations

from itertools import combinations

import pytest

from hetplan.catalog.models import find_model
from hetplan.errors import UsageError
from hetplan.profiling.place import Place, place_of
from hetplan.profiling.rank_sets import LinkSet, link_sets, tp_sets
from hetplan.profiling.shapes import Wish, attention_shapes, gemm_shapes

WISH = Wish(seq_len=256, samples=(1, 4), tps=(1, 2), precisions=("fp32",), quick=True)


def test_ranks_of_one_host_send_and_reduce_among_themselves() -> None:
    found = link_sets(["h", "h"], ["gpu", "gpu"])
    assert found == (LinkSet(kind="send", sets=((0, 1),)), LinkSet(kind="all_reduce", sets=((0, 1),)))


def test_every_pair_of_kinds_is_crossed_once() -> None:
    hosts, kinds = ["a0", "a1", "b0", "c0"], ["a", "a", "b", "c"]
    single = [found.sets[0] for found in link_sets(hosts, kinds) if found.kind == "send" and len(found.sets) == 1]
    assert sorted(tuple(sorted(kinds[rank] for rank in pair)) for pair in single) == [
        ("a", "a"),
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    ]
    assert LinkSet(kind="all_reduce", sets=((0, 1, 2, 3),)) in link_sets(hosts, kinds)


def test_two_pairs_between_the_same_hosts_run_side_by_side() -> None:
    assert LinkSet(kind="send", sets=((0, 2), (1, 3))) in link_sets(["x", "x", "y", "y"], ["a", "a", "b", "b"])


def test_two_pairs_of_hosts_across_one_line_run_side_by_side() -> None:
    beside = [found for found in link_sets(["a0", "a1", "b0", "b1"], ["a", "a", "b", "b"]) if len(found.sets) == 2]
    assert beside
    for found in beside:
        ranks = [rank for one in found.sets for rank in one]
        assert len(set(ranks)) == 4


def test_sets_that_work_at_once_never_share_a_rank() -> None:
    hosts = ["a0", "a0", "a0", "a0", "b0", "b0", "c0"]
    for found in link_sets(hosts, [host[0] for host in hosts]):
        for one, other in combinations(found.sets, 2):
            assert not set(one) & set(other)


def test_one_rank_has_no_links() -> None:
    assert link_sets(["h"], ["gpu"]) == ()


def test_tp_groups_stay_on_a_host_where_they_can_and_are_of_one_kind() -> None:
    hosts, kinds = ["x", "y", "x", "y", "z"], ["a", "a", "a", "a", "b"]
    assert tp_sets(kinds, hosts, 2) == ((0, 2), (1, 3))
    assert tp_sets(["a", "a", "b"], ["x", "y", "z"], 2) == ((0, 1),)
    assert tp_sets(["a", "b"], ["x", "y"], 2) == ()


def test_the_models_own_products_are_among_the_shapes() -> None:
    shapes = {(s.rows, s.inputs, s.outputs) for s in gemm_shapes(WISH, find_model("gpt2"), 1e14)}
    assert (256, 768, 3072) in shapes
    assert (1024, 1536, 768) in shapes, "cut by tp 2"
    assert any(inputs % 8 for _, inputs, _ in shapes), "awkward ones are in the grid"


def test_a_slow_device_is_not_given_what_it_cannot_finish() -> None:
    few, many = gemm_shapes(WISH, None, 1e9), gemm_shapes(WISH, None, 1e14)
    assert 0 < len(few) < len(many)
    assert all(shape.flop <= 1e9 * WISH.longest_s for shape in few)
    assert set(attention_shapes(WISH, None, 1e9)) <= set(attention_shapes(WISH, None, 1e14))


def test_torchrun_and_slurm_say_which_rank_this_is() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert place_of(torchrun) == Place(rank=3, num_ranks=5, local_rank=1, address="10.0.0.1", port=29500)
    slurm = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n[07-09]"}
    found = place_of(slurm)
    assert found is not None
    assert (found.rank, found.num_ranks, found.address) == (2, 4, "n07")
    assert place_of({}) is None
    assert place_of({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_senseless_rank_variables_are_refused() -> None:
    with pytest.raises(UsageError, match="rank variables"):
        place_of({"RANK": "first", "WORLD_SIZE": "2"})
