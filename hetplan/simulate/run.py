"""An event loop over a layout's Programs: every rank of every simulated copy, with what they share.

The rules are those of `plan.timing` (a rank runs its actions in order; a result leaves when it is made and the line to
that rank is free), so where nothing contends and nothing jitters the step time is `estimate`'s to the last digit.
Contention and jitter only delay. What follows the backward passes is `plan.sync`, started at the simulated ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.plan.estimate import RowWork, Work, row_finish, slowest, work_of
from hetplan.plan.program import Action, Program, program
from hetplan.plan.records import Layout
from hetplan.plan.sync import finish_step
from hetplan.plan.timing import Durations, Finish, action_seconds, source_of
from hetplan.simulate.records import Conditions, Interval, Lane, Timeline
from hetplan.simulate.resources import Servers, Use, shares_of


def simulate(layout: Layout, prices: Prices, conditions: Conditions | None = None) -> Timeline:
    """Return a step of a layout as it runs under the conditions.

    Raises:
        UsageError: the layout cannot be placed, or its schedule cannot run.
    """
    asked = conditions or Conditions()
    work = work_of(layout, prices)
    copies = [_chosen_copies(row, work, asked) for row in work.rows]
    shares = shares_of(work.layout.replicas, copies, prices)
    servers = Servers(shares.capacity if asked.contention else {})
    pipelines = list(_pipelines(work, copies, asked, shares.uses if asked.contention else {}))
    _run(pipelines, servers)
    finishes, planned = [], []
    for index, row in enumerate(work.rows):
        planned.append(row_finish(row, work.layout))
        simulated = [pipeline.finish() for pipeline in pipelines if pipeline.row == index]
        rest = [planned[index]] if len(copies[index]) < row.replica.copies else []
        finishes.append(slowest([*simulated, *rest]))
    end = finish_step(work.ending, [f.rank_s for f in finishes], [f.gradients_s for f in finishes])
    expected = finish_step(work.ending, [f.rank_s for f in planned], [f.gradients_s for f in planned])
    return Timeline(
        step_s=end.step_s,
        estimated_s=expected.step_s,
        replica_s=tuple(finish.pipeline_s for finish in finishes),
        lanes=tuple(lane for pipeline in pipelines for lane in pipeline.lanes()),
        events=end.events,
        waited_s={name: wait for name, wait in servers.waited_s.items() if wait > 1e-9 * end.step_s},
        copies=tuple((len(chosen), row.replica.copies) for chosen, row in zip(copies, work.rows, strict=True)),
    )


def _chosen_copies(row: RowWork, work: Work, asked: Conditions) -> list[int]:
    """Return the copies to simulate: one of each way boundaries lie, then the first ones."""
    replica = row.replica
    actions = 2 * replica.num_microbatches * len(replica.stages)
    most = max(1, min(asked.most_copies, asked.most_actions // (actions * len(work.rows))))
    chosen = dict.fromkeys(kind.copies[0] for kind in row.classes)
    for copy in range(replica.copies):
        if len(chosen) >= most:
            break
        chosen.setdefault(copy)
    return sorted(list(chosen)[:most])


def _pipelines(
    work: Work, copies: list[list[int]], asked: Conditions, uses: dict[tuple[int, int, int, int], Use]
) -> Iterator[_Pipeline]:
    for index, row in enumerate(work.rows):
        replica = row.replica
        order = program(work.layout.schedule, replica.pp, replica.num_microbatches, replica.vpp)
        of_copy = {copy: kind.durations for kind in row.classes for copy in kind.copies}
        for copy in copies[index]:
            own = {(s, r): use for (at, c, s, r), use in uses.items() if (at, c) == (index, copy)}
            slower = [_slowdowns(asked, (index, copy, rank), len(actions)) for rank, actions in enumerate(order.ranks)]
            yield _Pipeline(index, copy, order, of_copy[copy], _Surroundings(slower=slower, uses=own))


def _slowdowns(asked: Conditions, where: tuple[int, int, int], count: int) -> list[float] | None:
    """Return what each action of a rank is multiplied with (None: nothing)."""
    if asked.jitter == 0.0:
        return None
    draws = np.random.default_rng([asked.seed, *where]).standard_normal(count)
    factors: list[float] = (1.0 + asked.jitter * np.abs(draws)).tolist()
    return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """What a pipeline meets that its durations do not say."""

    slower: list[list[float] | None]
    uses: dict[tuple[int, int], Use]


class _Pipeline:
    """One copy of a replica while it runs."""

    def __init__(self, row: int, copy: int, order: Program, durations: Durations, around: _Surroundings) -> None:
        self.row, self.copy, self.order, self.durations = row, copy, order, durations
        self._around = around
        self._stages = order.pp * order.vpp
        self._split = order.schedule == "zero-bubble"
        self._next = [0] * order.pp
        self._free_s = [0.0] * order.pp
        self._busy = [False] * order.pp
        self._line_s: dict[tuple[int, int], float] = {}
        self._arrived: set[Action] = set()
        self._work: list[list[Interval]] = [[] for _ in range(order.pp)]
        self._sent: dict[tuple[int, int], list[Interval]] = {}

    def start(self, rank: int, now_s: float) -> float | None:
        """Start the next action of a rank if it is free and its input is there; return when it will end."""
        if self._busy[rank] or self._next[rank] == len(self.order.ranks[rank]):
            return None
        index = self._next[rank]
        action = self.order.ranks[rank][index]
        source = source_of(action, self._stages, split=self._split)
        if source is not None and source not in self._arrived:
            return None
        if source is not None:
            self._arrived.remove(source)
        seconds = action_seconds(action, self.durations)
        slower = self._around.slower[rank]
        begin = max(now_s, self._free_s[rank])
        end = begin + (seconds if slower is None else seconds * slower[index])
        self._work[rank].append(Interval(begin, end, *action))
        self._busy[rank] = True
        return end

    def end(self, rank: int, now_s: float, servers: Servers) -> tuple[int, float, Action] | None:
        """End the running action; return (receiving rank, arrival, action) of its result if it leaves the stage."""
        action = self.order.ranks[rank][self._next[rank]]
        self._next[rank] += 1
        self._busy[rank] = False
        self._free_s[rank] = now_s
        target = action.stage + {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        if target == action.stage or not 0 <= target < self._stages:
            return None
        receiver = target % self.order.pp
        if receiver == rank:
            return receiver, now_s, action
        ready = max(now_s, self._line_s.get((rank, receiver), 0.0))
        seconds = self.durations.p2p_s[min(action.stage, target)]
        start, arrival = servers.run(self._around.uses.get((rank, receiver), ()), ready, seconds)
        self._line_s[rank, receiver] = arrival
        if self.durations.sends_block:
            self._free_s[rank] += self.durations.sends_block * (arrival - now_s)
        self._sent.setdefault((rank, receiver), []).append(Interval(start, arrival, *action))
        return receiver, arrival, action

    def arrive(self, action: Action) -> None:
        """Note that the result of an action has reached the rank that waits for it."""
        self._arrived.add(action)

    def finish(self) -> Finish:
        """Return when ranks and stages are done."""
        last = "W" if self._split else "B"
        gradients_s = [0.0] * self._stages
        for intervals in self._work:
            for interval in intervals:
                if interval.kind == last:
                    gradients_s[interval.stage] = interval.end_s
        return Finish(rank_s=tuple(self._free_s), gradients_s=tuple(gradients_s))

    def lanes(self) -> Iterator[Lane]:
        """Yield what each rank did and sent."""
        for rank, intervals in enumerate(self._work):
            yield Lane(row=self.row, copy=self.copy, rank=rank, receiver=None, intervals=tuple(intervals))
        for (rank, receiver), intervals in sorted(self._sent.items()):
            yield Lane(row=self.row, copy=self.copy, rank=rank, receiver=receiver, intervals=tuple(intervals))


def _run(pipelines: list[_Pipeline], servers: Servers) -> None:
    """Run all pipelines to their end; events of one moment go in the order they were made."""
    events: list[tuple[float, int, int, int, Action | None]] = []
    made = 0

    def push(when_s: float, pipeline: int, rank: int, arrived: Action | None) -> None:
        nonlocal made
        heapq.heappush(events, (when_s, made, pipeline, rank, arrived))
        made += 1

    def try_start(pipeline: int, rank: int, now_s: float) -> None:
        end = pipelines[pipeline].start(rank, now_s)
        if end is not None:
            push(end, pipeline, rank, None)

    for index, pipeline in enumerate(pipelines):
        for rank in range(pipeline.order.pp):
            try_start(index, rank, 0.0)
    while events:
        now_s, _, index, rank, arrived = heapq.heappop(events)
        if arrived is not None:
            pipelines[index].arrive(arrived)
        else:
            sent = pipelines[index].end(rank, now_s, servers)
            if sent is not None:
                push(sent[1], index, sent[0], sent[2])
        try_start(index, rank, now_s)
