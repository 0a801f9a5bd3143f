"""A survey from one call: this process as a rank a launcher started, or ranks of its own on this machine."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

import torch

from hetplan.errors import UsageError
from hetplan.profiling.agenda import Progress
from hetplan.profiling.machine import cores
from hetplan.profiling.place import Place, free_port
from hetplan.profiling.ranks import Ranks
from hetplan.profiling.records import Survey
from hetplan.profiling.survey import Request, survey

Tell = Callable[[Progress], None]
GRACE_S = 5.0


def survey_as_rank(place: Place, request: Request, threads: int | None, tell: Tell) -> Survey:
    """Return the survey of all ranks a launcher started; every rank gets the same."""
    _use_threads(threads or 1)
    with Ranks(place, request.device) as ranks:
        return survey(ranks, request, tell if place.rank == 0 else _silent)


def survey_here(num_ranks: int, request: Request, threads: int | None, tell: Tell) -> Survey:
    """Return the survey of ranks started on this machine; none outlives this call.

    Raises:
        UsageError: a rank failed; the message says how.
    """
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    port, each = free_port(), threads or max(1, cores() // num_ranks)
    processes = [
        _started(
            context,
            Place(rank=rank, num_ranks=num_ranks, local_rank=rank, address="127.0.0.1", port=port),
            (request, each, messages),
        )
        for rank in range(num_ranks)
    ]
    grace_s = 0.0
    try:
        found = _result(processes, messages, tell)
        grace_s = GRACE_S
    finally:
        _end(processes, grace_s)
    return found


def _started(context: SpawnContext, place: Place, rest: tuple[Request, int, Any]) -> SpawnProcess:
    process = context.Process(target=_rank_main, args=(place, *rest), daemon=True)
    process.start()
    return process


def _rank_main(place: Place, request: Request, threads: int, messages: Any) -> None:
    """One rank of its own process; rank 0 reports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _use_threads(threads)

    def tell(progress: Progress) -> None:
        messages.put(progress)

    try:
        with Ranks(place, request.device) as ranks:
            found = survey(ranks, request, tell if place.rank == 0 else _silent)
        if place.rank == 0:
            messages.put(found)
    except Exception as error:  # noqa: BLE001 - whatever a rank dies of is told by the process that started it
        messages.put(f"rank {place.rank}: {type(error).__name__}: {error}")


def _result(processes: list[SpawnProcess], messages: Any, tell: Tell) -> Survey:
    while True:
        try:
            message = messages.get(timeout=0.5)
        except queue.Empty:
            dead = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if dead:
                raise UsageError(f"rank {dead[0]} ended with code {processes[dead[0]].exitcode}") from None
            continue
        if isinstance(message, Survey):
            return message
        if isinstance(message, str):
            raise UsageError(f"measuring failed: {message}")
        tell(message)


def _end(processes: list[SpawnProcess], grace_s: float) -> None:
    """Wait a moment for ranks to leave by themselves, then end them."""
    until_s = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, until_s - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _use_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def _silent(progress: Progress) -> None:
    """Say nothing."""
