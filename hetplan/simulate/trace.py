"""A timeline as Chrome trace JSON, which chrome://tracing and ui.perfetto.dev open.

A process is one copy of a replica; its threads are the ranks and, below them, what ranks send. Synchronisation and
optimizer have a process of their own, a thread a stage. Times are microseconds, as the format demands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetplan.simulate.records import Lane, Timeline

Document = dict[str, Any]
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_MICRO = 1e6


def chrome_trace(timeline: Timeline) -> Document:
    """Return a timeline in the trace event format."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "step_s": timeline.step_s,
            "estimated_s": timeline.estimated_s,
            "notes": list(timeline.notes),
        },
        "traceEvents": [*_pipelines(timeline), *_ending(timeline)],
    }


def _pipelines(timeline: Timeline) -> Iterator[Document]:
    numbers: dict[tuple[int, int], int] = {}
    threads: dict[int, int] = {}
    for lane in timeline.lanes:
        key = (lane.row, lane.copy)
        if key not in numbers:
            numbers[key] = len(numbers) + 1
            yield _name("process_name", numbers[key], 0, f"replica shape {lane.row}, copy {lane.copy}")
        pid = numbers[key]
        threads[pid] = tid = threads.get(pid, 0) + 1
        yield _name("thread_name", pid, tid, _lane_name(lane))
        yield from _intervals(lane, pid, tid)


def _lane_name(lane: Lane) -> str:
    return f"rank {lane.rank}" if lane.receiver is None else f"rank {lane.rank} sends to {lane.receiver}"


def _intervals(lane: Lane, pid: int, tid: int) -> Iterator[Document]:
    for interval in lane.intervals:
        yield {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": f"{interval.stage}{interval.kind}{interval.microbatch}",
            "cat": _NAMES[interval.kind] if lane.receiver is None else "transfer",
            "ts": interval.start_s * _MICRO,
            "dur": (interval.end_s - interval.start_s) * _MICRO,
            "args": {"stage": interval.stage, "microbatch": interval.microbatch},
        }


def _ending(timeline: Timeline) -> Iterator[Document]:
    pid = 0
    yield _name("process_name", pid, 0, "synchronisation and optimizer")
    threads: dict[tuple[int, int], int] = {}
    for event in timeline.events:
        for mesh in event.meshes:
            if mesh not in threads:
                threads[mesh] = len(threads) + 1
                yield _name("thread_name", pid, threads[mesh], f"replica shape {mesh[0]}, stage {mesh[1]}")
            yield {
                "ph": "X",
                "pid": pid,
                "tid": threads[mesh],
                "name": event.name,
                "cat": event.name.split()[0],
                "ts": event.start_s * _MICRO,
                "dur": (event.end_s - event.start_s) * _MICRO,
                "args": {},
            }


def _name(what: str, pid: int, tid: int, name: str) -> Document:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
