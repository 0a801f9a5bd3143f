"""Measured layers of other profilers: tables told by their header, Metis, Galvatron and Sailor told by their keys."""

import json

import pytest

from hetplan.errors import SpecError, UsageError
from hetplan.specs.importers.facts import SourceText
from hetplan.specs.importers.layer_times import Settings, layer_calibration, layer_model_text, together
from hetplan.specs.importers.layer_times_csv import read_table
from hetplan.specs.importers.layer_times_json import read_profile, settle_memory
from hetplan.specs.layer_table import ANY_SITE, LinkEnd

TIMES = """\
source,model,gpu,microbatch,tp,layer,kind,fwd_ms,bwd_ms,update_us
first,tiny,Card,1,1,0,embedding,0.5,0.1,20
first,tiny,Card,1,1,2,transformer,2,4,30
first,tiny,Card,1,1,4,head,3,5,40
first,tiny,Card,4,1,0,embedding,2,0.4,20
first,tiny,Card,4,1,2,transformer,8,16,30
first,tiny,Card,4,1,4,head,12,20,40
second,tiny,Card,1,1,2,transformer,9,9,9
second,tiny,Card,2,1,2,transformer,9,9,9
"""
SIZES = """\
model,tp,layer,kind,params,saved_bytes,output_floats
tiny,1,0,embedding,1000,100,64
tiny,1,2,transformer,500,700,64
tiny,1,4,head,900,300,1
"""


def source(text, name="table.csv"):
    return SourceText(name=name, text=text)


def first_rows(text=TIMES):
    return read_table(source(text), (("source", "first"),))


def test_layers_that_are_not_listed_take_the_row_of_their_kind():
    profile = together([first_rows(), read_table(source(SIZES), ())])
    table = layer_calibration(profile, Settings(), None).calibration.layers
    assert table.num_layers == 5
    spans = [(row.microbatch, row.first_layer, row.end_layer, row.forward_s) for row in table.rows]
    assert spans[:3] == [(1, 0, 1, 0.0005), (1, 1, 4, 0.002), (1, 4, 5, 0.003)]
    block = next(row for row in table.rows if row.microbatch == 4 and row.first_layer == 1)
    assert (block.backward_s, block.update_s) == (pytest.approx(0.016), pytest.approx(30e-6))
    assert (block.params, block.saved_bytes) == (500, 4 * 700)


def test_two_measurements_of_one_layer_are_refused_until_one_is_chosen():
    everything = read_table(source(TIMES), ())
    with pytest.raises(UsageError, match="twice with other numbers; choose rows with --where"):
        layer_calibration(everything, Settings(), None)


def test_a_combination_without_all_kinds_is_left_out_and_said_so():
    alone = read_table(source(TIMES), (("source", "second"),))
    profile = together([first_rows(), read_table(source(SIZES), ())])
    partial = together([profile, type(alone)(times=tuple(row for row in alone.times if row.microbatch == 2))])
    found = layer_calibration(partial, Settings(), None)
    assert {row.microbatch for row in found.calibration.layers.rows} == {1, 4}
    assert any("microbatch 2: no embedding was measured" in note for note in found.notes)


def test_a_model_of_the_sizes_has_every_layer():
    text = layer_model_text(together([first_rows(), read_table(source(SIZES), ())]), Settings(), None, 16)
    assert "{kind: decoder, repeat: 3, params: 500, width: 4, tp: 1}" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "expected a table of layer times"),
        ("gpu,microbatch,tp,layer,fwd_s,bwd_s\nCard,1,1,0,0,1\n", "forward seconds above 0"),
        ("gpu,microbatch,tp,layer,fwd_s,bwd_s\nCard,1.5,1,0,1,1\n", "microbatch: expected a whole number"),
        ("gpu,microbatch,tp,layer,fwd_s,bwd_s\nCard,1,1,0,fast,1\n", "'fast' is not a number"),
        ("gpu,microbatch,tp,layer,kind,fwd_s,bwd_s\nCard,1,1,0,roof,1,1\n", "kind: 'roof' is none of"),
    ],
)
def test_damaged_tables_are_refused_at_their_line(text, message):
    with pytest.raises(SpecError, match=message):
        read_table(source(text), ())


def test_fits_of_links_are_read_by_place_and_count():
    text = "send_zone,send_gpu,send_gpus,recv_zone,recv_gpu,recv_gpus,a,b,c,max_bw_Bps\nz,A,1,y,B,2,0,0.5,2,3e9\n"
    (ends, curve), *_ = read_table(source(text), ()).between.items()
    assert ends == (LinkEnd(device="A", site="z", ranks=1), LinkEnd(device="B", site="y", ranks=2))
    assert (curve.coefficients, curve.max_bytes_per_s) == ((0.0, 0.5e9, 2e9), 3e9)
    plain = read_table(source("send_gpu,recv_gpu,a,b,c\nA,B,0,0,1\n"), ()).between
    assert next(iter(plain))[0] == LinkEnd(device="A", site=ANY_SITE, ranks=1)


def metis(samples, layer_ms, layer_mb):
    document = {
        "model": {
            "model_name": "gpt",
            "num_layers": 3,
            "parameters": {"total_parameters_bytes": 2400, "parameters_per_layer_bytes": [800, 800, 800]},
        },
        "execution_time": {
            "total_time_ms": 1.0,
            "optimizer_time_ms": 0.6,
            "layer_compute_total_ms": [layer_ms, 3 * layer_ms, layer_ms],
        },
        "execution_memory": {"layer_memory_total_mb": [layer_mb] * 3},
    }
    return read_profile(source(json.dumps(document), f"profiles/DeviceType.A100_tp2_bs{samples}.json"), None, None)


def test_metis_profiles_tell_device_tp_and_microbatch_by_name_and_memory_by_two_microbatches():
    profile = settle_memory(together([metis(1, 3.0, 110), metis(4, 9.0, 140)]))
    table = layer_calibration(profile, Settings(), None).calibration.layers
    assert (table.model, table.num_layers) == ("gpt", 3)
    middle = next(row for row in table.rows if row.microbatch == 4 and row.first_layer == 1)
    assert (middle.device, middle.tp, middle.params) == ("A100", 2, 200)
    assert middle.forward_s + middle.backward_s == pytest.approx(0.027)
    assert middle.states_bytes == pytest.approx(100 << 20)
    assert middle.saved_bytes == pytest.approx(40 << 20)
    assert middle.update_s == pytest.approx(0.0002)


def test_metis_memory_of_one_microbatch_counts_as_states_and_says_so():
    profile = settle_memory(metis(1, 3.0, 110))
    assert {row.saved_bytes for row in profile.times} == {0.0}
    assert "one microbatch was measured" in profile.notes[0]


def test_galvatron_profiles_need_to_be_told_device_and_layers():
    times = source('{"layertype_0": 2.0, "layertype_other": 1.0}', "computation_profiling.json")
    with pytest.raises(SpecError, match="--set count=N"):
        read_profile(times, "Card", None)
    with pytest.raises(SpecError, match="--device NAME"):
        read_profile(times, None, 4)
    memory = {"layertype_0": {"parameter_size": 4.0, "tp_activation_per_bsz_dict": {"1": 10.0, "2": 6.0}}}
    sizes = read_profile(source(json.dumps(memory)), "Card", 4)
    profile = together([read_profile(times, "Card", 4), sizes])
    table = layer_calibration(profile, Settings(count=4), "gpt").calibration.layers
    block = next(row for row in table.rows if row.microbatch == 8 and row.first_layer == 1)
    assert (block.forward_s, block.backward_s) == (pytest.approx(0.016), pytest.approx(0.032))
    assert block.saved_bytes == pytest.approx(8 * 10 * (1 << 20))
    assert block.params == pytest.approx(1 << 20)


def test_sailor_profiles_hold_times_sizes_and_links():
    times = {"opt": {"Card": {"2": {"1": {"0": [0.1, 0.0, 0.2], "1": [0.3, 0.4, 0.2], "2": [0.5, 0.6, 0.2]}}}}}
    profile = read_profile(source(json.dumps(times)), None, None)
    assert [(row.microbatch, row.layer, row.kind) for row in profile.times] == [
        (2, 0, "embedding"),
        (2, 1, "decoder"),
        (2, 2, "head"),
    ]
    links = {"z": {"Card": {"1": {"y": {"Card": {"2": [[[1.0, 2.0, 3.0], 5e9]]}}}}}}
    found = read_profile(source(json.dumps(links)), None, None).between
    (ends, curve), *_ = found.items()
    assert (ends[1].ranks, curve.coefficients) == (2, (1e9, 2e9, 3e9))


def test_other_json_is_refused():
    for text in ("[1]", '{"a": 1}', "{"):
        with pytest.raises(SpecError):
            read_profile(source(text, "x.json"), None, None)
