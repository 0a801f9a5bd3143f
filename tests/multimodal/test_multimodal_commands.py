"""Jobs of several modules from the outside: data, search --data, check, emit."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from modular_jobs import cluster_of, model_of

from hetplan.cli.main import run
from hetplan.emit.mimo import MimoJob, emit_mimo
from hetplan.errors import CheckFailedError
from hetplan.plan.module_text import module_plan_text, read_module_plan
from hetplan.plan.modules import ModuleLayout, Placement

CLUSTER = """hetplan: cluster/v1
name: box
groups:
  g: {device: A100-SXM4-80GB, nodes: 'box-[1-2]', devices_per_node: 8}
networks:
  ib: {joins: [g], kind: infiniband, bandwidth: 200 Gbit/s, latency: 3 us, nics_per_node: 8}
"""
MODEL = """hetplan: model/v1
name: small-vlm
style: gpt
modules:
  - {name: vision, hidden: 1024, layers: 8, heads: 16, tokens: 256}
  - {name: language, hidden: 2048, layers: 12, heads: 16, vocab: 32000}
train: {vision: frozen}
"""
DATA = """hetplan: data/v1
name: mix
sources:
  - text: {lognormal: {median: 300, sigma: 0.8, most: 4096}}
    image: {count: {histogram: {values: [0, 1, 4], weights: [4, 4, 2]}}, tokens: {constant: 256}}
"""
Hetplan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hetplan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hetplan:
    for name, text in (("box.yaml", CLUSTER), ("vlm.yaml", MODEL), ("mix.yaml", DATA)):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


SEARCH = ("search", "box.yaml", "vlm.yaml", "--data", "mix.yaml", "--global-batch", "16", "--draws", "8")


def test_a_search_with_data_writes_a_plan_that_checks_and_emits(hetplan: Hetplan, tmp_path: Path) -> None:
    code, out, _ = hetplan(*SEARCH, "-o", "plan.yaml", "--arrangement", "disjoint", "--pp", "1,2,3")
    assert code == 0
    for words in ("vision", "language", "step time", "optimal", "one grid, one chain", "Notes"):
        assert words in out
    assert max(len(line) for line in out.splitlines()) <= 80
    first = (tmp_path / "plan.yaml").read_text()
    assert first.startswith("hetplan: module-plan/v1\n")
    plan = read_module_plan(tmp_path / "plan.yaml")
    assert module_plan_text(plan) == first
    assert hetplan(*SEARCH, "-o", "again.yaml", "--arrangement", "disjoint", "--pp", "1,2,3", "--no-compare")[0] == 0
    assert (tmp_path / "again.yaml").read_text() == first
    code, out, _ = hetplan("check", "plan.yaml")
    assert (code, out.splitlines()[0]) == (0, "plan.yaml: ok")
    assert hetplan("emit", "plan.yaml", "--to", "megatron", "--via", "slurm", "-o", "job")[0] == 0
    assert {path.name for path in (tmp_path / "job").iterdir()} == {
        "README.md",
        "job.sbatch",
        "parallelism.py",
        "plan.yaml",
    }


def test_json_says_the_same(hetplan: Hetplan) -> None:
    code, out, _ = hetplan(*SEARCH, "--json", "--no-compare")
    document = json.loads(out)
    assert code == 0
    assert document["bound_s"] <= document["step_s"] * (1 + 1e-9)
    assert [unit["modules"] for unit in document["units"]] == [["vision"], ["language"]]
    assert document["plan"]["workload"]["global_batch"] == 16


def test_a_plan_whose_data_or_cluster_changed_fails_its_check(hetplan: Hetplan, tmp_path: Path) -> None:
    assert hetplan(*SEARCH, "-o", "plan.yaml", "--no-compare")[0] == 0
    (tmp_path / "mix.yaml").write_text(DATA.replace("median: 300", "median: 1500"))
    code, out, _ = hetplan("check", "plan.yaml")
    assert code == 4
    assert "the data file is not what the plan was made from" in out
    assert "a step takes" in out
    (tmp_path / "mix.yaml").write_text(DATA)
    (tmp_path / "box.yaml").write_text(
        CLUSTER.replace("'box-[1-2]'", "'box-[1-1]'").replace("per_node: 8}", "per_node: 2}")
    )
    code, out, _ = hetplan("check", "plan.yaml")
    assert code == 4
    assert "ranks on group 'g', which has 2 devices" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--uniform",), "--uniform has no effect with --data"),
        (("--sharding", "full"), "--sharding: with --data give one of none, optimizer"),
        (("--arrangement", "apart"), "--arrangement"),
        (("--microbatches", "0"), "--microbatches: '0' is not a whole number"),
        (("--draws", "1000000"), "are more than 4,000,000: draw fewer"),
    ],
)
def test_options_that_make_no_sense_are_refused(hetplan: Hetplan, words: tuple[str, ...], message: str) -> None:
    code, out, err = hetplan(*SEARCH, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_model_of_one_module_is_refused(hetplan: Hetplan) -> None:
    code, _, err = hetplan("search", "box.yaml", "gpt2", "--data", "mix.yaml", "--global-batch", "16")
    assert code == 2
    assert "has one module" in err


def test_lengths_of_conversations_are_written_and_shown(hetplan: Hetplan, tmp_path: Path) -> None:
    samples = [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "width": 280, "height": 280}, {"type": "text", "text": "x" * 40}],
                }
            ]
        },
        {"messages": [{"role": "user", "content": "y" * 400}]},
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, samples)))
    assert hetplan("data", "lengths", "set.jsonl")[:2] == (0, "text,image\n10,100\n100,\n")
    assert hetplan("data", "lengths", "set.jsonl", "-o", "lengths.csv")[0] == 0
    assert (tmp_path / "lengths.csv").read_text() == "text,image\n10,100\n100,\n"
    code, out, _ = hetplan("data", "show", "lengths.csv", "--json")
    figures = json.loads(out)
    assert (code, figures["samples"], figures["tokens"]["image"]["with_any"]) == (0, 2, 0.5)
    assert "drawn from the mixture" in hetplan("data", "show", "mix.yaml")[1]
    assert hetplan("data", "show", "none.csv")[0] == 2
    code, _, err = hetplan("data", "lengths", "set.jsonl", "--least-pixels", "9", "--most-pixels", "8")
    assert (code, "--least-pixels 9 is more than" in err) == (2, True)


def test_other_engines_are_refused_with_their_reason(hetplan: Hetplan) -> None:
    assert hetplan(*SEARCH, "-o", "plan.yaml", "--no-compare")[0] == 0
    for engine in ("torchtitan", "deepspeed", "flagscale", "hexiscale", "vllm"):
        code, _, err = hetplan("emit", "plan.yaml", "--to", engine, "-o", "job")
        assert code == 2
        assert "modules on grids of their own" in err


SEVENTEEN = ModuleLayout(
    placements=(
        Placement(modules=("vision",), group="g", first_rank=16),
        Placement(modules=("language",), group="g", tp=4, pp=2, dp=2),
    ),
    num_microbatches=16,
    samples=2,
)


def mimo(layout: ModuleLayout = SEVENTEEN) -> MimoJob:
    model = model_of(MODEL.partition("\n")[2])
    return MimoJob(layout=layout, cluster=cluster_of(3), model=model, plan_text="plan\n", seq_len=2048)


def test_a_seventeen_rank_job_is_written(tmp_path: Path) -> None:
    files = emit_mimo(mimo())
    scope: dict[str, object] = {}
    text = files["parallelism.py"]
    body = text[text.index("PARALLELISM = ") :]
    exec(body, {"MegatronMIMOParallelismConfig": dict, "ModuleParallelismConfig": dict}, scope)
    grids = scope["PARALLELISM"]["module_parallelisms"]  # type: ignore[index]
    assert (grids["language"]["rank_offset"], grids["images"]["rank_offset"], scope["WORLD_SIZE"]) == (0, 16, 17)
    assert grids["language"]["tensor_model_parallel_size"] == 4
    launch = files["job.sbatch"]
    assert [int(part.split("--ntasks=")[1].split()[0]) for part in launch.split("--nodes=1 ")[1:]] == [8, 8, 1]
    assert '--component "images=tp=1,pp=1,cp=1,dp=1,rank_offset=16"' in launch
    assert "fewer data-parallel ranks" in files["README.md"]
    (tmp_path / "job.sbatch").write_text(launch)
    subprocess.run(["bash", "-n", str(tmp_path / "job.sbatch")], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(tmp_path / "job.sbatch")], check=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 3}, "tp 3 of images"),
        ({"dp": 3}, "dp 3 of images beside dp 2 of language"),
    ],
)
def test_what_megatron_mimo_does_not_run_is_named(changes: dict[str, int], words: str) -> None:
    first, second = SEVENTEEN.placements
    with pytest.raises(CheckFailedError, match=words):
        emit_mimo(mimo(replace(SEVENTEEN, placements=(replace(first, **changes), second))))


def test_encoders_on_shared_ranks_have_one_stage() -> None:
    first, second = SEVENTEEN.placements
    shared = replace(first, first_rank=0, tp=4, pp=2, dp=2)
    with pytest.raises(CheckFailedError, match="pp 2 of images on shared ranks"):
        emit_mimo(mimo(replace(SEVENTEEN, placements=(shared, second))))
