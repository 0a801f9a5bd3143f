"""FlagScale's process meshes: one pipeline whose stages have degrees of their own, as a flat list of numbers.

``hetero_process_meshes: [tp, cp, ep, dp, pp, tp, cp, ep, dp, pp, ...]`` names meshes in pipeline order, each of
``tp x cp x dp x pp`` devices; ``hetero_pipeline_layer_split`` gives the decoder layers of every stage of every mesh.
Distributed checkpoints (``torch_dist``) need the same tensor-parallel degree everywhere, so meshes whose tp differs
must be saved as ``torch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from hetplan.errors import UsageError
from hetplan.plan.cuts import pinned_cut
from hetplan.plan.records import Layout, Replica, Stage
from hetplan.plan.rules import listed
from hetplan.specs.model import Model

NUMBERS = 5
CheckpointFormat = Literal["torch", "torch_dist"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """A run of equal stages."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int

    @property
    def num_devices(self) -> int:
        """Devices of all its stages."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What the meshes are fed and where they run."""

    groups: tuple[str, ...]
    """Group of each mesh."""
    microbatch: int
    num_microbatches: int


def parse_meshes(numbers: Sequence[int]) -> tuple[ProcessMesh, ...]:
    """Return the meshes of a flat list.

    Raises:
        UsageError: the numbers are no list of meshes.
    """
    if not numbers or len(numbers) % NUMBERS or min(numbers) < 1:
        raise UsageError(f"process meshes come in fives (tp, cp, ep, dp, pp), all at least 1, not {listed(numbers)}")
    rows = [numbers[i : i + NUMBERS] for i in range(0, len(numbers), NUMBERS)]
    return tuple(ProcessMesh(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp) for tp, cp, ep, dp, pp in rows)


def mesh_numbers(meshes: Sequence[ProcessMesh]) -> tuple[int, ...]:
    """Return the flat list of some meshes."""
    return tuple(number for mesh in meshes for number in (mesh.tp, mesh.cp, mesh.ep, mesh.dp, mesh.pp))


def checkpoint_format(meshes: Sequence[ProcessMesh]) -> CheckpointFormat:
    """Return the checkpoint format the meshes can be saved in."""
    return "torch_dist" if len({mesh.tp for mesh in meshes}) == 1 else "torch"


def mesh_warnings(meshes: Sequence[ProcessMesh], wanted: CheckpointFormat) -> tuple[str, ...]:
    """Return what will break with a checkpoint format (empty: nothing)."""
    tps = tuple(dict.fromkeys(mesh.tp for mesh in meshes))
    if wanted == "torch_dist" and len(tps) > 1:
        return (f"meshes of tp {listed(tps)} cannot be saved as torch_dist; set ckpt_format: torch",)
    return ()


def layout_of_meshes(model: Model, meshes: Sequence[ProcessMesh], split: Sequence[int], feed: Feed) -> Layout:
    """Return the layout of process meshes: one replica whose stages carry their own dp axis.

    Raises:
        UsageError: the split does not suit the meshes or the model.
    """
    num_stages = sum(mesh.pp for mesh in meshes)
    if len(split) != num_stages:
        raise UsageError(f"the layer split names {len(split)} stages, the meshes have {num_stages}")
    if len(feed.groups) != len(meshes):
        raise UsageError(f"{len(feed.groups)} groups are named for {len(meshes)} meshes")
    cut = pinned_cut(model, split)
    owners = [(mesh, group) for mesh, group in zip(meshes, feed.groups, strict=True) for _ in range(mesh.pp)]
    stages = tuple(
        Stage(
            group=group,
            first_layer=cut[i],
            end_layer=cut[i + 1],
            tp=mesh.tp,
            cp=mesh.cp,
            dp=mesh.dp,
            ep=mesh.ep,
        )
        for i, (mesh, group) in enumerate(owners)
    )
    return Layout(
        replicas=(Replica(stages=stages, microbatch=feed.microbatch, num_microbatches=feed.num_microbatches),)
    )


def meshes_of(layout: Layout) -> tuple[ProcessMesh, ...]:
    """Return the process meshes of a layout.

    Raises:
        UsageError: replicas differ, which process meshes cannot say.
    """
    if len(layout.replicas) != 1 or layout.replicas[0].vpp != 1:
        raise UsageError("process meshes describe one pipeline without virtual stages; replicas must be equal")
    replica = layout.replicas[0]
    meshes = []
    for key, run in groupby(replica.stages, key=lambda stage: (stage.group, stage.tp, stage.cp, stage.dp, stage.ep)):
        _, tp, cp, dp, ep = key
        meshes.append(ProcessMesh(tp=tp, cp=cp, ep=ep, dp=dp * replica.copies, pp=len(list(run))))
    return tuple(meshes)
