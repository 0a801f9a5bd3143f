"""Two chips that differ: memory against speed in one pipeline, and unequal batch shares side by side."""

from dataclasses import replace

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.plan.check import check
from hetplan.plan.estimate import estimate
from hetplan.plan.limits import Limits
from hetplan.plan.placement import place
from hetplan.search.records import SearchRequest
from hetplan.search.solve import search
from hetplan.specs.calibration import Calibration, DeviceConstants
from hetplan.specs.cluster import Cluster, Group, Network
from hetplan.specs.workload import Workload

GIB = 2.0**30


def chip(name, flop_per_s, memory_bytes):
    """Return a chip that is an A100 but for its peak and its memory."""
    return replace(
        find_device("A100-SXM4-80GB"),
        name=name,
        memory_bytes=memory_bytes,
        usable_memory_bytes=memory_bytes,
        peak_flop_per_s={"bf16": flop_per_s, "fp16": flop_per_s},
    )


def group(name, device, per_node):
    return Group(
        name=name,
        device=device,
        nodes=(name,),
        devices_per_node=per_node,
        site="main",
        usable_memory_bytes=device.usable_memory_bytes,
    )


def joined(*groups, bytes_per_s=25e9):
    network = Network(
        name="net",
        joins=tuple(one.name for one in groups),
        kind="infiniband",
        bandwidth_bytes_per_s=bytes_per_s,
        latency_s=3e-6,
        nics_per_node=8,
    )
    return Cluster(name="two-chips", groups=groups, networks=(network,))


@pytest.fixture(scope="module")
def memory_against_speed():
    """Eight fast chips of 32 GiB and eight chips of half the speed and three times the memory."""
    fast, slow = chip("Fast", 300e12, 32 * GIB), chip("Slow", 150e12, 96 * GIB)
    cluster = joined(group("fast", fast, 8), group("slow", slow, 8))
    prices = price(cluster, find_model("llama-2-13b"), Workload(seq_len=8192, global_batch=64))
    return search(prices, SearchRequest(limits=Limits(sharding=("optimizer",)), effort=2.0))


def test_chips_with_more_memory_take_the_early_stages(memory_against_speed):
    for row in memory_against_speed.best.layout.replicas:
        groups = [stage.group for stage in row.stages]
        assert groups == sorted(groups, key=("slow", "fast").index)
        assert set(groups) == {"slow", "fast"}


def test_fast_chips_recompute_alone_and_no_more_in_company(memory_against_speed):
    alone = next(row.candidate for row in memory_against_speed.alternatives if row.name == "only Fast")
    assert alone is not None
    assert any(stage.recompute == "full" for row in alone.layout.replicas for stage in row.stages)
    company = [stage for row in memory_against_speed.best.layout.replicas for stage in row.stages]
    assert {stage.recompute for stage in company if stage.group == "fast"} == {"none"}


def test_mix_outruns_the_sum_of_its_parts(memory_against_speed):
    """Throughput over that of both chips alone; H2 (arXiv:2505.17548) reports up to 116 % for such a mix."""
    assert memory_against_speed.hetero_efficiency == pytest.approx(1.14, abs=0.06)


def short_gpt():
    """Return four wide layers between a table and its tied head: products of matrices take nearly all the time."""
    whole = find_model("gpt-1.7b")
    decoders = [layer for layer in whole.chain if layer.kind == "decoder"]
    ends = (whole.chain[0], whole.chain[-1])
    module = replace(whole.modules[0], layers=(ends[0], *decoders[:4], ends[1]))
    return replace(whole, modules=(module,))


def compute_bound(*devices):
    """Return constants by which memory traffic and launches take next to no time."""
    constants = DeviceConstants(memory_fraction=1000.0, layer_overhead_s=0.0, gemm_half_flop=1.0)
    return Calibration(devices={device.name: constants for device in devices})


def test_batch_shares_follow_speed():
    a100, v100 = find_device("A100-SXM4-40GB"), find_device("V100-SXM2-16GB")
    cluster = joined(group("a100", a100, 1), group("v100", v100, 1))
    workload = Workload(seq_len=512, global_batch=224, precision="fp16", attention="materialised")
    prices = price(cluster, short_gpt(), workload, compute_bound(a100, v100))
    limits = Limits(tp=(1,), pp=(1,), microbatch=(4,), sharding=("none",))
    result = search(prices, SearchRequest(limits=limits, simplicity=0.0, compare=False))
    shares = {row.stages[0].group: row.num_samples for row in result.best.layout.replicas}
    assert shares["a100"] / shares["v100"] == pytest.approx(5 / 2, rel=0.1)
    equal = replace(
        result.best.layout,
        replicas=tuple(replace(row, num_microbatches=28) for row in result.best.layout.replicas),
    )
    equal = place(equal, cluster)
    assert check(equal, prices, limits) == ()
    assert estimate(equal, prices).step_s >= 1.7 * result.best.estimate.step_s
