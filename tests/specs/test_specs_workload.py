from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_samples import FULL, find_device

from hetplan.errors import SpecError, UsageError
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.read_workload import make_workload, resolve_precision, workload_fields, workload_fields_from_text

TEXT = """\
hetplan: workload/v1
seq_len: 4096
global_batch: 512
precision: auto
gradient_precision: fp32
attention: flash
sequence_parallel: false
"""
LAB = cluster_from_text(FULL, "lab.yaml", find_device)


def test_every_key_of_a_workload(tmp_path):
    path = tmp_path / "work.yaml"
    path.write_text(TEXT)
    assert workload_fields(path) == {
        "seq_len": 4096,
        "global_batch": 512,
        "precision": "auto",
        "gradient_precision": "fp32",
        "attention": "flash",
        "sequence_parallel": False,
    }


def test_what_is_not_written_is_absent():
    assert workload_fields_from_text("hetplan: workload/v1\n", "w.yaml") == {}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("seq_len: 4096", "seq_len: 0", "w.yaml:2:10: seq_len: must be at least 1"),
        ("seq_len: 4096", "seq_len: 1" + "0" * 30, "must be at most"),
        ("seq_len: 4096", "seq_length: 4096", "w.yaml:2:1: unknown key 'seq_length'; did you mean 'seq_len'?"),
        ("precision: auto", "precision: bf15", "did you mean 'bf16'?"),
        ("attention: flash", "attention: flesh", "did you mean 'flash'?"),
        ("sequence_parallel: false", "sequence_parallel: off", "expected true or false"),
        ("workload/v1", "cluster/v1", "this file is 'cluster/v1', expected 'workload/v1'"),
    ],
)
def test_a_bad_workload_is_refused(old, new, problem):
    changed = TEXT.replace(f"\n{old}" if old != "workload/v1" else old, f"\n{new}" if old != "workload/v1" else new)
    assert changed != TEXT
    with pytest.raises(SpecError) as caught:
        workload_fields_from_text(changed, "w.yaml")
    assert problem in str(caught.value)


def test_automatic_precision_is_what_every_group_has():
    assert resolve_precision(LAB, "auto") == "fp16", "a V100 has no bf16"
    assert resolve_precision(LAB, "auto", excluded={"v100"}) == "bf16"
    assert resolve_precision(LAB, "fp8") == "fp8"
    device = replace(LAB.groups[0].device, peak_flop_per_s={"fp32": 1e12})
    old = replace(LAB, groups=(replace(LAB.groups[0], device=device), *LAB.groups[1:]))
    assert resolve_precision(old, "auto") == "fp32"


def test_a_workload_is_made_from_fields_and_a_cluster():
    workload = make_workload(workload_fields_from_text(TEXT, "w.yaml"), LAB)
    assert (workload.seq_len, workload.global_batch, workload.precision) == (4096, 512, "fp16")
    assert (workload.gradient_precision, workload.attention, workload.sequence_parallel) == ("fp32", "flash", False)
    assert make_workload({"seq_len": 1, "global_batch": 1}, LAB, excluded=["v100"]).precision == "bf16"


def test_length_and_batch_are_required():
    with pytest.raises(UsageError, match="sequence length is missing"):
        make_workload({"global_batch": 8}, LAB)
    with pytest.raises(UsageError, match="global batch is missing"):
        make_workload({"seq_len": 8}, LAB)
    with pytest.raises(UsageError, match="between 1 and"):
        make_workload({"seq_len": 0, "global_batch": 8}, LAB)
