"""Why an engine cannot run a plan, in its own words: by name, stage and number.

What a plan may be for an engine is `hetplan.plan.limits.ENGINES`, which `hetplan search --engine` obeys. The profiles
here add what a search leaves at one value anyway (schedules) and vLLM, which serves the layer split of a plan and
trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hetplan.emit.records import Job
from hetplan.plan.limits import ENGINES, Limits
from hetplan.plan.records import SCHEDULES, ScheduleName, Stage
from hetplan.plan.rules import listed, row_place
from hetplan.specs.cluster import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What an engine can run."""

    limits: Limits
    schedules: tuple[ScheduleName, ...]
    says: str
    """What its configuration can say, in a few words."""
    max_cp: int | None = None
    vpp: bool = True
    precisions: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16", "fp8")


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "hetplan": Profile(
            limits=ENGINES["hetplan"], schedules=SCHEDULES, precisions=("fp32", "tf32", "bf16"), says="every plan"
        ),
        "megatron": Profile(
            limits=ENGINES["megatron"],
            schedules=("1f1b", "interleaved"),
            says="one grid of degrees; any layers a stage, the same in every replica",
        ),
        "torchtitan": Profile(
            limits=ENGINES["torchtitan"],
            schedules=("gpipe", "1f1b", "interleaved"),
            precisions=("fp32", "bf16"),
            says="one grid of degrees; any layers a stage, the same in every replica",
        ),
        "flagscale": Profile(
            limits=ENGINES["flagscale"],
            schedules=("1f1b",),
            precisions=("fp32", "fp16", "bf16"),
            says="one pipeline of meshes, each with its own tp, cp, ep, dp; any layers a stage",
            vpp=False,
        ),
        "hexiscale": Profile(
            limits=ENGINES["hexiscale"],
            schedules=("gpipe", "1f1b"),
            says="pipelines of their own length, tp, layers and share of the batch; nothing sharded",
            max_cp=1,
            vpp=False,
            precisions=("fp32", "fp16", "bf16"),
        ),
        "deepspeed": Profile(
            limits=ENGINES["deepspeed"],
            schedules=SCHEDULES,
            precisions=("fp32", "fp16", "bf16"),
            says="data parallelism with ZeRO and one tp, no pipeline; any number of devices a node",
            max_cp=1,
        ),
        "vllm": Profile(
            limits=Limits(
                ep=(1,), min_decoder_layers=1, uniform_degrees=True, uniform_cuts=True, allow_mixed_vendors=False
            ),
            schedules=SCHEDULES,
            says="serves the layer split: one tp, any layers a stage, the same in every replica",
            max_cp=1,
            vpp=False,
        ),
    }
)


def refusals(job: Job, engine: str) -> tuple[str, ...]:
    """Return what an engine cannot run of a plan, one phrase each (empty: it can)."""
    profile = PROFILES[engine]
    found = [*_degrees(job, profile.limits), *_rows(job, profile.limits), *_values(job, profile)]
    vendors = dict.fromkeys(job.cluster.group(stage.group).device.vendor for stage in _stages(job))
    if len(vendors) > 1 and not profile.limits.allow_mixed_vendors:
        found.append(f"devices of {listed(vendors)} in one job: their collective libraries do not talk to each other")
    return tuple(found)


def _stages(job: Job) -> list[Stage]:
    return [stage for replica in job.layout.replicas for stage in replica.stages]


_DEGREES: tuple[tuple[str, Callable[[Stage], object]], ...] = (
    ("tp", lambda stage: stage.tp),
    ("cp", lambda stage: stage.cp),
    ("dp", lambda stage: stage.dp),
    ("ep", lambda stage: stage.ep),
    ("recomputation", lambda stage: stage.recompute),
)


def _degrees(job: Job, limits: Limits) -> Iterator[str]:
    if not limits.uniform_degrees:
        return
    replicas = job.layout.replicas
    for name, value in _DEGREES:
        if len({value(stage) for stage in _stages(job)}) == 1:
            continue
        inside = next((replica for replica in replicas if len({value(s) for s in replica.stages}) > 1), None)
        if inside is not None:
            words = listed(f"stage {i}: {value(stage)}" for i, stage in enumerate(inside.stages))
            yield f"stages with different {name} ({words})"
        else:
            words = listed(f"{row_place(i)}: {value(replica.stages[0])}" for i, replica in enumerate(replicas))
            yield f"replicas with different {name} ({words})"


def _rows(job: Job, limits: Limits) -> Iterator[str]:
    replicas = job.layout.replicas
    if limits.max_shapes is not None and len(replicas) > limits.max_shapes:
        yield f"{len(replicas)} replica shapes (at most {limits.max_shapes})"
    if limits.uniform_cuts and len({tuple(s.first_layer for s in replica.stages) for replica in replicas}) > 1:
        words = listed(
            f"{row_place(i)}: {'+'.join(str(stage.num_layers) for stage in replica.stages)}"
            for i, replica in enumerate(replicas)
        )
        yield f"replicas cut differently (layers with embedding and head, {words})"
    if limits.uniform_microbatches and len({(r.microbatch, r.num_microbatches) for r in replicas}) > 1:
        words = listed(
            f"{row_place(i)}: {replica.num_microbatches} of {replica.microbatch}" for i, replica in enumerate(replicas)
        )
        yield f"replicas with different microbatches ({words})"


def _values(job: Job, profile: Profile) -> Iterator[str]:
    layout, limits = job.layout, profile.limits
    if layout.schedule not in profile.schedules:
        yield f"the schedule {layout.schedule} (it has {listed(profile.schedules)})"
    if layout.sharding not in limits.sharding:
        yield f"sharding {layout.sharding} (it has {listed(limits.sharding)})"
    recompute = sorted({stage.recompute for stage in _stages(job)} - set(limits.recompute))
    if recompute:
        yield f"{listed(recompute)} recomputation (it has {listed(limits.recompute)})"
    pipelines = sorted({replica.pp for replica in layout.replicas} - set(limits.pp or ())) if limits.pp else []
    if pipelines:
        yield f"pipelines of {listed(pipelines)} stages (its pp is {listed(limits.pp or ())})"
    if profile.max_cp is not None and any(stage.cp > profile.max_cp for stage in _stages(job)):
        yield "context parallelism"
    if not profile.vpp and any(replica.vpp > 1 for replica in layout.replicas):
        yield "virtual stages"
