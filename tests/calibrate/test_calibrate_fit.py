"""Constants that are fitted, and what is said about them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from calibrate_samples import GPT_18B, SMALL

from hetplan.calibrate.calibration import FittedCalibration, calibrate
from hetplan.calibrate.express import setup_of
from hetplan.calibrate.fit import Observation, Predictions, fit
from hetplan.calibrate.memory import GIB, Peak, fit_memory, peak_bytes
from hetplan.calibrate.parameters import PARAMETERS, blocks, calibration_of, limits
from hetplan.calibrate.predict import StageMemory, step_s
from hetplan.calibrate.runs import Run
from hetplan.calibrate.stacks import fit_stacks
from hetplan.costs.prices import price
from hetplan.errors import CalibrationError
from hetplan.plan.estimate import estimate
from hetplan.specs.calibration import Calibration, DeviceConstants
from hetplan.specs.read_calibration import calibration_from_text, calibration_text

DEVICE = "A100-SXM4-80GB"
TRUTH = Calibration(
    devices={DEVICE: DeviceConstants(gemm_peak_fraction=0.55, gemm_half_flop=8e9, layer_overhead_s=150e-6)}
)


@pytest.fixture(scope="module")
def timed() -> tuple[Run, ...]:
    """Small runs with the times a known calibration gives them."""
    return tuple(replace(run, iter_time_s=repr(step_s(setup_of(run), TRUTH))) for run in SMALL)


@pytest.fixture(scope="module")
def fitted(timed: tuple[Run, ...]) -> FittedCalibration:
    """The calibration of these runs, one of which is said to have taken twice as long."""
    wrong = replace(timed[3], iter_time_s=repr(2 * float(timed[3].iter_time_s)))
    return calibrate([*timed[:3], wrong, *timed[4:]], network="fabric", source="made up")


def test_a_row_that_disagrees_is_named(fitted: FittedCalibration, timed: tuple[Run, ...]) -> None:
    assert [row.id for row in fitted.rows if row.disagrees] == [timed[3].id]


def test_step_time_is_what_estimate_says() -> None:
    setup = setup_of(GPT_18B)
    prices = price(setup.cluster, setup.model, setup.workload, TRUTH)
    assert step_s(setup, TRUTH) == estimate(setup.layout, prices).step_s


def test_no_offset_is_the_assumed_calibration() -> None:
    setup = setup_of(GPT_18B)
    entries = blocks((DEVICE,))
    calibration = calibration_of(setup.cluster, entries, np.zeros(len(entries)))
    assert step_s(setup, calibration) == step_s(setup, Calibration())


def test_offsets_stay_within_bounds() -> None:
    setup = setup_of(GPT_18B)
    entries = blocks((DEVICE,))
    low, high = limits(setup.cluster, entries)
    assert np.all(low <= 0) and np.all(high >= 0)
    constants = calibration_of(setup.cluster, entries, high).devices[DEVICE]
    for entry in PARAMETERS:
        if entry.record == "device":
            assert getattr(constants, entry.name) == pytest.approx(entry.highest)


def test_known_constants_are_found_again(fitted: FittedCalibration) -> None:
    assert np.median([abs(row.error) for row in fitted.rows]) < 0.02
    assert fitted.held_out_error is not None
    found = fitted.calibration.devices[DEVICE]
    assert found.gemm_peak_fraction == pytest.approx(0.55, rel=0.15)


def test_what_the_runs_say_nothing_about_stays_assumed(fitted: FittedCalibration) -> None:
    known = {constant.name: constant.known for constant in fitted.constants}
    assert known["gemm_peak_fraction"] > 0.5
    assert known["expert_fraction"] == pytest.approx(0.0, abs=1e-6)
    assert fitted.calibration.devices[DEVICE].expert_fraction == pytest.approx(1.0)


def test_a_fitted_calibration_is_read_back_as_it_was(fitted: FittedCalibration) -> None:
    made = fitted.calibration
    again = calibration_from_text(calibration_text(made), "calibration.yaml")
    assert again.devices[DEVICE].gemm_peak_fraction == made.devices[DEVICE].gemm_peak_fraction
    assert set(again.networks) == {"fabric"}
    assert again.relative_error == made.relative_error


def test_runs_without_times_are_refused_with_the_reason() -> None:
    with pytest.raises(CalibrationError, match="no step time"):
        calibrate([replace(GPT_18B, iter_time_s="")], network="ib", source="made up")


def test_runs_of_unknown_stacks_and_devices_use_more_general_constants(timed: tuple[Run, ...]) -> None:
    observations = [Observation(setup=setup_of(run), step_s=float(run.iter_time_s)) for run in timed[:4]]
    stacks = fit_stacks(observations)
    assert stacks.find(observations[0].setup)[0] == "stack"
    assert stacks.find(setup_of(replace(timed[0], stratum="other")))[0] == "device"
    assert stacks.find(setup_of(replace(timed[0], stratum="other", device="H100")))[0] == "all"


def test_few_rows_move_constants_less_than_many(timed: tuple[Run, ...]) -> None:
    observations = [Observation(setup=setup_of(run), step_s=float(run.iter_time_s)) for run in timed]
    start = np.zeros(len(blocks((DEVICE,))))
    one = fit(observations[:1], (DEVICE,), start, Predictions())
    many = fit(observations, (DEVICE,), start, Predictions())
    assert many.entries[0][1].name == "gemm_peak_fraction"
    assert many.spread[0] < one.spread[0]


def test_overhead_and_reserve_are_found_from_peaks() -> None:
    setup = setup_of(GPT_18B)
    peaks = []
    for states, grown in ((10, 20), (30, 5), (20, 20), (40, 10), (5, 50)):
        stage = StageMemory(
            states=states * GIB, logits=0.0, activations=grown * GIB, grown=grown * GIB, capacity=80 * GIB
        )
        peaks.append(Peak(setup=setup, stages=(stage,), peak_bytes=(states + 1.2 * grown + 2.0) * GIB))
    constants = fit_memory(peaks)
    assert constants == pytest.approx([0.2, 2.0], abs=0.1)
    assert peak_bytes(peaks[0].stages, constants) == pytest.approx(peaks[0].peak_bytes, rel=0.02)
