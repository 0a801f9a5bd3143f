"""What sets two plans apart, on plans made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.plan.difference import MovedDevices, MovedLayers, difference
from hetplan.plan.read_plan import read_plan
from hetplan.plan.records import Plan

GOLDEN = Path(__file__).parents[1] / "golden" / "two-generation-lab.yaml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """8 copies of stages of 24, 5 and 5 layers."""
    return read_plan(GOLDEN)


def with_cuts(plan: Plan, *cuts: int) -> Plan:
    (replica,) = plan.layout.replicas
    stages = tuple(
        replace(stage, first_layer=first, end_layer=end)
        for stage, first, end in zip(replica.stages, (0, *cuts), (*cuts, 34), strict=True)
    )
    return replace(plan, layout=replace(plan.layout, replicas=(replace(replica, stages=stages),)))


def test_a_plan_is_the_same_as_itself(plan: Plan) -> None:
    found = difference(plan, plan)
    assert found.is_empty
    assert all(cost.before == cost.after for cost in (*found.totals, *found.parts, *found.memory))


def test_moved_cuts_are_runs_of_layers(plan: Plan) -> None:
    found = difference(plan, with_cuts(plan, 22, 30))
    assert found.layers == (
        MovedLayers(row=0, first_layer=22, end_layer=24, before="stage 0 (a100)", after="stage 1 (v100)"),
        MovedLayers(row=0, first_layer=29, end_layer=30, before="stage 2 (v100)", after="stage 1 (v100)"),
    )
    assert (found.settings, found.devices, found.inputs) == ((), (), ())


@pytest.mark.parametrize(
    ("change", "what", "before", "after"),
    [
        ({"copies": 4}, "replica A copies", "8", "4"),
        ({"microbatch": 2}, "replica A microbatch", "1", "2"),
        ({"num_microbatches": 64}, "replica A num_microbatches", "32", "64"),
    ],
)
def test_each_change_of_the_batch_is_named(
    plan: Plan, change: dict[str, int], what: str, before: str, after: str
) -> None:
    (replica,) = plan.layout.replicas
    changed = replace(plan, layout=replace(plan.layout, replicas=(replace(replica, **change),)))
    settings = {one.what: (one.before, one.after) for one in difference(plan, changed).settings}
    assert settings.pop(what) == (before, after)
    assert settings.keys() <= {"devices in use"}


def test_degrees_recompute_sharding_and_schedule_are_named(plan: Plan) -> None:
    (replica,) = plan.layout.replicas
    replica = replace(replica, stages=tuple(replace(stage, recompute="none") for stage in replica.stages))
    plan = replace(plan, layout=replace(plan.layout, replicas=(replica,)))
    first, *others = replica.stages
    stages = (replace(first, tp=4, recompute="full"), *others)
    layout = replace(plan.layout, schedule="gpipe", sharding="full", replicas=(replace(replica, stages=stages),))
    settings = {one.what: (one.before, one.after) for one in difference(plan, replace(plan, layout=layout)).settings}
    assert settings == {
        "schedule": ("1f1b", "gpipe"),
        "sharding": ("optimizer", "full"),
        "devices in use": ("48", "64"),
        "replica A tp": ("2", "4, 2, 2"),
        "replica A recompute": ("none", "full, none, none"),
    }


def test_devices_and_replicas_on_one_side_only(plan: Plan) -> None:
    (replica,) = plan.layout.replicas
    first, *others = replica.stages
    moved = replace(replica, stages=(replace(first, devices=((0, 4), (6, 18))), *others))
    both = replace(plan, layout=replace(plan.layout, replicas=(moved, replica)))
    found = difference(replace(plan, layout=replace(plan.layout, replicas=(moved,))), plan)
    assert found.devices == (MovedDevices(group="a100", only_before=((16, 18),), only_after=((4, 6),)),)
    rows = [run for run in difference(plan, both).layers if run.row == 1]
    assert [(run.before, run.first_layer, run.end_layer) for run in rows] == [
        (None, 0, 24),
        (None, 24, 29),
        (None, 29, 34),
    ]


def test_other_inputs_are_said(plan: Plan) -> None:
    other = replace(
        plan,
        cluster=replace(plan.cluster, sha256="0" * 64),
        model=replace(plan.model, name="other", sha256="1" * 64),
        workload={**plan.workload, "global_batch": 512},
    )
    found = {one.what: (one.before, one.after) for one in difference(plan, other).inputs}
    assert found["cluster"] == (f"{plan.cluster.name} ({plan.cluster.sha256[:8]})", f"{plan.cluster.name} (00000000)")
    assert found["model"] == ("llama-3.1-8b", "other")
    assert found["global_batch"] == ("256", "512")


def test_parts_sum_to_the_change_of_the_step(plan: Plan) -> None:
    parts = replace(plan.estimate.parts, compute_s=20.0, bubble_s=3.0)
    cheaper = replace(plan, estimate=replace(plan.estimate, parts=parts, step_s=parts.total_s))
    found = difference(plan, cheaper)
    change = sum((cost.after or 0.0) - (cost.before or 0.0) for cost in found.parts)
    (step,) = [cost for cost in found.totals if cost.name == "step_s"]
    assert step.before is not None
    assert step.after is not None
    assert change == pytest.approx(step.after - step.before)
