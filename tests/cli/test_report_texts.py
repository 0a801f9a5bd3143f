"""Tables, bars and the answer of a search as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import CLUSTER, ESTIMATE, LAYOUT, RESULT, SETTING, group, stage

from hetplan.plan.records import Layout
from hetplan.report.documents import search_document
from hetplan.report.estimates import memory_table, time_table
from hetplan.report.gantt import Bar, Row, gantt
from hetplan.report.layouts import layout_table, replica_text, shape_name
from hetplan.report.nodes import node_names, nodes_of
from hetplan.report.searches import comparison_table, layout_words, runner_up_notes, search_text
from hetplan.report.tables import bar, percent, table


def test_numbers_stand_right_and_words_left() -> None:
    text = table(("name", "count"), [("a", "5"), ("long name", "1,234")])
    assert text == "name       count\na              5\nlong name  1,234"


def test_columns_with_nothing_in_them_are_left_out() -> None:
    assert table(("a", "b", "c"), [("1", "", "3")]) == "a  c\n1  3"


def test_only_the_column_that_may_shrink_is_cut() -> None:
    text = table(("nodes", "what"), [("n" * 60, "w" * 40)], shrink="nodes")
    assert max(map(len, text.splitlines())) == 80
    assert "w" * 40 in text
    assert "n.." in text


@given(st.floats(-1, 3))
def test_bars_keep_their_width(fraction: float) -> None:
    assert len(bar(fraction, 10)) == 10


def test_a_bar_beyond_its_end_says_so() -> None:
    assert bar(1.2, 4) == "###!"
    assert bar(1.0, 4) == "####"
    assert bar(0.5, 4) == "##.."


def test_percentages_keep_a_decimal_while_it_matters() -> None:
    assert [percent(x) for x in (0.0, 0.0003, 0.0012, 0.0994, 0.0996, 1.16)] == [
        "0.0 %",
        "<0.1 %",
        "0.1 %",
        "9.9 %",
        "10 %",
        "116 %",
    ]


def test_who_does_what_shows_layers_nodes_and_memory() -> None:
    text = layout_table(LAYOUT, ESTIMATE, SETTING)
    first, second = text.splitlines()[2:]
    assert "A: 2 copies, each 64 microbatches of 2 samples" in text
    assert first.split()[:6] == ["0", "fast", "fast-[01-02]", "21", "8", "none"]
    assert second.split()[:6] == ["1", "slow", "slow-01", "11", "4", "full"]
    assert "76 %" in first
    assert "cp" not in text


def test_long_pipelines_share_rows_unless_all_is_asked_for() -> None:
    stages = tuple(
        replace(LAYOUT.replicas[0].stages[0], first_layer=i, end_layer=i + 1, devices=((0, 8),)) for i in range(30)
    )
    layout = Layout(replicas=(replace(LAYOUT.replicas[0], stages=stages),))
    estimate = replace(ESTIMATE, stages=tuple(stage(i, "fast", 60.0 - i) for i in range(30)))
    joined = layout_table(layout, estimate, SETTING)
    assert "1-29" in joined
    assert len(layout_table(layout, estimate, SETTING, full=True).splitlines()) == 32


def test_left_out_devices_shift_the_nodes_of_a_range() -> None:
    whole = node_names(CLUSTER)["fast"]
    assert nodes_of(whole, ((7, 9),)) == ("fast-01", "fast-02")
    one_out = node_names(replace(CLUSTER, groups=(group("fast", 2, left_out=frozenset({(0, 3)})),)))["fast"]
    assert nodes_of(one_out, ((0, 7),)) == ("fast-01",)
    assert nodes_of(one_out, ((7, 8),)) == ("fast-02",)


def test_shape_names_do_not_run_out() -> None:
    assert [shape_name(i) for i in (0, 25, 26, 53)] == ["A", "Z", "A1", "B2"]


def test_one_copy_and_one_sample_are_singular() -> None:
    replica = replace(LAYOUT.replicas[0], copies=1, microbatch=1, num_microbatches=1)
    assert replica_text(replica) == "1 copy with 1 microbatch of 1 sample"


def test_parts_of_a_step_that_take_no_time_are_not_shown() -> None:
    text = time_table(ESTIMATE)
    assert "context parallel" not in text
    assert "bubble" in text
    assert "gradients, hidden" in text


def test_comparison_says_why_something_does_not_fit() -> None:
    text = comparison_table(RESULT)
    assert "1.10x" in text
    assert "12.5 GiB short on stage 0" in text
    assert "hetero efficiency 97 %" in text


def test_a_layout_in_words_names_groups_and_degrees() -> None:
    assert layout_words(LAYOUT) == ("2x (fast tp8 -> slow tp4 full recompute), 64 microbatches of 2; optimizer sharded")


@pytest.mark.parametrize("full", [False, True])
def test_an_answer_fits_80_columns_of_ascii(full: bool) -> None:
    text = search_text(RESULT, SETTING, full=full)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    assert ("30 candidates dropped: tp beyond a node" in text) == full


def test_wide_answers_fit_80_columns_too() -> None:
    replica = LAYOUT.replicas[0]
    stages = tuple(replace(stage, dp=16, cp=4, ep=8, recompute="selective") for stage in replica.stages)
    layout = Layout(replicas=(replace(replica, stages=stages),), sharding="gradients")
    best = replace(RESULT.best, layout=layout)
    proof = replace(RESULT.proof, status="interrupted", bound=1501.0, value=1502.0, floor=1401.0)
    setting = replace(SETTING, model=replace(SETTING.model, name="a-model-with-a-rather-long-name-as-they-often-have"))
    text = search_text(replace(RESULT, best=best, proof=proof), setting)
    assert max(map(len, text.splitlines())) <= 80
    assert "no mix of shapes below 23 min 21 s" in " ".join(text.split())


def test_memory_table_starts_with_the_fullest_stage() -> None:
    rows = memory_table(ESTIMATE).splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["A0", "A1"]


def test_search_document_is_json_and_carries_the_promised_keys() -> None:
    document = json.loads(json.dumps(search_document(RESULT, {"hetplan": "plan/v1"}), allow_nan=False))
    promised = {"status", "step_s", "bound_s", "gap", "search_s", "tokens_per_s", "mfu", "usd_per_step"}
    assert promised | {"joules_per_step", "peak_bytes", "plan", "comparison", "dropped", "space"} <= document.keys()
    assert document["bound_s"] == 1.99
    assert document["gap"] == pytest.approx(0.005)
    assert len(document["peak_bytes"]) == 2


def test_every_key_of_a_document_is_described_in_the_readme() -> None:
    table_of_keys = (Path(__file__).parents[2] / "README.md").read_text().split("### JSON")[1].split("## Files")[0]
    described = set(re.findall(r"`(\w+)`", table_of_keys))
    document = search_document(RESULT, {})
    assert document.keys() | document["stages"][0].keys() | document["time_parts_s"].keys() <= described


def test_plans_closer_than_the_calibration_errs_are_called_so() -> None:
    best = replace(RESULT.best, estimate=replace(RESULT.best.estimate, relative_error=0.05))
    near, far = (replace(best, estimate=replace(best.estimate, step_s=best.estimate.step_s * x)) for x in (1.03, 1.2))
    close, distant = runner_up_notes(best, [near, far])
    assert close.endswith("(closer than the calibration can tell, +- 5.0 %)")
    assert "closer than" not in distant
    unsure = search_document(replace(RESULT, best=best, runners_up=(near, far)), {})["runners_up"]
    assert [other["closer_than_error"] for other in unsure] == [True, False]
    sure = search_document(replace(RESULT, runners_up=(near,)), {})["runners_up"]
    assert sure[0]["closer_than_error"] is None


def test_another_objective_has_no_bound_in_seconds() -> None:
    proof = replace(RESULT.proof, objective="energy")
    document = search_document(replace(RESULT, proof=proof), {})
    assert document["bound_s"] is None
    assert document["bound"] == 1.99


def test_gantt_shows_what_fills_most_of_a_column() -> None:
    rows = [
        Row(name="0", bars=(Bar(start_s=0.0, end_s=4.0, mark="F"), Bar(start_s=6.0, end_s=8.0, mark="B"))),
        Row(name="1", bars=(Bar(start_s=3.0, end_s=3.4, mark="F"),)),
    ]
    assert gantt(rows, 8.0, width=12) == "0 |FFFF..BB|\n1 |........|"
