"""What each fitted constant does to the cost model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from calibrate_samples import COMMON, table_row

from hetplan.calibrate.express import setup_of
from hetplan.calibrate.predict import stage_memories, step_s
from hetplan.calibrate.runs import Run
from hetplan.costs.collectives import exchange_inside, stack
from hetplan.specs.calibration import Calibration, DeviceConstants

DENSE = replace(table_row("GPT", (4, 2048, 16), (2, 1, 1, 4), (2, 16)), precision="fp8", year="2024", device="H100")
MIXTURE = replace(
    COMMON,
    model="Mixtral-8x7B",
    ffn="moe",
    layers="2",
    seq="1024",
    device="H100",
    year="2024",
    precision="fp8",
    n_devices="16",
    tp="1",
    pp="1",
    dp="16",
    ep="16",
    micro_batch="1",
    global_batch="16",
    inter_net="1x IB 100Gb/s",
    vocab="",
)
SMALL_MIXTURE = replace(MIXTURE, ep="8", n_devices="8", dp="8")


def seconds(run: Run, **constants: float) -> float:
    setup = setup_of(run)
    device = replace(DeviceConstants(), **constants)
    return step_s(setup, Calibration(devices={setup.devices[0]: device}))


@pytest.mark.parametrize(
    ("run", "name", "value"),
    [
        (DENSE, "fp8_fraction", 0.5),
        (SMALL_MIXTURE, "expert_fraction", 0.5),
        (SMALL_MIXTURE, "expert_overhead_s", 1e-3),
        (SMALL_MIXTURE, "exchange_fraction", 0.5),
    ],
)
def test_a_worse_constant_takes_longer(run: Run, name: str, value: float) -> None:
    assert seconds(run, **{name: value}) > seconds(run)


@pytest.mark.parametrize("name", ["expert_fraction", "exchange_fraction", "exchange_merged"])
def test_constants_of_experts_leave_dense_models_alone(name: str) -> None:
    assert seconds(DENSE, **{name: 0.5}) == seconds(DENSE)


def test_8_bit_constants_leave_16_bit_runs_alone() -> None:
    run = replace(DENSE, precision="bf16")
    assert seconds(run, fp8_fraction=0.5) == seconds(run)


def test_expert_overhead_comes_once_forward_and_twice_backward() -> None:
    run = replace(SMALL_MIXTURE, global_batch="8")
    layers, forward, backward, repeated = 2, 1, 2, 1
    added = seconds(run, expert_overhead_s=1e-3) - seconds(run)
    assert added == pytest.approx(layers * (forward + backward + repeated) * 1e-3, rel=0.05)
    kept = replace(run, recompute="none")
    added = seconds(kept, expert_overhead_s=1e-3) - seconds(kept)
    assert added == pytest.approx(layers * (forward + backward) * 1e-3, rel=0.05)


def test_merged_exchanges_send_a_token_once_to_each_node() -> None:
    run = replace(MIXTURE, ep="8", devices_per_node="4", n_devices="8", dp="8")
    assert seconds(run, exchange_merged=1.0) < seconds(run)
    assert seconds(SMALL_MIXTURE, exchange_merged=1.0) == seconds(SMALL_MIXTURE)


def test_an_exchange_is_as_slow_as_its_slower_half() -> None:
    setup = setup_of(replace(MIXTURE, ep="8", devices_per_node="4", n_devices="8", dp="8"))
    ring = exchange_inside(setup.cluster, setup.cluster.groups[0], Calibration(), num_ranks=8, stride=1)
    rings = stack([ring])
    whole = rings.exchange_s(np.array([1e9]), np.array([1.0]))
    assert whole == pytest.approx(rings.reduce_scatter_s(np.array([1e9])))
    assert ring.num_domains == 2
    assert ring.outer_s_per_byte > ring.inner_s_per_byte > 0


def test_materialised_heads_off_the_matrix_units_are_slow() -> None:
    rows = {
        heads: replace(table_row("GPT", (4, 1728, heads), (1, 1, 1, 1), (4, 4)), device="A100-SXM-80GB")
        for heads in (16, 18)
    }
    widths = {heads: 1728 / heads for heads in rows}
    assert widths == {16: 108.0, 18: 96.0}
    assert seconds(rows[16]) > 1.2 * seconds(rows[18])
    fused = {heads: replace(row, notes="flash") for heads, row in rows.items()}
    assert seconds(fused[16]) == pytest.approx(seconds(fused[18]), rel=0.1)


def test_logits_and_recomputed_layers_do_not_add_up() -> None:
    run = replace(table_row("GPT", (2, 512, 8), (1, 1, 1, 1), (4, 4)), recompute="full")
    (stage,) = stage_memories(setup_of(run))
    assert stage.logits > stage.activations
    (kept,) = stage_memories(setup_of(replace(run, recompute="none")))
    assert kept.activations > stage.activations
