"""What each engine is told of a plan, and what it cannot be told."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from emit_samples import cluster, data_parallel, files, group, job, layout, notes, pair, replica, stage, two_stages

from hetplan.catalog.models import find_model
from hetplan.emit.capability import PROFILES, refusals
from hetplan.emit.emit import EMITTERS
from hetplan.emit.megatron import layer_flags
from hetplan.emit.ranks import agents_of, fewest_agents, ranks_of
from hetplan.emit.rotary import positions
from hetplan.errors import CheckFailedError, UsageError
from hetplan.plan.megatron_layout import cut_of_layout, parse_layout
from hetplan.specs.model import Volumes


def cut(bounds, *, vpp=1):
    """A replica of 18 layers cut at these bounds."""
    edges = (0, *bounds, 18)
    stages = [stage("a100", first, end) for first, end in pairwise(edges)]
    return replica(*stages, vpp=vpp)


def program(made):
    return re.search(r"    PROGRAM=\(\n        (.*?)\n    \)", made["common.sh"], re.S)[1].split("\n        ")


def test_every_engine_has_a_profile():
    assert PROFILES.keys() == EMITTERS.keys()


@pytest.mark.parametrize(
    ("bounds", "vpp", "words"),
    [
        ((9,), 1, ()),
        ((5, 9, 13), 2, ("--num-virtual-stages-per-pipeline-rank", "2")),
        ((12,), 1, ("--decoder-first-pipeline-num-layers", "11")),
        ((7, 12), 1, ("--decoder-first-pipeline-num-layers", "6")),
        ((7, 11), 1, ("--decoder-first-pipeline-num-layers", "6", "--decoder-last-pipeline-num-layers", "6")),
        ((3, 6, 12), 1, ("--pipeline-model-parallel-layout", "'Et*2|t*3|t*6|t*5L'")),
        ((1, 17), 1, ("--pipeline-model-parallel-layout", "'E|t*16|L'")),
    ],
)
def test_megatron_is_told_the_layers_of_a_stage_in_the_shortest_way(bounds, vpp, words):
    work = job(pair(), layout(cut(bounds, vpp=vpp)))
    row = work.layout.replicas[0]
    assert layer_flags(work.model, row) == words
    if words and "layout" in words[0]:
        stages = parse_layout(words[1].strip("'"))
        assert cut_of_layout(work.model, stages) == (*(s.first_layer for s in row.stages), 18)


def test_megatron_is_told_degrees_batch_and_sizes():
    made = files(job(pair(), two_stages(sharding="optimizer"), gradient_precision="fp32"), "megatron")
    lines = program(made)
    for line in (
        "--num-layers 16",
        "--hidden-size 2048",
        "--num-query-groups 8",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--decoder-first-pipeline-num-layers 11",
        "--use-distributed-optimizer",
        "--global-batch-size 16",
        "--micro-batch-size 1",
        "--sequence-parallel",
    ):
        assert line in lines
    assert "--untie-embeddings-and-output-weights" not in lines
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in made["common.sh"]


def test_megatron_is_left_the_sizes_of_models_its_flags_cannot_say():
    a100 = group("a100", "A100-SXM4-80GB", 1, 8)
    plan = layout(replica(stage("a100", 0, 29), copies=8))
    made = files(job(cluster(a100), plan, "deepseek-v2-lite"), "megatron")
    assert "--hidden-size" not in made["common.sh"] and '"${MODEL_ARGS[@]}"' in made["common.sh"]
    assert "MEGATRON_MODEL_ARGS" in made["site.sh"]


def test_megatron_is_told_what_gradients_the_plan_was_priced_with():
    narrow = program(files(job(pair(), two_stages()), "megatron"))
    assert "--grad-reduce-in-bf16" in narrow and "--accumulate-allreduce-grads-in-fp32" not in narrow
    wide = program(files(job(pair(), two_stages(), gradient_precision="fp32"), "megatron"))
    assert "--accumulate-allreduce-grads-in-fp32" in wide and "--grad-reduce-in-bf16" not in wide
    half = program(files(job(pair(), two_stages(), precision="fp16"), "megatron"))
    assert "--fp16" in half and not any("grad" in line and "accum" in line for line in half)


def test_megatron_is_told_what_costs_nothing_too():
    """Its own defaults drop a tenth, know no rotary scaling and another base."""
    lines = program(files(job(pair(), two_stages()), "megatron"))
    for line in (
        "--hidden-dropout 0.0",
        "--attention-dropout 0.0",
        "--norm-epsilon 1e-05",
        "--rotary-base 500000",
        "--use-rope-scaling",
        "--rope-scaling-factor 32.0",
    ):
        assert line in lines
    a100 = group("a100", "A100-SXM4-80GB", 1, 8)
    gpt = program(files(job(cluster(a100), layout(replica(stage("a100", 0, 14), copies=8)), "gpt2"), "megatron"))
    assert {"--hidden-dropout 0.1", "--attention-dropout 0.1", "--norm-epsilon 1e-05"} <= set(gpt)
    assert "--position-embedding-type learned_absolute" in gpt and not any("rotary" in line for line in gpt)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"rope_theta": 10000.0}, {"rotary_base": 10000}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rotary_base": 1_000_000}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rotary_seq_len_interpolation_factor": 4}),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, None),
        ({"rope_theta": 12345.5}, {"rotary_base": "$ROTARY_BASE"}),
    ],
)
def test_rotary_positions_are_said_as_published_or_not_at_all(fields, found):
    model = replace(find_model("llama-3.2-1b"), published=fields)
    said = positions(model)
    assert (said is None) if found is None else found.items() <= said.items()


def test_devices_before_ampere_run_without_transformer_engine_where_they_can():
    v100 = group("v100", "V100-SXM2-32GB", 1, 8)
    plan = layout(replica(stage("v100", 0, 18, tp=2), copies=4))
    split = job(cluster(v100), plan, precision="fp16")
    assert not any("transformer-impl" in line for line in program(files(split, "megatron")))
    assert any("must be built for them" in note for note in notes(split, "megatron"))
    whole = job(cluster(v100), plan, precision="fp16", sequence_parallel=False)
    assert {"--transformer-impl local", "--no-persist-layer-norm"} <= set(program(files(whole, "megatron")))
    assert not any("must be built" in note for note in notes(whole, "megatron"))


def test_experts_run_in_one_product_where_devices_allow():
    a100, v100 = group("a100", "A100-SXM4-80GB", 1, 8), group("v100", "V100-SXM2-32GB", 1, 8)
    for where, there in ((a100, True), (v100, False)):
        plan = layout(replica(stage(where.name, 0, 34, dp=8, ep=8), microbatch=8))
        lines = program(files(job(cluster(where), plan, "mixtral-8x7b", precision="fp16"), "megatron"))
        assert ("--moe-grouped-gemm" in lines) == there and "--moe-token-dispatcher-type alltoall" in lines


def test_ranks_go_in_each_engines_order():
    plan = layout(replica(stage("a100", 0, 12, tp=2), stage("v100", 12, 18, tp=2), copies=2))
    work = job(pair(), plan)
    by_stage = [(rank.stage, rank.copy, rank.place) for rank in ranks_of(work, "stages")]
    assert by_stage == [(s, c, p) for s in (0, 1) for c in (0, 1) for p in (0, 1)]
    by_replica = [(rank.copy, rank.stage, rank.place) for rank in ranks_of(work, "replicas")]
    assert by_replica == [(c, s, p) for c in (0, 1) for s in (0, 1) for p in (0, 1)]
    assert len(agents_of(ranks_of(work, "replicas"))) == 4
    assert [agent.node for agent in agents_of(ranks_of(work, "nodes"))] == ["a100-1", "v100-1"]


def test_stages_side_by_side_on_nodes_turn_the_mapping_of_megatron():
    """Two nodes, each a whole pipeline: with dp inside pp every rank would come back to both nodes."""
    nodes = group("a100", "A100-SXM4-80GB", 2, 2)
    stages = (stage("a100", 0, 9, devices=((0, 1), (2, 3))), stage("a100", 9, 18, devices=((1, 2), (3, 4))))
    work = job(cluster(nodes), layout(replica(*stages, copies=2)))
    assert fewest_agents(work, ("stages", "pipelines"))[0] == "pipelines"
    assert "--use-tp-pp-dp-mapping" in program(files(work, "megatron"))


def test_a_node_that_ranks_come_back_to_starts_two_agents():
    made = files(job(pair(), two_stages()), "megatron")
    assert made["launch-a100-1.sh"].count("torchrun") == 1
    plan = layout(replica(stage("a100", 0, 6), stage("v100", 6, 12), stage("a100", 12, 18)))
    work = job(pair(), plan)
    launch = files(work, "megatron")["launch-a100-1.sh"]
    assert launch.count("torchrun --nnodes=3") == 2 and "wait -n" in launch
    assert any("come back to node a100-1" in note for note in notes(work, "megatron"))


def test_torchtitan_gets_the_modules_of_every_part():
    made = files(job(pair(), two_stages(sharding="full")), "torchtitan")
    scope = {}
    source = made["hetplan_titan.py"]
    tree = compile(source, "hetplan_titan.py", "exec")
    assert tree is not None
    exec(re.search(r"module_fqns_per_model_part(=\[.*?\n {8}\]),", source, re.S)[0].strip().rstrip(","), scope)
    first, second = scope["module_fqns_per_model_part"]
    assert first == ["tok_embeddings", *(f"layers.{i}" for i in range(11))]
    assert second == [*(f"layers.{i}" for i in range(11, 16)), "norm", "lm_head"]
    assert "data_parallel_shard_degree=4" in source and "data_parallel_replicate_degree=1" in source
    assert "num_tokens_per_train_step = 16 * 4096" in source and "tensor_parallel_degree=2" in source


def test_torchtitan_starts_from_its_own_configuration_where_it_has_one():
    a100 = group("a100", "A100-SXM4-80GB", 1, 8)
    plan = layout(replica(stage("a100", 0, 34, tp=8, recompute="full")))
    source = files(job(cluster(a100), plan, "llama-3.1-8b"), "torchtitan")["hetplan_titan.py"]
    assert "from torchtitan.models.llama3.config_registry import llama3_8b" in source
    assert "config.activation_checkpoint = FullAC.Config()" in source


def unequal_tp():
    return layout(replica(stage("a100", 0, 12, tp=8, dp=1), stage("v100", 12, 18, tp=4, dp=2), microbatch=2))


def test_flagscale_gets_a_mesh_a_stage_and_the_plain_checkpoint_format():
    work = job(pair(), unequal_tp(), "llama-3.2-1b")
    with pytest.raises(CheckFailedError, match="share embeddings between stages with different tp"):
        files(work, "flagscale")
    plan = layout(replica(stage("a100", 0, 24, tp=8), stage("v100", 24, 34, tp=4, dp=2), microbatch=2))
    untied = job(pair(), plan, "llama-3.1-8b")
    train = yaml.safe_load(files(untied, "flagscale")["train-hetero.yaml"])
    hetero = train["system"]["hetero"]
    assert hetero["hetero_process_meshes"] == [8, 1, 1, 1, 1, 4, 1, 1, 2, 1]
    assert hetero["hetero_pipeline_layer_split"] == [23, 9]
    assert hetero["hetero_device_types"] == ["A100-SXM4-80GB", "V100-SXM2-32GB"]
    assert train["system"]["checkpoint"]["ckpt_format"] == "torch"
    assert (train["model"]["micro_batch_size"], train["model"]["global_batch_size"]) == (2, 8)
    assert any("ckpt_format: torch" in note for note in notes(untied, "flagscale"))
    assert files(untied, "flagscale")["hostfile"].splitlines() == [
        "a100-1 slots=8 type=A100-SXM4-80GB",
        "v100-1 slots=8 type=V100-SXM2-32GB",
    ]


def test_flagscale_is_told_of_an_untied_head_even_of_a_model_it_has_no_arguments_for():
    layers = len(find_model("qwen2.5-vl-7b").chain)
    plan = layout(replica(stage("a100", 0, 24, tp=4), stage("v100", 24, layers, tp=2, dp=2), microbatch=2))
    model = yaml.safe_load(files(job(pair(), plan, "qwen2.5-vl-7b"), "flagscale")["train-hetero.yaml"])["model"]
    assert "hidden_size" not in model
    assert model["untie_embeddings_and_output_weights"] is True


def test_flagscale_is_told_which_stages_recompute():
    plan = layout(replica(stage("a100", 0, 12, recompute="full"), stage("v100", 12, 18), num_microbatches=6))
    train = yaml.safe_load(files(job(pair(), plan), "flagscale")["train-hetero.yaml"])
    recompute = train["system"]["recompute"]
    assert recompute["recompute_granularity"] == "full"
    assert recompute["recompute_granularity_per_stage_micro_batch"] == [[1, 6, 1], [1, 6, 0]]


def test_hexiscale_gets_a_list_a_pipeline():
    a100 = group("a100", "A100-SXM4-80GB", 1, 3)
    v100 = group("v100", "V100-SXM2-32GB", 1, 4)
    plan = layout(
        replica(stage("a100", 0, 20, tp=2), stage("v100", 20, 34), num_microbatches=6),
        replica(stage("v100", 0, 18), stage("v100", 18, 34), num_microbatches=2, microbatch=2),
    )
    made = files(job(cluster(a100, v100), plan, "llama-2-7b"), "hexiscale")
    lists = json.loads(made["hetero_configs.json"])
    assert lists["hetero_configs"] == [[2, 1], [1, 1]]
    assert lists["layer_partitions"] == [[19, 13], [17, 15]]
    assert lists["devices_id"] == [[[0, 0], [1]], [[1], [1]]]
    lines = program(made)
    assert "--model_size llama-7b" in lines

    assert "--chunks 6 2" in lines and "--global_bsz_size 6 4" in lines


def test_vllm_gets_the_layer_split():
    made = files(job(pair(), layout(replica(stage("a100", 0, 12, tp=2), stage("v100", 12, 18, tp=2)))), "vllm")
    head, other = made["serve-0-a100-1.sh"], made["serve-0-v100-1.sh"]
    assert "VLLM_PP_LAYER_PARTITION=11,5" in head and "VLLM_PP_LAYER_PARTITION=11,5" in other
    assert "--nnodes 2 --node-rank 0" in head and "--headless" not in head
    assert "--nnodes 2 --node-rank 1" in other and "--headless" in other


@pytest.mark.parametrize(
    ("engine", "plan", "words"),
    [
        ("megatron", unequal_tp(), "megatron cannot run stages with different tp (stage 0: 8, stage 1: 4)"),
        (
            "torchtitan",
            layout(replica(stage("a100", 0, 18)), replica(stage("v100", 0, 18), num_microbatches=2)),
            "replicas with different microbatches (replica A: 4 of 1, replica B: 2 of 1)",
        ),
        (
            "megatron",
            layout(replica(stage("a100", 0, 9), stage("a100", 9, 18)), replica(stage("v100", 0, 18))),
            "replicas cut differently (layers with embedding and head, replica A: 9+9, replica B: 18)",
        ),
        (
            "megatron",
            layout(replica(stage("a100", 0, 18, tp=2)), replica(stage("v100", 0, 18, tp=4))),
            "replicas with different tp (replica A: 2, replica B: 4)",
        ),
        ("torchtitan", two_stages(sharding="optimizer"), "sharding optimizer (it has none, gradients, full)"),
        ("deepspeed", two_stages(), "pipelines of 2 stages (its pp is 1)"),
        ("megatron", two_stages(schedule="gpipe"), "the schedule gpipe (it has 1f1b, interleaved)"),
        (
            "hexiscale",
            layout(replica(stage("a100", 0, 18, recompute="selective"))),
            "selective recomputation (it has none, full)",
        ),
        ("flagscale", layout(replica(stage("a100", 0, 18)), replica(stage("v100", 0, 18))), "2 replica shapes"),
    ],
)
def test_an_engine_refuses_what_it_cannot_run_by_name(engine, plan, words):
    with pytest.raises(CheckFailedError) as caught:
        files(job(pair(), plan), engine)
    assert words in str(caught.value)
    assert not refusals(job(pair(), plan), "hetplan")


@pytest.mark.parametrize(
    ("engine", "work", "words"),
    [
        ("torchtitan", job(pair(), two_stages(), precision="fp16"), "torchtitan cannot run fp16"),
        ("hexiscale", job(pair(), two_stages(), "qwen3-1.7b"), "Llama models of width"),
    ],
)
def test_an_engine_refuses_models_and_precisions_no_plan_would_change(engine, work, words):
    with pytest.raises(UsageError, match=words):
        files(work, engine)


def test_deepspeed_refuses_tp_with_everything_sharded():
    a100 = group("a100", "A100-SXM4-80GB", 1, 8)
    plan = layout(replica(stage("a100", 0, 18, tp=2), copies=4), sharding="full")
    with pytest.raises(CheckFailedError, match="ZeRO stage 3"):
        files(job(cluster(a100), plan), "deepspeed")
    assert not refusals(job(cluster(a100), data_parallel(a100)), "deepspeed")


def test_an_engine_that_starts_its_own_processes_takes_no_launcher():
    with pytest.raises(UsageError, match="leave --via slurm out"):
        files(job(pair(), two_stages()), "flagscale", "slurm")


def test_frozen_layers_and_adapters_are_not_silently_trained():
    work = job(pair(), two_stages())
    (module,) = work.model.modules
    frozen = replace(module, layers=(module.layers[0], *(replace(x, gradients="input") for x in module.layers[1:])))
    partly = replace(work, model=replace(work.model, modules=(frozen,)))
    for engine in ("megatron", "torchtitan", "flagscale", "hetplan"):
        with pytest.raises(UsageError, match=f"{engine} cannot be told of frozen layers"):
            files(partly, engine)


def test_a_job_known_by_its_traffic_is_not_launched():
    work = job(pair(), two_stages())
    traffic = Volumes(stages=2, replicas=2, gradient_bytes=1.0, activation_bytes=1.0)
    with pytest.raises(UsageError, match="nothing to launch"):
        files(replace(work, model=replace(work.model, volumes=traffic)))
