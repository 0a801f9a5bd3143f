"""Plans under Sailor's simulator, re-stated; figures of the simulator itself are those its code prints."""

from dataclasses import replace
from pathlib import Path

import peer_paths  # noqa: F401 - makes the benches importable
import peers_sailor
import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model_config
from hetplan.costs.prices import Prices, price
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.importers.facts import read_source
from hetplan.specs.importers.layer_times import Settings, layer_calibration, layer_model_text, together
from hetplan.specs.importers.layer_times_csv import read_table
from hetplan.specs.read_calibration import calibration_from_text, calibration_text
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.read_model import model_from_text
from hetplan.specs.workload import Workload

SETTINGS = Settings(
    bytes_per_param=24.0,
    reserve_bytes={1: 2e9, 2: 3e9},
    update="stage",
    pipeline="lock-step",
    hidden=0.0,
    bucket_bytes=5e8,
)
LIMITS = Limits(recompute=("none",), sharding=("none",), uniform_microbatches=True, equal_dp=True)
A, V, ZONE = "A100-40", "V100-16", "us-central1-a"


@pytest.fixture(scope="module")
def profile():
    tables = (peers_sailor.TIMES, peers_sailor.SIZES, peers_sailor.LINKS)
    return together([read_table(read_source(path), ()) for path in tables])


@pytest.fixture(scope="module")
def prices_of(profile):
    calibration = layer_calibration(profile, SETTINGS, "OPT-350").calibration
    model = model_from_text(layer_model_text(profile, Settings(), "OPT-350", 2048), Path("opt.yaml"), find_model_config)

    def make(*groups: tuple[str, str, int]) -> Prices:
        cluster = cluster_from_text(peers_sailor.cluster_text("test", groups), "cluster.yaml", find_device)
        return price(cluster, model, Workload(seq_len=2048, global_batch=1024, precision="fp32"), calibration)

    return make


def neutral(microbatch: int, *stages: tuple[tuple[int, int], list[tuple[str, int, int]]]):
    return {
        "model": "OPT-350",
        "global_batch": 1024,
        "microbatch": microbatch,
        "pipelines": [
            {
                "stages": [
                    {
                        "range": list(ends),
                        "replicas": [{"gpu": gpu, "tp": tp, "zone": ZONE, "count": n} for gpu, tp, n in replicas],
                    }
                    for ends, replicas in stages
                ]
            }
        ],
    }


@pytest.mark.parametrize(
    ("plan", "simulated_s", "warns"),
    [
        (neutral(2, ((0, 26), [(A, 1, 8)])), 26.8720, False),
        (
            neutral(
                2, ((0, 5), [(V, 2, 16)]), ((5, 9), [(V, 2, 16)]), ((9, 13), [(V, 2, 16)]), ((13, 26), [(A, 2, 16)])
            ),
            5.0705,
            False,
        ),
        (neutral(2, ((0, 5), [(V, 1, 4)]), ((5, 26), [(A, 1, 4)])), 47.3628, False),
        (neutral(2, ((0, 26), [(A, 1, 4), (V, 4, 1)])), 42.8597, True),
    ],
)
def test_the_restated_evaluator_says_what_the_simulator_says(plan, simulated_s, warns):
    score = peers_sailor.evaluate(plan)
    assert score.step_s == pytest.approx(simulated_s, abs=5e-5)
    assert bool(score.warnings) is warns


def test_memory_that_does_not_fit_is_refused_by_both(prices_of):
    plan = neutral(4, ((0, 26), [(V, 1, 4)]))
    assert not peers_sailor.evaluate(plan).fits
    stage = Stage(group=f"{V}.{ZONE}".lower(), first_layer=0, end_layer=26)
    layout = Layout(replicas=(Replica(stages=(stage,), microbatch=4, num_microbatches=64, copies=4),))
    found = estimate(layout, prices_of((V, ZONE, 4)))
    assert found.stages[0].memory.total_bytes == pytest.approx(
        peers_sailor.stage_bytes("OPT-350", 4, 1, [0, 26], 1), rel=1e-9
    )
    assert found.stages[0].memory.total_bytes > found.stages[0].capacity_bytes


@pytest.mark.parametrize(
    ("groups", "best"),
    [
        (((A, ZONE, 8),), 0.0372),
        (((A, ZONE, 32),), 0.1297),
        (((A, ZONE, 8), (V, ZONE, 24)), 0.06074),
        (tuple((A, zone, 8) for zone in (*peers_sailor.CENTRAL, "us-west1-b")), 0.1249),
    ],
)
def test_plans_are_no_slower_than_the_best_known_and_priced_as_the_simulator_does(prices_of, groups, best):
    prices = prices_of(*groups)
    found = search(prices, SearchRequest(limits=LIMITS, compare=False)).best
    places = {f"{gpu}.{zone}".lower(): (gpu, zone) for gpu, zone, _ in groups}
    rows = found.layout.replicas
    cut = [[stage.first_layer, stage.end_layer] for stage in rows[0].stages]
    assert all([[stage.first_layer, stage.end_layer] for stage in row.stages] == cut for row in rows)
    stages = [
        {
            "range": ends,
            "replicas": [
                {
                    "gpu": places[row.stages[i].group][0],
                    "zone": places[row.stages[i].group][1],
                    "tp": row.stages[i].tp,
                    "count": row.copies,
                }
                for row in rows
            ],
        }
        for i, ends in enumerate(cut)
    ]
    plan = neutral(rows[0].microbatch) | {"pipelines": [{"stages": stages}]}
    score = peers_sailor.evaluate(plan)
    assert score.fits and not score.warnings
    assert 1 / score.step_s >= best * (1 - 1e-6)
    assert found.estimate.step_s == pytest.approx(score.step_s, rel=2e-3)


def test_cost_within_time_is_never_dearer_than_the_fastest_plan_and_fewest_devices_keep_the_rate(prices_of):
    prices = prices_of((A, ZONE, 8), (V, ZONE, 24))
    request = SearchRequest(limits=LIMITS, compare=False, time_budget_s=1 / 0.05818)
    fastest = search(prices, replace(request, time_budget_s=None)).best
    cheapest = search(prices, replace(request, objective="cost-within-time")).best
    fewest = search(prices, replace(request, objective="devices")).best
    assert cheapest.estimate.usd_per_step <= min(fastest.estimate.usd_per_step, 0.4680)
    assert max(cheapest.estimate.step_s, fewest.estimate.step_s) <= request.time_budget_s
    assert fewest.layout.num_devices <= cheapest.layout.num_devices


def test_a_calibration_of_measured_layers_comes_back_from_its_text(profile):
    calibration = layer_calibration(profile, SETTINGS, "OPT-350").calibration
    assert calibration_from_text(calibration_text(calibration), "file") == calibration
