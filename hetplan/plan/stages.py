"""What one stage does in one microbatch: sums of the cost model over its layers.

Gradients or weights that are shared out among data-parallel ranks move with every microbatch: fully sharded layers
fetch their weights before each pass and hand out their gradients after the backward pass; with sharded gradients only
the latter. Where the calibration says that such traffic overlaps (`overlap.gathers`), a layer takes the longer of
computing and communicating, else their sum. What exceeds computing counts as data-parallel time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from hetplan.costs.prices import Prices
from hetplan.costs.records import Floats, Holders, ShardDegrees, StageOption
from hetplan.plan.records import Replica, Stage
from hetplan.specs.model import Experts, Layer, Linear, Table, operator_params, trained_params
from hetplan.specs.workload import Sharding

P = ParamSpec("P")
R = TypeVar("R")


def remembered(work: Callable[Concatenate[Prices, P], R]) -> Callable[Concatenate[Prices, P], R]:
    """Return `work`, whose answers are kept with the prices they came from, and go with them."""

    def ask(prices: Prices, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (work, args)
        found: R
        if key in prices.answers:
            found = prices.answers[key]
        else:
            found = prices.answers[key] = work(prices, *args, **kwargs)
        return found

    return ask


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Seconds of one microbatch on one stage."""

    forward_s: float
    backward_s: float
    weight_s: float
    """Part of `backward_s` a split schedule may move."""
    compute_s: float
    """Arithmetic of both passes."""
    tp_s: float
    cp_s: float
    ep_s: float
    sharding_s: float
    """What moving shared-out weights and gradients adds to both passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRun:
    """A run of layers and all the meshes that hold it."""

    first_layer: int
    end_layer: int
    holders: tuple[Holders, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Who holds what together; no constant of the cost model changes it."""

    runs: tuple[HeldRun, ...]
    holders: tuple[tuple[tuple[int, int], ...], ...]
    """By run: (row, virtual stage) of every stage that holds it."""
    degrees: Mapping[tuple[int, int], ShardDegrees]
    """By (row, virtual stage): over how many ranks its states are shared out; empty where nothing is."""


def option_of(stage: Stage, replica: Replica) -> StageOption:
    """Return how a stage runs, in the cost model's words."""
    return StageOption(
        group=stage.group,
        tp=stage.tp,
        cp=stage.cp,
        dp=stage.dp,
        ep=stage.ep,
        samples=max(1, replica.microbatch // stage.dp),
        recompute=stage.recompute,
    )


_ROWS = (
    "forward_total_s",
    "backward_total_s",
    "weight_gradient_s",
    "forward_s",
    "backward_s",
    "tp_forward_s",
    "tp_backward_s",
    "cp_forward_s",
    "cp_backward_s",
    "ep_forward_s",
    "ep_backward_s",
    "params",
    "expert_params",
    "saved_bytes",
)
FORWARD, BACKWARD, WEIGHT, PARAMS, EXPERT_PARAMS, SAVED = 0, 1, 2, 11, 12, 13


@remembered
def _matrix(prices: Prices, option: StageOption) -> Floats:
    """Return the costs of an option, a row each of `_ROWS`, shape (rows, layers)."""
    costs = prices.layers(option)
    return np.stack([np.asarray(getattr(costs, name), dtype=np.float64) for name in _ROWS])


def layer_seconds(prices: Prices, option: StageOption) -> Floats:
    """Return the seconds of both passes of one microbatch, communication included, a layer each."""
    matrix = _matrix(prices, option)
    return np.asarray(matrix[FORWARD] + matrix[BACKWARD], dtype=np.float64)


@remembered
def span_sums(prices: Prices, option: StageOption, first: int, end: int) -> tuple[float, ...]:
    """Return the sums of each row of `_ROWS` over layers `first` to `end`."""
    return tuple(_matrix(prices, option)[:, first:end].sum(axis=1).tolist())


@remembered
def stage_work(prices: Prices, option: StageOption, first: int, end: int) -> StageWork:
    """Return what a stage does where nothing moves between data-parallel ranks before the step's end."""
    sums = span_sums(prices, option, first, end)
    return StageWork(
        forward_s=sums[FORWARD],
        backward_s=sums[BACKWARD],
        weight_s=sums[WEIGHT],
        compute_s=sums[3] + sums[4],
        tp_s=sums[5] + sums[6],
        cp_s=sums[7] + sums[8],
        ep_s=sums[9] + sums[10],
        sharding_s=0.0,
    )


@remembered
def sharded_work(prices: Prices, option: StageOption, runs: tuple[HeldRun, ...], sharding: Sharding) -> StageWork:
    """Return what a stage of `runs` does where its gradients, or weights too, are shared out."""
    first, end = runs[0].first_layer, runs[-1].end_layer
    plain = stage_work(prices, option, first, end)
    matrix = _matrix(prices, option)
    forward_s = backward_s = 0.0
    for run in runs:
        layers = slice(run.first_layer, run.end_layer)
        gather_l, reduce_l = prices.gathers_s(option, run.holders)
        gather_l = gather_l[layers] if sharding == "full" else np.zeros(run.end_layer - run.first_layer)
        beside = _beside if prices.calibration.overlap.gathers else np.add
        forward_s += float(np.sum(beside(matrix[FORWARD, layers], gather_l)))
        backward_s += float(np.sum(beside(matrix[BACKWARD, layers], gather_l + reduce_l[layers])))
    added_s = (forward_s - plain.forward_s) + (backward_s - plain.backward_s)
    return StageWork(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=plain.weight_s,
        compute_s=plain.compute_s,
        tp_s=plain.tp_s,
        cp_s=plain.cp_s,
        ep_s=plain.ep_s,
        sharding_s=max(0.0, added_s),
    )


def _beside(compute_l: Floats, communicate_l: Floats) -> Floats:
    return np.maximum(compute_l, communicate_l)


@remembered
def boundary_seconds(prices: Prices, sender: StageOption, receiver: StageOption, layer: int, near: int) -> float:
    """Return the cost model's `boundary_s`, asked once; `near` is 1 where the meshes share a domain."""
    return float(prices.boundary_s(sender, receiver, layer, same_node=bool(near)))


def whole_params(prices: Prices) -> tuple[Floats, Floats]:
    """Return the trained parameters of each layer before any split: routed experts apart, and routed experts."""
    return _whole_params(prices.root)


@remembered
def _whole_params(prices: Prices) -> tuple[Floats, Floats]:
    chain = prices.model.chain
    expert_l = np.array([_expert_params(layer) for layer in chain], dtype=np.float64)
    return np.array([trained_params(layer) for layer in chain], dtype=np.float64) - expert_l, expert_l


def _expert_params(layer: Layer) -> int:
    if layer.gradients != "all":
        return 0
    return sum(
        operator.num_experts * sum(operator_params(linear) for linear in operator.linears)
        for operator in layer.operators
        if isinstance(operator, Experts)
    )


def tied_tables(prices: Prices) -> tuple[tuple[int, int, int], ...]:
    """Return (layer that holds a table, layer whose weight is tied to it, parameters) for each tied weight."""
    return _tied_tables(prices.root)


@remembered
def _tied_tables(prices: Prices) -> tuple[tuple[int, int, int], ...]:
    chain = prices.model.chain
    tables: dict[int, int] = {}
    for index, layer in enumerate(chain):
        for operator in layer.operators:
            if isinstance(operator, Table) and not operator.tied:
                tables.setdefault(operator.rows * operator.width, index)
    ties: list[tuple[int, int, int]] = []
    for index, layer in enumerate(chain):
        for operator in layer.operators:
            size = _tied_size(operator) if isinstance(operator, Linear | Table) else 0
            if size and size in tables and tables[size] != index:
                ties.append((tables[size], index, size))
    return tuple(ties)


def _tied_size(operator: Linear | Table) -> int:
    if not operator.tied:
        return 0
    return operator.inputs * operator.outputs if isinstance(operator, Linear) else operator.rows * operator.width
