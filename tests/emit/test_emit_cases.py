"""Problems users reported with launching on unlike nodes, as what emitted files must say."""

import json
import re

import pytest
import yaml
from emit_samples import (
    cluster,
    data_parallel,
    files,
    group,
    job,
    layout,
    network,
    notes,
    pair,
    replica,
    stage,
    two_stages,
)

from hetplan.emit.ranks import agents_of, ranks_of
from hetplan.errors import CheckFailedError, UsageError


def torchrun_words(text):
    """(--nnodes, --node-rank, --nproc-per-node) of every torchrun line."""
    found = re.findall(r"torchrun --nnodes=(\d+) --node-rank=(\d+) --nproc-per-node=(\d+)", text)
    return [tuple(map(int, words)) for words in found]


def test_twenty_two_cards_on_four_unlike_nodes_are_one_world_of_22():
    """https://github.com/Lightning-AI/pytorch-lightning/issues/13506: 2 A100 + 4 A40 + 8 + 8 RTX 3090 became 8."""
    groups = (
        group("a100", "A100-SXM4-80GB", 1, 2),
        group("a40", "A40", 1, 4),
        group("r3090", "RTX-3090", 2, 8),
    )
    made = files(job(cluster(*groups), data_parallel(*groups)))
    assert json.loads(made["expected.json"])["world_size"] == 22
    lines = {name: torchrun_words(made[f"launch-{name}.sh"]) for name in ("a100-1", "a40-1", "r3090-1", "r3090-2")}
    assert lines == {"a100-1": [(4, 0, 2)], "a40-1": [(4, 1, 4)], "r3090-1": [(4, 2, 8)], "r3090-2": [(4, 3, 8)]}


def test_eight_cards_as_two_three_three_get_a_torchrun_line_each():
    """https://github.com/huggingface/accelerate/issues/1291: said to need equal counts; torchrun does not."""
    groups = (group("a", "RTX-3090", 1, 2), group("b", "RTX-3090", 1, 3), group("c", "RTX-3090", 1, 3))
    made = files(job(cluster(*groups), data_parallel(*groups)))
    assert [torchrun_words(made[f"launch-{name}-1.sh"]) for name in "abc"] == [[(3, 0, 2)], [(3, 1, 3)], [(3, 2, 3)]]
    assert not any("accelerate" in text for text in made.values())


def test_deepspeed_gets_a_hostfile_that_is_checked_before_it_starts():
    """https://github.com/microsoft/DeepSpeedExamples/issues/575: no hostfile found, so two local devices ran alone."""
    groups = (group("two", "RTX-3090", 1, 2), group("one", "RTX-3090", 1, 1))
    made = files(job(cluster(*groups), data_parallel(*groups, sharding="full")), "deepspeed")
    assert made["hostfile"] == "two-1 slots=2\none-1 slots=1\n"
    launch = made["launch-deepspeed.sh"]
    assert launch.index("[ ! -s hostfile ]") < launch.index('"$slots" -ne 3') < launch.index("deepspeed --hostfile")
    assert json.loads(made["ds_config.json"]) == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    assert json.loads(made["expected.json"])["world_size"] == 3


def test_kubernetes_gets_a_replicated_job_a_group():
    """https://github.com/kubeflow/trainer/issues/4064: a TrainJob has one shape of worker."""
    made = files(job(pair(), two_stages()), "megatron", "kubernetes")
    jobset = yaml.safe_load(made["jobset.yaml"])
    rows = jobset["spec"]["replicatedJobs"]
    specs = [row["template"]["spec"]["template"]["spec"] for row in rows]
    assert [row["name"] for row in rows] == ["a100", "v100"]
    assert [spec["nodeSelector"] for spec in specs] == [
        {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
        {"nvidia.com/gpu.product": "Tesla-V100-SXM2-32GB"},
    ]
    assert [spec["containers"][0]["resources"]["limits"] for spec in specs] == [{"nvidia.com/gpu": 8}] * 2
    assert "trainjob.yaml" not in made


def test_a_uniform_plan_gets_a_trainjob_as_well():
    """https://github.com/kubeflow/trainer/issues/4064, where one shape of worker is all there is."""
    groups = (group("a100", "A100-SXM4-80GB", 2, 8),)
    made = files(job(cluster(*groups), data_parallel(*groups)), "hetplan", "kubernetes")
    trainer = yaml.safe_load(made["trainjob.yaml"])["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)


@pytest.mark.parametrize("launcher", ["kubernetes", "skypilot"])
def test_unlike_cards_in_one_node_cannot_be_asked_for(launcher):
    """https://github.com/skypilot-org/skypilot/pull/8230: 2 L4 + 2 A100 in a node, whose label names one product."""
    groups = (group("l4", "L4", ["box"], 2), group("a100", "A100-SXM4-80GB", ["box"], 2))
    work = job(cluster(*groups, networks=()), data_parallel(*groups))
    with pytest.raises(UsageError, match=rf"{launcher} cannot ask for node box: .*a100, l4"):
        files(work, "hetplan", launcher)
    assert any("unlike cards" in note for note in notes(work))


def test_a_slurm_job_of_unlike_nodes_has_its_components_node_lists_wired():
    """https://github.com/NVIDIA-NeMo/Skills/pull/336: host names depend on the order of the groups' variables."""
    script = files(job(pair(), two_stages()), "megatron", "slurm")["job.sbatch"]
    first, second = script.split("#SBATCH hetjob\n")
    assert "--nodelist=a100-1" in first and "--nodelist=v100-1" in second
    order = [script.index(f'"$SLURM_JOB_NODELIST_HET_GROUP_{n}"') for n in (0, 1)]
    assert order == sorted(order)
    assert "srun --het-group=0" in script and ": --het-group=1" in script


def test_nccl_and_rccl_do_not_meet_in_one_job():
    """https://github.com/ROCm/rccl/issues/1220: AMD and T4 in one DDP job, message truncated."""
    groups = (group("t4", "T4", 1, 1), group("amd", "MI100", 1, 1))
    work = job(cluster(*groups), data_parallel(*groups), precision="fp32")
    for engine in ("megatron", "deepspeed"):
        with pytest.raises(CheckFailedError, match=f"{engine} cannot run devices of NVIDIA, AMD in one job"):
            files(work, engine)
    assert any("bridge such as gloo" in note for note in notes(work))
    made = files(work)
    assert "HIP_VISIBLE_DEVICES=0 torchrun" in made["launch-amd-1.sh"]
    assert "CUDA_VISIBLE_DEVICES=0 torchrun" in made["launch-t4-1.sh"]


def roce_pair():
    hosts = group("h100", "H100-SXM5-80GB", 2, 8)
    return cluster(hosts, networks=[network("roce", ["h100"], "roce", gbit=400.0, nics=4)]), hosts


def test_every_node_names_its_own_adapters():
    """https://github.com/NVIDIA/nccl/issues/1277: mlx5_0/3/5/8 on one node, mlx5_0/1/4/5 on the other, and a hang."""
    where, hosts = roce_pair()
    made = files(job(where, data_parallel(hosts)))
    for node in hosts.nodes:
        text = made[f"env-{node}.sh"]
        assert f"node {node}" in text and "Names that differ on this node go here" in text
        assert 'export NCCL_IB_HCA="=$IB_HCA_H100"' in text and 'NCCL_IB_GID_INDEX="$IB_GID_INDEX_H100"' in text
        assert f"source ./env-{node}.sh" in made[f"launch-{node}.sh"]
    assert 'IB_HCA_H100="${IB_HCA_H100:-FILL_IN}"' in made["site.sh"]
    assert "comma list of 4" in made["site.sh"]
    assert not any("mlx5" in text for text in made.values())


def test_the_preflight_wants_equally_many_adapters_on_every_node():
    """https://github.com/NVIDIA/nccl/issues/2428: one adapter less on one node, and the job spins."""
    where, hosts = roce_pair()
    scope = {"__name__": "preflight"}
    exec(compile(files(job(where, data_parallel(hosts)))["preflight.py"], "preflight.py", "exec"), scope)
    reports = [{"node": "a", "adapters": ["x", "y"]}, {"node": "b", "adapters": ["x"]}]
    assert scope["differing_adapters"](reports) == ["node a names 2 adapters, others 1: use 1 on every node"]
    assert scope["differing_adapters"](reports[:1] * 2) == []


def test_no_ring_is_told_to_use_rdma_across_kinds():
    """Holmes (arXiv:2312.03549): InfiniBand and RoCE nodes meet on Ethernet only."""
    ib, roce = group("ib", "A100-SXM4-80GB", 1, 8), group("roce", "A100-SXM4-80GB", 1, 8)
    nets = [
        network("fabric", ["ib"], "infiniband", gbit=200.0),
        network("converged", ["roce"], "roce", gbit=200.0),
        network("eth", ["ib", "roce"]),
    ]
    where = cluster(ib, roce, networks=nets)
    made = files(job(where, data_parallel(ib, roce)))
    for node, kind in (("ib-1", "infiniband network fabric"), ("roce-1", "roce network converged")):
        text = made[f"env-{node}.sh"]
        assert "NCCL_IB_DISABLE=1" in text and "NCCL_NET=Socket" in text and "NCCL_IB_HCA" not in text
        assert kind in text
    assert any("no RDMA network joins all" in note for note in notes(job(where, data_parallel(ib, roce))))
    two_ib = group("ib", "A100-SXM4-80GB", 2, 8)
    alone = files(job(cluster(two_ib, networks=nets[:1]), data_parallel(two_ib)))
    assert "NCCL_IB_DISABLE=0" in alone["env-ib-1.sh"] and "GID" not in alone["env-ib-1.sh"]


def test_tensor_parallel_groups_of_a_mixed_box_are_of_one_kind_each():
    """Ranks follow the order in which a box shows its cards, whatever cards they are."""
    new, old = group("new", "RTX-3090", ["box"], 2), group("old", "RTX-2080-Ti", ["box"], 2)
    plan = layout(replica(stage("old", 0, 6, tp=2), stage("new", 6, 18, tp=2)))
    work = job(cluster(new, old, networks=()), plan, precision="fp16")
    (agent,) = agents_of(ranks_of(work, "stages"))
    assert agent.devices == (2, 3, 0, 1)
    assert "CUDA_VISIBLE_DEVICES=2,3,0,1 torchrun" in files(work, "megatron")["launch-box.sh"]
