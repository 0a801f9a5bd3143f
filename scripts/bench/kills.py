"""Kills a running job with SIGKILL at random moments and looks at what is left, again and again.

After every kill the last checkpoint must be whole (every number of it is read, its checksums verified) and no more
steps lost than since it was written. At the end the run is finished in peace and must reach the loss of a run that was
never killed.

    python scripts/bench/kills.py --kills 100
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import signal
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hetplan.errors import HetplanError
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.runtime.checkpoint import Reader, complete_steps, folder_of
from hetplan.runtime.data import open_tokens
from hetplan.runtime.launch import run_here
from hetplan.runtime.pieces import bucket_plans
from hetplan.runtime.ranks import Task, plain_seats
from hetplan.runtime.schedule import LearningRate
from hetplan.runtime.train import Job, Saving
from hetplan.specs.importers.hugging_face import model_from_config
from hetplan.specs.workload import Workload

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 8, "n_positions": 64, "vocab_size": 256}
MODEL = model_from_config(CONFIG, "small")
SEQ_LEN, EVERY = 32, 3


def _stage(first: int, end: int) -> Stage:
    return Stage(group="a", first_layer=first, end_layer=end)


LAYOUT = Layout(
    replicas=(
        Replica(stages=(_stage(0, 6), _stage(6, 10)), microbatch=1, num_microbatches=5),
        Replica(stages=(_stage(0, 10),), microbatch=1, num_microbatches=3),
    ),
    sharding="optimizer",
)


def _job(text: Path, steps: int, saving: Saving) -> Job:
    return Job(
        model=MODEL,
        task=Task(layout=LAYOUT, seats=plain_seats(LAYOUT), seq_len=SEQ_LEN),
        workload=Workload(seq_len=SEQ_LEN, global_batch=LAYOUT.num_samples, precision="fp32"),
        data=open_tokens(text, "bytes", SEQ_LEN, 256, 0),
        steps=steps,
        rate=LearningRate(peak=1e-3, steps=steps, decay="constant"),
        saving=saving,
        timeout_s=120.0,
    )


def _victim(text: Path, root: Path, events: Path) -> None:
    os.setpgid(0, 0)

    def tell(event: Mapping[str, Any]) -> None:
        with events.open("a") as file:
            file.write(json.dumps(event) + "\n")

    resume = folder_of(root, complete_steps(root)[-1]) if complete_steps(root) else None
    run_here(_job(text, 10**6, Saving(root=root, every=EVERY, keep=2, resume=resume)), tell)


def _steps(events: Path) -> list[int]:
    lines = events.read_text().splitlines() if events.exists() else []
    return [event["step"] for line in lines if (event := json.loads(line))["event"] == "step"]


def _is_whole(folder: Path) -> bool:
    """Return whether every number of a checkpoint can be read and its checksum is right."""
    alone = Layout(replicas=(Replica(stages=(_stage(0, 10),), microbatch=1, num_microbatches=1),))
    task = Task(layout=alone, seats=plain_seats(alone), seq_len=SEQ_LEN)
    try:
        reader = Reader(folder)
        for plan in bucket_plans(MODEL, task, by_layer=False):
            for piece in plan.pieces:
                reader.box(piece.name, piece.box)
    except HetplanError as error:
        print(f"damaged: {error}", flush=True)
        return False
    return True


def _last_loss(text: Path, steps: int, saving: Saving) -> float:
    found: list[float] = []
    run_here(_job(text, steps, saving), lambda e: found.append(e["loss"]) if e["event"] == "step" else None)
    return found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--most-wait", type=float, default=2.0, help="seconds a job lives, at most, once it trains")
    parser.add_argument("--out", type=Path, help="write the result there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(7)
    lost, during_write, moved, damaged = [], 0, 0, 0
    with tempfile.TemporaryDirectory() as place:
        text, root, events = Path(place) / "text", Path(place) / "checkpoints", Path(place) / "events"
        text.write_bytes(
            b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[2].rglob("hetplan/**/*.py")))
        )
        for number in range(given.kills):
            before = len(_steps(events))
            victim = multiprocessing.get_context("fork").Process(target=_victim, args=(text, root, events))
            victim.start()
            while len(_steps(events)) == before:
                time.sleep(0.02)
            time.sleep(draw.uniform(0.0, given.most_wait))
            os.killpg(victim.pid, signal.SIGKILL)
            victim.join()
            during_write += any(root.glob(".step-*.part"))
            done = complete_steps(root)
            damaged += bool(done) and not _is_whole(folder_of(root, done[-1]))
            last = _steps(events)[-1]
            lost.append(last - (done[-1] if done else 0))
            moved += len(_steps(events)) - before
            print(f"kill {number + 1}: {moved} steps run, at step {last}, lost {lost[-1]}", flush=True)
        left = complete_steps(root)[-1:]
        target = sum(left) + 5
        resumed = _last_loss(text, target, Saving(resume=folder_of(root, left[0]) if left else None))
        peaceful = _last_loss(text, target, Saving())
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "kills": given.kills,
        "checkpoint_every": EVERY,
        "steps_lost_at_most": max(lost),
        "steps_lost_mean": sum(lost) / len(lost),
        "kills_during_a_write": during_write,
        "checkpoints_damaged": damaged,
        "final_step": target,
        "final_loss": resumed,
        "final_loss_without_kills": peaceful,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
    }
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
