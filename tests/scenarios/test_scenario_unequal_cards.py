"""A 13B Llama on 3 A800, 3 RTX 4090 and 2 RTX 3090: what unequal stages gain over equal ones.

HexiScale (arXiv:2409.01143) reports 41.52 s for the best equal and 25.55 s for its unequal plan, a ratio of 1.63.
"""

from pathlib import Path

from hetplan.catalog.load import load_cluster
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.search.compare import UNIFORM
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.workload import Workload

CLUSTER = load_cluster(Path(__file__).parents[2] / "cluster_specs" / "a800-4090-3090.yaml")[0]


def test_unequal_stages_gain_what_was_reported():
    prices = price(CLUSTER, find_model("llama-2-13b"), Workload(seq_len=4096, global_batch=24))
    result = search(prices, SearchRequest(effort=2.0))
    uniform = next(row.candidate for row in result.alternatives if row.name == UNIFORM)
    assert uniform is not None
    assert check(uniform.layout, prices) == ()
    ratio = uniform.estimate.step_s / result.best.estimate.step_s
    assert 1.4 <= ratio <= 1.8
    assert len({stage.group for row in result.best.layout.replicas for stage in row.stages}) > 1
