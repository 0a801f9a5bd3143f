from dataclasses import replace

import pytest
from plan.fake_prices import GIB, FakePrices, Rates, cluster, decoder, device, group, model

from hetplan.plan.check import check, degree_errors, layers_tp, show_layers, valid_ep, valid_tp
from hetplan.plan.limits import ENGINES, Limits
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.specs.cluster import Cluster, Network
from hetplan.specs.workload import Workload

PRICES = FakePrices(cluster(group("a"), group("b")), model(6), Workload(seq_len=128, global_batch=16))
GOOD = Layout(
    replicas=(
        Replica(
            stages=(
                Stage(group="a", first_layer=0, end_layer=4, tp=2, devices=((0, 4),)),
                Stage(group="a", first_layer=4, end_layer=8, tp=2, devices=((4, 8),)),
            ),
            microbatch=1,
            num_microbatches=6,
            copies=2,
        ),
        Replica(
            stages=(Stage(group="b", first_layer=0, end_layer=8, tp=2, devices=((0, 2),)),),
            microbatch=2,
            num_microbatches=2,
        ),
    )
)


def with_row(row=0, **changes):
    rows = list(GOOD.replicas)
    rows[row] = replace(rows[row], **changes)
    return replace(GOOD, replicas=tuple(rows))


def with_stage(stage=0, row=0, **changes):
    stages = list(GOOD.replicas[row].stages)
    stages[stage] = replace(stages[stage], **changes)
    return with_row(row, stages=tuple(stages))


def broken(layout, limits=None, prices=PRICES):
    return [violation.rule for violation in check(layout, prices, limits)]


def said(layout, limits=None, prices=PRICES):
    (violation,) = check(layout, prices, limits)
    return str(violation)


def test_a_good_layout_breaks_no_rule():
    assert check(GOOD, PRICES) == ()
    assert check(place(GOOD, PRICES.cluster), PRICES, Limits()) == ()


@pytest.mark.parametrize(
    ("layout", "rule", "words"),
    [
        (replace(GOOD, replicas=()), "positive counts", "no replica"),
        (with_row(microbatch=0), "positive counts", "microbatch must be at least 1, not 0"),
        (with_row(vpp=0), "positive counts", "vpp must be at least 1"),
        (with_row(stages=()), "positive counts", "no stage"),
        (with_row(row=1, vpp=2), "positive counts", "no multiple of vpp 2"),
        (with_stage(tp=0), "positive counts", "replica A stage 0: tp must be at least 1, not 0"),
        (with_stage(stage=1, first_layer=5), "layers exactly once", "begins with layer 5, not 4"),
        (with_stage(stage=1, first_layer=3), "layers exactly once", "begins with layer 3, not 4"),
        (with_stage(stage=1, end_layer=7), "layers exactly once", "the model has 8 layers"),
        (with_row(num_microbatches=5), "exact global batch", "2 x 5 x 1 + 1 x 2 x 2 = 14 samples, not 16"),
        (with_stage(row=1, tp=1, dp=4, devices=((0, 4),)), "whole samples a rank", "does not divide a microbatch of 2"),
        (replace(GOOD, schedule="interleaved"), "limits", "schedule interleaved is not allowed"),
        (with_stage(group="c"), "groups exist", "no group 'c'"),
        (with_stage(devices=((0, 3),)), "devices exist", "2 copies of 2 devices need 4, not 3"),
        (with_stage(devices=((14, 18),)), "devices exist", "14 to 18 are not among the 16"),
        (with_stage(devices=((-2, 2),)), "devices exist", "not among"),
        (with_stage(devices=((3, 7),)), "devices used once", "also used by replica A stage 0"),
        (with_stage(row=1, devices=((7, 9),)), "tp inside a node", "1 tp groups of 2 reach beyond"),
        (with_stage(cp=2, tp=1), "limits", "cp 2 is not allowed (allowed: 1)"),
    ],
)
def test_each_rule_refuses_what_breaks_it_alone(layout, rule, words):
    found = check(layout, PRICES)
    assert [violation.rule for violation in found] == [rule]
    assert words in str(found[0])


def test_a_stage_without_layers_is_refused():
    stages = (replace(GOOD.replicas[0].stages[0], end_layer=8), replace(GOOD.replicas[0].stages[1], first_layer=8))
    assert "holds no layer" in said(with_row(stages=stages))


def test_too_many_devices_are_refused_by_count():
    assert broken(with_row(copies=12, num_microbatches=1)) == ["enough devices"]
    huge = with_row(copies=10**15, num_microbatches=1)
    assert "enough devices" in broken(huge)


def test_a_count_of_microbatches_beyond_reason_is_refused_at_once():
    assert "schedule" in broken(with_row(num_microbatches=10**14))


def test_unplaced_layouts_are_checked_where_they_would_go():
    stages = tuple(replace(stage, devices=()) for stage in GOOD.replicas[0].stages)
    assert check(with_row(stages=stages), PRICES) == ()


@pytest.mark.parametrize("tp", [3, 8])
def test_tp_must_divide_heads_and_widths(tp):
    layout = with_stage(row=1, tp=tp, devices=((0, tp),))
    assert said(layout) == (f"replica B stage 0: tp {tp} does not divide 4 key/value heads (valid: 1, 2, 4)")


def test_valid_degrees_follow_from_heads_and_experts():
    assert valid_tp(model(2)) == (1, 2, 4)
    assert valid_tp(model(2, num_heads=28, num_kv_heads=28, width=28 * 8)) == (1, 2, 4, 7, 14, 28)
    assert valid_tp(model(2, num_heads=28, num_kv_heads=4, width=28 * 8)) == (1, 2, 4)
    assert valid_tp(model(2, num_heads=52, num_kv_heads=52, width=52 * 2)) == (1, 2, 4, 13, 26, 52)
    assert layers_tp([decoder(num_heads=25, num_kv_heads=25, width=100)]) == (1, 5, 25)
    assert valid_ep(model(2)) == (1,)
    assert valid_ep(model(2, experts=6)) == (1, 2, 3, 6)
    assert degree_errors(model(2, num_kv_heads=2), tp=4) == ("tp 4 does not divide 2 key/value heads (valid: 1, 2)",)
    assert degree_errors(model(2), tp=4, cp=2, seq_len=128) == ()
    assert degree_errors(model(2), cp=3, seq_len=128) == (
        "cp 3 needs a sequence length that is a multiple of 6, not 128",
    )
    assert "needs routed experts" in degree_errors(model(2), ep=2)[0]
    assert "does not divide 6 routed experts" in degree_errors(model(2, experts=6), ep=4)[0]


def test_modules_may_have_different_degrees():
    vision = [decoder(num_heads=25, num_kv_heads=25, width=100)] * 2
    text = [decoder()] * 2
    whole = model(4)
    module = replace(whole.modules[0], layers=(*vision, *text))
    prices = FakePrices(cluster(group("a", per_node=8)), replace(whole, modules=(module,)))
    stages = (
        Stage(group="a", first_layer=0, end_layer=2, tp=5),
        Stage(group="a", first_layer=2, end_layer=4, tp=4),
    )
    layout = Layout(replicas=(Replica(stages=stages, microbatch=1, num_microbatches=8),))
    assert broken(layout, prices=prices) == []
    swapped = (replace(stages[0], tp=4), replace(stages[1], tp=4))
    layout = Layout(replicas=(Replica(stages=swapped, microbatch=1, num_microbatches=8),))
    assert broken(layout, prices=prices) == ["degrees divide the model"]


def test_ep_needs_experts_and_ranks():
    prices = FakePrices(cluster(group("a")), model(6, experts=4), Workload(seq_len=128, global_batch=8))

    def layout(**stage):
        stages = (Stage(group="a", first_layer=0, end_layer=8, **stage),)
        return Layout(replicas=(Replica(stages=stages, microbatch=2, num_microbatches=4),))

    assert broken(layout(dp=2, ep=2), prices=prices) == []
    assert broken(layout(dp=2), prices=prices) == ["limits"]
    assert broken(layout(ep=2), prices=prices) == ["ep inside dp x cp"]
    assert broken(layout(dp=2, ep=3), prices=prices) == ["degrees divide the model", "ep inside dp x cp"]


def test_memory_says_how_much_is_missing_and_what_takes_most():
    prices = FakePrices(
        PRICES.cluster, PRICES.model, PRICES.workload, Rates(saved_bytes=2 * GIB, capacity_bytes={"a": 6 * GIB})
    )
    found = check(GOOD, prices)
    assert [(v.rule, v.where) for v in found] == [("memory", "replica A stage 0")]
    assert "1.00 GiB short; most is activations of 2 microbatches" in found[0].message
    assert not found[0].unpriceable


def test_precision_must_be_supported():
    prices = FakePrices(
        cluster(group("a", device=device(precisions=("fp16", "fp32"))), group("b")), PRICES.model, PRICES.workload
    )
    assert set(broken(GOOD, prices=prices)) == {"precision"}


def test_groups_that_share_layers_or_borders_need_a_network():
    groups = (group("a"), group("b"), group("c"))
    networks = [
        Network(name=name, joins=joins, kind="ethernet", bandwidth_bytes_per_s=1e9, latency_s=1e-5)
        for name, joins in (("one", ("a", "c")), ("two", ("b",)))
    ]
    apart = FakePrices(Cluster(name="x", groups=groups, networks=tuple(networks)), PRICES.model, PRICES.workload)
    assert broken(GOOD, prices=apart) == ["gradients reachable"]
    mixed = with_row(1, stages=(replace(GOOD.replicas[1].stages[0], group="c"),))
    assert broken(mixed, prices=apart) == []
    stages = (
        Stage(group="a", first_layer=0, end_layer=4),
        Stage(group="b", first_layer=4, end_layer=8),
    )
    line = Layout(replicas=(Replica(stages=stages, microbatch=1, num_microbatches=16),))
    assert broken(line, prices=apart) == ["stages reachable"]
    assert broken(line) == []


def test_tied_weights_need_a_network_between_their_stages():
    groups = (group("a"), group("b"), group("c"))
    networks = tuple(
        Network(name=name, joins=joins, kind="ethernet", bandwidth_bytes_per_s=1e9, latency_s=1e-5)
        for name, joins in (("one", ("a", "b")), ("two", ("b", "c")))
    )
    machines = Cluster(name="x", groups=groups, networks=networks)
    stages = tuple(
        Stage(group=name, first_layer=first, end_layer=end)
        for name, first, end in (("a", 0, 3), ("b", 3, 6), ("c", 6, 8))
    )
    layout = Layout(replicas=(Replica(stages=stages, microbatch=1, num_microbatches=16),))
    assert broken(layout, prices=FakePrices(machines, model(6), PRICES.workload)) == []
    tied = FakePrices(machines, model(6, tied=True), PRICES.workload)
    assert broken(layout, prices=tied) == ["stages reachable"]
    assert "tied to one here" in said(layout, prices=tied)


def test_a_stage_over_several_nodes_needs_a_network_of_its_group():
    alone = FakePrices(Cluster(name="x", groups=(group("a"),), networks=()), PRICES.model, PRICES.workload)

    def layout(devices):
        stage = Stage(group="a", first_layer=0, end_layer=8, devices=devices)
        return Layout(replicas=(Replica(stages=(stage,), microbatch=1, num_microbatches=8, copies=2),))

    assert broken(layout(((0, 2),)), prices=alone) == []
    assert broken(layout(((7, 9),)), prices=alone) == ["gradients reachable"]


def test_one_fast_link_domain_needs_no_network():
    places = replace(group("a", nodes=2), domain_nodes=2)
    alone = FakePrices(Cluster(name="x", groups=(places,), networks=()), PRICES.model, PRICES.workload)
    size = alone.cluster.group("a").devices_per_node
    whole = Stage(group="a", first_layer=0, end_layer=8, devices=((size - 1, size + 1),))
    halves = tuple(
        Stage(group="a", first_layer=4 * q, end_layer=4 * q + 4, devices=((q * size, q * size + 2),)) for q in range(2)
    )
    for stages in ((whole,), halves):
        layout = Layout(replicas=(Replica(stages=stages, microbatch=1, num_microbatches=8, copies=2),))
        assert broken(layout, prices=alone) == []


def test_vendors_mix_only_where_limits_let_them():
    prices = FakePrices(
        cluster(group("a"), group("b", device=device("B", vendor="AMD"))), PRICES.model, PRICES.workload
    )
    assert broken(GOOD, prices=prices) == []
    assert broken(GOOD, Limits(allow_mixed_vendors=False), prices) == ["one vendor"]
    assert broken(GOOD, Limits(allow_mixed_vendors=False)) == []


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(tp=(1, 4)), "tp 2 is not allowed (allowed: 1, 4)"),
        (Limits(pp=(1,)), "pp 2 is not allowed"),
        (Limits(ep=(2,)), "ep 1 is not allowed"),
        (Limits(stage_dp=(2,)), "dp 1 inside a stage"),
        (Limits(microbatch=(1,)), "microbatch 2 is not allowed"),
        (Limits(recompute=("full",)), "recompute none is not allowed"),
        (Limits(sharding=("full",)), "sharding none is not allowed"),
        (Limits(schedules=("gpipe",)), "schedule 1f1b is not allowed (allowed: gpipe)"),
        (Limits(max_shapes=1), "2 replica shapes, at most 1 allowed"),
        (Limits(uniform_cuts=True), "replica B: stages must hold the layers"),
        (Limits(uniform_microbatches=True), "replica B: microbatches must be"),
        (Limits(min_decoder_layers=4), "stage 0: holds 3 decoder layers, at least 4 wanted"),
        (Limits(pinned_layers=(6,)), "replica A: stages hold 3, 3 decoder layers, pinned are 6"),
        (Limits(exclude=frozenset({"b"})), "replica B stage 0: group b is excluded"),
    ],
)
def test_each_limit_refuses_what_is_outside_it(limits, words):
    found = check(GOOD, PRICES, limits)
    assert {violation.rule for violation in found} == {"limits"}
    assert any(words in str(violation) for violation in found)


def test_uniform_degrees_and_equal_cuts():
    assert broken(GOOD, Limits(uniform_degrees=True, equal_cuts=True)) == []
    unlike = with_stage(row=1, tp=1, devices=((0, 1),))
    assert broken(unlike, Limits(uniform_degrees=True)) == ["limits"]
    uneven = with_row(
        stages=tuple(
            replace(stage, first_layer=first, end_layer=end)
            for stage, first, end in zip(GOOD.replicas[0].stages, (0, 3), (3, 8), strict=True)
        )
    )
    assert "not 2, 4" in said(uneven, Limits(equal_cuts=True))


def test_tp_may_leave_the_node_where_limits_let_it():
    assert broken(with_stage(row=1, devices=((7, 9),)), Limits(tp_within_node=False)) == []


def test_virtual_stages_stay_on_their_mesh():
    stages = tuple(
        Stage(group="a", first_layer=first, end_layer=end, tp=tp)
        for first, end, tp in ((0, 2, 1), (2, 4, 1), (4, 6, 1), (6, 8, 2))
    )
    layout = Layout(
        replicas=(Replica(stages=stages, microbatch=1, num_microbatches=16, vpp=2),), schedule="interleaved"
    )
    limits = Limits(schedules=("interleaved",))
    assert broken(layout, limits) == ["virtual stages share a mesh"]
    good = replace(layout.replicas[0], stages=(*stages[:3], replace(stages[3], tp=1)))
    assert broken(replace(layout, replicas=(good,)), limits) == []
    odd = replace(good, num_microbatches=15)
    assert "schedule" in broken(replace(layout, replicas=(odd,)), limits)


def test_engines_refuse_what_they_cannot_run():
    assert broken(GOOD, ENGINES["hetplan"]) == []
    assert set(broken(GOOD, ENGINES["megatron"])) == {"limits"}


def test_layers_are_shown_with_embedding_and_head():
    assert show_layers(GOOD, PRICES) == ("E+3, 3+L", "E+6+L")
