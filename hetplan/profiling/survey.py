"""All measurements of one run: what each rank does alone, all ranks at the same time, and then the links between them.

Ranks of one host work side by side on purpose: a training step keeps all of them busy, and what they share (memory
bandwidth, caches, power) is then in the figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hetplan.profiling import kernels, machine
from hetplan.profiling.agenda import Item, Progress, work_through
from hetplan.profiling.layers import LayerBench, LayerCase
from hetplan.profiling.links import QUICK_SIZES, SIZES, measure_links
from hetplan.profiling.rank_sets import LinkSet, link_sets
from hetplan.profiling.ranks import Ranks
from hetplan.profiling.records import (
    AttentionFigure,
    DeviceFigures,
    GemmFigure,
    LayerFigure,
    LinkFigure,
    RankReport,
    Survey,
    Timing,
    TrafficFigure,
)
from hetplan.profiling.shapes import AttentionShape, GemmShape, Wish, attention_shapes, gemm_shapes
from hetplan.profiling.stopwatch import Stopwatch
from hetplan.specs.cluster import Precision
from hetplan.specs.model import Model

ROUND_S, QUICK_ROUND_S = 0.5, 0.08
"""Assumed: what one round of repetitions may take."""
QUICK_UNHURRIED_S = 25.0
"""Assumed: a quick survey takes less than this on a machine that is not busy."""
CUDA_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure."""

    device: machine.DeviceKind
    name: str | None
    """What the calibration calls the device; None: what the catalog or the driver calls it."""
    wish: Wish
    model: Model | None
    group: str | None = None
    """Where the cluster file puts this host; None: hosts are told apart by their devices."""
    speed: float = 1.0


class _Notebook:
    """Figures of one rank, gathered one by one."""

    def __init__(self, watch: Stopwatch, precision: Precision) -> None:
        self._watch, self._precision = watch, precision
        self._gemms: list[GemmFigure] = []
        self._attentions: list[AttentionFigure] = []
        self._traffic: list[TrafficFigure] = []
        self._layers: list[LayerFigure] = []
        self._launch: Timing | None = None

    def figures(self) -> DeviceFigures:
        """Return all there are."""
        return DeviceFigures(
            gemms=tuple(self._gemms),
            attentions=tuple(self._attentions),
            traffic=tuple(self._traffic),
            launch=self._launch,
            layers=tuple(self._layers),
        )

    def product(self, shape: GemmShape, precision: Precision) -> None:
        """Measure a product."""
        self._gemms.append(kernels.gemm(shape, precision, self._watch))

    def attention(self, shape: AttentionShape) -> None:
        """Measure attention."""
        self._attentions.extend(kernels.attention(shape, self._precision, self._watch))

    def elementwise(self) -> None:
        """Measure elementwise work."""
        self._traffic.extend(kernels.elementwise(self._precision, self._watch))

    def update(self) -> None:
        """Measure the optimizer."""
        self._traffic.append(kernels.update(self._watch))

    def copies(self) -> None:
        """Measure copies."""
        self._traffic.extend(kernels.copies(self._watch))

    def launch(self) -> None:
        """Measure a launch."""
        self._launch = kernels.launch(self._watch)

    def layer(self, bench: LayerBench, case: LayerCase) -> None:
        """Measure whole layers."""
        self._layers.extend(bench.measure(case))


def survey(ranks: Ranks, request: Request, tell: Callable[[Progress], None]) -> Survey:
    """Make all measurements together with the other ranks; the result is the same on each."""
    wish = request.wish
    watch = Stopwatch(
        device=ranks.device,
        round_s=QUICK_ROUND_S if wish.quick else ROUND_S,
        speed=request.speed,
        rounds=2 if wish.quick else 3,
        hurry_from_s=time.monotonic() + QUICK_UNHURRIED_S if wish.quick else math.inf,
    )
    here = machine.look(ranks.device, request.name)
    places = ranks.gather((here.host, request.group or here.device))
    sets = link_sets([host for host, _ in places], [kind for _, kind in places])
    notebook, links = _Notebook(watch, wish.precisions[0]), list[LinkFigure]()
    items = [*_alone(request, watch, notebook)]
    if request.model is not None:
        bench = LayerBench(ranks, request.model, wish, watch, places)
        items.extend(
            Item(
                name=f"layer {case.name}",
                expected_s=4 * watch.round_s,
                measure=partial(notebook.layer, bench, case),
            )
            for case in bench.cases()
        )
    sizes = QUICK_SIZES if wish.quick else SIZES
    items.extend(
        Item(
            name=f"{chosen.kind.replace('_', '-')} over {len(chosen.sets[0])} ranks",
            expected_s=2 * watch.round_s * len(sizes),
            measure=partial(_links, links, ranks, (chosen, sizes), watch),
        )
        for chosen in sets
    )
    seconds = work_through(items, tell)
    reports = ranks.gather(RankReport(machine=here, figures=notebook.figures(), seconds=seconds))
    return Survey(ranks=tuple(reports), links=tuple(links))


def _alone(request: Request, watch: Stopwatch, notebook: _Notebook) -> Iterator[Item]:
    """Yield what a rank measures without the others."""
    wish, once_s = request.wish, 2 * watch.round_s
    precision = wish.precisions[0]
    for peak in _probed(wish, watch):
        yield Item(name=f"peak {peak}", expected_s=once_s, measure=partial(notebook.product, _large(watch), peak))
    speed = kernels.gemm(kernels.PROBE, precision, replace(watch, rounds=1))
    flop_per_s = speed.flop / speed.timing.seconds
    for shape in gemm_shapes(wish, request.model, flop_per_s):
        name = f"product {shape.rows} x {shape.inputs} x {shape.outputs}"
        yield Item(name=name, expected_s=once_s, measure=partial(notebook.product, shape, precision))
    for heads in attention_shapes(wish, request.model, flop_per_s):
        name = f"attention {heads.heads} x {heads.seq_len} x {heads.head_dim}"
        yield Item(name=name, expected_s=2 * once_s, measure=partial(notebook.attention, heads))
    yield Item(name="elementwise work", expected_s=5 * once_s, measure=notebook.elementwise)
    yield Item(name="optimizer", expected_s=once_s, measure=notebook.update)
    yield Item(name="copies", expected_s=once_s, measure=notebook.copies)
    yield Item(name="launches", expected_s=once_s, measure=notebook.launch)


def _links(found: list[LinkFigure], ranks: Ranks, chosen: tuple[LinkSet, Sequence[int]], watch: Stopwatch) -> None:
    found.extend(measure_links(ranks, chosen[0], chosen[1], watch))


def _probed(wish: Wish, watch: Stopwatch) -> tuple[Precision, ...]:
    """Return the precisions whose peak is measured: those asked for, and on a GPU all it has."""
    if watch.device == "cpu":
        return wish.precisions
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    found = [p for p in CUDA_PRECISIONS if p not in ("bf16", "tf32") or has_bf16]
    return tuple(dict.fromkeys((*wish.precisions, *found)))


def _large(watch: Stopwatch) -> GemmShape:
    """Return a product large enough to reach a device's best."""
    size = 1024 if watch.device == "cpu" else 8192
    return GemmShape(rows=size, inputs=size, outputs=size)
