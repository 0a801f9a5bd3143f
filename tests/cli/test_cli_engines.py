"""What a search for an engine takes for granted about it."""

import json
from pathlib import Path

import pytest

from hetplan.cli.main import run

CLUSTER = Path(__file__).parents[2] / "cluster_specs" / "mixed-workstation.yaml"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--engine", "megatron"], "fp32"),
        (["--engine", "megatron", "--gradient-precision", "bf16"], "bf16"),
        (["--engine", "torchtitan"], None),
        (["--engine", "megatron", "--precision", "fp16"], None),
    ],
)
def test_engines_that_keep_wide_gradients_are_priced_so(words, found, capsys):
    """Megatron-LM accumulates and reduces bf16 gradients in fp32 unless told otherwise."""
    line = ["search", str(CLUSTER), "tinyllama-1.1b", "--global-batch", "16", "--seq-len", "1024", "--effort", "0.1"]
    assert run([*line, "--no-compare", "--json", *words]) == 0
    workload = json.loads(capsys.readouterr().out)["plan"]["workload"]
    assert workload.get("gradient_precision") == found
