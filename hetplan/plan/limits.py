"""The space of plans a search may return and a check accepts: user switches and what an engine can run.

`Limits` is data; `check` refuses a layout outside them and the search never builds one. An engine's capability
profile is the `Limits` named after it in `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hetplan.plan.records import ScheduleName
from hetplan.specs.workload import RECOMPUTES, SHARDINGS, Recompute, Sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a layout may be. None: any value."""

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] | None = None
    stage_dp: tuple[int, ...] = (1,)
    """Sample-splitting inside a stage (a stage's own `dp` axis). Expert parallelism widens it as it needs."""
    microbatch: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] = RECOMPUTES
    sharding: tuple[Sharding, ...] = SHARDINGS
    schedules: tuple[ScheduleName, ...] = ("1f1b",)
    max_shapes: int | None = None
    """Rows of `Layout.replicas`."""
    uniform_degrees: bool = False
    """Every stage of every replica has the same tp, cp, dp, ep and recompute."""
    uniform_cuts: bool = False
    """Every replica has the same cut (decoder layers by stage position), whatever group its stages run on."""
    equal_cuts: bool = False
    """Stages hold equal numbers of decoder layers."""
    uniform_microbatches: bool = False
    """Every replica takes the same microbatch size and count."""
    replicas: tuple[int, ...] | None = None
    """Replicas of all rows together."""
    equal_dp: bool = False
    """All stages of a replica split a microbatch over the same dp."""
    tp_within_node: bool = True
    """Tensor-parallel groups stay inside one fast-link domain."""
    allow_mixed_vendors: bool = True
    """Ranks of different vendors may exchange data (over the network, by a bridge such as gloo)."""
    min_decoder_layers: int = 0
    """Decoder layers every stage must hold."""
    pinned_layers: tuple[int, ...] | None = None
    """Decoder layers of each stage, in order, given by the user."""
    exclude: frozenset[str] = frozenset()
    """Groups that must not be used."""


_ONE_GRID = Limits(uniform_degrees=True, uniform_cuts=True, uniform_microbatches=True, allow_mixed_vendors=False)

ENGINES: Mapping[str, Limits] = MappingProxyType(
    {
        "hetplan": Limits(),
        "megatron": _ONE_GRID,
        "torchtitan": replace(_ONE_GRID, sharding=("none", "gradients", "full")),
        "flagscale": Limits(max_shapes=1, stage_dp=(1, 2, 4, 8), sharding=("none", "optimizer")),
        "hexiscale": Limits(
            min_decoder_layers=1, recompute=("none", "full"), sharding=("none",), allow_mixed_vendors=False
        ),
        "deepspeed": replace(_ONE_GRID, pp=(1,), ep=(1,)),
    }
)
