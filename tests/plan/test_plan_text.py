import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan.fake_prices import FakePrices, cluster, group, model

from hetplan.costs.records import MemoryUse
from hetplan.errors import HetplanError, SpecError
from hetplan.plan.document import plan_document, ranges_text
from hetplan.plan.estimate import estimate
from hetplan.plan.layouts import Grid, grid_layout
from hetplan.plan.read_plan import OBJECTIVES, ORIGINS, STATUSES
from hetplan.plan.records import (
    SCHEDULES,
    Estimate,
    Input,
    Layout,
    Plan,
    Proof,
    Replica,
    Stage,
    StageEstimate,
    TimeParts,
)
from hetplan.plan.text import plan_from_text, plan_text, read_plan
from hetplan.specs.workload import RECOMPUTES, SHARDINGS, Workload

COUNT = st.integers(1, 10**6)
NUMBER = st.floats(0, 1e18)
NAME = st.sampled_from(
    ["a", "a100-80", "1", "1e3", "true", "x: y", "a #b", "[c]", "Zürich", "tab\there", '"q"', "- d", "é'"]
)


def records(record, values):
    return st.builds(record, **{field.name: values for field in dataclasses.fields(record)})


@st.composite
def replicas(draw):
    pp, vpp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    stages = []
    for _ in range(pp * vpp):
        first = draw(st.integers(0, 99))
        ranges = draw(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 99)), max_size=3))
        stages.append(
            Stage(
                group=draw(NAME),
                first_layer=first,
                end_layer=first + draw(st.integers(1, 99)),
                tp=draw(COUNT),
                cp=draw(COUNT),
                dp=draw(COUNT),
                ep=draw(COUNT),
                recompute=draw(st.sampled_from(RECOMPUTES)),
                devices=tuple((first, first + count) for first, count in ranges),
            )
        )
    return Replica(
        stages=tuple(stages),
        microbatch=draw(COUNT),
        num_microbatches=draw(COUNT),
        copies=draw(COUNT),
        vpp=vpp,
    )


@st.composite
def plans(draw):
    layout = Layout(
        replicas=tuple(draw(st.lists(replicas(), min_size=1, max_size=2))),
        schedule=draw(st.sampled_from(SCHEDULES)),
        sharding=draw(st.sampled_from(SHARDINGS)),
    )
    stages = tuple(
        StageEstimate(
            replica=row,
            stage=stage,
            group=draw(NAME),
            forward_s=draw(NUMBER),
            backward_s=draw(NUMBER),
            busy_s=draw(NUMBER),
            in_flight=draw(COUNT),
            memory=draw(records(MemoryUse, NUMBER)),
            capacity_bytes=draw(NUMBER),
        )
        for row, replica in enumerate(layout.replicas)
        for stage in range(replica.pp)
    )
    source = st.builds(Input, name=NAME, sha256=st.text("0123456789abcdef", min_size=64, max_size=64))
    return Plan(
        layout=layout,
        cluster=draw(source),
        model=draw(source),
        calibration=draw(st.none() | source),
        workload={"seq_len": draw(COUNT), "global_batch": draw(COUNT), "precision": "bf16"}
        | draw(
            st.sampled_from([{}, {"sequence_parallel": False}, {"attention": "flash", "gradient_precision": "fp32"}])
        ),
        estimate=Estimate(
            step_s=draw(NUMBER),
            parts=draw(records(TimeParts, NUMBER)),
            replica_s=tuple(draw(NUMBER) for _ in layout.replicas),
            dp_overlapped_s=draw(NUMBER),
            tokens_per_s=draw(NUMBER),
            mfu=draw(st.floats(0, 1)),
            usd_per_step=draw(st.none() | NUMBER),
            joules_per_step=draw(NUMBER),
            stages=stages,
            relative_error=draw(st.none() | st.floats(0, 1)),
            origins=draw(st.dictionaries(NAME, st.sampled_from(ORIGINS), max_size=2)),
        ),
        proof=draw(
            st.none()
            | st.builds(
                Proof,
                objective=st.sampled_from(OBJECTIVES),
                value=NUMBER,
                bound=NUMBER,
                status=st.sampled_from(STATUSES),
                effort=NUMBER,
                engine=st.sampled_from(["hetplan", "megatron"]),
            )
        ),
    )


def example_plan():
    prices = FakePrices(cluster(group("a"), group("b", speed=0.5)), model(6), Workload(seq_len=128, global_batch=16))
    layout = grid_layout(prices, Grid(tp=4, pp=2))
    return Plan(
        layout=layout,
        cluster=Input(name="lab.yaml", sha256="0" * 64),
        model=Input(name="toy", sha256="1" * 64),
        calibration=None,
        workload={"seq_len": 128, "global_batch": 16, "precision": "bf16"},
        estimate=estimate(layout, prices),
        proof=Proof(objective="time", value=1.0, bound=0.5, status="feasible", effort=2.0),
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(plans())
def test_a_plan_is_read_back_as_it_was_written(plan):
    text = plan_text(plan)
    assert plan_from_text(text, "plan.yaml") == plan
    assert plan_text(plan_from_text(text, "plan.yaml")) == text


def test_a_plan_takes_a_line_a_stage(tmp_path):
    plan = example_plan()
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(plan))
    assert read_plan(path) == plan
    lines = path.read_text().splitlines()
    assert lines[0] == "hetplan: plan/v1"
    assert "cluster: {name: lab.yaml, sha256: " + '"' + "0" * 64 + '"}' in lines
    stages = [line for line in lines if "layers:" in line]
    assert stages[0].strip() == (
        '- {group: a, layers: "0-4", tp: 4, cp: 1, dp: 1, ep: 1, recompute: none, devices: "0-15"}'
    )


def test_the_document_is_plain_json():
    document = plan_document(example_plan())
    assert json.loads(json.dumps(document)) == document
    assert list(document) == ["cluster", "model", "workload", "layout", "estimate", "proof"]
    assert list(document["estimate"])[:3] == ["step_s", "parts", "replica_s"]


def test_ranges_have_inclusive_ends():
    assert ranges_text([(0, 8), (12, 13)]) == "0-7,12"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('schedule: "1f1b"', 'schedule: "2f2b"', "layout.schedule: '2f2b' is not one of gpipe"),
        ("tp: 4", "tp: 0", "tp"),
        ("tp: 4", "tpp: 4", "tp"),
        ('layers: "0-4"', 'layers: "4-0"', "range 4-0 ends before it begins"),
        ('layers: "0-4"', 'layers: "0-4,5"', "at most 1 ranges"),
        ('layers: "0-4"', 'layers: "x"', "expected ranges like 0-7,12"),
        ("copies: 4", "copies: 1e30", "copies"),
        ("vpp: 1", "vpp: 3", "multiple of vpp 3 stages"),
        ("precision: bf16", "precision: bf61", "did you mean 'bf16'"),
        ("status: feasible", "status: maybe", "proof.status"),
        ("step_s: ", "step_s: .nan #", "step_s"),
        ("mfu: ", "mfu: fast #", "mfu"),
        ("replica_s: [", "replica_s: [true, ", "replica_s[0]"),
        ("replica_s: [", "replica_s: [1.0, ", "one number a replica shape"),
        ("hetplan: plan/v1", "hetplan: model/v1", "plan"),
        ("model: {name", "modell: {name", "model"),
    ],
)
def test_errors_say_where_and_what(old, new, words):
    text = plan_text(example_plan())
    assert old in text
    with pytest.raises(SpecError) as caught:
        plan_from_text(text.replace(old, new, 1), "plan.yaml")
    assert str(caught.value).startswith("plan.yaml:")
    assert words in str(caught.value)


@settings(max_examples=200)
@given(st.data())
def test_mutated_plans_are_read_or_refused_with_one_sentence(data):
    text = plan_text(example_plan())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        cut = data.draw(st.integers(0, 9))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", "0", "-", ":", "{", "]", "x", "\n", "9" * 30, '"']))
            + text[at + cut :]
        )
    try:
        plan_from_text(text, "plan.yaml")
    except HetplanError as error:
        assert "\n" not in str(error)
