"""Sweeps: points are priced where they stand, more nodes never do worse, and gains say where adding stops paying."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hetplan.catalog.devices import find_device
from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.errors import UsageError
from hetplan.search.sweep import Axis, Point, Sweep, last_paying, sweep
from hetplan.specs.cluster import Cluster, Group, Network
from hetplan.specs.workload import Workload


def prices(**workload):
    card = find_device("RTX-3090")
    group = Group(
        name="g",
        device=card,
        nodes=("g-1",),
        devices_per_node=2,
        usable_memory_bytes=card.usable_memory_bytes,
        site="main",
        usd_per_device_hour=1.0,
    )
    net = Network(name="eth", joins=("g",), kind="ethernet", bandwidth_bytes_per_s=1e9, latency_s=1e-5, nics_per_node=1)
    fields = {"seq_len": 512, "global_batch": 16, "precision": "bf16", **workload}
    where = Cluster(name="c", groups=(group,), networks=(net,))
    return price(where, find_model("gpt2"), Workload(**fields), None)


NODES = Axis(kind="nodes", of="g", values=(1.0, 2.0, 4.0))


def test_every_point_of_the_grid_is_priced_where_it_stands():
    axes = (NODES, Axis(kind="bandwidth", of="eth", values=(1e8, 1e10)))
    found = sweep(prices(), axes)
    assert [point.values for point in found.points] == [(n, b) for n in NODES.values for b in (1e8, 1e10)]
    assert [point.num_devices for point in found.points] == [2, 2, 4, 4, 8, 8]
    fast = {point.values: point.tokens_per_s for point in found.points}
    assert all(fast[n, 1e10] >= fast[n, 1e8] for n in NODES.values)
    assert fast[4.0, 1e10] > 1.5 * fast[1.0, 1e10]


def test_more_nodes_never_do_worse_and_gains_are_of_the_added_devices():
    found = sweep(prices(), (NODES,))
    rates = [point.tokens_per_s for point in found.points]
    assert rates == sorted(rates)
    first, second, third = found.points
    assert first.marginal_tokens_per_s is None and first.pays is None
    assert second.marginal_tokens_per_s == pytest.approx((rates[1] - rates[0]) / 2)
    assert third.marginal_tokens_per_s == pytest.approx((rates[2] - rates[1]) / 4)


def test_workload_axes_change_the_workload():
    axes = (Axis(kind="global_batch", values=(8.0, 16.0)), Axis(kind="seq_len", values=(256.0, 512.0)))
    found = sweep(prices(), axes)
    tokens = [point.tokens_per_s * point.candidate.estimate.step_s for point in found.points]
    assert tokens == pytest.approx([8 * 256, 8 * 512, 16 * 256, 16 * 512])
    assert found.along is None
    assert all(point.usd_per_million_tokens > 0 and point.joules_per_token > 0 for point in found.points)


def made(rates, worth=0.5):
    """A sweep of 1, 2, 3 .. nodes of one device with these throughputs."""
    axis = Axis(kind="nodes", of="g", values=tuple(float(n + 1) for n in range(len(rates))))
    points = []
    for i, rate in enumerate(rates):
        candidate = None if rate is None else SimpleNamespace(estimate=SimpleNamespace(tokens_per_s=rate))
        gain = None if i == 0 or None in (rate, rates[i - 1]) else rate - rates[i - 1]
        pays = None if gain is None else gain >= worth * rates[i - 1] / i
        point = Point(values=(float(i + 1),), num_devices=i + 1, candidate=candidate)
        points.append(replace(point, marginal_tokens_per_s=gain, pays=pays))
    return Sweep(axes=(axis,), points=tuple(points), worth=worth)


@pytest.mark.parametrize(
    ("rates", "last"),
    [((10, 20, 30), None), ((10, 20, 22, 23), 2), ((None, 10, 20, 21), 3), ((10, 10), 1), ((None, None), None)],
)
def test_adding_stops_paying_before_the_first_poor_gain(rates, last):
    found = last_paying(made(rates).points)
    assert (found.num_devices if found else None) == last


def test_what_a_gain_is_held_against_is_the_share_asked_for():
    found = sweep(prices(), (NODES,), worth=0.0)
    assert all(point.pays for point in found.points[1:])
    found = sweep(prices(), (NODES,), worth=1e9)
    assert not any(point.pays for point in found.points[1:])


def test_grids_beyond_reason_are_refused():
    with pytest.raises(UsageError, match="too many"):
        sweep(prices(), [Axis(kind="seq_len", values=tuple(float(n) for n in range(1, 1200)))])
    with pytest.raises(UsageError, match="must rise"):
        Axis(kind="nodes", of="g", values=(2.0, 1.0))
