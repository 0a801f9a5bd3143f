"""Plans whose replicas all take equal shares: one cut, one microbatch, one count of microbatches for all.

Groups with the same devices form a *class*, wherever they are: a replica may take its devices from any of them. A
plan is then a *composition*: of how many stages of each kind (class, tensor-parallel degree) a replica consists, how
many replicas there are (D) and how large a microbatch is, which leaves `m = batch / (D x microbatch)` microbatches.

For each composition a bound is worked out that no order of its stages and no cut of the chain beats (`counts`): the
pace is at least the least tau at which its stages hold all repeated layers,

    sum_k n_k floor((tau - c_k) / u_k) >= L      and      sum_k n_k (tau - c_k) / u_k >= W,

`u_k` a layer's seconds on kind k, `c_k` what a stage of it sends, W all layers in such units. Compositions are visited
from the lowest bound on; orders and cuts are tried to the end (`cutting`), the best laid over groups and sites
(`laying`) and priced by the one objective. The search is over where the next bound is above the best plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np

from hetplan.costs.records import Floats, Holders
from hetplan.plan.stages import whole_params
from hetplan.search.book import Book
from hetplan.search.classes_counts import Counts, Ints, bounds_s, compositions, loose_bounds_s
from hetplan.search.classes_cutting import Cutter, Sequenced
from hetplan.search.classes_laying import DeviceClass, classes_of, layouts
from hetplan.search.problem import Problem, Tables, build_tables
from hetplan.search.records import SearchRequest
from hetplan.specs.workload import Sharding

MOST_VISITED = 4000
"""Compositions whose orders and cuts are tried."""
MOST_PRICED = 80
FIRST_TRIED = 2
"""Compositions of each setup that are tried at once, so that there is something to beat."""
MOST_WAITING = 2000
"""Compositions of each setup that are kept."""
MOST_DEGREE = 64
NEAR = 1.02
"""A cut is priced where its closed form is at most this much above the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to run a stage of a replica."""

    device_class: int
    mesh: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Replicas, microbatch and sharding, with the costs and kinds they leave."""

    replicas: int
    num_microbatches: int
    tables: Tables
    kinds: tuple[Kind, ...]
    counts: Counts
    cutter: Cutter


@dataclass(order=True, frozen=True, slots=True, kw_only=True)
class Entry:
    """A composition in the order in which it is visited."""

    value: float
    number: int
    setup: Setup = field(compare=False)
    stages_k: tuple[int, ...] = field(compare=False)


class EqualShares:
    """The search over one problem."""

    def __init__(self, book: Book, classes: Sequence[DeviceClass]) -> None:
        self._book = book
        self._problem: Problem = book.problem
        self._classes = tuple(classes)
        self._closed_form = self._problem.prices.calibration.overlap.pipeline != "exact"
        self._tables: dict[tuple[int, Sharding, int], Tables | None] = {}
        self._params = float(sum(values.sum() for values in whole_params(self._problem.prices)))
        self._priced = 0
        self._tried: set[int] = set()
        self.least = math.inf
        """The least bound of all compositions."""

    def run(self) -> None:
        """Fill the book."""
        waiting: list[Entry] = []
        for number, (coarse, key) in enumerate(sorted(self._coarse(), key=lambda item: item[0])):
            if self._value(coarse) >= self._book.best_value:
                continue
            self._book.keep_time()
            entries = list(self._entries(key, number << 24))
            for entry in entries[:FIRST_TRIED]:
                if entry.value < self._book.best_value:
                    self._try(entry)
            waiting.extend(entries)
        self._visit(waiting)

    def _visit(self, waiting: list[Entry]) -> None:
        heapq.heapify(waiting)
        self.least = min([self.least, self._book.best_value, *(entry.value for entry in waiting)])
        for _ in range(MOST_VISITED):
            if not waiting or self._priced >= MOST_PRICED:
                return
            entry = heapq.heappop(waiting)
            if entry.value >= self._book.best_value:
                return
            if entry.number not in self._tried:
                self._book.keep_time()
                self._try(entry)

    def _try(self, entry: Entry) -> None:
        self._tried.add(entry.number)
        setup = entry.setup
        orders = [self._cut(setup, order) for order in _orders(setup.kinds, entry.stages_k)]
        found = [one for one in orders if one is not None]
        if not found:
            return
        value, best = min(((self._closed(setup, one), one) for one in found), key=lambda pair: pair[0])
        if value > self._book.best_value * NEAR:
            return
        self._priced += 1
        for layout in layouts(self._problem, self._classes, setup.tables, best, setup.replicas):
            self._book.consider(layout)

    def _cut(self, setup: Setup, kinds: Sequence[Kind]) -> Sequenced | None:
        limit_s = self._book.best_value * NEAR if self._book.request.objective == "time" else math.inf
        return setup.cutter.best([kind.mesh for kind in kinds], [kind.device_class for kind in kinds], limit_s)

    def _closed(self, setup: Setup, one: Sequenced) -> float:
        """Return the value of a cut by its closed form, gradients included."""
        after = 0.0
        for mesh, (first, end) in zip(one.meshes, one.spans, strict=True):
            after = max(after, self._sync_s(setup, mesh, first, end))
        devices = sum(self._problem.meshes[mesh].size for mesh in one.meshes)
        usd_per_s = sum(self._usd_per_s(mesh) for mesh in one.meshes)
        values = self._values(setup, np.array([one.pipeline_s + after]), np.array([devices]), np.array([usd_per_s]))
        return float(values[0])

    def _sync_s(self, setup: Setup, mesh: int, first: int, end: int) -> float:
        params = float(sum(values[first:end].sum() for values in whole_params(self._problem.prices)))
        hidden = self._problem.prices.calibration.overlap.gradients
        whole_s = self._ring_s(mesh, params, setup.replicas, setup.tables.sharding)
        backward_s = float(setup.tables.backward_mrl[mesh, 0, first:end].sum())
        return max(0.0, whole_s - hidden * backward_s)

    def _ring_s(self, mesh: int, params: float, replicas: int, sharding: Sharding) -> float:
        one = self._problem.meshes[mesh]
        group = self._problem.prices.cluster.group(one.name)
        near = max(1, min(replicas, group.devices_per_node // one.tp))
        holders = (Holders(group=one.name, num_ranks=replicas, ranks_per_node=near, tp=one.tp),)
        cost = self._problem.prices.sync(params, holders, sharding)
        return cost.reduce_s + cost.gather_s

    def _coarse(self) -> Iterator[tuple[float, tuple[int, int, Sharding]]]:
        """Yield each (replicas, microbatch, sharding) with seconds no plan of it is below."""
        problem = self._problem
        devices = sum(one.devices for one in self._classes)
        for size in problem.microbatches:
            if problem.batch % size:
                continue
            parts = problem.batch // size
            for replicas in (d for d in range(1, min(parts, devices) + 1) if parts % d == 0 and self._may_be(d)):
                for sharding in problem.limits.sharding if replicas > 1 else ("none",):
                    tables = self._table(size, sharding, replicas)
                    if sharding in problem.limits.sharding and tables is not None:
                        yield self._coarse_s(tables, replicas, parts // replicas), (replicas, size, sharding)

    def _may_be(self, replicas: int) -> bool:
        allowed = self._problem.limits.replicas
        return allowed is None or replicas in allowed

    def _coarse_s(self, tables: Tables, replicas: int, m: int) -> float:
        speed = 0.0
        for number, one in enumerate(self._classes):
            rates = [
                1.0 / (tables.unit_m[kind.mesh] * kind.tp)
                for kind in self._kinds(tables)
                if kind.device_class == number
            ]
            speed += max(rates, default=0.0) * (one.devices // replicas)
        return float(m * tables.weight_l.sum() / speed) if speed > 0 else math.inf

    def _table(self, size: int, sharding: Sharding, replicas: int) -> Tables | None:
        degree = 1 if sharding == "none" else min(replicas, MOST_DEGREE)
        key = (size, sharding, degree)
        if key not in self._tables:
            self._tables[key] = build_tables(self._problem, size, sharding, degree, degree)
        return self._tables[key]

    def _kinds(self, tables: Tables) -> list[Kind]:
        found = []
        for number, one in enumerate(self._classes):
            for m, mesh in enumerate(self._problem.meshes):
                plain = mesh.cp == mesh.dp == mesh.ep == 1
                if mesh.name == one.groups[0] and plain and tables.usable_m[m] and np.isfinite(tables.unit_m[m]):
                    found.append(Kind(device_class=number, mesh=m, tp=mesh.tp))
        return found

    def _entries(self, key: tuple[int, int, Sharding], number: int) -> Iterator[Entry]:
        replicas, size, sharding = key
        tables = self._table(size, sharding, replicas)
        if tables is None:
            return
        kinds = tuple(self._kinds(tables))
        m = self._problem.batch // size // replicas
        cutter = Cutter(self._problem, tables, m)
        room = [one.devices // replicas for one in self._classes]
        limits = self._problem.limits
        counts = compositions(
            [(kind.device_class, kind.tp) for kind in kinds], room, self._problem.num_layers, limits.pp
        )
        setup = Setup(replicas=replicas, num_microbatches=m, tables=tables, kinds=kinds, counts=counts, cutter=cutter)
        rates = np.array([self._usd_per_s(kind.mesh) for kind in kinds])
        devices = counts.stages @ np.array([kind.tp for kind in kinds])
        paces = cutter.pace_table([kind.mesh for kind in kinds])
        loose = self._values(setup, loose_bounds_s(counts, paces, m), devices, counts.stages @ rates)
        near = np.flatnonzero(loose < self._book.best_value)
        counts, devices = replace(counts, stages=counts.stages[near]), devices[near]
        seconds = bounds_s(counts, paces, m, closed_form=self._closed_form) + self._after(setup, devices)
        values = self._values(setup, seconds, devices, counts.stages @ rates)
        order = np.argsort(values, kind="stable").tolist()
        if len(order) > MOST_WAITING:
            self.least = min(self.least, float(values[order[MOST_WAITING]]))
        for row in order[:MOST_WAITING]:
            if values[row] < self._book.best_value:
                stages = tuple(counts.stages[row].tolist())
                yield Entry(value=float(values[row]), number=number + row, setup=setup, stages_k=stages)

    def _values(self, setup: Setup, seconds: Floats, devices: Ints, usd_per_s: Floats) -> Floats:
        """Return the values of compositions from their seconds; devices and dollars are of one replica."""
        request = self._book.request
        late = np.zeros(len(seconds), dtype=bool)
        if request.time_budget_s is not None:
            late = seconds > request.time_budget_s
        values: Floats
        match request.objective:
            case "time":
                values = seconds
            case "devices":
                values = devices.astype(np.float64) * setup.replicas
            case "energy":
                values = np.zeros(len(seconds))
            case _:
                values = seconds * usd_per_s * setup.replicas
        return np.where(late, np.inf, values)

    def _after(self, setup: Setup, devices: Ints) -> Floats:
        """Return seconds that gradients take at least: some stage holds the mean number of parameters a device."""
        if self._problem.prices.calibration.overlap.gradients > 0 or setup.replicas == 1:
            return np.zeros(len(devices))
        least = {}
        for count in np.unique(devices).tolist():
            paces = [
                self._ring_s(kind.mesh, self._params / count * kind.tp, setup.replicas, setup.tables.sharding)
                for kind in setup.kinds
            ]
            least[count] = min(paces)
        return np.array([least[count] for count in devices.tolist()])

    def _usd_per_s(self, mesh: int) -> float:
        one = self._problem.meshes[mesh]
        return (self._problem.prices.usd_per_s(one.name) or 0.0) * one.size

    def _value(self, seconds: float) -> float:
        """Return a value no plan is below that takes at least so long."""
        request = self._book.request
        late = request.time_budget_s is not None and seconds > request.time_budget_s
        if request.objective == "time":
            return seconds
        return math.inf if late else 0.0


def _orders(kinds: Sequence[Kind], stages_k: Sequence[int]) -> Iterator[list[Kind]]:
    """Yield sequences of stages: classes one after the other in every order, degrees rising or falling inside."""
    used = [(kind, count) for kind, count in zip(kinds, stages_k, strict=True) if count]
    classes = list(dict.fromkeys(kind.device_class for kind, _ in used))
    seen = set()
    for order in permutations(classes):
        for falling in (False, True):
            sequence = tuple(
                kind
                for number in order
                for kind, count in sorted(used, key=lambda item: item[0].tp, reverse=falling)
                if kind.device_class == number
                for _ in range(count)
            )
            if sequence not in seen:
                seen.add(sequence)
                yield list(sequence)


def asks_for_equal_shares(request: SearchRequest) -> bool:
    """Return whether a search is one over equal shares with free degrees and cuts."""
    limits = request.limits
    if limits.uniform_degrees or limits.equal_cuts or limits.pinned_layers is not None:
        return False
    return limits.uniform_microbatches or request.objective == "devices"


def price_equal_shares(book: Book) -> float:
    """Put the best plans of equal shares into the book; return what no such plan of one shape is below."""
    book.enter("equal shares")
    merged = classes_of(book.problem, merge=True)
    search = EqualShares(book, merged)
    search.run()
    if 1 < len(book.problem.prices.cluster.groups) <= 3 and any(len(one.groups) > 1 for one in merged):
        EqualShares(book, classes_of(book.problem, merge=False)).run()
    return 0.0 if math.isinf(search.least) else search.least
