"""Runs whose layers were measured, networks that tables hardly describe, and constants of one software."""

from __future__ import annotations

from dataclasses import replace

import pytest
from calibrate_samples import GPT_18B, SMALL

from hetplan.calibrate.express import setup_of
from hetplan.calibrate.fit import Observation
from hetplan.calibrate.parameters import PARAMETERS, matters
from hetplan.calibrate.predict import step_s
from hetplan.calibrate.stacks import few_of_each, fit_stacks
from hetplan.calibrate.tables import with_table
from hetplan.specs.calibration import Calibration
from hetplan.specs.layer_table import LayerRow, LayerTable

RUN = SMALL[0]
MODEL = "GPT-1024"


def table(model: str = MODEL, device: str = "A100-SXM4-80GB") -> LayerTable:
    row = LayerRow(device=device, tp=1, microbatch=1, first_layer=0, end_layer=10, forward_s=0.01, backward_s=0.02)
    return LayerTable(model=model, num_layers=10, rows=(row,))


def test_a_table_that_covers_a_run_stands_for_the_formulas() -> None:
    alone = setup_of(replace(RUN, n_devices="1", dp="1", global_batch="64"))
    setup = with_table(alone, (table("other"), table()))
    assert setup.layers == table()
    passes_s = 64 * (10 * 0.03 + 8 * 0.01)  # microbatches through ten layers, of which the decoders are recomputed
    assert step_s(setup, Calibration()) == pytest.approx(passes_s, rel=1e-3)


@pytest.mark.parametrize("other", [table("GPT-4096"), table(device="H100-SXM5-80GB")])
def test_a_table_of_another_model_or_device_is_no_help(other: LayerTable) -> None:
    assert with_table(setup_of(RUN), (other,)).layers is None


def test_an_ethernet_without_a_rate_is_a_plain_one() -> None:
    (network,) = setup_of(replace(GPT_18B, inter_net="Ethernet")).cluster.networks
    assert (network.nics_per_node, network.bandwidth_bytes_per_s) == (1, 1e9 / 8)


def test_constants_matter_to_runs_that_have_what_they_price() -> None:
    dense, piped = setup_of(replace(GPT_18B, precision="bf16")), setup_of(SMALL[2])
    known = {entry.name: entry for entry in PARAMETERS}
    for name in ("fp8_fraction", "expert_fraction", "exchange_fraction", "pcie_fraction", "sends_block"):
        assert not matters(known[name], dense), name
    assert matters(known["tp_fraction"], dense) and matters(known["bandwidth_fraction"], dense)
    assert matters(known["sends_block"], piped)


def test_software_known_from_other_devices_is_used_on_a_new_one() -> None:
    runs = [replace(run, device=device) for device in ("A100", "H100") for run in SMALL[:2]]
    rows = [Observation(setup=setup_of(run), step_s=0.3) for run in runs]
    stacks = fit_stacks(rows)
    assert set(stacks.by_software) == {RUN.stratum}
    assert stacks.find(setup_of(replace(RUN, device="A800-SXM-80GB")))[0] == "software"
    assert stacks.find(setup_of(RUN))[0] == "stack"


def test_what_a_release_changes_on_one_device_is_expected_on_another() -> None:
    def observed(device: str, release: str, place: int) -> Observation:
        run = replace(SMALL[place], device=device, source=f"made up [{release} test]", id=f"{device}-{release}-{place}")
        setup = setup_of(run)
        return Observation(setup=setup, step_s=step_s(setup, Calibration()) * (0.6 if release == "2.0" else 1.0))

    old = [observed(device, "1.0", place) for device in ("A100", "H100") for place in (0, 1, 2)]
    here, asked = observed("H100", "2.0", 2), observed("H100", "2.0", 0)
    there = [observed("A100", "2.0", place) for place in (0, 1)]
    told, untold = (fit_stacks([*old, here, *more]).calibration(asked.setup) for more in (there, []))
    known = abs(step_s(asked.setup, told) / asked.step_s - 1.0)
    assert known < 0.8 * abs(step_s(asked.setup, untold) / asked.step_s - 1.0)


def test_general_levels_look_at_few_rows_of_each_stack() -> None:
    rows = [Observation(setup=setup_of(RUN), step_s=1.0 + k) for k in range(30)]
    chosen = few_of_each(rows, 8)
    assert len(chosen) == 8 and chosen[0] is rows[0] and chosen[-1] in rows[24:]
