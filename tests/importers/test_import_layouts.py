"""Settings of trainers: which layers each stage holds, as each trainer divides them."""

import pytest
from import_samples import CATALOG

from hetplan.catalog.models import find_model
from hetplan.costs.prices import price
from hetplan.errors import SpecError, UsageError
from hetplan.plan.check import check
from hetplan.plan.flagscale_meshes import mesh_numbers, meshes_of
from hetplan.plan.imported import imported_grid, mesh_groups, stage_counts, uneven_layout, virtual_stages
from hetplan.plan.layouts import grid_layout
from hetplan.plan.limits import Limits
from hetplan.specs.importers.facts import SourceText
from hetplan.specs.importers.layout_settings import read_settings
from hetplan.specs.importers.settings_text import device_names_of
from hetplan.specs.read_cluster import cluster_from_text
from hetplan.specs.workload import Workload

# https://github.com/FlagOpen/FlagScale: examples/aquila, train_hetero.yaml, shortened; its 12 layers of width 4096
FLAGSCALE = """\
system:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 3
  use_distributed_optimizer: True
  hetero:
    enable_hetero: True
    # hetero_process_meshes: [2, 1, 1, 1, 4]
    hetero_pipeline_layer_split: [6, 2, 4]
    hetero_process_meshes: [2, 1, 1, 1, 1, 4, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    hetero_device_types: ["A800", "A800", "A800"]
  recompute:
    recompute_granularity: "full"
model:
  num_layers: 12
  seq_length: 2048
  norm_epsilon: 1e-5
  global_batch_size: 32
  micro_batch_size: 1
data:
  data_path: xxxx # your data
"""
# https://github.com/Relaxed-System-Lab/FlashFlex: form of its launch scripts
HEXISCALE = """\
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes $NNODES \\
"
torchrun $DISTRIBUTED_ARGS llama_train.py \\
--total-layer-num 12 \\
--hetero_configs "[[4, 4], [2] * 2]" \\
--layer_partitions "[[7, 5], [6, 6]]" \\
--chunks 4 2 \\
--global_bsz_size 8 2 \\
--checkpoint-all \\
# --recompute-stage-output \\
"""
MEGATRON = """\
#!/bin/bash
TP=4
PP=${PP:-4}
MODEL_ARGS=(
    --num-layers 61
    --seq-length 4096
    --max-position-embeddings 4096
)
PARALLEL_ARGS="
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size ${PP} \\
    --decoder-last-pipeline-num-layers 13 \\
    --micro-batch-size 1 --global-batch-size 256
    --use-distributed-optimizer  # sharded states
"
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} $PARALLEL_ARGS
"""
TORCHTITAN = """\
[training]
local_batch_size = 8
global_batch_size = 64
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
"""
CLUSTER = """\
hetplan: cluster/v1
name: x
groups:
  a: {device: A800-SXM4-80GB, nodes: 2, devices_per_node: 8}
networks:
  ib: {joins: [a], kind: infiniband, bandwidth: 200 Gbit/s, latency: 3 us, nics_per_node: 4}
"""
MODEL = "gpt2"
"""12 layers."""


def settings(text):
    return read_settings(SourceText(name="file", text=text))


def prices(batch, seq_len=1024):
    from hetplan.catalog.devices import find_device

    cluster = cluster_from_text(CLUSTER, "x.yaml", find_device)
    return price(cluster, find_model(MODEL), Workload(seq_len=seq_len, global_batch=batch, precision="bf16"))


def test_megatron_flags_with_variables_arrays_and_comments():
    found = settings(MEGATRON)
    assert (found.trainer, found.tp, found.pp, found.num_layers) == ("megatron", 4, 4, 61)
    assert (found.micro_batch, found.global_batch, found.sharding) == (1, 256, "optimizer")
    assert stage_counts(found) == (16, 16, 16, 13)


@pytest.mark.parametrize(
    ("flags", "counts", "vpp"),
    [
        ("--num-layers 32 --pipeline-model-parallel-size 4", (8, 8, 8, 8), 1),
        ("--num-layers 32 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4", (4,) * 8, 2),
        (
            "--num-layers 30 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split"
            " --account-for-loss-in-pipeline-split",
            (7, 8, 8, 7),
            1,
        ),
        (
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*2|(tt|)*5t|tmL'",
            (2, 2, 2, 2, 2, 2, 1, 1),
            2,
        ),
        ("--pipeline-model-parallel-size=2 --pipeline-model-parallel-layout=Et*7|t*7mL", (7, 7), 1),
        ("--num-layers 13 --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 3", (3, 5, 5), 1),
    ],
)
def test_layers_of_stages_from_megatron_flags(flags, counts, vpp):
    found = settings(flags)
    assert stage_counts(found) == counts
    assert virtual_stages(found) == vpp


def test_a_layout_string_alone():
    assert stage_counts(settings("Et*15|t*15|t*16|t*15L\n")) == (15, 15, 16, 15)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MEGATRON.replace("TP=4\n", ""), "file:9:1: --tensor-model-parallel-size: '$TP' is not set in this file"),
        (MEGATRON.replace("--num-layers 61", "--num-layers many"), "file:5:1: --num-layers: 'many' is not a whole"),
        (HEXISCALE.replace("[[7, 5], [6, 6]]", "[[7, 5], [6]]"), "file:8:1: --layer_partitions: its pipelines"),
        (HEXISCALE.replace("[[7, 5], [6, 6]]", "[[7, 5], [6, 7]]"), "each must hold the whole model"),
        (HEXISCALE.replace("[[4, 4], [2] * 2]", "__import__('os').listdir()"), "is no list of whole numbers"),
        (HEXISCALE.replace("[2] * 2", "[2] * 999999999"), "is no list of whole numbers"),
        (HEXISCALE.replace("--chunks 4 2", "--chunks 4 2 1"), "file:9:1: --chunks: 3 numbers for 2 pipelines"),
        (
            FLAGSCALE.replace("[6, 2, 4]", "auto"),
            "file:8:34: system.hetero.hetero_pipeline_layer_split: expected a list",
        ),
        (
            "experiment:\n  auto_tuner: {space: {hetero_process_meshes: auto}}\n  x: 1\nhetero_process_meshes: [1]\n",
            "search space decides no layout",
        ),
        (TORCHTITAN.replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 2.5"), "file:8:1: tensor_parallel"),
        (TORCHTITAN.replace('"Interleaved1F1B"', '"Mine"'), "pipeline schedule 'Mine'"),
        (TORCHTITAN + "[", "file:13:1: not valid TOML"),
        ("hello", "found no settings of Megatron-LM, FlagScale, HexiScale or torchtitan"),
    ],
)
def test_what_is_not_decided_or_damaged_is_refused(text, words):
    with pytest.raises(SpecError) as caught:
        settings(text)
    assert words in str(caught.value)


def test_settings_that_contradict_themselves_are_refused():
    with pytest.raises(UsageError, match="do not make 13"):
        stage_counts(settings(FLAGSCALE.replace("num_layers: 12", "num_layers: 13")))
    with pytest.raises(UsageError, match="no multiple of pp 3"):
        virtual_stages(settings("--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout 'Et|t|t|tL'"))


def test_torchtitan_divides_as_it_weighs_embedding_and_head():
    found = settings(TORCHTITAN)
    assert (found.dp, found.sharding, found.recompute, found.schedule) == (4, "full", "selective", "interleaved")
    grid = imported_grid(found, 30, None)
    assert (grid.pp, grid.vpp) == (4, 2)
    assert grid.layers_per_stage == (3, 4, 4, 4, 4, 4, 4, 3)
    parts = '[["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3"], ["layers.4", "norm", "output"]]'
    named = settings(TORCHTITAN.replace("[activation", f"module_fqns_per_model_part = {parts}\n[activation"))
    assert stage_counts(named) == (1, 2, 1, 1)
    assert virtual_stages(named) == 1


def test_a_megatron_layout_becomes_a_plan_of_those_layers():
    found = settings(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*5|t*7L' "
        "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 32"
    )
    costs = prices(32)
    layout = grid_layout(costs, imported_grid(found, 12, None))
    (replica,) = layout.replicas
    assert [(s.first_layer, s.end_layer, s.tp) for s in replica.stages] == [(0, 6, 2), (6, len(costs.model.chain), 2)]
    assert (replica.copies, replica.microbatch, layout.num_samples) == (4, 2, 32)
    assert check(layout, costs, Limits()) == ()


def test_flagscale_meshes_go_to_groups_and_back():
    found = settings(FLAGSCALE)
    costs = prices(32)
    names = device_names_of(CATALOG, {"a": "A800-SXM4-80GB"})
    groups = mesh_groups(found, names)
    assert groups == ("a", "a", "a")
    layout = uneven_layout(found, costs, groups)
    assert mesh_numbers(meshes_of(layout)) == found.meshes
    assert [stage.num_layers for stage in layout.replicas[0].stages][1] == 2
    assert (layout.num_samples, layout.sharding) == (32, "optimizer")
    with pytest.raises(UsageError, match="device type 'A800' is that of 2 groups"):
        mesh_groups(found, device_names_of(CATALOG, {"a": "A800-SXM4-80GB", "b": "A800-SXM4-80GB"}))


def test_hexiscale_pipelines_keep_their_own_cuts_and_batches():
    found = settings(HEXISCALE)
    assert [(p.tp, p.layers, p.num_samples, p.num_microbatches) for p in found.pipelines] == [
        ((4, 4), (7, 5), 8, 4),
        ((2, 2), (6, 6), 2, 2),
    ]
    assert (found.global_batch, found.recompute) == (10, "full")
    layout = uneven_layout(found, prices(10), ["a"])
    assert [(r.microbatch, r.num_microbatches, [s.tp for s in r.stages]) for r in layout.replicas] == [
        (2, 4, [4, 4]),
        (1, 2, [2, 2]),
    ]
    assert layout.num_devices == 12
    with pytest.raises(UsageError, match="3 groups are named for 4 stages"):
        uneven_layout(found, prices(10), ["a", "a", "a"])
