"""Seconds and bytes of a workload on a cluster: the one door to the cost model.

`price(cluster, model, workload, calibration)` returns `Prices`; its methods answer one question each and cache what
repeats. Everything above this package asks here and computes no cost itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from hetplan.costs.batch import Batches, peak_flop_per_s, rates, side_by_side
from hetplan.costs.boundary import Boundaries
from hetplan.costs.constants import constants_of
from hetplan.costs.fitted_links import FittedLinks
from hetplan.costs.flops import model_flop
from hetplan.costs.links import Link
from hetplan.costs.measured_layers import MeasuredLayers, states_size_alone
from hetplan.costs.memory import MemoryModel, StageMemory, Tie, memory_model
from hetplan.costs.optimizer import optimizer_s
from hetplan.costs.power import power_w, usd_per_s
from hetplan.costs.records import Floats, Holders, LayerCosts, MemoryUse, ShardDegrees, StageOption, SyncCost
from hetplan.costs.sync import SyncRing, sync_ring
from hetplan.costs.table import FIELDS, cost_table, unlike_layers
from hetplan.costs.ties import find_ties
from hetplan.errors import CalibrationError
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster, Group
from hetplan.specs.model import Layer, Model
from hetplan.specs.workload import Sharding, Workload


class Prices:
    """Answers of the cost model for one cluster, model, workload and calibration.

    A group whose device cannot compute in the workload's precision raises `CalibrationError` when it is asked about,
    not before: a cluster may hold groups a plan leaves out. Places that no network joins are infinitely far apart.
    """

    def __init__(self, cluster: Cluster, model: Model, workload: Workload, calibration: Calibration) -> None:
        self.cluster = cluster
        self.model = model
        self.workload = workload
        self._chain = model.chain
        self._sample_bytes_l = np.array([self._sample_bytes(layer) for layer in self._chain])
        self._unlike, self._index_l = unlike_layers(self._chain)
        self._ties: dict[int, tuple[Tie, ...]] = {}
        self._states_size_alone = states_size_alone(self._chain)
        self.root = self
        """Prices of the same cluster, model and workload that these were made from (`under`), or these."""
        self._rest_on(calibration)

    def _rest_on(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.answers: dict[object, Any] = {}
        """What parts above have worked out from these prices."""
        self._batches = Batches(self.cluster, self.workload, calibration)
        self._boundaries = Boundaries(self.cluster, self.workload, calibration)
        self._layers: dict[StageOption, LayerCosts] = {}
        self._memory: dict[tuple[StageOption, Sharding, ShardDegrees], MemoryModel] = {}
        self._rings: dict[tuple[tuple[Holders, ...], bool], SyncRing] = {}
        table, fits = calibration.layers, calibration.links
        self._measured = None if table is None else MeasuredLayers(table, self.cluster, self._chain)
        self._fitted = None if fits is None else FittedLinks(fits, self.cluster)
        if table is None and self._states_size_alone:
            raise CalibrationError(
                f"model {self.model.name!r} states the sizes of its layers and no work: give --calibration with"
                " measured layers (hetplan import layer-times)"
            )

    def under(self, calibration: Calibration) -> Prices:
        """Return the prices of the same cluster, model and workload under other constants."""
        other = copy(self)
        other._rest_on(calibration)
        return other

    def covers(self, option: StageOption) -> bool:
        """Return whether the seconds of an option are known; where layers were measured, only measured ones are."""
        return self._measured is None or self._measured.covers(option)

    def layers(self, option: StageOption) -> LayerCosts:
        """Costs of every layer of the chain, arrays of shape (layers,)."""
        if self._measured is not None:
            self._measured.require(option)
        return self._layers_of(option)

    def _layers_of(self, option: StageOption) -> LayerCosts:
        if option not in self._layers:
            row = self.table([option])
            self._layers[option] = LayerCosts(**{name: getattr(row, name)[0] for name in FIELDS})
        return self._layers[option]

    def table(self, options: Sequence[StageOption]) -> LayerCosts:
        """The same for many options at once, arrays of shape (options, layers)."""
        costs = cost_table(self._unlike, self._index_l, self._batches.make(options))
        if self._measured is None:
            return costs
        return self._measured.overlay(costs, options, self._input_bytes(options))

    def kept_table(self, options: Sequence[StageOption]) -> LayerCosts:
        """The same; `layers` and memory of these options are then not worked out again."""
        costs = self.table(options)
        for row, option in enumerate(options):
            self._layers.setdefault(option, LayerCosts(**{name: getattr(costs, name)[row] for name in FIELDS}))
        return costs

    def memory(
        self, option: StageOption, span: tuple[int, int], in_flight: int, sharding: Sharding, degrees: ShardDegrees
    ) -> MemoryUse:
        """Peak on one device of a stage that holds layers `span` (half-open) with `in_flight` microbatches."""
        return self._memory_of(option, sharding, degrees).use(span, in_flight)

    def memory_matrices(self, option: StageOption, sharding: Sharding, degrees: ShardDegrees) -> tuple[Floats, Floats]:
        """`fixed[i, j] + in_flight * per_microbatch[i, j]` is `memory(...)`'s total for the span (i, j).

        Both have shape (layers + 1, layers + 1); entries with j <= i are 0.
        """
        return self._memory_of(option, sharding, degrees).matrices()

    def capacity_bytes(self, group: str) -> float:
        """Memory a device of `group` offers."""
        return self.cluster.group(group).usable_memory_bytes

    def link(self, first: str, second: str) -> Link | None:
        """Link between nodes of two groups (or two nodes of one group); None where no network joins them."""
        return self._boundaries.link(first, second)

    def boundary_bytes(self, layer: int) -> float:
        """Bytes of one sample's activations as they leave `layer`, all ranks together."""
        return self._sample_bytes(self._chain[layer])

    def boundary_s(self, sender: StageOption, receiver: StageOption, layer: int, *, same_node: bool) -> float:
        """Seconds one microbatch's activations take from the stage whose last layer is `layer` to the next one.

        The gradient takes as long on its way back. `same_node`: both meshes share a node (or a fast-link domain).
        """
        sample_bytes = self._sample_bytes(self._chain[layer])
        if self._fitted is not None:
            return self._fitted.transfer_s(sender, receiver, sample_bytes, same_node=same_node)
        return self._boundaries.seconds(sender, receiver, sample_bytes, same_node=same_node)

    def sync(self, params: float, holders: Sequence[Holders], sharding: Sharding, *, expert: bool = False) -> SyncCost:
        """Gradient synchronisation of `params` parameters among `holders`, before tp divides them.

        `expert`: routed experts, `params` after ep divides them; every device of a node takes part in some ring of
        theirs. Holders in different groups or with different tp meet on the best network that joins them; the slowest
        part of the ring decides (see `costs.sync`).
        """
        num_bytes = params * self.workload.gradient_bytes
        if self._fitted is not None:
            whole_s = self._fitted.all_reduce_s(num_bytes, holders)
            halves = (whole_s, 0.0) if sharding == "none" else (whole_s / 2, whole_s / 2)
            return SyncCost(reduce_s=halves[0], gather_s=halves[1])
        ring = self._ring(holders, expert=expert)
        if sharding == "none":
            reduce_s = ring.all_reduce_s(num_bytes)
            return SyncCost(reduce_s=reduce_s, gather_s=0.0, shared_lines=ring.shared_lines)
        return SyncCost(
            reduce_s=ring.half_s(num_bytes),
            gather_s=ring.half_s(params * self.workload.weight_bytes),
            shared_lines=ring.shared_lines,
        )

    def norm_s(self, holders: Sequence[Holders]) -> float:
        """Return the seconds to sum up one number over all ranks: latency only; none where links were measured."""
        return 0.0 if self._fitted is not None else self._ring(holders, expert=False).all_reduce_s(0.0)

    def gathers_s(self, option: StageOption, holders: Sequence[Holders]) -> tuple[Floats, Floats]:
        """Per layer, seconds to gather its weights once, and to reduce-scatter its gradients once (fully sharded)."""
        ring = self._ring(holders, expert=False)
        costs = self.layers(option)
        whole_l = (costs.params + costs.expert_params) * option.tp
        held_l = whole_l > 0
        latency_s, bytes_s_l = ring.half_s(0.0), whole_l * ring.half_s_per_byte
        gather_l = np.where(held_l, latency_s + bytes_s_l * self.workload.weight_bytes, 0.0)
        scatter_l = np.where(held_l, latency_s + bytes_s_l * self.workload.gradient_bytes, 0.0)
        return gather_l, scatter_l

    def update_s(self, option: StageOption, first: int, end: int) -> float | None:
        """Measured seconds a stage takes to update layers `first` to `end`; None where nothing was measured."""
        return None if self._measured is None else self._measured.update_s(option, first, end)

    def optimizer_s(self, group: str, params: float) -> float:
        """Seconds one device of `group` takes to update `params` parameters (gradient norm included)."""
        return optimizer_s(params, rates(self._group(group), self.workload, self.calibration), self.workload)

    def model_flop(self) -> float:
        """Model FLOPs of one sample, forward and backward, without recomputation."""
        return model_flop(self.model, self.workload)

    def peak_flop_per_s(self, group: str) -> float:
        """Dense peak of one device in the workload's precision."""
        return peak_flop_per_s(self._group(group), self.workload.precision)

    def usd_per_s(self, group: str) -> float | None:
        """Price of one device for one second; None where the cluster names none."""
        return usd_per_s(self._group(group))

    def power_w(self, group: str, utilization: float) -> float:
        """Draw of one device that computes a fraction `utilization` of the time."""
        return power_w(self._group(group), utilization, self.calibration)

    def origins(self) -> dict[str, str]:
        """Name of a device or network -> where its numbers come from."""
        devices = {
            group.device.name: self.calibration.device(group.device.name).origin for group in self.cluster.groups
        }
        networks = {network.name: self.calibration.network(network.name).origin for network in self.cluster.networks}
        return {**devices, **networks}

    def _group(self, name: str) -> Group:
        return self.cluster.group(name)

    def _input_bytes(self, options: Sequence[StageOption]) -> Floats:
        """Return the bytes of each layer's input on one rank, shape (options, layers)."""
        before_l = np.concatenate([self._sample_bytes_l[:1], self._sample_bytes_l[:-1]])
        samples_o = np.array([float(option.samples) for option in options])
        return np.asarray(samples_o[:, None] * before_l[None, :])

    def _sample_bytes(self, layer: Layer) -> float:
        tokens = layer.tokens_per_sample or self.workload.seq_len
        return float(tokens * layer.width * self.workload.activation_bytes)

    def _memory_of(self, option: StageOption, sharding: Sharding, degrees: ShardDegrees) -> MemoryModel:
        key = (option, sharding, degrees)
        if key not in self._memory:
            split = option.cp * (option.tp if self.workload.sequence_parallel else 1)
            stage = StageMemory(
                costs=self._layers_of(option),
                boundary_bytes_l=self._sample_bytes_l * option.samples / split,
                ties=self._ties_of(option.tp),
                constants=constants_of(self._group(option.group), self.calibration),
            )
            model = memory_model(stage, self.workload, sharding, degrees)
            if self._measured is not None:
                model = self._measured.memory(model, option, sharding, degrees)
            self._memory[key] = model
        return self._memory[key]

    def _ties_of(self, tp: int) -> tuple[Tie, ...]:
        if tp not in self._ties:
            self._ties[tp] = find_ties(self._chain, tp)
        return self._ties[tp]

    def _ring(self, holders: Sequence[Holders], *, expert: bool) -> SyncRing:
        key = (tuple(holders), expert)
        if key not in self._rings:
            self._rings[key] = sync_ring(self.cluster, holders, self.calibration, expert=expert)
        return self._rings[key]


def price_together(variants: Sequence[Prices], options: Sequence[StageOption]) -> None:
    """Work out layers of `options` under several calibrations of one root at once: much cheaper than one by one."""
    first = variants[0]
    if any(prices._measured is not None for prices in variants):
        return
    batch = side_by_side([prices._batches.make(options) for prices in variants])
    costs = cost_table(first._unlike, first._index_l, batch)
    places = ((prices, option) for prices in variants for option in options)
    for row, (prices, option) in enumerate(places):
        prices._layers[option] = LayerCosts(**{name: getattr(costs, name)[row] for name in FIELDS})


def price(cluster: Cluster, model: Model, workload: Workload, calibration: Calibration | None = None) -> Prices:
    """Return the cost model for a workload on a cluster."""
    return Prices(cluster, model, workload, calibration or Calibration())
