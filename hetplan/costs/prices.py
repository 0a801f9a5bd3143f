"""Seconds and bytes of a workload on a cluster: the one door to the cost model.

`price(cluster, model, workload, calibration)` returns `Prices`; its methods answer one question each and cache what
repeats. Everything above this package asks here and computes no cost itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetplan.costs.records import Floats, Holders, LayerCosts, MemoryUse, ShardDegrees, StageOption, SyncCost
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster
from hetplan.specs.model import Model
from hetplan.specs.workload import Sharding, Workload


class Prices:
    """Answers of the cost model for one cluster, model, workload and calibration."""

    def __init__(self, cluster: Cluster, model: Model, workload: Workload, calibration: Calibration) -> None:
        self.cluster = cluster
        self.model = model
        self.workload = workload
        self.calibration = calibration

    def layers(self, option: StageOption) -> LayerCosts:
        """Costs of every layer of the chain, arrays of shape (layers,)."""
        raise NotImplementedError

    def table(self, options: Sequence[StageOption]) -> LayerCosts:
        """The same for many options at once, arrays of shape (options, layers)."""
        raise NotImplementedError

    def memory(
        self, option: StageOption, span: tuple[int, int], in_flight: int, sharding: Sharding, degrees: ShardDegrees
    ) -> MemoryUse:
        """Peak on one device of a stage that holds layers `span` (half-open) with `in_flight` microbatches."""
        raise NotImplementedError

    def memory_matrices(
        self, option: StageOption, sharding: Sharding, degrees: ShardDegrees
    ) -> tuple[Floats, Floats]:
        """`fixed[i, j] + in_flight * per_microbatch[i, j]` is `memory(...)`'s total for the span (i, j).

        Both have shape (layers + 1, layers + 1); entries with j <= i are 0.
        """
        raise NotImplementedError

    def capacity_bytes(self, group: str) -> float:
        """Memory a device of `group` offers."""
        raise NotImplementedError

    def boundary_s(self, sender: StageOption, receiver: StageOption, layer: int, *, same_node: bool) -> float:
        """Seconds one microbatch's activations take from the stage ending with `layer` to the next one.

        The gradient takes as long on its way back. `same_node`: both meshes share a node (or a fast-link domain).
        """
        raise NotImplementedError

    def sync(
        self, params: float, holders: Sequence[Holders], sharding: Sharding, *, expert: bool = False
    ) -> SyncCost:
        """Gradient synchronisation of `params` parameters (of the whole layer, before tp) among `holders`.

        Holders in different groups or with different tp meet on the best network that joins them; the slowest part of
        the ring decides (see `costs.collectives`).
        """
        raise NotImplementedError

    def gathers_s(self, option: StageOption, holders: Sequence[Holders]) -> tuple[Floats, Floats]:
        """Per layer, seconds to gather its weights once, and to reduce-scatter its gradients once (fully sharded)."""
        raise NotImplementedError

    def optimizer_s(self, group: str, params: float) -> float:
        """Seconds one device of `group` takes to update `params` parameters (gradient norm included)."""
        raise NotImplementedError

    def model_flop(self) -> float:
        """Model FLOPs of one sample, forward and backward, without recomputation."""
        raise NotImplementedError

    def peak_flop_per_s(self, group: str) -> float:
        """Dense peak of one device in the workload's precision."""
        raise NotImplementedError

    def usd_per_s(self, group: str) -> float | None:
        """Price of one device for one second; None where the cluster names none."""
        raise NotImplementedError

    def power_w(self, group: str, utilization: float) -> float:
        """Draw of one device that computes a fraction `utilization` of the time."""
        raise NotImplementedError

    def origins(self) -> dict[str, str]:
        """Name of a device or network -> where its numbers come from."""
        raise NotImplementedError


def price(cluster: Cluster, model: Model, workload: Workload, calibration: Calibration | None = None) -> Prices:
    """Return the cost model for a workload on a cluster."""
    return Prices(cluster, model, workload, calibration or Calibration())
