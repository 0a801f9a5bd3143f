"""Whole layers of the planned model: forward and backward of the executor's own layers, at each microbatch and tp.

Decoders are timed a few in a row, as a stage runs them, and the time divided: what one leaves in the caches the next
one finds. With tp the ranks of neighbouring devices of one kind form groups, and all groups of a kind work at once,
one kind after the other; the figures hold their collectives. A rank that is slowed to a share `speed` of its core
sleeps after each pass until

    processor time / speed + time in collectives

has passed, so its partners see, and its caches hold, what they would in a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetplan.profiling.kernels import DTYPES
from hetplan.profiling.rank_sets import tp_sets
from hetplan.profiling.ranks import Ranks
from hetplan.profiling.records import LayerFigure, Timing
from hetplan.profiling.shapes import Wish
from hetplan.profiling.stopwatch import PassTimings, Stopwatch, summary
from hetplan.runtime.attention import Tokens, positions_of
from hetplan.runtime.linear import Deferred, Sink
from hetplan.runtime.model import Block, build_layer, start_values
from hetplan.runtime.parallel import Axis, Mesh
from hetplan.specs.model import Loss, Model

IN_A_ROW = 4
QUICK_IN_A_ROW = 2
LONGEST_S, QUICK_LONGEST_S = 20.0, 6.0
"""Assumed: repetitions of one case may take so long; larger microbatches of the layer are then left out."""
FEWEST, MOST = 7, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """One layer under one option."""

    index: int
    """Place of the first such layer in the chain."""
    tp: int
    samples: int

    @property
    def name(self) -> str:
        """For the line of progress."""
        return f"{self.index}, tp {self.tp}, microbatch {self.samples}"


class LayerBench:
    """Builds and times layers."""

    def __init__(self, ranks: Ranks, model: Model, wish: Wish, watch: Stopwatch, kinds: Sequence[tuple[str, str]]):
        self._ranks, self._model, self._wish, self._watch = ranks, model, wish, watch
        self._hosts, self._kinds = [host for host, _ in kinds], [kind for _, kind in kinds]
        self._last_s: dict[tuple[int, int], tuple[int, float]] = {}

    def cases(self) -> Iterator[LayerCase]:
        """Yield what to measure: each unlike layer at each tp that some ranks can form, smallest microbatch first."""
        kinds = [layer.kind for layer in self._model.chain]
        for tp in self._wish.tps:
            if tp_sets(self._kinds, self._hosts, tp):
                for index in dict.fromkeys(kinds.index(kind) for kind in kinds):
                    for samples in sorted(self._wish.samples):
                        yield LayerCase(index=index, tp=tp, samples=samples)

    def measure(self, case: LayerCase) -> tuple[LayerFigure, ...]:
        """Return this rank's figure of one case; all ranks call it together."""
        sets = tp_sets(self._kinds, self._hosts, case.tp)
        groups = [self._ranks.group(one) if case.tp > 1 else None for one in sets]
        if not self._fits(case):
            return ()
        figure, once_s = None, 0.0
        mine = next((i for i, one in enumerate(sets) if self._ranks.place.rank in one), None)
        for kind in dict.fromkeys(self._kinds[one[0]] for one in sets) if case.tp > 1 else (None,):
            self._ranks.meet()
            if mine is None or kind not in (None, self._kinds[sets[mine][0]]):
                continue
            rank = sets[mine].index(self._ranks.place.rank)
            axis = Axis(degree=case.tp, rank=rank, group=groups[mine]) if case.tp > 1 else Axis()
            figure = self._measure(case, Mesh(tp=axis, sequence_parallel=self._wish.sequence_parallel))
            once_s = figure.forward.seconds + figure.backward.seconds
        self._last_s[case.index, case.tp] = (case.samples, max(self._ranks.gather(once_s)))
        return (figure,) if figure else ()

    def _fits(self, case: LayerCase) -> bool:
        """Whether the time of the microbatch before says this one can be repeated; the same on all ranks."""
        before, seconds = self._last_s.get((case.index, case.tp), (case.samples, 0.0))
        longest_s = QUICK_LONGEST_S if self._wish.quick else LONGEST_S
        in_a_row = QUICK_IN_A_ROW if self._wish.quick else IN_A_ROW
        return seconds * case.samples / before * in_a_row * FEWEST <= longest_s

    def _measure(self, case: LayerCase, mesh: Mesh) -> LayerFigure:
        bench = _Stretch(self._model, case, mesh, self._wish, self._watch.device)
        together = case.tp > 1 or self._watch.speed < 1.0
        pair = _paced(bench, mesh, self._watch) if together else self._watch.passes(bench.forward, bench.backward)
        return LayerFigure(
            kind=self._model.chain[case.index].kind,
            samples=case.samples,
            seq_len=self._wish.seq_len,
            tp=case.tp,
            precision=self._wish.precisions[0],
            forward=_share(pair.forward, bench.length),
            backward=_share(pair.backward, bench.length),
            params=float(sum(p.numel() for p in bench.layers[0].parameters())),
        )


def _share(timing: Timing, parts: int) -> Timing:
    return Timing(seconds=timing.seconds / parts, spread=timing.spread, repeats=timing.repeats)


class _Stretch:
    """A few equal layers in a row, with inputs and a gradient to send back."""

    def __init__(self, model: Model, case: LayerCase, mesh: Mesh, wish: Wish, device: str) -> None:
        where, dtype = torch.device(device), DTYPES[wish.precisions[0]]
        kinds = [layer.kind for layer in model.chain]
        most = QUICK_IN_A_ROW if wish.quick else IN_A_ROW
        self.length = min(most, kinds.count("decoder")) if kinds[case.index] == "decoder" else 1
        self.layers: list[Block] = [
            build_layer(model, case.index + i, mesh, dtype=dtype, device=where) for i in range(self.length)
        ]
        deferred = Deferred()
        for layer in self.layers:
            start_values(layer.parameters(), 0, kinds.count("decoder"))
            for parameter in layer.parameters():
                parameter.grad = torch.zeros_like(parameter)
                parameter.sink = Sink(parameter.grad, deferred)
        count = case.samples * wish.seq_len
        width = model.chain[case.index].width
        ids = torch.randint(_words(model), (2, count), device=where)
        self._tokens = Tokens(
            num_samples=case.samples, positions=positions_of(wish.seq_len, 1, 0, where), ids=ids[0], labels=ids[1]
        )
        split = case.tp if wish.sequence_parallel else 1
        has_rows = kinds[case.index] != "embedding"
        self._rows = torch.randn(count // split, width, device=where).to(dtype).requires_grad_() if has_rows else None
        self._gradient = torch.randn(count // split, width, device=where).to(dtype)

    def forward(self) -> torch.Tensor:
        """Return what the layers make of the rows."""
        rows = self._rows
        for layer in self.layers:
            rows = layer(rows, self._tokens)
        if rows is None:
            raise ValueError("a stretch has at least one layer")
        return rows

    def backward(self, out: torch.Tensor) -> None:
        """Send a gradient back."""
        out.backward(self._gradient if out.dim() else None)


def _words(model: Model) -> int:
    return min(op.vocab for layer in model.chain for op in layer.operators if isinstance(op, Loss))


def _paced(bench: _Stretch, mesh: Mesh, watch: Stopwatch) -> PassTimings:
    """Time passes with collectives or pauses in them; ranks of a group repeat as often as its first one says."""
    first = _pass_pair(bench, mesh, watch)
    first = _pass_pair(bench, mesh, watch)
    hurries = time.monotonic() > watch.hurry_from_s
    wanted = FEWEST if hurries else max(FEWEST, min(MOST, 2 * watch.round_s / max(sum(first), 1e-9)))
    count = torch.tensor([float(wanted)])
    if mesh.tp.degree > 1:
        torch.distributed.broadcast(count, group=mesh.tp.group, group_src=0)
    pairs = [_pass_pair(bench, mesh, watch) for _ in range(int(count.item()))]
    return PassTimings(forward=summary([a for a, _ in pairs]), backward=summary([b for _, b in pairs]))


def _pass_pair(bench: _Stretch, mesh: Mesh, watch: Stopwatch) -> tuple[float, float]:
    kept: list[torch.Tensor] = []
    forward_s = _one(lambda: kept.append(bench.forward()), mesh, watch)
    return forward_s, _one(lambda: bench.backward(kept[0]), mesh, watch)


def _one(work: Callable[[], Any], mesh: Mesh, watch: Stopwatch) -> float:
    mesh.clock.take()
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    work()
    if watch.device != "cpu":
        torch.cuda.synchronize()
    wall_s = time.perf_counter() - start_s
    if watch.device != "cpu" or watch.speed >= 1.0:
        return wall_s
    due_s = (time.thread_time() - start_cpu_s) / watch.speed + mesh.clock.take()["tp"]
    time.sleep(max(0.0, due_s - wall_s))
    return due_s
