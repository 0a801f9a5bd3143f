"""Emitted files as the real things read them, where they are installed or named by an environment variable.

HETPLAN_PARSER_PYTHON: an interpreter with torch (and deepspeed, jsonschema, kubernetes-validate, kubeflow-training);
HETPLAN_MEGATRON, HETPLAN_TORCHTITAN, HETPLAN_FLAGSCALE: source folders; HETPLAN_JOBSET, HETPLAN_TRAINJOB: files of the
custom resource definitions. `scripts/validate_emit.py` asks the same of every shipped cluster and model.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from emit_samples import cluster, data_parallel, files, group, job, layout, pair, replica, stage
from test_emit_golden import CASES, meshes, zero

from hetplan.cli.emit import write_folder

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from emitted import shell_problems, starts, world_problems  # noqa: E402

OWN_START = {"flagscale", "vllm"}


def real(*names):
    """The values of environment variables; skips where one is not set."""
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        pytest.skip(f"not here: {', '.join(missing)} (see the head of this file)")
    return [os.environ[name] for name in names]


def ask(**request):
    (python,) = real("HETPLAN_PARSER_PYTHON")
    done = subprocess.run(
        [python, str(SCRIPTS / "real_parsers.py")],
        input=json.dumps(request) + "\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def emitted(tmp_path, work, engine, launcher="torchrun"):
    write_folder(tmp_path / "out", files(work, engine, launcher))
    return tmp_path / "out"


def megatron_cases():
    a100 = group("a100", "A100-SXM4-80GB", 1, 8)
    cuts = {
        "equal": (0, 9, 18),
        "first": (0, 12, 18),
        "layout": (0, 3, 6, 12, 18),
        "empty ends": (0, 1, 17, 18),
    }
    for name, cut in cuts.items():
        stages = [stage("a100", first, end) for first, end in pairwise(cut)]
        yield (
            name,
            job(cluster(a100), layout(replica(*stages), sharding="optimizer")),
            [e - b for b, e in pairwise(cut)],
        )
    stages = [stage("a100", 2 * i, 2 * i + 2) for i in range(9)]
    plan = layout(replica(*stages, vpp=3), schedule="interleaved")
    yield "virtual", job(cluster(a100), plan), [2] * 9
    plan = layout(replica(stage("a100", 0, 34, dp=8, ep=8), microbatch=8))
    yield "experts", job(cluster(a100), plan, "mixtral-8x7b"), [34]


@pytest.mark.parametrize(("work", "held"), [pytest.param(w, h, id=n) for n, w, h in megatron_cases()])
def test_megatron_builds_the_layers_of_the_plan(tmp_path, work, held):
    (source,) = real("HETPLAN_MEGATRON")
    folder = emitted(tmp_path, work, "megatron")
    found = starts(folder, tmp_path / "scratch")
    said = ask(
        parser="megatron",
        source=source,
        arguments=found[0].program[1:],
        world_size=sum(start.num_processes for start in found),
        environment={k: v for k, v in found[0].environment.items() if k == "CUDA_DEVICE_MAX_CONNECTIONS"},
    )
    assert said["problems"] == []
    expected = [held[0] - 1, *held[1:-1], held[-1] - 1] if len(held) > 1 else [held[0] - 2]
    assert said["facts"]["layers"] == expected
    assert said["facts"]["hidden_dropout"] == 0.0


def test_torchtitan_takes_its_configuration(tmp_path):
    (source,) = real("HETPLAN_TORCHTITAN")
    a100 = group("a100", "A100-SXM4-80GB", 1, 8)
    stages = (stage("a100", 0, 20, tp=2), stage("a100", 20, 34, tp=2))
    work = job(cluster(a100), layout(replica(*stages, copies=2), sharding="full"), "llama-3.1-8b")
    folder = emitted(tmp_path, work, "torchtitan")
    words = ["--module", "hetplan_titan", "--config", "plan", "--hf_assets_path", "x"]
    said = ask(parser="torchtitan", source=source, folder=str(folder), arguments=words, world_size=8)
    assert said == {"problems": [], "facts": {"parts": [20, 15], "layers": 32}}


def test_flagscale_takes_its_meshes(tmp_path):
    (source,) = real("HETPLAN_FLAGSCALE")
    said = ask(parser="flagscale", source=source, folder=str(emitted(tmp_path, meshes(), "flagscale")))
    assert said["problems"] == []
    assert said["facts"]["ranks"] == [8, 8]
    assert said["facts"]["slots"] == {"a100-1": 8, "v100-1": 8}
    assert {"--hetero-process-meshes", "--hetero-pipeline-layer-split", "--hidden-dropout"} <= set(
        said["facts"]["flags"]
    )


def test_deepspeed_takes_its_configuration_and_hostfile(tmp_path):
    said = ask(parser="deepspeed", folder=str(emitted(tmp_path, zero(), "deepspeed")), data_parallel=3)
    assert said == {"problems": [], "facts": {"slots": {"two-1": 2, "one-1": 1}, "zero": 2, "batch": 12}}


@pytest.mark.parametrize(
    ("name", "variable"), [("jobset.yaml", "HETPLAN_JOBSET"), ("trainjob.yaml", "HETPLAN_TRAINJOB")]
)
def test_custom_resources_match_their_definitions(tmp_path, name, variable):
    (source,) = real(variable)
    made = files(*CASES["hetplan-kubernetes-roce"])
    assert ask(parser="crd", source=source, document=yaml.safe_load(made[name]))["problems"] == []
    wrong = yaml.safe_load(made[name])
    wrong["spec"]["nodez"] = 3
    assert "nodez" in ask(parser="crd", source=source, document=wrong)["problems"][0]


def test_kubeflow_reads_every_field_of_a_pytorchjob(tmp_path):
    document = yaml.safe_load(files(*CASES["hetplan-kubernetes-roce"])["pytorchjob.yaml"])
    assert ask(parser="pytorchjob", document=document) == {
        "problems": [],
        "facts": {"replicas": {"Master": 1, "Worker": 1}},
    }


def test_the_jobs_of_a_jobset_are_jobs(tmp_path):
    rows = yaml.safe_load(files(*CASES["hetplan-kubernetes-roce"])["jobset.yaml"])["spec"]["replicatedJobs"]
    for row in rows:
        document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": row["name"]}}
        assert ask(parser="kubernetes", document=document | {"spec": row["template"]["spec"]})["problems"] == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1] not in OWN_START])
def test_scripts_start_the_planned_world(tmp_path, name):
    folder = emitted(tmp_path, *CASES[name])
    assert world_problems(folder, starts(folder, tmp_path / "scratch")) == []
    assert shell_problems(folder) == []


def test_uniform_plans_get_a_pytorchjob_with_a_master_and_workers():
    groups = (group("a100", "A100-SXM4-80GB", 3, 8),)
    made = files(job(cluster(*groups), data_parallel(*groups)), "hetplan", "kubernetes")
    specs = yaml.safe_load(made["pytorchjob.yaml"])["spec"]["pytorchReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in specs.items()} == {"Master": 1, "Worker": 2}
    container = specs["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch" and 'JOB_COMPLETION_INDEX="$RANK"' in container["command"][2]
    unlike = files(job(pair(), data_parallel(*pair().groups), precision="fp32"), "hetplan", "kubernetes")
    assert "pytorchjob.yaml" not in unlike
