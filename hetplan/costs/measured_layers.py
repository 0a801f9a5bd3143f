"""Seconds and bytes of layers out of a measured table, laid over what formulas say.

For a device, tp and microbatch `b` that were measured, a layer costs what stands there. Between two measured
microbatches `b0 < b < b1` of the same device, tp and layer every figure is taken on the line

    y(b) = y(b0) + (b - b0) / (b1 - b0) * (y(b1) - y(b0))

Anything else (another tp, a microbatch below or above all measured ones, cp, ep, selective recomputation) is not
covered: asked alone it is an error, in a table of many options it costs infinitely much. Full recomputation repeats
the measured forward pass and keeps a layer's input.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetplan.costs.activations import RECOMPUTED_KINDS
from hetplan.costs.memory import MemoryModel
from hetplan.costs.records import Floats, LayerCosts, ShardDegrees, StageOption
from hetplan.errors import CalibrationError
from hetplan.specs.cluster import Cluster, Device
from hetplan.specs.layer_table import LayerRow, LayerTable
from hetplan.specs.model import Layer, Parameters
from hetplan.specs.read_layers import STATED
from hetplan.specs.workload import Sharding

NO_DEVICE_BYTES = 1e30
"""What an option that is not covered needs: more than any device has."""
FIELDS = ("forward_s", "backward_s", "update_s", "params", "states_bytes", "saved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One microbatch on one rank; an entry a layer, NaN where the table does not say."""

    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    params: Floats
    states_bytes: Floats
    saved_bytes: Floats


class MeasuredLayers:
    """Answers from one table, for the groups of one cluster and one chain of layers.

    Raises:
        CalibrationError: the table is of a chain of another length.
    """

    def __init__(self, table: LayerTable, cluster: Cluster, chain: Sequence[Layer]) -> None:
        if table.num_layers != len(chain):
            raise CalibrationError(
                f"the measured layers are of {table.model} with {table.num_layers} layers, embedding and head included;"
                f" the model has {len(chain)}"
            )
        self.table = table
        self._devices: Mapping[str, Device] = {group.name: group.device for group in cluster.groups}
        self._recomputed_l = np.array([layer.kind in RECOMPUTED_KINDS for layer in chain])
        self._found: dict[tuple[str, int, int], Measured | None] = {}
        self._rows: dict[tuple[str, int], dict[int, list[LayerRow]]] = {}
        for row in table.rows:
            self._rows.setdefault((row.device, row.tp), {}).setdefault(row.microbatch, []).append(row)

    def covers(self, option: StageOption) -> bool:
        """Return whether the table tells what an option costs."""
        return self._find(option) is not None

    def overlay(self, costs: LayerCosts, options: Sequence[StageOption], input_bytes_ol: Floats) -> LayerCosts:
        """Return `costs` (options x layers) with measured figures where they are, infinite ones where they must be."""
        new = {name: np.array(getattr(costs, name), dtype=np.float64) for name in LayerCosts.__dataclass_fields__}
        for name in ("weight_gradient_s", "recompute_s"):
            new[name][:] = 0.0
        for name in ("tp_forward_s", "tp_backward_s", "cp_forward_s", "cp_backward_s", "ep_forward_s", "ep_backward_s"):
            new[name][:] = 0.0
        for o, option in enumerate(options):
            found = self._find(option)
            if found is None:
                new["forward_s"][o] = new["backward_s"][o] = np.inf
                continue
            repeated_l = np.where(self._recomputed_l & (option.recompute == "full"), found.forward_s, 0.0)
            new["forward_s"][o] = found.forward_s
            new["backward_s"][o] = found.backward_s + repeated_l
            new["recompute_s"][o] = repeated_l
            new["params"][o] = _known(found.params, new["params"][o])
            told_l = np.isfinite(found.saved_bytes)
            saved_l = np.where(self._recomputed_l & (option.recompute == "full"), input_bytes_ol[o], found.saved_bytes)
            new["saved_bytes"][o] = np.where(told_l, saved_l, new["saved_bytes"][o])
            again_l = np.where(self._recomputed_l & (option.recompute == "full"), found.saved_bytes, 0.0)
            new["working_bytes"][o] = np.where(told_l, again_l, new["working_bytes"][o])
            new["scores_bytes"][o] = np.where(told_l, 0.0, new["scores_bytes"][o])
            new["logits_bytes"][o] = np.where(told_l, 0.0, new["logits_bytes"][o])
        return LayerCosts(**new)

    def require(self, option: StageOption) -> None:
        """Refuse an option the table does not cover.

        Raises:
            CalibrationError: it does not; the message says what was measured.
        """
        if self.covers(option):
            return
        device = self._devices[option.group]
        wanted = f"tp {option.tp}, {option.samples} samples at once"
        wanted += f", cp {option.cp}" if option.cp > 1 else ""
        wanted += f", {option.recompute} recomputation" if option.recompute == "selective" else ""
        measured = [
            f"tp {tp}: {', '.join(map(str, sorted(sizes)))} samples"
            for (name, tp), sizes in sorted(self._rows.items())
            if name in (device.name, *device.aliases)
        ]
        words = "; ".join(measured) or "nothing"
        raise CalibrationError(
            f"layers of {self.table.model} were not measured on {device.name} with {wanted} (measured: {words}),"
            " and nothing on both sides of it was"
        )

    def update_s(self, option: StageOption, first: int, end: int) -> float:
        """Return the seconds a stage takes to update layers `first` to `end`.

        Raises:
            CalibrationError: the option was not measured.
        """
        self.require(option)
        found = self._find(option)
        update_l = found.update_s if found is not None else np.zeros(end)
        if self.table.update_scope == "stage":
            return float(update_l[first])
        return float(update_l[first:end].sum())

    def memory(self, model: MemoryModel, option: StageOption, sharding: Sharding, degrees: ShardDegrees) -> MemoryModel:
        """Return a memory model with what the table says of states, buffers and reserve."""
        found = self._find(option)
        if found is None:
            return replace(model, weights_bytes_l=np.full_like(model.weights_bytes_l, NO_DEVICE_BYTES))
        stated_l = found.states_bytes
        if self.table.bytes_per_param is not None:
            stated_l = _known(stated_l, found.params * self.table.bytes_per_param)
        held_l = model.weights_bytes_l + model.gradients_bytes_l + model.optimizer_bytes_l
        if sharding != "none":
            stated_l = np.where(np.isfinite(stated_l), held_l, stated_l) if degrees.dense > 1 else stated_l
        rest_l = np.where(np.isfinite(stated_l), stated_l - held_l, 0.0)
        told = bool(np.isfinite(found.saved_bytes).all())
        return replace(
            model,
            optimizer_bytes_l=model.optimizer_bytes_l + rest_l,
            boundary_bytes_l=np.zeros_like(model.boundary_bytes_l) if told else model.boundary_bytes_l,
            overhead=1.0 if told else model.overhead,
            reserve_bytes=self._reserve(option.tp, model.reserve_bytes),
        )

    def _reserve(self, tp: int, otherwise: float) -> float:
        below = [least for least in self.table.reserve_bytes if least <= tp]
        return self.table.reserve_bytes[max(below)] if below else otherwise

    def _find(self, option: StageOption) -> Measured | None:
        if option.cp > 1 or option.ep > 1 or option.recompute == "selective":
            return None
        key = (option.group, option.tp, option.samples)
        if key not in self._found:
            self._found[key] = self._look_up(*key)
        return self._found[key]

    def _look_up(self, group: str, tp: int, samples: int) -> Measured | None:
        device = self._devices[group]
        names = [name for name in (device.name, *device.aliases) if (name, tp) in self._rows]
        if not names:
            return None
        by_size = {size: found for size, rows in self._rows[names[0], tp].items() if (found := self._complete(rows))}
        if samples in by_size:
            return by_size[samples]
        sizes = sorted(by_size)
        at = bisect_left(sizes, samples)
        if at in (0, len(sizes)):
            return None
        low, high = sizes[at - 1], sizes[at]
        share = (samples - low) / (high - low)
        return Measured(
            **{
                name: getattr(by_size[low], name) + share * (getattr(by_size[high], name) - getattr(by_size[low], name))
                for name in FIELDS
            }
        )

    def _complete(self, rows: Sequence[LayerRow]) -> Measured | None:
        """Return the figures of all layers, None where a layer was not measured."""
        arrays = {name: np.full(self.table.num_layers, np.nan) for name in FIELDS}
        for row in rows:
            for name in FIELDS:
                value = getattr(row, name)
                if value is not None:
                    arrays[name][row.first_layer : row.end_layer] = value
        if np.isnan(arrays["forward_s"]).any():
            return None
        return Measured(**arrays)


def _known(measured: Floats, otherwise: Floats) -> Floats:
    return np.where(np.isfinite(measured), measured, otherwise)


def states_size_alone(chain: Sequence[Layer]) -> bool:
    """Return whether a chain states the sizes of its layers and no work, so that only a table can price it."""
    return any(
        isinstance(operator, Parameters) and operator.name == STATED for layer in chain for operator in layer.operators
    )
