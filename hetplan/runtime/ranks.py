"""Who each rank of a job is, and which tokens of a microbatch it holds.

Ranks are counted as `hetplan emit --to hetplan` counts them (`emit.ranks`, order ``nodes``), so scripts and executor
agree. A microbatch of a replica is ``microbatch * seq_len`` rows, sample by sample. A rank of a stage holds the samples
of its dp rank; of each, the positions of its cp rank; and with sequence parallelism an equal run of those rows for each
tp rank. `rows_of` says so as half-open ranges of the microbatch's rows, in the order the rank keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from hetplan.emit.ranks import ranks_of
from hetplan.emit.records import Job
from hetplan.errors import UsageError
from hetplan.plan.placement import place
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.runtime.parameters import Cut, share
from hetplan.specs.cluster import Cluster
from hetplan.specs.model import Model
from hetplan.specs.workload import Workload

Rows = tuple[tuple[int, int], ...]
AxisName = Literal["tp", "cp", "ep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank: where it runs and what it is in its replica."""

    rank: int
    node: str
    group: str
    index: int
    """Of its device in the node."""
    row: int
    copy: int
    stage: int
    """Physical stage."""
    place: int
    """In the stage's mesh: tp fastest, then cp, then dp."""

    @property
    def words(self) -> str:
        """How messages name it."""
        return f"rank {self.rank} (host {self.node}, replica {self.row}.{self.copy}, stage {self.stage})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A layout with the ranks that run it and the workload's sizes."""

    layout: Layout
    seats: tuple[Seat, ...]
    seq_len: int
    sequence_parallel: bool = True

    def replica(self, seat: Seat) -> Replica:
        """Return the replica a rank works in."""
        return self.layout.replicas[seat.row]

    def stage(self, seat: Seat) -> Stage:
        """Return the mesh and recomputation of a rank's stage (its first virtual one)."""
        return self.replica(seat).stages[seat.stage]

    def virtual_stages(self, seat: Seat) -> tuple[int, ...]:
        """Return the virtual stages a rank runs, in model order."""
        replica = self.replica(seat)
        return tuple(range(seat.stage, len(replica.stages), replica.pp))

    def mesh_of(self, seat: Seat, stage: int) -> tuple[Seat, ...]:
        """Return the seats of a physical stage of a rank's own replica, by place."""
        return _meshes(self.seats)[seat.row, seat.copy, stage]

    @property
    def global_batch(self) -> int:
        """Samples a step."""
        return self.layout.num_samples

    def first_sample(self, seat: Seat) -> int:
        """Return the first sample, within a step's, that a rank's replica takes."""
        before = sum(replica.num_samples for replica in self.layout.replicas[: seat.row])
        own = self.replica(seat)
        return before + seat.copy * own.num_microbatches * own.microbatch

    def sequence_parallel_in(self, seat: Seat) -> bool:
        """Return whether a rank keeps only its run of rows between layers: rows must divide by tp."""
        stage, replica = self.stage(seat), self.replica(seat)
        rows = replica.microbatch // stage.dp * (self.seq_len // stage.cp)
        return self.sequence_parallel and stage.tp > 1 and rows % stage.tp == 0


@lru_cache(maxsize=8)
def _meshes(seats: tuple[Seat, ...]) -> dict[tuple[int, int, int], tuple[Seat, ...]]:
    found: dict[tuple[int, int, int], list[Seat]] = {}
    for seat in seats:
        found.setdefault((seat.row, seat.copy, seat.stage), []).append(seat)
    return {key: tuple(sorted(own, key=lambda seat: seat.place)) for key, own in found.items()}


def coordinates(seat: Seat, stage: Stage) -> tuple[int, int, int]:
    """Return the dp, cp and tp rank of a place in a mesh."""
    return seat.place // (stage.tp * stage.cp), seat.place // stage.tp % stage.cp, seat.place % stage.tp


def cut_of_seat(task: Task, seat: Seat) -> Cut:
    """Return which part of its layers a rank holds."""
    stage = task.stage(seat)
    tp_rank = coordinates(seat, stage)[2]
    return Cut(
        tp=stage.tp,
        tp_rank=tp_rank,
        ep=stage.ep,
        ep_rank=seat.place // stage.tp % stage.ep,
        sequence_parallel=task.sequence_parallel_in(seat),
    )


def axis_ranks(task: Task, seat: Seat, axis: AxisName) -> tuple[int, ...]:
    """Return the ranks of a seat's group along an axis of its mesh."""
    stage = task.stage(seat)
    dp_rank, cp_rank, tp_rank = coordinates(seat, stage)
    mesh = task.mesh_of(seat, seat.stage)
    if axis == "tp":
        places = [(dp_rank * stage.cp + cp_rank) * stage.tp + i for i in range(stage.tp)]
    elif axis == "cp":
        places = [(dp_rank * stage.cp + i) * stage.tp + tp_rank for i in range(stage.cp)]
    else:
        first = (dp_rank * stage.cp + cp_rank) // stage.ep * stage.ep
        places = [(first + i) * stage.tp + tp_rank for i in range(stage.ep)]
    return tuple(mesh[place].rank for place in places)


def position_ranges(seq_len: int, cp: int, cp_rank: int) -> Rows:
    """Return the ranges of positions a cp rank holds: one early piece and its mirror image."""
    if cp == 1:
        return ((0, seq_len),)
    piece = seq_len // (2 * cp)
    mirror = 2 * cp - 1 - cp_rank
    return (cp_rank * piece, (cp_rank + 1) * piece), (mirror * piece, (mirror + 1) * piece)


def sample_range(task: Task, seat: Seat) -> tuple[int, int]:
    """Return the samples of each microbatch that a rank holds."""
    stage = task.stage(seat)
    return share(task.replica(seat).microbatch, stage.dp, coordinates(seat, stage)[0])


def rows_of(task: Task, seat: Seat) -> Rows:
    """Return the rows of a microbatch a rank holds between layers."""
    stage = task.stage(seat)
    _, cp_rank, tp_rank = coordinates(seat, stage)
    first, end = sample_range(task, seat)
    pieces = position_ranges(task.seq_len, stage.cp, cp_rank)
    whole = _merged((s * task.seq_len + a, s * task.seq_len + b) for s in range(first, end) for a, b in pieces)
    if not task.sequence_parallel_in(seat):
        return whole
    num_rows = sum(b - a for a, b in whole)
    return _within(whole, *share(num_rows, stage.tp, tp_rank))


def _merged(ranges: Iterator[tuple[int, int]]) -> Rows:
    found: list[tuple[int, int]] = []
    for first, end in ranges:
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return tuple(found)


def _within(rows: Rows, first: int, end: int) -> Rows:
    """Return the part of some rows that lies at the local indices from `first` to `end`."""
    found, base = [], 0
    for a, b in rows:
        low, high = max(first, base), min(end, base + b - a)
        if low < high:
            found.append((a + low - base, a + high - base))
        base += b - a
    return tuple(found)


def plain_seats(layout: Layout) -> tuple[Seat, ...]:
    """Return the ranks of a layout replica by replica, all on one host."""
    seats: list[Seat] = []
    for row, replica in enumerate(layout.replicas):
        for copy in range(replica.copies):
            for number, stage in enumerate(replica.stages[: replica.pp]):
                for inside in range(stage.mesh_size):
                    seats.append(
                        Seat(
                            rank=len(seats),
                            node="localhost",
                            group=stage.group,
                            index=len(seats),
                            row=row,
                            copy=copy,
                            stage=number,
                            place=inside,
                        )
                    )
    return tuple(seats)


def seats_of_plan(layout: Layout, cluster: Cluster, model: Model, workload: Workload) -> tuple[Seat, ...]:
    """Return the ranks of a plan in the order `hetplan emit --to hetplan` starts them."""
    job = Job(
        layout=place(layout, cluster),
        cluster=cluster,
        model=model,
        workload=workload,
        plan_text="",
        plan_sha256="",
        peak_bytes={},
    )
    return tuple(
        Seat(
            rank=number,
            node=found.node,
            group=found.group,
            index=found.index,
            row=found.row,
            copy=found.copy,
            stage=found.stage,
            place=found.place,
        )
        for number, found in enumerate(ranks_of(job, "nodes"))
    )


def require_runnable(layout: Layout, workload: Workload) -> None:
    """Refuse what a plan may say and the executor does not do.

    Raises:
        UsageError: a precision or a degree is not run.
    """
    if workload.precision not in ("fp32", "tf32", "bf16"):
        raise UsageError(f"precision {workload.precision} is planned but not run; `hetplan run` trains in bf16 or fp32")
    if workload.gradient_precision not in (None, "fp32", "bf16"):
        raise UsageError(f"gradients in {workload.gradient_precision} are planned but not run")
    for replica in layout.replicas:
        for stage in replica.stages:
            if replica.microbatch % stage.dp or workload.seq_len % (2 * stage.cp if stage.cp > 1 else 1):
                raise UsageError("a stage's dp must divide the microbatch, and 2 cp the sequence length")
