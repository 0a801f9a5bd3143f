"""The repository's own saved plans, for every engine: a folder that holds together, or a refusal that says why."""

from pathlib import Path

import pytest

from hetplan.cli.emit import job_of
from hetplan.cli.inputs import load_plan
from hetplan.emit.emit import EMITTERS, LAUNCHERS, emit
from hetplan.errors import CheckFailedError, UsageError

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "tests" / "golden").glob("*.yaml"))


@pytest.fixture(scope="module", params=PLANS, ids=lambda path: path.stem)
def work(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return job_of(load_plan(str(request.param)), str(request.param))


@pytest.mark.parametrize("engine", EMITTERS)
def test_each_engine_takes_a_saved_plan_or_says_why_not(work, engine):
    try:
        made, _ = emit(work, engine)
    except (CheckFailedError, UsageError) as error:
        assert str(error).startswith(f"{engine} cannot ")
        return
    assert made["plan.yaml"] == work.plan_text
    assert work.plan_sha256 in made["README.md"]
    nodes = {rank.node for rank in EMITTERS[engine](work).ranks}
    assert {name for name in made if name.startswith("env-")} == {f"env-{node}.sh" for node in nodes}
    if engine not in ("flagscale", "vllm"):
        assert {f"launch-{node}.sh" for node in nodes} <= made.keys()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_starts_a_saved_plan_or_says_why_not(work, launcher):
    try:
        made, _ = emit(work, "hetplan", launcher)
    except UsageError as error:
        assert "cannot " in str(error)
        return
    file = {"slurm": "job.sbatch", "kubernetes": "jobset.yaml", "skypilot": "sky.yaml"}.get(launcher, "common.sh")
    assert work.plan_sha256 in made[file] or launcher == "torchrun"
