"""Rules a layout must keep before anything about it can be computed: counts, layers, batch, schedule, meshes."""

from __future__ import annotations

from collections.abc import Iterator

from hetplan.plan.program import schedule_errors
from hetplan.plan.records import Replica, Stage
from hetplan.plan.rules import Case, Violation, row_place, stage_place


def positive_counts(case: Case) -> Iterator[Violation]:
    """Every degree and count is at least 1, and there is something at all."""
    if not case.layout.replicas:
        yield _broken("positive counts", "", "the layout has no replica")
    for row, replica in enumerate(case.layout.replicas):
        yield from _below_one(row_place(row), replica, ("microbatch", "num_microbatches", "copies", "vpp"))
        if not replica.stages:
            yield _broken("positive counts", row_place(row), "there is no stage")
        elif replica.vpp >= 1 and len(replica.stages) % replica.vpp:
            message = f"{len(replica.stages)} stages are no multiple of vpp {replica.vpp}"
            yield _broken("positive counts", row_place(row), message)
    for where, _, stage in case.stages():
        yield from _below_one(where, stage, ("tp", "cp", "dp", "ep"))


def _below_one(where: str, record: Replica | Stage, names: tuple[str, ...]) -> Iterator[Violation]:
    for name in names:
        if getattr(record, name) < 1:
            yield _broken("positive counts", where, f"{name} must be at least 1, not {getattr(record, name)}")


def _broken(rule: str, where: str, message: str) -> Violation:
    return Violation(rule=rule, where=where, message=message, unpriceable=True)


def layers_once(case: Case) -> Iterator[Violation]:
    """Each replica holds every layer of the chain exactly once, in order, and no stage is empty."""
    num_layers, rule = len(case.prices.model.chain), "layers exactly once"
    for row, replica in enumerate(case.layout.replicas):
        expected = 0
        for v, stage in enumerate(replica.stages):
            where = stage_place(row, v)
            if stage.first_layer != expected:
                yield _broken(rule, where, f"begins with layer {stage.first_layer}, not {expected}")
            if stage.end_layer <= stage.first_layer:
                yield _broken(rule, where, f"holds no layer ({stage.first_layer} to {stage.end_layer})")
            expected = stage.end_layer
        if replica.stages and expected != num_layers:
            yield _broken(
                rule,
                stage_place(row, len(replica.stages) - 1),
                f"ends before layer {expected}, the model has {num_layers} layers (embedding and head included)",
            )


def virtual_stages_share_a_mesh(case: Case) -> Iterator[Violation]:
    """Virtual stage `i` runs on the mesh of entry `i % pp`: same group, degrees and devices."""
    for row, replica in enumerate(case.layout.replicas):
        for v, stage in enumerate(replica.stages[replica.pp :], start=replica.pp):
            own = replica.stages[v % replica.pp]
            if _mesh_of(stage) != _mesh_of(own):
                message = f"must run on the mesh of stage {v % replica.pp}"
                yield _broken("virtual stages share a mesh", stage_place(row, v), message)


def _mesh_of(stage: Stage) -> tuple[object, ...]:
    return (stage.group, stage.tp, stage.cp, stage.dp, stage.ep, stage.devices)


def schedule_runs(case: Case) -> Iterator[Violation]:
    """The schedule can run each row's counts."""
    for row, replica in enumerate(case.layout.replicas):
        for message in schedule_errors(case.layout.schedule, replica.pp, replica.num_microbatches, replica.vpp):
            yield _broken("schedule", row_place(row), message)


def exact_batch(case: Case) -> Iterator[Violation]:
    """The replicas take exactly the global batch."""
    samples, wanted = case.layout.num_samples, case.prices.workload.global_batch
    if samples != wanted:
        words = " + ".join(_share(replica) for replica in case.layout.replicas)
        yield Violation(
            rule="exact global batch", where="", message=f"replicas take {words} = {samples} samples, not {wanted}"
        )


def _share(replica: Replica) -> str:
    return f"{replica.copies} x {replica.num_microbatches} x {replica.microbatch}"


def whole_samples(case: Case) -> Iterator[Violation]:
    """A stage's own dp divides the microbatch into whole samples."""
    for where, replica, stage in case.stages():
        if replica.microbatch % stage.dp:
            message = f"dp {stage.dp} does not divide a microbatch of {replica.microbatch} samples"
            yield _broken("whole samples a rank", where, message)


COUNT_RULES = (positive_counts,)
SHAPE_RULES = (
    layers_once,
    virtual_stages_share_a_mesh,
    schedule_runs,
    exact_batch,
    whole_samples,
)
