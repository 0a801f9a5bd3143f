"""Stage options side by side: degrees, sizes and device rates as arrays, one entry an option.

Suffix `_o`: shape (options,). Everything that depends on an option but not on a layer is worked out here once, so
that the walk over a layer's operators is plain arithmetic on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from hetplan.costs.collectives import Ring, Rings, exchange_inside, ring_inside, stack
from hetplan.costs.constants import constants_of
from hetplan.costs.records import Floats, StageOption
from hetplan.errors import CalibrationError
from hetplan.specs.calibration import Calibration
from hetplan.specs.cluster import Cluster, Group, Precision
from hetplan.specs.workload import Workload

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device of one group does in a second, speed factor included."""

    gemm_flop_per_s: float
    """Large, aligned GEMMs inside layers (fp8 where the workload asks for it)."""
    dense_flop_per_s: float
    """Large, aligned GEMMs in the precision of weights and activations."""
    attention_flop_per_s: float
    vector_flop_per_s: float
    """Products the matrix units cannot take, in fp32; infinite where the datasheet states no fp32 peak."""
    memory_bytes_per_s: float
    half_flop: float
    misaligned_penalty: float
    overhead_s: float
    expert_fraction: float
    expert_overhead_s: float
    exchange_fraction: float
    exchange_merged: float
    update_bytes_per_s: float
    """What the optimizer's update moves."""
    flash: bool


def peak_flop_per_s(group: Group, precision: Precision) -> float:
    """Return the dense peak of a device of `group`.

    Raises:
        CalibrationError: the device does not compute in this precision.
    """
    peak = group.device.peak_flop_per_s.get(precision)
    if peak is None:
        known = ", ".join(sorted(group.device.peak_flop_per_s))
        raise CalibrationError(
            f"device {group.device.name!r} (group {group.name!r}) has no {precision} peak; it has {known}:"
            f" choose one of these with --precision, or leave the group out"
        )
    return peak


def rates(group: Group, workload: Workload, calibration: Calibration) -> Rates:
    """Return the rates of one group.

    Raises:
        CalibrationError: the device does not compute in the workload's precision.
    """
    constants = constants_of(group, calibration)
    gemm_peak = peak_flop_per_s(group, workload.precision) * group.speed
    dense_peak = gemm_peak
    if workload.precision == "fp8":
        dense_peak = peak_flop_per_s(group, "bf16") * group.speed
        gemm_peak *= constants.fp8_fraction
    attention = constants.attention_fraction
    memory = group.device.memory_bandwidth_bytes_per_s * constants.memory_fraction * group.speed
    return Rates(
        gemm_flop_per_s=gemm_peak * constants.gemm_peak_fraction,
        dense_flop_per_s=dense_peak * constants.gemm_peak_fraction,
        attention_flop_per_s=dense_peak * attention,
        vector_flop_per_s=group.device.peak_flop_per_s.get("fp32", math.inf)
        * group.speed
        * constants.gemm_peak_fraction,
        memory_bytes_per_s=memory,
        half_flop=constants.gemm_half_flop,
        misaligned_penalty=constants.misaligned_penalty,
        overhead_s=constants.layer_overhead_s,
        expert_fraction=constants.expert_fraction,
        expert_overhead_s=constants.expert_overhead_s,
        exchange_fraction=constants.exchange_fraction,
        exchange_merged=constants.exchange_merged,
        update_bytes_per_s=memory * constants.update_fraction,
        flash=uses_flash(group, workload),
    )


def uses_flash(group: Group, workload: Workload) -> bool:
    """Return whether attention never materialises its scores on this group."""
    if workload.attention == "auto":
        return "flash_attention" in group.device.features
    return workload.attention == "flash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Options side by side, with what they all share."""

    workload: Workload
    tp_o: Floats
    cp_o: Floats
    ep_o: Floats
    samples_o: Floats
    full_o: Flags
    """Everything is recomputed."""
    selective_o: Flags
    """Attention scores are recomputed."""
    flash_o: Flags
    sequence_o: Floats
    """Over how many ranks norms and residuals are split: tp with sequence parallelism, else 1."""
    gemm_flop_per_s_o: Floats
    dense_flop_per_s_o: Floats
    attention_flop_per_s_o: Floats
    vector_flop_per_s_o: Floats
    memory_bytes_per_s_o: Floats
    half_flop_o: Floats
    misaligned_penalty_o: Floats
    overhead_s_o: Floats
    expert_fraction_o: Floats
    expert_overhead_s_o: Floats
    exchange_fraction_o: Floats
    exchange_merged_o: Floats
    tp_rings: Rings
    cp_rings: Rings
    ep_rings: Rings
    tp_exposed: Floats | float
    """Part of tensor-parallel communication that nothing hides."""

    @property
    def num_options(self) -> int:
        """Options side by side."""
        return len(self.tp_o)

    @property
    def zeros_o(self) -> Floats:
        """A fresh array of zeros, an entry an option."""
        return np.zeros(len(self.tp_o))

    def tokens_o(self, tokens_per_sample: int | None) -> Floats:
        """Return the tokens one rank sees of a microbatch, after cp."""
        return self.samples_o * (tokens_per_sample or self.workload.seq_len) / self.cp_o


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """Return batches of one workload as one."""
    merged: dict[str, object] = {"workload": batches[0].workload}
    for field in fields(Batch):
        values = [getattr(batch, field.name) for batch in batches]
        if field.name == "workload":
            continue
        if field.name == "tp_exposed":
            merged[field.name] = np.concatenate([np.full(batch.num_options, batch.tp_exposed) for batch in batches])
        elif isinstance(values[0], Rings):
            names = [entry.name for entry in fields(Rings)]
            merged[field.name] = Rings(**{n: np.concatenate([getattr(v, n) for v in values]) for n in names})
        else:
            merged[field.name] = np.concatenate(values)
    return Batch(**merged)  # type: ignore[arg-type]  # fields of several types by name


class Batches:
    """Makes batches; remembers rates and rings, which repeat from batch to batch."""

    def __init__(self, cluster: Cluster, workload: Workload, calibration: Calibration) -> None:
        self._cluster = cluster
        self._workload = workload
        self._calibration = calibration
        self._groups: Mapping[str, Group] = {group.name: group for group in cluster.groups}
        self._rates: dict[str, Rates] = {}
        self._rings: dict[tuple[str, str, int, int], Ring] = {}

    def make(self, options: Sequence[StageOption]) -> Batch:
        """Return `options` side by side.

        Raises:
            CalibrationError: a group in use cannot compute in the workload's precision.
        """
        rows = [self._rates_of(option.group) for option in options]
        tp_o = np.array([float(option.tp) for option in options])
        return Batch(
            workload=self._workload,
            tp_o=tp_o,
            cp_o=np.array([float(option.cp) for option in options]),
            ep_o=np.array([float(option.ep) for option in options]),
            samples_o=np.array([float(option.samples) for option in options]),
            full_o=np.array([option.recompute == "full" for option in options]),
            selective_o=np.array([option.recompute == "selective" for option in options]),
            flash_o=np.array([row.flash for row in rows]),
            sequence_o=tp_o if self._workload.sequence_parallel else np.ones(len(options)),
            gemm_flop_per_s_o=np.array([row.gemm_flop_per_s for row in rows]),
            dense_flop_per_s_o=np.array([row.dense_flop_per_s for row in rows]),
            attention_flop_per_s_o=np.array([row.attention_flop_per_s for row in rows]),
            vector_flop_per_s_o=np.array([row.vector_flop_per_s for row in rows]),
            memory_bytes_per_s_o=np.array([row.memory_bytes_per_s for row in rows]),
            half_flop_o=np.array([row.half_flop for row in rows]),
            misaligned_penalty_o=np.array([row.misaligned_penalty for row in rows]),
            overhead_s_o=np.array([row.overhead_s for row in rows]),
            expert_fraction_o=np.array([row.expert_fraction for row in rows]),
            expert_overhead_s_o=np.array([row.expert_overhead_s for row in rows]),
            exchange_fraction_o=np.array([row.exchange_fraction for row in rows]),
            exchange_merged_o=np.array([row.exchange_merged for row in rows]),
            tp_rings=stack([self._ring("tp", option.group, option.tp, 1) for option in options]),
            cp_rings=stack([self._ring("cp", option.group, option.cp, option.tp) for option in options]),
            ep_rings=stack([self._ring("ep", option.group, option.ep, option.tp) for option in options]),
            tp_exposed=1.0 - self._calibration.overlap.tp_fraction,
        )

    def _rates_of(self, name: str) -> Rates:
        if name not in self._rates:
            self._rates[name] = rates(self._groups[name], self._workload, self._calibration)
        return self._rates[name]

    def _ring(self, axis: str, name: str, num_ranks: int, stride: int) -> Ring:
        key = (axis, name, num_ranks, stride)
        if key not in self._rings:
            make = exchange_inside if axis == "ep" else ring_inside
            group = self._groups[name]
            self._rings[key] = make(self._cluster, group, self._calibration, num_ranks=num_ranks, stride=stride)
        return self._rings[key]
