"""Emitted texts, kept; `pytest --update-golden` writes them anew."""

from pathlib import Path

import pytest
from emit_samples import cluster, data_parallel, files, group, job, layout, network, pair, replica, stage, two_stages

GOLDEN = Path(__file__).parents[1] / "golden" / "emit"


def two_three_three():
    groups = (group("a", "RTX-3090", 1, 2), group("b", "RTX-4090", 1, 3), group("c", "RTX-4090", 1, 3))
    return job(cluster(*groups), data_parallel(*groups))


def roce():
    hosts = group("h100", "H100-SXM5-80GB", 2, 8)
    where = cluster(hosts, networks=[network("roce", ["h100"], "roce", gbit=400.0, nics=4)])
    return job(where, data_parallel(hosts, sharding="full"))


def box():
    groups = (group("new", "RTX-3090", ["box"], 2), group("old", "RTX-2080-Ti", ["box"], 2))
    plan = layout(replica(stage("old", 0, 6, tp=2), stage("new", 6, 18, tp=2)))
    return job(cluster(*groups, networks=()), plan, precision="fp16")


def meshes():
    plan = layout(replica(stage("a100", 0, 24, tp=8), stage("v100", 24, 34, tp=4, dp=2), microbatch=2))
    return job(pair(), plan, "llama-3.1-8b", precision="fp16")


def zero():
    groups = (group("two", "RTX-3090", 1, 2), group("one", "RTX-3090", 1, 1))
    return job(cluster(*groups), data_parallel(*groups, sharding="gradients"))


def pipelines():
    plan = layout(
        replica(stage("a100", 0, 24, tp=2), stage("v100", 24, 34), copies=2, num_microbatches=6),
        replica(stage("v100", 0, 18, tp=2), stage("v100", 18, 34, tp=2), num_microbatches=2, microbatch=2),
    )
    return job(pair(), plan, "llama-2-7b")


CASES = {
    "hetplan-torchrun": (two_three_three(), "hetplan", "torchrun"),
    "hetplan-kubernetes-roce": (roce(), "hetplan", "kubernetes"),
    "megatron-slurm": (job(pair(), two_stages(sharding="optimizer")), "megatron", "slurm"),
    "megatron-box": (box(), "megatron", "torchrun"),
    "torchtitan-skypilot": (job(pair(), two_stages(sharding="full")), "torchtitan", "skypilot"),
    "flagscale": (meshes(), "flagscale", "torchrun"),
    "hexiscale": (pipelines(), "hexiscale", "torchrun"),
    "deepspeed": (zero(), "deepspeed", "torchrun"),
    "vllm": (job(pair(), two_stages()), "vllm", "torchrun"),
}
SAME_EVERYWHERE = frozenset({"preflight.py", "plan.yaml", "expected.json"})


def as_text(made):
    return "".join(f"==> {name}\n{text}\n" for name, text in sorted(made.items()) if name not in SAME_EVERYWHERE)


@pytest.mark.parametrize("name", CASES)
def test_emitted_texts_are_as_kept(name, update_golden):
    work, engine, launcher = CASES[name]
    text = as_text(files(work, engine, launcher))
    path = GOLDEN / f"{name}.txt"
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_kept_text_has_its_case():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == CASES.keys()
