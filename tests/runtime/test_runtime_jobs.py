"""Whole jobs: resumed under other plans, killed, hung, out of space, damaged; and what is left of them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the executor needs torch; pip install 'hetplan[torch]'")

from runtime_cases import model_of, replica

from hetplan.errors import RunError, UsageError
from hetplan.plan.records import Layout
from hetplan.runtime import beats, checkpoint, train
from hetplan.runtime.beats import Sign, blame
from hetplan.runtime.checkpoint import Reader, complete_steps
from hetplan.runtime.data import open_tokens, permuted
from hetplan.runtime.launch import run_here
from hetplan.runtime.pieces import bucket_plans
from hetplan.runtime.ranks import Task, plain_seats
from hetplan.runtime.schedule import LearningRate
from hetplan.runtime.train import Job, Saving
from hetplan.specs.workload import Workload

SEQ_LEN = 16
MIXED = Layout(replicas=(replica("gpt2-4", "3+1", count=3), replica("gpt2-4", "4", count=1)))
OTHER = Layout(
    replicas=(replica("gpt2-4", "1+3", tp="2+1", count=1, mb=2), replica("gpt2-4", "4", count=2)), sharding="optimizer"
)
THIRD = Layout(replicas=(replica("gpt2-4", "2+2", copies=2, count=2),), sharding="full")
ALONE = Layout(replicas=(replica("gpt2-4", "4", mb=4, count=1),))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Bytes of a skewed alphabet that the small models know."""
    path = tmp_path / "text"
    path.write_bytes(bytes(int(random.Random(i).paretovariate(1.0)) % 60 for i in range(4000)))
    return path


def job(text: Path, layout: Layout, steps: int = 4, **fields: Any) -> Job:
    """A small job."""
    words = {"rate": LearningRate(peak=1e-3, steps=steps, decay="constant"), "timeout_s": 60.0, **fields}
    return Job(
        model=model_of("gpt2-4"),
        task=Task(layout=layout, seats=plain_seats(layout), seq_len=SEQ_LEN),
        workload=Workload(seq_len=SEQ_LEN, global_batch=layout.num_samples, precision="fp32"),
        data=open_tokens(text, "bytes", SEQ_LEN, 67, 0),
        steps=steps,
        **words,
    )


def losses(*jobs: Job) -> list[float]:
    """The losses of jobs run one after the other."""
    events: list[Mapping[str, Any]] = []
    for one in jobs:
        run_here(one, events.append)
    return [event["loss"] for event in events if event["event"] == "step"]


def test_a_run_goes_on_under_other_plans_as_if_nothing_had_happened(text: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    whole = losses(job(text, ALONE, 6))
    first = job(text, MIXED, 2, saving=Saving(root=root))
    second = job(text, OTHER, 4, saving=Saving(root=root, resume=root / "step-00000002"))
    third = job(text, THIRD, 6, saving=Saving(root=root, resume=root / "step-00000004"))
    assert losses(first, second, third) == pytest.approx(whole, rel=1e-6)
    assert complete_steps(root) == [4, 6]


def test_bf16_with_wide_states_follows_the_wide_run(text: Path, tmp_path: Path) -> None:
    narrow = replace(job(text, MIXED, 3), workload=replace(job(text, MIXED).workload, precision="bf16"))
    root = tmp_path / "checkpoints"
    wide = losses(job(text, ALONE, 3))
    assert losses(replace(narrow, saving=Saving(root=root))) == pytest.approx(wide, rel=5e-3)
    later = replace(narrow, steps=4, saving=Saving(resume=root))
    assert losses(later) == pytest.approx(losses(job(text, ALONE, 4, saving=Saving(resume=root))), rel=5e-3)


def child_of(rank: int) -> Any:
    """The process of a rank; ranks are started in order."""
    return sorted(multiprocessing.active_children(), key=lambda process: process.pid or 0)[rank]


def at_step(step: int, act: Callable[[], None]) -> Callable[[Mapping[str, Any]], None]:
    """A listener that acts once, when a step is told of."""

    def tell(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == step:
            act()

    return tell


def test_a_killed_rank_ends_the_job_and_is_named(text: Path) -> None:
    kill = at_step(2, lambda: os.kill(child_of(1).pid, signal.SIGKILL))
    with pytest.raises(RunError, match=r"rank 1 \(host localhost, replica 0\.0, stage 1\): killed by signal 9"):
        run_here(job(text, MIXED, 10_000), kill)
    assert not multiprocessing.active_children()


def test_a_stopped_rank_ends_the_job_within_the_timeout_and_is_named(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "STALE_S", 1.5)
    stop = at_step(2, lambda: os.kill(child_of(2).pid, signal.SIGSTOP))
    with pytest.raises(RunError, match=r"rank 2 \(host localhost, replica 1\.0, stage 0\): no sign of life for"):
        run_here(job(text, MIXED, 10_000, timeout_s=8.0), stop)
    assert not multiprocessing.active_children()


def test_a_rank_that_works_for_ever_is_told_from_those_that_wait() -> None:
    signs = [
        Sign(alive_s=100.0, changed_s=60.0, waits=True),
        Sign(alive_s=100.0, changed_s=59.0, waits=False),
        Sign(alive_s=99.8, changed_s=61.0, waits=True),
    ]
    assert blame(signs, 100.0).ranks == (1,)
    assert blame([signs[0], signs[2]], 100.0).ranks == (0, 1)
    stopped = Sign(alive_s=58.0, changed_s=58.0, waits=True)
    assert blame([*signs, stopped], 100.0).ranks == (3,)


def test_a_full_disk_ends_the_job_and_leaves_the_checkpoint_before(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    true = checkpoint._to_disk

    def full(file: Any) -> None:
        if "rank-00001.bin" in file.name and "step-00000004" in file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true(file)

    monkeypatch.setattr(checkpoint, "_to_disk", full)
    saving = Saving(root=root, every=2)
    with pytest.raises(RunError, match=r"rank 1 .*cannot write checkpoint .*step-00000004: No space left on device"):
        run_here(job(text, MIXED, 8, saving=saving), lambda event: None)
    assert complete_steps(root) == [2]
    assert not list(root.glob(".*/rank-00001.*"))
    monkeypatch.undo()
    assert losses(job(text, ALONE, 3, saving=Saving(resume=root / "step-00000002")))


def test_a_damaged_checkpoint_is_refused_by_name(text: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    losses(job(text, MIXED, 1, saving=Saving(root=root)))
    folder = root / "step-00000001"
    share = folder / "rank-00000.bin"
    data = bytearray(share.read_bytes())
    data[len(data) // 2] ^= 1
    share.write_bytes(data)
    with pytest.raises(RunError, match=r"rank \d .*checkpoint .*rank-00000.bin is damaged"):
        losses(job(text, ALONE, 2, saving=Saving(resume=folder)))
    (folder / "index.json").write_text("{")
    with pytest.raises(RunError, match="damaged: its index"):
        losses(job(text, ALONE, 2, saving=Saving(resume=folder)))


def test_a_token_outside_the_vocabulary_is_the_users_error(text: Path) -> None:
    text.write_bytes(b"~" * 500)
    with pytest.raises(UsageError, match=r"word 126 near token \d+ is not of the model's vocabulary of 67"):
        losses(job(text, MIXED, 2))


def test_a_file_that_changes_while_it_is_read_ends_the_job(text: Path) -> None:
    longer = text.read_bytes() + b"0" * 5000

    def grow() -> None:
        with text.open("r+b") as file:
            file.write(longer)

    change = at_step(1, grow)
    with pytest.raises(RunError, match="text has changed since the run began"):
        run_here(job(text, MIXED, 10_000), change)


def check_whole(folder: Path) -> None:
    """Read every box of a checkpoint."""
    model, reader = model_of("gpt2-4"), Reader(folder)
    for plan in bucket_plans(model, Task(layout=ALONE, seats=plain_seats(ALONE), seq_len=SEQ_LEN), by_layer=False):
        for piece in plan.pieces:
            reader.box(piece.name, piece.box)


def test_a_job_killed_at_any_moment_leaves_a_whole_checkpoint(text: Path, tmp_path: Path) -> None:
    root, events = tmp_path / "checkpoints", tmp_path / "events"
    draw = random.Random(3)

    def forever(resume: Path | None) -> None:
        os.setpgid(0, 0)
        saving = Saving(root=root, every=1, keep=2, resume=resume)

        def tell(event: Mapping[str, Any]) -> None:
            with events.open("a") as file:
                file.write(json.dumps(event) + "\n")

        run_here(job(text, MIXED, 10**6, saving=saving), tell)

    for _ in range(5):
        before = complete_steps(root)
        resume = root / f"step-{before[-1]:08d}" if before else None
        # Not a daemon: it has ranks of its own.
        victim = multiprocessing.get_context("fork").Process(target=forever, args=(resume,))
        victim.start()
        end_s = time.monotonic() + 30
        while complete_steps(root) == before and time.monotonic() < end_s:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.3))
        os.killpg(victim.pid, signal.SIGKILL)
        victim.join()
        after = complete_steps(root)
        assert after and after != before
        check_whole(root / f"step-{after[-1]:08d}")
        told = [json.loads(line) for line in events.read_text().splitlines()]
        reached = max(event["step"] for event in told if event["event"] == "step")
        assert reached - after[-1] <= 1


def test_every_sample_of_an_epoch_is_read_once_whatever_the_size() -> None:
    for count in (1, 2, 3, 7, 64, 1000):
        for key in (0, 1, 5):
            assert sorted(permuted(i, count, key) for i in range(count)) == list(range(count))
    assert [permuted(i, 1000, 0) for i in range(20)] != [permuted(i, 1000, 1) for i in range(20)]


def test_rates_go_up_and_down() -> None:
    rate = LearningRate(peak=1.0, steps=110, warmup=10, decay="cosine", floor=0.1)
    assert [rate.at(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate.at(60) == pytest.approx(0.55)
    assert rate.at(110) == pytest.approx(0.1)
    assert LearningRate(peak=2.0, steps=10, decay="constant").at(9) == 2.0


def test_the_folder_of_the_last_checkpoint_is_found(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no complete checkpoint"):
        train.checkpoint_at(tmp_path)
    for step in (3, 20):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-00000003" / "index.json").write_text("{}")
    assert train.checkpoint_at(tmp_path).name == "step-00000003"
