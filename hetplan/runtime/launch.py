"""Starting the ranks of a job on this machine and watching over them; or being one rank a launcher started.

On one machine the parent imports torch once and forks: ranks start in a tenth of the time a fresh interpreter takes.
The parent alone speaks: it passes on what rank 0 tells, and ends the whole job when a rank dies, reports a failure or
hangs, with one message that names the first cause. Failures that only follow from another one (a closed connection) are
told apart from those that do not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hetplan.errors import HetplanError, RunError, SpecError, UsageError
from hetplan.runtime.beats import SharedBeats, StoreBeats, blame, shared_signs, stored_signs
from hetplan.runtime.groups import Groups
from hetplan.runtime.ranks import Seat
from hetplan.runtime.traces import RankTrace
from hetplan.runtime.train import Job, Tell, gathered, train

POLL_S = 0.25
START_S = 60.0
"""Least time ranks are given to come up, whatever the timeout between steps."""
SETTLE_S = 2.0
"""How long the parent listens for the first cause once something has gone wrong."""
_FOLLOWS = (
    *("Connection closed", "Connection reset", "Connection refused", "Timed out", "timed out", "Broken pipe"),
    *("NCCL", "Socket", "socket", "connectFullMesh", "Wait timeout", "store"),
)
"""Words of errors that only say that another rank is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended."""

    seat: Seat
    words: str
    rank_of_cause: int
    """0: certainly the cause; higher: more likely a consequence."""
    usage: bool = False

    @property
    def error(self) -> HetplanError:
        """What to tell the user."""
        if self.usage:
            return UsageError(self.words)
        return RunError(f"{self.seat.words}: {self.words}")


def failure_of(error: Exception, seat: Seat) -> Failure:
    """Return what an exception of a rank means."""
    if isinstance(error, HetplanError):
        usage = isinstance(error, UsageError | SpecError)
        return Failure(seat=seat, words=str(error), rank_of_cause=1, usage=usage)
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    follows = isinstance(error, RuntimeError) and any(word in str(error) for word in _FOLLOWS)
    if follows:
        return Failure(seat=seat, words=f"lost contact to another rank ({text[:160]})", rank_of_cause=3)
    return Failure(seat=seat, words=f"{type(error).__name__}: {text}", rank_of_cause=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What every rank of one machine is given."""

    job: Job
    store: str
    cells: Any
    parent: int
    debug: bool


class _Child:
    """A rank as its parent sees it."""

    def __init__(self, seat: Seat, pipe: Connection, process: Any) -> None:
        self.seat, self.pipe, self.process = seat, pipe, process
        self.done = False
        self.traces: list[RankTrace] | None = None


def run_here(job: Job, tell: Tell, *, debug: bool = False) -> list[RankTrace]:
    """Run all ranks on this machine; return their traces.

    Raises:
        RunError: a rank failed, died or hangs.
        UsageError: a rank found the input unusable.
    """
    # Every rank's first backward pass brings this module in, half a second of work: once here, before the fork.
    import_module("torch.fx.experimental.symbolic_shapes")
    context = multiprocessing.get_context("fork")
    seats = job.task.seats
    cells = context.RawArray("d", [time.monotonic()] * (3 * len(seats)))
    with tempfile.TemporaryDirectory(prefix="hetplan-run-") as folder:
        start = _Start(job=job, store=str(Path(folder) / "store"), cells=cells, parent=os.getpid(), debug=debug)
        children: list[_Child] = []
        for seat in seats:
            mine, theirs = context.Pipe(duplex=False)
            inherited = [mine, *(child.pipe for child in children)]
            process = context.Process(target=_rank_main, args=(start, seat, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            children.append(_Child(seat, mine, process))
        try:
            return _watched(children, cells, tell, job.timeout_s)
        finally:
            _end(children)


def _rank_main(start: _Start, seat: Seat, pipe: Connection, inherited: list[Connection]) -> None:
    """Be one rank; nothing of the parent's is run on the way out."""
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = start.job
    beats = SharedBeats(start.cells, seat.rank)
    beats.start(start.parent)
    code = 0
    try:
        torch.set_num_threads(job.threads)
        wait_s = timedelta(seconds=job.timeout_s + 30)
        world_size, device = len(job.task.seats), device_of(job, seat.rank)
        if world_size > 1:
            meeting = dist.FileStore(start.store, world_size)
            dist.init_process_group(
                _backend(device), store=meeting, rank=seat.rank, world_size=world_size, timeout=wait_s
            )

        def tell(event: Any) -> None:
            if seat.rank == 0:
                pipe.send(event)

        groups = Groups(seat.rank, job.timeout_s + 30)
        trace = train(job, groups, device, tell, beats.report)
        pipe.send(gathered(trace, world_size))
    except Exception as error:  # noqa: BLE001 - the parent tells the user
        if start.debug:
            traceback.print_exc()
        with suppress(OSError):
            pipe.send(failure_of(error, seat))
        code = 1
    pipe.close()
    os._exit(code)


def _watched(children: Sequence[_Child], cells: Any, tell: Tell, timeout_s: float) -> list[RankTrace]:
    """Pass on what ranks tell until all have ended."""
    limit_s = max(timeout_s, START_S)
    while not all(child.done for child in children):
        open_ones = [child for child in children if not child.done]
        ready = wait([child.pipe for child in open_ones], timeout=POLL_S)
        failures = [f for child in open_ones if child.pipe in ready and (f := _hear(child, tell))]
        if failures:
            raise _first_cause(children, failures, tell).error
        now_s = time.monotonic()
        signs = shared_signs(cells)
        last_s = max(sign.changed_s for sign in signs)
        stale_s = min((signs[child.seat.rank].alive_s for child in children if not child.done), default=now_s)
        if ready:
            limit_s = timeout_s
        if now_s - last_s > limit_s or now_s - stale_s > limit_s:
            found = blame(signs, now_s)
            names = ", ".join(child.seat.words for child in children if child.seat.rank in found.ranks)
            raise RunError(f"{names}: {found.words}; ended after --timeout {timeout_s:g} s")
    return next(child.traces for child in children if child.traces)


def _hear(child: _Child, tell: Tell) -> Failure | None:
    """Take what a rank has to say; return its failure, if that is what it says or how it ended."""
    try:
        said = child.pipe.recv()
    except (EOFError, OSError):
        child.process.join(10)
        child.done = True
        code = child.process.exitcode
        if code == 0:
            return None
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return Failure(seat=child.seat, words=f"killed by signal {-code} ({name})", rank_of_cause=0)
        return Failure(seat=child.seat, words=f"ended with exit code {code}", rank_of_cause=2)
    if isinstance(said, Failure):
        return said
    if isinstance(said, list):
        child.traces = said or child.traces
    else:
        tell(said)
    return None


def _first_cause(children: Sequence[_Child], failures: list[Failure], tell: Tell) -> Failure:
    """Listen a little longer and return the failure that explains the others."""
    end_s = time.monotonic() + SETTLE_S
    found = list(failures)
    while time.monotonic() < end_s and not any(failure.rank_of_cause == 0 for failure in found):
        open_ones = [child for child in children if not child.done]
        for pipe in wait([child.pipe for child in open_ones], timeout=POLL_S):
            child = next(child for child in open_ones if child.pipe is pipe)
            failure = _hear(child, tell)
            found += [failure] if failure else []
    return min(found, key=lambda failure: failure.rank_of_cause)


def _end(children: Sequence[_Child]) -> None:
    for child in children:
        if child.process.is_alive():
            child.process.kill()
    for child in children:
        child.process.join(10)
        child.pipe.close()


def run_as_rank(job: Job, rank: int, tell: Tell) -> list[RankTrace]:
    """Be the rank a launcher (torchrun, Slurm with its variables) made this process; return all traces on rank 0.

    Raises:
        RunError: this or another rank failed; one rank of the job says so for all.
    """
    timeout = timedelta(seconds=job.timeout_s)
    seat = job.task.seats[rank]
    world_size = len(job.task.seats)
    torch.set_num_threads(job.threads)
    store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
    device = device_of(job, int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group(_backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout)
    beats = StoreBeats(store, rank)
    beats.start(_gone)
    try:
        trace = train(job, Groups(rank, job.timeout_s), device, tell, beats.report)
        traces = gathered(trace, world_size)
        dist.barrier()
    except (HetplanError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise _told_once(failure_of(error, seat), job, store) from error
    finally:
        beats.stop()
    dist.destroy_process_group()
    return traces


def _gone() -> None:
    """The store went with the rank that held it; what waits on it will fail by itself."""


def _told_once(failure: Failure, job: Job, store: Any) -> HetplanError:
    """Return the first cause as far as this rank can know it."""
    try:
        if failure.rank_of_cause <= 1:
            store.set("hetplan/failure", f"{failure.seat.words}: {failure.words}")
            return failure.error
        for _ in range(round(SETTLE_S / POLL_S)):
            if store.check(["hetplan/failure"]):
                return RunError(store.get("hetplan/failure").decode())
            time.sleep(POLL_S)
        found = blame(stored_signs(store, len(job.task.seats)), time.monotonic())
        if store.add("hetplan/said", 1) > 1:
            return RunError(f"{failure.seat.words}: ended with the job, see the other message")
    except RuntimeError:
        return failure.error
    names = ", ".join(job.task.seats[rank].words for rank in found.ranks)
    return RunError(f"{names}: {found.words} ({failure.seat.words} {failure.words})")


def device_of(job: Job, local_rank: int) -> torch.device:
    """Return the device of a rank: `auto` takes a CUDA or ROCm device where every local rank finds one.

    Raises:
        UsageError: one was asked for and there is none.
    """
    if job.device == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", len(job.task.seats)))
    if wanted > found:
        if job.device == "cuda":
            raise UsageError(f"{wanted} ranks here need a CUDA device each, there are {found}")
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
