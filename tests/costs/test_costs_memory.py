from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from costs_samples import A100, GIB, MIB, V100, cluster, exact, gpt, group, with_params
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.costs.prices import price
from hetplan.costs.records import ShardDegrees, StageOption
from hetplan.specs.workload import RECOMPUTES, SHARDINGS, Workload

WORK = Workload(seq_len=1024, global_batch=8, precision="fp16")
ONE = StageOption(group="a", samples=1)


def states(params, *, sharding, ranks, work=WORK):
    prices = price(cluster(group("a")), with_params(params), work, exact())
    return prices.memory(ONE, (0, 1), 1, sharding, ShardDegrees(dense=ranks))


@pytest.mark.parametrize(("ranks", "mib"), [(1, 474.8), (2, 237.4), (8, 59.4)])
def test_optimizer_states_of_gpt2_sharded_over_ranks(ranks, mib):
    # GPT-2 124M under ZeRO-1 on 1, 2 and 8 A100, measured (https://github.com/karpathy/llm.c/pull/309): each moment.
    use = states(124_475_904, sharding="optimizer", ranks=ranks)
    assert use.optimizer_bytes / 3 / MIB == pytest.approx(mib, abs=0.05)
    assert use.weights_bytes / MIB == pytest.approx(237.4, abs=0.05)
    assert use.gradients_bytes == use.weights_bytes


@pytest.mark.parametrize(("params", "gib"), [(6_738_415_616, 12.55), (8_030_261_248, 14.96)])
def test_fully_sharded_states_take_16_bytes_a_parameter_over_all_ranks(params, gib):
    # Llama-2-7B on eight V100-16 and Llama-3-8B on eight RTX 3090 (https://github.com/meta-llama/llama-cookbook/issues/234,
    # https://github.com/hiyouga/LlamaFactory/issues/5977).
    use = states(params, sharding="full", ranks=8)
    assert (use.weights_bytes + use.gradients_bytes + use.optimizer_bytes) / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize(
    ("sharding", "parts"),
    [("none", (2, 2, 12)), ("optimizer", (2, 2, 3)), ("gradients", (2, 0.5, 3)), ("full", (0.5, 0.5, 3))],
)
def test_each_sharding_divides_what_its_name_says(sharding, parts):
    use = states(1000, sharding=sharding, ranks=4)
    assert (use.weights_bytes, use.gradients_bytes, use.optimizer_bytes) == pytest.approx([1000 * x for x in parts])


def test_weights_gradients_and_optimizer_of_gpt3_take_18_bytes_a_parameter():
    # Korthikanti 2022 (arXiv:2205.05198), figure 1: 45.56 GiB for 12 of 96 layers at tp 8 with fp32 gradients.
    work = replace(WORK, gradient_precision="fp32")
    prices = price(cluster(group("a")), gpt(96, 12288, 96), work, exact())
    use = prices.memory(replace(ONE, tp=8), (1, 13), 1, "none", ShardDegrees())
    total = use.weights_bytes + use.gradients_bytes + use.optimizer_bytes
    assert total / GIB == pytest.approx(45.5625, rel=1e-3)


def test_fully_sharded_stages_hold_two_gathered_layers_and_a_gradient():
    params = 8_000_000
    prices = price(cluster(group("a")), with_params(params, layers=4), WORK, exact())
    use = prices.memory(ONE, (0, 4), 1, "full", ShardDegrees(dense=8))
    assert use.buffers_bytes == pytest.approx(params / 4 * 7 / 8 * (2 * 2 + 2))
    assert prices.memory(ONE, (0, 4), 1, "none", ShardDegrees(dense=8)).buffers_bytes == 0


def test_stages_inside_a_pipeline_hold_what_they_receive_and_send():
    prices = price(cluster(group("a")), gpt(4, 1024, 16), WORK, exact())
    tensor = 1024 * 1024 * 2
    held = [prices.memory(ONE, span, 1, "none", ShardDegrees()).buffers_bytes for span in ((0, 6), (0, 3), (2, 4))]
    assert held == [0, tensor, 2 * tensor]


def test_only_stages_with_the_head_hold_logits_and_only_once():
    prices = price(cluster(group("a")), gpt(4, 1024, 16), WORK, exact())
    logits = prices.layers(ONE).logits_bytes[-1]
    assert prices.memory(ONE, (3, 6), 4, "none", ShardDegrees()).logits_bytes == logits > 0
    assert prices.memory(ONE, (0, 5), 4, "none", ShardDegrees()).logits_bytes == 0


def test_a_stage_with_a_tied_head_but_without_the_table_holds_a_copy_of_the_weight():
    prices = price(cluster(group("a")), gpt(4, 1024, 16, vocab=50000), WORK, exact())
    copied = 50000 * 1024 / 2
    option = replace(ONE, tp=2)
    params = prices.layers(option).params
    for sharding, per_param in (("none", (2, 2, 12)), ("optimizer", (2, 2, 3)), ("full", (0.5, 0.5, 3))):
        degrees = ShardDegrees(dense=4)
        split = prices.memory(option, (3, 6), 1, sharding, degrees)
        whole = prices.memory(option, (0, 6), 1, sharding, degrees)
        expected = [(params[3:].sum() + copied) * num_bytes for num_bytes in per_param]
        assert [split.weights_bytes, split.gradients_bytes, split.optimizer_bytes] == pytest.approx(expected)
        assert whole.weights_bytes == pytest.approx(params.sum() * per_param[0])


def test_overhead_and_reserve_come_from_the_constants():
    plain = price(cluster(group("a")), gpt(4, 1024, 16), WORK, exact())
    more = price(
        cluster(group("a")), gpt(4, 1024, 16), WORK, exact(A100, memory_overhead_fraction=0.1, reserve_bytes=1e9)
    )
    a = plain.memory(ONE, (1, 3), 2, "none", ShardDegrees())
    b = more.memory(ONE, (1, 3), 2, "none", ShardDegrees())
    assert b.activations_bytes == pytest.approx(1.1 * a.activations_bytes)
    assert b.buffers_bytes == pytest.approx(1.1 * a.buffers_bytes)
    assert (b.weights_bytes, b.reserve_bytes) == (a.weights_bytes, 1e9)


@st.composite
def questions(draw):
    option = StageOption(
        group=draw(st.sampled_from(["a", "v"])),
        tp=draw(st.sampled_from([1, 2, 4])),
        cp=draw(st.sampled_from([1, 2])),
        samples=draw(st.integers(1, 4)),
        recompute=draw(st.sampled_from(RECOMPUTES)),
    )
    first = draw(st.integers(0, 6))
    end = draw(st.integers(first + 1, 7))
    degrees = ShardDegrees(dense=draw(st.integers(1, 16)), expert=draw(st.integers(1, 4)))
    return option, (first, end), draw(st.integers(1, 8)), draw(st.sampled_from(SHARDINGS)), degrees


@settings(max_examples=200, deadline=None)
@given(question=questions(), sequence_parallel=st.booleans())
def test_matrices_give_the_total_of_every_span(question, sequence_parallel):
    option, (first, end), in_flight, sharding, degrees = question
    work = replace(WORK, sequence_parallel=sequence_parallel)
    prices = price(cluster(group("a"), group("v", V100)), gpt(5, 512, 8), work)
    fixed, per_microbatch = prices.memory_matrices(option, sharding, degrees)
    use = prices.memory(option, (first, end), in_flight, sharding, degrees)
    assert fixed.shape == per_microbatch.shape == (8, 8)
    assert fixed[first, end] + in_flight * per_microbatch[first, end] == pytest.approx(use.total_bytes, rel=1e-9)
    assert not np.tril(fixed).any()
    assert not np.tril(per_microbatch).any()


@settings(max_examples=100, deadline=None)
@given(question=questions())
def test_memory_grows_with_layers_and_microbatches_and_shrinks_with_sharing(question):
    option, (first, end), in_flight, sharding, degrees = question
    prices = price(cluster(group("a"), group("v", V100)), gpt(5, 512, 8), WORK)
    total = prices.memory(option, (first, end), in_flight, sharding, degrees).total_bytes
    assert prices.memory(option, (first, end), in_flight + 1, sharding, degrees).total_bytes > total
    if end < 7:
        grown = prices.memory(option, (first, end + 1), in_flight, sharding, degrees)
        shrunk = prices.memory(option, (first, end), in_flight, sharding, degrees)
        assert grown.total_bytes - grown.buffers_bytes > shrunk.total_bytes - shrunk.buffers_bytes
    wider = ShardDegrees(dense=degrees.dense * 2, expert=degrees.expert * 2)
    states = [
        use.weights_bytes + use.gradients_bytes + use.optimizer_bytes
        for use in (prices.memory(option, (first, end), in_flight, sharding, d) for d in (degrees, wider))
    ]
    assert states[1] <= states[0]
