"""Whole steps of one linear layer, worked out by hand from FLOPs, bytes and the figures of a datasheet."""

import pytest
from costs_samples import A100, cluster, exact, group, one_layer

from hetplan.costs.prices import price
from hetplan.plan.estimate import estimate
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.calibration import Calibration, Overlap
from hetplan.specs.model import Layer, Linear, Model, Module
from hetplan.specs.workload import Workload

TOKENS, WIDTH = 4096, 8192
PRODUCT_S = 2 * TOKENS * WIDTH * WIDTH / 312e12
"""One product of all tokens with the weight at the peak of an A100."""
PARAMS = WIDTH * WIDTH
UPDATE_S = PARAMS * (2 * 2 + 2 * 12 + 2) / 2039e9
"""fp16: the gradient is read twice, master copy and moments are read and written, the weight is written."""
ALL_REDUCE_S = 2 * (1 / 2) * 2 * PARAMS / 300e9
"""Two ranks add up fp16 gradients over NVLink: 2 (n - 1) / n of the buffer."""
LINEAR = Linear(name="linear", inputs=WIDTH, outputs=WIDTH)


def constants(*, overlap: float = 0.0, sends_block: float = 0.0) -> Calibration:
    known = exact(A100)
    hidden = Overlap(gradients=overlap, sends_block=sends_block)
    return Calibration(devices=known.devices, networks=known.networks, overlap=hidden)


def step(model, *, copies=1, stages=1, microbatches=4, sharding="none", overlap=0.0, sends_block=0.0):
    work = Workload(seq_len=TOKENS, global_batch=copies * microbatches, precision="fp16")
    prices = price(cluster(group("a")), model, work, constants(overlap=overlap, sends_block=sends_block))
    each = len(model.chain) // stages
    rows = tuple(Stage(group="a", first_layer=i * each, end_layer=(i + 1) * each) for i in range(stages))
    replica = Replica(stages=rows, microbatch=1, num_microbatches=microbatches, copies=copies)
    return estimate(Layout(replicas=(replica,), sharding=sharding), prices)


def two_layers() -> Model:
    layer = Layer(kind="decoder", name="decoder", width=WIDTH, operators=(LINEAR,))
    return Model(name="two", modules=(Module(name="language", layers=(layer, layer)),))


def test_a_backward_pass_is_two_products_for_the_one_of_the_forward_pass():
    found = step(one_layer(LINEAR))
    (stage,) = found.stages
    assert stage.forward_s == pytest.approx(PRODUCT_S)
    assert stage.backward_s == pytest.approx(2 * PRODUCT_S)
    assert found.parts.compute_s == pytest.approx(4 * 3 * PRODUCT_S)


def test_a_step_of_one_device_is_its_products_and_the_update():
    found = step(one_layer(LINEAR))
    assert found.parts.optimizer_s == pytest.approx(UPDATE_S)
    assert found.step_s == pytest.approx(4 * 3 * PRODUCT_S + UPDATE_S)


def test_what_follows_the_pipeline_is_the_all_reduce_and_the_update():
    found = step(one_layer(LINEAR), copies=2)
    assert found.parts.dp_s == pytest.approx(ALL_REDUCE_S)
    assert found.step_s == pytest.approx(4 * 3 * PRODUCT_S + ALL_REDUCE_S + UPDATE_S)


def test_sharded_states_are_reduced_updated_in_halves_and_gathered():
    found = step(one_layer(LINEAR), copies=2, sharding="optimizer")
    half_s = (1 / 2) * 2 * PARAMS / 300e9
    assert found.step_s == pytest.approx(4 * 3 * PRODUCT_S + half_s + UPDATE_S / 2 + half_s)


def test_gradients_of_the_last_layer_hide_behind_the_first_layers_backward_pass():
    found = step(two_layers(), copies=2, overlap=1.0)
    assert ALL_REDUCE_S < 2 * PRODUCT_S
    assert found.step_s == pytest.approx(4 * 6 * PRODUCT_S + ALL_REDUCE_S + 2 * UPDATE_S)


def test_two_equal_stages_take_the_microbatches_one_bubble_and_the_ending():
    found = step(two_layers(), copies=2, stages=2, microbatches=4)
    # The last stage waits once for an input that waited for a gradient, so four transfers are on the critical path.
    boundary_s = TOKENS * WIDTH * 2 / 300e9
    assert found.step_s == pytest.approx((4 + 1) * 3 * PRODUCT_S + 4 * boundary_s + ALL_REDUCE_S + UPDATE_S)


def test_sends_that_block_add_one_transfer_to_each_microbatch_of_the_last_stage():
    # Its rank does F, B and then sends the gradient, m times; the first input and the first stage's last backward pass
    # come on top.
    boundary_s = TOKENS * WIDTH * 2 / 300e9
    found = step(two_layers(), stages=2, microbatches=4, sends_block=1.0)
    pipeline_s = PRODUCT_S + boundary_s + 4 * (3 * PRODUCT_S + boundary_s) + 2 * PRODUCT_S
    assert found.step_s == pytest.approx(pipeline_s + UPDATE_S, rel=1e-3)
