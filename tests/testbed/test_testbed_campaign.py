"""The campaign's layouts are plans of its clusters, and its figures say what they should."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from bed_modules import SCRIPTS, bed_spec

from hetplan.catalog.devices import find_device
from hetplan.catalog.load import load_model
from hetplan.costs.prices import Prices, price
from hetplan.plan.check import check
from hetplan.plan.limits import ENGINES
from hetplan.plan.placement import place
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.workload import Workload

sys.path.insert(0, str(SCRIPTS.parent / "bench"))
campaign = import_module("campaign")


def prices_of(bed_name: str, model_name: str, folder: Path) -> Prices:
    bed = bed_spec.read_bed(SCRIPTS / "beds" / f"{bed_name}.yaml")
    cluster = cluster_from_text(bed_spec.cluster_of(bed), bed_name, find_device)
    setting = campaign.Setting(bed=bed, model_name=model_name, folder=folder)
    model, _ = load_model(setting.model_path)
    sizes = {"seq_len": campaign.SEQ_LEN, "global_batch": campaign.GLOBAL_BATCH}
    return price(cluster, model, Workload(precision="fp32", **sizes))


@pytest.mark.parametrize("bed_name", campaign.LAYOUTS)
@pytest.mark.parametrize("model_name", campaign.MODELS)
def test_every_layout_is_a_valid_plan_of_the_whole_batch(bed_name: str, model_name: str, tmp_path: Path) -> None:
    prices = prices_of(bed_name, model_name, tmp_path)
    num_decoders = len(prices.model.chain) - 2
    assert len(campaign.LAYOUTS[bed_name]) >= 8
    for words in campaign.LAYOUTS[bed_name]:
        layout = place(campaign.layout_of(words, num_decoders), prices.cluster)
        assert not check(layout, prices, ENGINES["hetplan"]), words
        assert layout.num_samples == campaign.GLOBAL_BATCH, words


def trial(predicted_s: float, *passes_s: float) -> object:
    return campaign.Trial(name="x", uses_tp=False, predicted_s=predicted_s, passes_s=passes_s)


def test_errors_are_relative_to_the_mean_of_the_passes() -> None:
    one = trial(1.1, 0.9, 1.1)
    assert one.error == pytest.approx(0.1)
    assert one.repeat_error == pytest.approx(0.2)


def test_order_counts_clear_pairs_only() -> None:
    right = [trial(1.0, 1.0), trial(2.0, 2.0), trial(2.01, 1.99)]
    assert "2 of 2 clear pairs" in campaign.summary_of(right)
    wrong = [trial(3.0, 1.0), trial(2.0, 2.0), trial(1.0, 3.0)]
    assert "Kendall's tau -1.00, 0 of 3 clear pairs" in campaign.summary_of(wrong)
