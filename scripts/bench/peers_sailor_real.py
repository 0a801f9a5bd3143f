"""The verdict of Sailor's own simulator on a plan in its neutral form, run in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REAL = """
import contextlib, io, json, sys, types
sys.path.insert(0, sys.argv[1])
for name in ("torch", "pandas"):
    module = types.ModuleType(name)
    module.Tensor = type("Tensor", (), {})
    sys.modules.setdefault(name, module)
from sailor.Planner.simulations import runtime_simulator as rs
plan = json.load(open(sys.argv[2]))
folder = sys.argv[1] + "/sailor/Planner"
llm, profiles = json.load(open(folder + "/llm_info.json")), json.load(open(folder + "/simulations/profiles_tmp.json"))
layers = len(llm[plan["model"]]["1"])
hidden = {"OPT-350": 1024, "GPT-Neo-2.7": 2560}[plan["model"]]
training = dict(global_batch_size=plan["global_batch"], num_all_layers=layers, num_layers=layers - 2,
                model=plan["model"], optimizer="Adam", hidden_size=hidden, sequence_length=2048)
native = []
for one in plan["pipelines"]:
    stages = [[[[[r["gpu"], r["tp"], r["zone"]]], r["tp"]] for r in s["replicas"] for _ in range(r.get("count", 1))]
              for s in one["stages"]]
    native.append(dict(num_stages=len(stages), layers_per_stage=[list(range(*s["range"])) for s in one["stages"]],
                       tmp_per_stage=stages, dp=[len(s) for s in stages]))
native = dict(pipeline_list=native, mbs=plan["microbatch"])
with contextlib.redirect_stdout(io.StringIO()):
    parent = sys.argv[1].rstrip("/").rsplit("/", 1)[0]
    simulator = rs.Simulator(parent, training, llm, False, profiles, "us-central1-a")
    fits = bool(simulator.check_config_fits(native))
    seconds, usd, _ = simulator.simulate_iteration_time(native)
print(json.dumps([seconds, usd, fits]))
"""


def real_verdict(neutral: dict[str, Any], path: Path, repo: Path) -> tuple[float, float, bool]:
    """Return seconds, dollars of traffic, and whether it fits; `repo` is a checkout in a folder named `sailor`.

    Raises:
        RuntimeError: it cannot score the plan.
    """
    path.write_text(json.dumps(neutral), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(repo.resolve()), str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    seconds, traffic_usd, fits = json.loads(done.stdout)
    return seconds, traffic_usd, fits
