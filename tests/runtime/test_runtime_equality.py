"""Every layout trains what a single process trains: all gradients, the parameters after five steps, and the losses.

Losses alone would show little: a dropped 1/tp moves them by a hundred-thousandth. So gradients are compared tensor by
tensor, by norm, on every rank that holds a part of them, and bugs of each kind are planted to see the comparison fail.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the executor needs torch; pip install 'hetplan[torch]'")

from runtime_cases import Case, case, replica
from runtime_pool import Pool
from runtime_single import Difference, difference, single_of

from hetplan.runtime.ranks import plain_seats

MOST = {"fp32": 1e-4, "fp64": 1e-9}
MOST_LOSS = {"fp32": 1e-6, "fp64": 1e-9}

CASES = {
    "pp2": case("gpt2-4", replica("gpt2-4", "2+2", count=3)),
    "pp2 uneven, tied ends": case("gpt2-4", replica("gpt2-4", "3+1", mb=2, count=2)),
    "pp4 uneven": case("gpt2", replica("gpt2", "1+4+2+1", count=5)),
    "pp3 of fewer microbatches than stages": case("llama", replica("llama", "1+2+1", count=2)),
    "gpipe": case("gpt2-4", replica("gpt2-4", "1+3", count=5), schedule="gpipe"),
    "interleaved": case("gpt2-4", replica("gpt2-4", "1+1+1+1", vpp=2, count=4), schedule="interleaved"),
    "interleaved uneven, two shapes": case(
        "gpt2-4",
        replica("gpt2-4", "1+2+1+0", vpp=2, count=2),
        replica("gpt2-4", "3+1", count=3),
        schedule="interleaved",
    ),
    "interleaved on one rank": case("llama", replica("llama", "2+2", vpp=2, count=3), schedule="interleaved"),
    "zero-bubble": case("gpt2-4", replica("gpt2-4", "1+2+1", count=5), schedule="zero-bubble"),
    "zero-bubble, tp": case("llama", replica("llama", "2+2", tp="2+1", count=3), schedule="zero-bubble"),
    "dp2": case("gpt2-4", replica("gpt2-4", "4", copies=2)),
    "dp3 of unlike counts": case(
        "gpt2-4", replica("gpt2-4", "4", count=1), replica("gpt2-4", "4", count=5), replica("gpt2-4", "4", count=2)
    ),
    "5+3 and 8": case("gpt2", replica("gpt2", "5+3", count=4), replica("gpt2", "8", count=3)),
    "5+3, 2+6 and 8, unlike microbatches": case(
        "gpt2",
        replica("gpt2", "5+3", mb=3, count=1),
        replica("gpt2", "2+6", count=3),
        replica("gpt2", "8", mb=2, count=1),
    ),
    "tp2": case("llama", replica("llama", "4", tp="2", mb=2)),
    "tp2 without sequence parallelism": case("gpt2-4", replica("gpt2-4", "4", tp="2"), sequence_parallel=False),
    "tp2 of odd rows": case("llama", replica("llama", "2+2", tp="2+2"), seq_len=15),
    "tp 2 to 1": case("gpt2-4", replica("gpt2-4", "2+2", tp="2+1", mb=2)),
    "tp 1 to 2": case("llama", replica("llama", "3+1", tp="1+2", mb=2)),
    "tp 1 to 2 without sequence parallelism": case("llama", replica("llama", "3+1", tp="1+2"), sequence_parallel=False),
    "tp 2 to 4": case("gpt2-4", replica("gpt2-4", "2+2", tp="2+4")),
    "tp 4 to 1 and tp 1 to 2": case(
        "gpt2-4", replica("gpt2-4", "1+3", tp="4+1", mb=2, count=2), replica("gpt2-4", "3+1", tp="1+2", count=3)
    ),
    "tp 2 and 1 by replica": case("llama", replica("llama", "4", tp="2", mb=2), replica("llama", "1+3", count=3)),
    "stage dp2": case("llama", replica("llama", "2+2", dp=2, mb=2)),
    "stage dp2 with tp 2": case("llama", replica("llama", "4", dp=2, mb=2, tp="2")),
    "cp2": case("llama", replica("llama", "3+1", cp=2)),
    "cp2 with tp 2": case("qwen3", replica("qwen3", "2+1", cp=2, tp="2+1", mb=2, count=2)),
    "recompute": case("gpt2-4", replica("gpt2-4", "2+2", recompute="full+selective")),
    "recompute, tp": case("llama", replica("llama", "2+2", recompute="full+none", tp="2+1", mb=2)),
    "recompute, zero-bubble": case("llama", replica("llama", "2+2", recompute="full+full"), schedule="zero-bubble"),
    "ZeRO-1": case("gpt2-4", replica("gpt2-4", "4", copies=3), sharding="optimizer"),
    "ZeRO-1, unlike replicas": case(
        "qwen3", replica("qwen3", "2+1", copies=2), replica("qwen3", "3", tp="2", mb=2, count=1), sharding="optimizer"
    ),
    "ZeRO-2": case("llama", replica("llama", "3+1", copies=2), replica("llama", "4"), sharding="gradients"),
    "ZeRO-3": case("llama", replica("llama", "2+2", copies=2, recompute="full+none"), sharding="full"),
    "ZeRO-3, tied, unlike replicas": case(
        "qwen3", replica("qwen3", "2+1", copies=2), replica("qwen3", "3", tp="2", mb=2, count=1), sharding="full"
    ),
    "ep2": case("mixtral", replica("mixtral", "1+1", dp=2, ep=2, mb=2)),
    "ep2 and experts whole": case("mixtral", replica("mixtral", "2", dp=2, ep=2, mb=2), replica("mixtral", "1+1")),
    "ep4 with shared experts": case("qwen2_moe", replica("qwen2_moe", "2", dp=4, ep=4, mb=4, count=2)),
    "ep2 with tp 2": case("qwen2_moe", replica("qwen2_moe", "2", dp=2, ep=2, tp="2", mb=2)),
    "ep2, ZeRO-3": case("mixtral", replica("mixtral", "1+1", dp=2, ep=2, mb=2, copies=2, count=2), sharding="full"),
    "interleaved by channels": case(
        "gpt2-4", replica("gpt2-4", "1+1+1+1", vpp=2, count=4), schedule="interleaved", channels=True
    ),
    "tp 1 to 2 by channels": case("llama", replica("llama", "3+1", tp="1+2", mb=2), channels=True),
    "no clipping": case("llama", replica("llama", "3+1"), clip_norm=0.0),
    "fp64, 5+3 and 8": case("gpt2", replica("gpt2", "5+3", count=4), replica("gpt2", "8", count=3), precision="fp64"),
    "fp64, tp 2 to 1 and 1, ZeRO-1": case(
        "qwen3",
        replica("qwen3", "2+1", tp="2+1", mb=2),
        replica("qwen3", "3", count=3),
        precision="fp64",
        sharding="optimizer",
    ),
    "fp64, ep2 with tp 2": case("mixtral", replica("mixtral", "2", dp=2, ep=2, tp="2", mb=2), precision="fp64"),
}

BUGS = {
    "replicated_gradients_count_once_a_tp_rank": "tp2 without sequence parallelism",
    "tied_tables_are_not_summed": "pp2 uneven, tied ends",
    "one_layers_gradient_group_is_forgotten": "5+3 and 8",
    "replicas_are_averaged_whatever_their_samples": "5+3 and 8",
    "resharding_sends_the_first_rows_to_everyone": "tp 1 to 2",
    "recomputed_layers_pass_gradients_by": "recompute",
    "last_shard_of_the_optimizer_is_not_updated": "ZeRO-1",
    "experts_get_rows_in_the_order_they_came": "ep2",
    "last_deferred_weight_gradient_is_lost": "zero-bubble",
    "each_rank_clips_by_its_own_norm": "pp2",
    "backward_takes_another_microbatchs_activations": "interleaved",
    "all_replicas_read_the_same_samples": "dp2",
    "cp_ranks_read_neighbouring_halves": "cp2",
    "gradients_going_back_are_halved": "gpipe",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One set of ranks for all layouts."""
    made = Pool()
    yield made
    made.close()


def broken(found: Difference, tried: Case) -> list[str]:
    """What does not agree."""
    limit = MOST[tried.precision]
    return [
        *(["gradient"] if not found.gradient <= limit else []),
        *(["parameters"] if not found.parameter <= limit else []),
        *(["loss"] if not found.loss <= MOST_LOSS[tried.precision] else []),
        *(["norm"] if not found.norm <= limit else []),
    ]


def test_enough_layouts_are_tried() -> None:
    assert len(CASES) >= 30
    assert {len(plain_seats(tried.layout)) for tried in CASES.values()} >= {1, 2, 3, 4, 6, 8}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_trains_what_one_process_trains(pool: Pool, name: str) -> None:
    tried = CASES[name]
    found = difference(pool.run(tried), single_of(tried))
    assert not broken(found, tried), found


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(pool: Pool, bug: str) -> None:
    tried = CASES[BUGS[bug]]
    found = difference(pool.run(tried, planted=bug, num_steps=2), single_of(tried))
    assert broken(found, tried), found
    assert {"gradient", "parameters", "norm"} & set(broken(found, tried))
