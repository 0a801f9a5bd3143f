"""Measured layers and fitted links: what is covered, interpolated and refused, and rings by message size."""

import math
from pathlib import Path

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model_config
from hetplan.costs.fitted_links import FittedLinks, message_s
from hetplan.costs.prices import price
from hetplan.costs.records import Holders, ShardDegrees, StageOption
from hetplan.errors import CalibrationError
from hetplan.plan.timing import blocking_s, columns_s, lock_step_s
from hetplan.specs.calibration import Calibration
from hetplan.specs.layer_table import LayerRow, LayerTable, LinkCurve, LinkEnd, LinkFits
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.read_model import model_from_text
from hetplan.specs.workload import Workload

CLUSTER = """\
hetplan: cluster/v1
name: two
devices:
  card: {like: A100-SXM4-40GB}
groups:
  here: {device: card, nodes: 2, devices_per_node: 4, site: east}
  there: {device: card, nodes: 2, devices_per_node: 4, site: west}
networks:
  net: {joins: [here, there], kind: ethernet, bandwidth: 10 Gbit/s, latency: 1 us}
"""
MODEL = """\
hetplan: model/v1
name: small
layers:
  - {kind: embedding, params: 1000, width: 64, tp: 4}
  - {kind: decoder, repeat: 2, params: 5000, width: 64, tp: 4}
"""


def row(microbatch, first, end, seconds, tp=1, **more):
    return LayerRow(
        device="card",
        tp=tp,
        microbatch=microbatch,
        first_layer=first,
        end_layer=end,
        forward_s=seconds,
        backward_s=2 * seconds,
        update_s=0.25,
        **more,
    )


ROWS = (
    row(1, 0, 1, 1.0, params=1000.0, saved_bytes=10.0),
    row(1, 1, 3, 3.0, params=5000.0, saved_bytes=100.0),
    row(4, 0, 1, 4.0, params=1000.0, saved_bytes=40.0),
    row(4, 1, 3, 9.0, params=5000.0, saved_bytes=400.0),
)


def prices(table=None, **more):
    cluster = cluster_from_text(CLUSTER, "cluster.yaml", find_device)
    model = model_from_text(MODEL, Path("small.yaml"), find_model_config)
    calibration = Calibration(layers=table, **more)
    return price(cluster, model, Workload(seq_len=128, global_batch=8, precision="fp32"), calibration)


def measured(**more):
    return prices(LayerTable(model="small", num_layers=3, rows=ROWS, **more))


def option(samples, tp=1, **more):
    return StageOption(group="here", tp=tp, samples=samples, **more)


def test_what_was_measured_takes_the_place_of_formulas():
    costs = measured().layers(option(1))
    assert costs.forward_s.tolist() == [1.0, 3.0, 3.0]
    assert costs.backward_s.tolist() == [2.0, 6.0, 6.0]
    assert costs.saved_bytes.tolist() == [10.0, 100.0, 100.0]
    assert costs.tp_forward_s.tolist() == [0.0, 0.0, 0.0]


def test_between_two_measured_microbatches_figures_lie_on_a_line():
    costs = measured().layers(option(2))
    assert costs.forward_s.tolist() == pytest.approx([2.0, 5.0, 5.0])
    assert costs.saved_bytes.tolist() == pytest.approx([20.0, 200.0, 200.0])


@pytest.mark.parametrize("asked", [option(8), option(1, tp=2), option(1, cp=2), option(1, recompute="selective")])
def test_what_was_not_measured_is_refused_by_name_and_never_free(asked):
    known = measured()
    assert not known.covers(asked)
    with pytest.raises(CalibrationError, match=r"not measured on card.*tp 1: 1, 4 samples"):
        known.layers(asked)
    assert math.isinf(known.table([asked]).forward_s.min())
    fixed, _ = known.memory_matrices(asked, "none", ShardDegrees())
    assert fixed[0, 1] > 1e20


def test_full_recomputation_repeats_the_measured_forward_pass():
    costs = measured().layers(option(1, recompute="full"))
    assert costs.backward_s.tolist() == [2.0, 9.0, 9.0]
    assert costs.saved_bytes[1] == 128 * 64 * 4


def test_a_layer_some_rows_leave_out_makes_the_microbatch_unknown():
    table = LayerTable(model="small", num_layers=3, rows=ROWS[:1])
    assert not prices(table).covers(option(1))


def test_a_table_of_another_length_is_refused():
    with pytest.raises(CalibrationError, match="with 4 layers"):
        prices(LayerTable(model="small", num_layers=4, rows=ROWS))


def test_sizes_alone_cannot_be_priced():
    with pytest.raises(CalibrationError, match="states the sizes of its layers and no work"):
        prices()


def test_memory_is_states_activations_and_reserve():
    known = measured(bytes_per_param=24.0, reserve_bytes={1: 2e9, 2: 3e9})
    use = known.memory(option(1), (0, 2), 3, "none", ShardDegrees())
    assert use.total_bytes == pytest.approx(24 * 6000 + 3 * 110 + 2e9)


def test_updates_are_of_each_layer_or_of_the_stage():
    assert measured().update_s(option(1), 0, 3) == pytest.approx(0.75)
    assert measured(update_scope="stage").update_s(option(1), 0, 3) == pytest.approx(0.25)


RISING = LinkCurve(coefficients=(0.5e9, 2e9), max_bytes_per_s=4e9)


def test_bandwidth_follows_the_size_of_a_message_up_to_the_measured_most():
    assert message_s(RISING, 4e6) == pytest.approx(4e6 / 3e9)
    assert message_s(RISING, 1e12) == pytest.approx(1e12 / 4e9)
    assert message_s(RISING, 0.0) == 0.0


def test_where_a_fit_is_not_positive_the_time_of_the_least_size_it_holds_for_stays():
    assert message_s(RISING, 1.0) == message_s(RISING, 2.0) > 0


def fits(**more):
    east, west = LinkEnd(device="card", site="east"), LinkEnd(device="card", site="west")
    slow = LinkCurve(coefficients=(1e9,))
    between = {(east, east): LinkCurve(coefficients=(4e9,)), (east, west): slow}
    return FittedLinks(LinkFits(between=between, **more), cluster_from_text(CLUSTER, "c.yaml", find_device))


def holder(group, ranks, tp=1):
    return Holders(group=group, num_ranks=ranks, ranks_per_node=1, tp=tp)


def test_a_ring_goes_at_the_pace_of_its_slowest_pair():
    alone = fits().all_reduce_s(8e8, [holder("here", 4)])
    assert alone == pytest.approx(2 * 3 * 2e8 / 4e9)
    assert fits().all_reduce_s(8e8, [holder("here", 3), holder("there", 1)]) == pytest.approx(2 * 3 * 2e8 / 1e9)
    assert fits().all_reduce_s(8e8, [holder("here", 4, tp=2)]) == pytest.approx(alone / 2)
    assert fits().all_reduce_s(8e8, [holder("here", 1)]) == 0.0


def test_a_pair_no_fit_speaks_of_is_out_of_reach():
    assert math.isinf(fits().all_reduce_s(1e6, [holder("there", 2)]))


def test_gradients_in_pieces_take_as_long_as_whole_where_bandwidth_does_not_change():
    whole, pieces = fits(), fits(bucket_bytes=3e8)
    assert pieces.all_reduce_s(8e8, [holder("here", 4)]) == pytest.approx(whole.all_reduce_s(8e8, [holder("here", 4)]))


def test_closed_forms_of_pipelines():
    assert lock_step_s(4, [2.0, 3.0], [0.5]) == pytest.approx((2.5 + 4.0) + 3 * 4.0)
    assert lock_step_s(4, [2.0, 3.0, 1.0, 1.0], [0.5] * 3) == pytest.approx((3 + 4 + 2 + 2) + 3 * 4.0)
    assert blocking_s(4, [2.0, 3.0, 1.0], [0.5, 0.5]) == pytest.approx((3 + 5 + 2) + 3 * 5.0)
    assert columns_s(3, [2.0, 3.0], [0.5]) == pytest.approx(3.0 + 3.0 + 3.0 + 3.0)
    assert columns_s(3, [1.0, 3.0], [0.0]) == pytest.approx(1.0 + 3 * 3.0)
