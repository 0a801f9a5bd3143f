"""Surveys made of known constants, so that what a fit finds can be held against what was put in."""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.profiling.records import (
    AttentionFigure,
    DeviceFigures,
    GemmFigure,
    LayerFigure,
    LinkFigure,
    LinkKind,
    Machine,
    RankReport,
    Survey,
    Timing,
    TrafficFigure,
)

PEAK, MEMORY = 100e9, 40e9
FRACTION, HALF, PENALTY, ATTENTION = 0.8, 2e5, 0.1, 0.35
LATENCY_S, RATE, RING_LATENCY_S, RING_RATE = 50e-6, 4e9, 80e-6, 2e9


def timed(seconds: float, spread: float = 0.01) -> Timing:
    return Timing(seconds=seconds, spread=spread, repeats=9)


def gemm(rows: int, inputs: int, outputs: int) -> GemmFigure:
    steps = max((size % 64 != 0) + (size % 8 != 0) for size in (rows, inputs, outputs))
    seconds = (2.0 * rows * inputs * outputs + HALF) / (PEAK * FRACTION * (1 - PENALTY * steps))
    return GemmFigure(rows=rows, inputs=inputs, outputs=outputs, precision="fp32", timing=timed(seconds))


def gemms() -> tuple[GemmFigure, ...]:
    sizes = [(r, i, o) for r in (64, 512) for i, o in ((256, 256), (1024, 1024), (1000, 1000), (1021, 1021))]
    return tuple(gemm(*size) for size in sizes)


def attentions() -> tuple[AttentionFigure, ...]:
    found = []
    for way, factor in (("forward", 1.0), ("backward", 2.5)):
        for seq_len in (128, 512):
            flop = 2.0 * 8 * seq_len * (seq_len + 1) * 64
            found.append(
                AttentionFigure(
                    samples=1,
                    heads=8,
                    seq_len=seq_len,
                    head_dim=64,
                    precision="fp32",
                    way="forward" if way == "forward" else "backward",
                    timing=timed(factor * (flop + HALF) / (PEAK * ATTENTION)),
                )
            )
    return tuple(found)


def traffic() -> tuple[TrafficFigure, ...]:
    rates = {"norm forward": 20e9, "activation backward": 20e9, "sum": 20e9, "optimizer": 30e9, "copy": MEMORY}
    return tuple(TrafficFigure(name=name, num_bytes=1e6, timing=timed(1e6 / rate)) for name, rate in rates.items())


def layer(kind: str, samples: int, seconds: float) -> LayerFigure:
    return LayerFigure(
        kind=kind,
        samples=samples,
        seq_len=128,
        tp=1,
        precision="fp32",
        forward=timed(seconds),
        backward=timed(2 * seconds),
        params=1e6,
    )


def report(host: str, device: str, layers: Sequence[LayerFigure] = ()) -> RankReport:
    machine = Machine(
        host=host,
        device=device,
        kind="cpu",
        memory_bytes=8 * 2.0**30,
        host_memory_bytes=8 * 2.0**30,
        threads=1,
        reserve_bytes=3e8,
        software="torch 2",
        driver="Linux 6",
    )
    figures = DeviceFigures(
        gemms=gemms(), attentions=attentions(), traffic=traffic(), launch=timed(2e-6), layers=tuple(layers)
    )
    return RankReport(machine=machine, figures=figures, seconds=1.0)


def link(kind: LinkKind, ranks: tuple[int, ...], num_bytes: int, together: int = 1) -> LinkFigure:
    if kind == "send":
        seconds = LATENCY_S + together * num_bytes / RATE
    else:
        n = len(ranks)
        seconds = 2 * (n - 1) * (RING_LATENCY_S + num_bytes / n / RING_RATE)
    return LinkFigure(kind=kind, ranks=ranks, num_bytes=num_bytes, timing=timed(seconds), together=together)


def links(*sets: tuple[int, ...]) -> tuple[LinkFigure, ...]:
    sizes = (1 << 12, 1 << 18, 1 << 22, 1 << 24)
    sends = [link("send", ranks[:2], size) for ranks in sets for size in sizes if len(ranks) == 2]
    return (*sends, *(link("all_reduce", ranks, size) for ranks in sets for size in sizes))


def two_ranks_of_one_host(layers: Sequence[LayerFigure] = ()) -> Survey:
    return Survey(ranks=(report("lab", "Chip", layers), report("lab", "Chip", layers)), links=links((0, 1)))
