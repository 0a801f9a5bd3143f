"""What a trainer's settings say of a plan: decoder layers of each stage, and the layout on a cluster.

The rules by which each trainer divides layers are those of `megatron_layout`, `flagscale_meshes` and `module_names`;
here they meet what was written. Nothing that a file leaves open is filled in: a missing batch, group or degree is an
error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetplan.costs.prices import Prices
from hetplan.errors import UsageError
from hetplan.plan.cuts import pinned_cut
from hetplan.plan.flagscale_meshes import Feed, ProcessMesh, layout_of_meshes, parse_meshes
from hetplan.plan.layouts import Grid
from hetplan.plan.megatron_layout import accounted_counts, decoder_counts, flag_counts, parse_layout
from hetplan.plan.placement import place
from hetplan.plan.program import schedule_errors
from hetplan.plan.records import SCHEDULES, Layout, Replica, Stage
from hetplan.plan.rules import listed
from hetplan.specs.importers.layout_settings import LayoutSettings, Pipeline


def virtual_stages(settings: LayoutSettings) -> int:
    """Return the virtual stages of a rank.

    Raises:
        UsageError: the layers of a rank are no multiple of what a virtual stage is to hold.
    """
    if settings.vpp is not None:
        return settings.vpp
    if settings.layout is not None and settings.pp > 1:
        num_stages = len(parse_layout(settings.layout))
        if num_stages % settings.pp:
            raise UsageError(f"{settings.source}: the layout has {num_stages} stages, no multiple of pp {settings.pp}")
        return num_stages // settings.pp
    if settings.trainer == "torchtitan":
        return _torchtitan_stages(settings)
    each, total = settings.layers_per_virtual_stage, settings.num_layers
    if each is None or total is None:
        return 1
    if total % (each * settings.pp):
        raise UsageError(f"{settings.source}: {total} layers are no multiple of pp {settings.pp} x {each} layers")
    return total // (each * settings.pp)


def _torchtitan_stages(settings: LayoutSettings) -> int:
    """Schedules that loop over ranks have two virtual stages a rank unless layers a stage are given."""
    each, total, pp = settings.layers_per_virtual_stage, settings.num_layers, settings.pp
    if settings.stage_layers is not None:
        num_stages = len(settings.stage_layers)
    elif each is not None and total is not None:
        num_stages = -(-(total + sum(settings.less_layers or (1, 1))) // each)
    else:
        num_stages = pp * (1 if settings.schedule in ("gpipe", "1f1b", None) else 2)
    if num_stages % pp:
        raise UsageError(f"{settings.source}: {num_stages} virtual stages are no multiple of pp {pp}")
    return num_stages // pp


def stage_counts(settings: LayoutSettings) -> tuple[int, ...] | None:
    """Return the decoder layers of each virtual stage; None where they follow from a number of layers not known.

    Raises:
        UsageError: the settings contradict themselves or the number of layers.
    """
    total = settings.num_layers
    vpp = virtual_stages(settings)
    if settings.layout is not None:
        stages = parse_layout(settings.layout)
        pp = settings.pp if settings.pp > 1 else len(stages)
        return decoder_counts(stages, pp, vpp if settings.pp > 1 else 1)
    if settings.stage_layers is not None:
        if total is not None and sum(settings.stage_layers) != total:
            raise UsageError(f"{settings.source}: {listed(settings.stage_layers)} layers do not make {total}")
        return settings.stage_layers
    if total is None or settings.pipelines:
        return None
    return _by_rule(settings, total, vpp)


def _by_rule(settings: LayoutSettings, total: int, vpp: int) -> tuple[int, ...]:
    pp = settings.pp
    if settings.trainer == "torchtitan":
        return _evenly_weighted(total, pp * vpp, settings.less_layers or (1, 1))
    if settings.counts_embedding or settings.counts_loss:
        return accounted_counts(total, pp * vpp, embedding=settings.counts_embedding, loss=settings.counts_loss)
    ranks = flag_counts(total, pp, first=settings.first_layers, last=settings.last_layers)
    uneven = [count for count in ranks if count % vpp]
    if uneven:
        raise UsageError(f"{settings.source}: {uneven[0]} layers of a rank are no multiple of vpp {vpp}")
    return tuple(count // vpp for count in ranks) * vpp


def _evenly_weighted(total: int, num_stages: int, less: tuple[int, int]) -> tuple[int, ...]:
    """Return torchtitan's own split: the ends count as `less` layers, the remainder goes to the first stages."""
    if num_stages == 1:
        return (total,)
    first, last = less
    each, extra = divmod(total + first + last, num_stages)
    if each < max(first, last):
        raise UsageError(f"{total} layers cannot fill {num_stages} stages whose ends hold {first} and {last} less")
    counts = [each + (stage < extra) for stage in range(num_stages)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def imported_grid(settings: LayoutSettings, num_layers: int, groups: tuple[str, ...] | None) -> Grid:
    """Return the degrees of uniform settings.

    Raises:
        UsageError: the settings are not uniform, or contradict themselves.
    """
    if settings.pipelines or settings.meshes:
        raise UsageError(f"{settings.source}: stages have degrees of their own")
    settings = settings if settings.num_layers is not None else replace(settings, num_layers=num_layers)
    counts = stage_counts(settings)
    schedule = next((name for name in SCHEDULES if name == settings.schedule), None)
    vpp, pp = virtual_stages(settings), settings.pp
    if settings.layout is not None and pp == 1 and counts is not None:
        pp = len(counts)
    return Grid(
        tp=settings.tp,
        pp=pp,
        cp=settings.cp,
        ep=settings.ep,
        dp=settings.dp,
        vpp=vpp,
        micro_batch=_micro_batch(settings),
        recompute=settings.recompute,
        sharding=settings.sharding,
        schedule=schedule if vpp == 1 or schedule != "1f1b" else None,
        layers_per_stage=counts,
        groups=groups,
    )


def _micro_batch(settings: LayoutSettings) -> int:
    if settings.micro_batch is None:
        raise UsageError(f"{settings.source}: the micro batch size is missing")
    return settings.micro_batch


def uneven_layout(settings: LayoutSettings, prices: Prices, groups: Sequence[str]) -> Layout:
    """Return the placed layout of settings whose stages have degrees of their own.

    `groups`: one for each process mesh, or one for each stage of all pipelines in order.

    Raises:
        UsageError: a batch is not written, the groups do not suit, or the layers are not the model's.
    """
    layout = _of_meshes(settings, prices, groups) if settings.meshes else _of_pipelines(settings, prices, groups)
    for replica in layout.replicas:
        for message in schedule_errors(layout.schedule, replica.pp, replica.num_microbatches, replica.vpp):
            raise UsageError(message)
    return place(layout, prices.cluster)


def _of_meshes(settings: LayoutSettings, prices: Prices, groups: Sequence[str]) -> Layout:
    """The micro batch is that of a rank of the first mesh; the same samples go through all meshes."""
    meshes = parse_meshes(settings.meshes)
    if settings.stage_layers is None:
        raise UsageError(f"{settings.source}: hetero_pipeline_layer_split is missing")
    if settings.micro_batch is None:
        raise UsageError(f"{settings.source}: micro_batch_size is missing")
    size = settings.micro_batch * meshes[0].dp
    odd = [mesh.dp for mesh in meshes if size % mesh.dp]
    if odd:
        raise UsageError(f"{settings.source}: {size} samples of the first mesh cannot be divided by dp {odd[0]}")
    batch = prices.workload.global_batch
    if batch % size:
        raise UsageError(f"a global batch of {batch} is no multiple of micro batch x dp = {size}")
    feed = Feed(groups=tuple(groups), microbatch=size, num_microbatches=batch // size)
    layout = layout_of_meshes(prices.model, meshes, settings.stage_layers, feed)
    return Layout(replicas=layout.replicas, schedule=layout.schedule, sharding=settings.sharding)


def _of_pipelines(settings: LayoutSettings, prices: Prices, groups: Sequence[str]) -> Layout:
    num_stages = sum(len(pipeline.tp) for pipeline in settings.pipelines)
    if len(groups) not in (1, num_stages):
        raise UsageError(f"{len(groups)} groups are named for {num_stages} stages; name one for each, or one for all")
    names = list(groups) if len(groups) == num_stages else [groups[0]] * num_stages
    replicas = []
    for pipeline in settings.pipelines:
        own, names = names[: len(pipeline.tp)], names[len(pipeline.tp) :]
        replicas.append(_replica(settings, prices, pipeline, own))
    return Layout(replicas=tuple(replicas), sharding=settings.sharding)


def _replica(settings: LayoutSettings, prices: Prices, pipeline: Pipeline, groups: Sequence[str]) -> Replica:
    samples, count = pipeline.num_samples, pipeline.num_microbatches
    if samples is None or count is None:
        raise UsageError(f"{settings.source}: --global_bsz_size and --chunks must say each pipeline's batch")
    if samples % count:
        raise UsageError(f"{settings.source}: {samples} samples cannot be divided into {count} microbatches")
    cut = pinned_cut(prices.model, pipeline.layers)
    stages = tuple(
        Stage(group=group, first_layer=cut[i], end_layer=cut[i + 1], tp=tp, recompute=settings.recompute)
        for i, (tp, group) in enumerate(zip(pipeline.tp, groups, strict=True))
    )
    return Replica(stages=stages, microbatch=samples // count, num_microbatches=count)


def mesh_groups(settings: LayoutSettings, device_of: dict[str, str]) -> tuple[str, ...]:
    """Return the group of each process mesh by its device type; `device_of`: group -> names of its device, joined.

    Raises:
        UsageError: a type is that of no group, or of several.
    """
    meshes: tuple[ProcessMesh, ...] = parse_meshes(settings.meshes)
    if len(settings.device_types) != len(meshes):
        raise UsageError(f"{settings.source}: {len(settings.device_types)} device types for {len(meshes)} meshes")
    groups = []
    for word in settings.device_types:
        fitting = [name for name, device in device_of.items() if word.casefold() in device.casefold().split()]
        close = fitting or [name for name, device in device_of.items() if device.casefold().startswith(word.casefold())]
        if len(close) != 1:
            raise UsageError(f"device type {word!r} is that of {len(close)} groups of the cluster; name them: --groups")
        groups.append(close[0])
    return tuple(groups)
