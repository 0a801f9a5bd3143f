"""Rules that come from `Limits`: what the user allows and what an engine can run; one function a field."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hetplan.plan.records import Replica, Stage
from hetplan.plan.rules import Case, Violation, listed, row_place, stage_place


def _refuse(where: str, message: str) -> Violation:
    return Violation(rule="limits", where=where, message=message)


def _among(
    case: Case, name: str, allowed: tuple[object, ...] | None, value: Callable[[Stage], object]
) -> Iterator[Violation]:
    """Refuse stages whose value is not among the allowed."""
    if allowed is None:
        return
    for where, _, stage in case.stages():
        if value(stage) not in allowed:
            yield _refuse(where, f"{name} {value(stage)} is not allowed (allowed: {listed(allowed)})")


def allowed_tp(case: Case) -> Iterator[Violation]:
    """Return stages whose tp is not allowed."""
    return _among(case, "tp", case.limits.tp, lambda stage: stage.tp)


def allowed_cp(case: Case) -> Iterator[Violation]:
    """Return stages whose cp is not allowed."""
    return _among(case, "cp", case.limits.cp, lambda stage: stage.cp)


def allowed_ep(case: Case) -> Iterator[Violation]:
    """Return stages whose ep is not allowed."""
    return _among(case, "ep", case.limits.ep, lambda stage: stage.ep)


def allowed_recompute(case: Case) -> Iterator[Violation]:
    """Return stages whose recomputation is not allowed."""
    return _among(case, "recompute", case.limits.recompute, lambda stage: stage.recompute)


def allowed_stage_dp(case: Case) -> Iterator[Violation]:
    """Return stages whose own dp is not allowed; expert parallelism may widen it."""
    allowed = case.limits.stage_dp
    for where, _, stage in case.stages():
        if stage.ep == 1 and stage.dp not in allowed:
            yield _refuse(where, f"dp {stage.dp} inside a stage is not allowed (allowed: {listed(allowed)})")


def _rows_among(
    case: Case, name: str, allowed: tuple[int, ...] | None, value: Callable[[Replica], int]
) -> Iterator[Violation]:
    if allowed is None:
        return
    for row, replica in enumerate(case.layout.replicas):
        if value(replica) not in allowed:
            yield _refuse(row_place(row), f"{name} {value(replica)} is not allowed (allowed: {listed(allowed)})")


def allowed_pp(case: Case) -> Iterator[Violation]:
    """Return rows whose pp is not allowed."""
    return _rows_among(case, "pp", case.limits.pp, lambda replica: replica.pp)


def allowed_microbatch(case: Case) -> Iterator[Violation]:
    """Return rows whose microbatch is not allowed."""
    return _rows_among(case, "microbatch", case.limits.microbatch, lambda replica: replica.microbatch)


def allowed_schedule(case: Case) -> Iterator[Violation]:
    """The schedule and the sharding are among the allowed."""
    layout, limits = case.layout, case.limits
    if layout.schedule not in limits.schedules:
        yield _refuse("", f"schedule {layout.schedule} is not allowed (allowed: {listed(limits.schedules)})")
    if layout.sharding not in limits.sharding:
        yield _refuse("", f"sharding {layout.sharding} is not allowed (allowed: {listed(limits.sharding)})")


def few_shapes(case: Case) -> Iterator[Violation]:
    """There are at most `max_shapes` rows."""
    most, rows = case.limits.max_shapes, len(case.layout.replicas)
    if most is not None and rows > most:
        yield _refuse("", f"{rows} replica shapes, at most {most} allowed")


def allowed_replicas(case: Case) -> Iterator[Violation]:
    """Return whether there are as many replicas as allowed."""
    allowed, found = case.limits.replicas, sum(replica.copies for replica in case.layout.replicas)
    if allowed is not None and found not in allowed:
        yield _refuse("", f"{found} replicas are not allowed (allowed: {listed(allowed)})")


def uniform_degrees(case: Case) -> Iterator[Violation]:
    """Every stage has the degrees of the first."""
    if not case.limits.uniform_degrees:
        return
    wanted = _degrees(case.layout.replicas[0].stages[0])
    for where, _, stage in case.stages():
        if _degrees(stage) != wanted:
            yield _refuse(where, "degrees and recomputation must equal those of every other stage")
            return


def _degrees(stage: Stage) -> tuple[object, ...]:
    return (stage.tp, stage.cp, stage.dp, stage.ep, stage.recompute)


def uniform_cuts(case: Case) -> Iterator[Violation]:
    """Every row cuts the chain where the first does."""
    if not case.limits.uniform_cuts:
        return
    wanted = _cuts(case.layout.replicas[0])
    for row, replica in enumerate(case.layout.replicas):
        if _cuts(replica) != wanted:
            yield _refuse(row_place(row), "stages must hold the layers they hold in every other replica")
            return


def _cuts(replica: Replica) -> tuple[object, ...]:
    return (replica.vpp, *(stage.first_layer for stage in replica.stages))


def equal_cuts(case: Case) -> Iterator[Violation]:
    """All stages of a row hold equally many decoder layers."""
    if not case.limits.equal_cuts:
        return
    for row, counts in enumerate(case.decoders()):
        if len(set(counts)) > 1:
            yield _refuse(row_place(row), f"stages must hold equally many decoder layers, not {listed(counts)}")


def uniform_microbatches(case: Case) -> Iterator[Violation]:
    """Every row takes as many microbatches of as many samples as the first."""
    if not case.limits.uniform_microbatches:
        return
    wanted = [(replica.microbatch, replica.num_microbatches) for replica in case.layout.replicas]
    for row, share in enumerate(wanted):
        if share != wanted[0]:
            yield _refuse(row_place(row), "microbatches must be as many and as large as every other replica's")
            return


def equal_dp(case: Case) -> Iterator[Violation]:
    """All stages of a row have the same dp."""
    if not case.limits.equal_dp:
        return
    for row, replica in enumerate(case.layout.replicas):
        degrees = [stage.dp for stage in replica.stages]
        if len(set(degrees)) > 1:
            yield _refuse(row_place(row), f"stages must have equal dp, not {listed(degrees)}")


def enough_decoders(case: Case) -> Iterator[Violation]:
    """Every stage holds at least `min_decoder_layers` decoder layers."""
    least = case.limits.min_decoder_layers
    if least <= 0:
        return
    for row, counts in enumerate(case.decoders()):
        for v, count in enumerate(counts):
            if count < least:
                yield _refuse(stage_place(row, v), f"holds {count} decoder layers, at least {least} wanted")


def pinned_layers(case: Case) -> Iterator[Violation]:
    """Stages hold the decoder layers the user gave them."""
    pinned = case.limits.pinned_layers
    if pinned is None:
        return
    for row, counts in enumerate(case.decoders()):
        if tuple(counts) != pinned:
            yield _refuse(row_place(row), f"stages hold {listed(counts)} decoder layers, pinned are {listed(pinned)}")


def excluded_groups(case: Case) -> Iterator[Violation]:
    """No stage runs on a group the user excluded."""
    for where, _, stage in case.stages():
        if stage.group in case.limits.exclude:
            yield _refuse(where, f"group {stage.group} is excluded")


LIMIT_RULES = (
    allowed_tp,
    allowed_cp,
    allowed_ep,
    allowed_recompute,
    allowed_stage_dp,
    allowed_pp,
    allowed_microbatch,
    allowed_schedule,
    few_shapes,
    allowed_replicas,
    uniform_degrees,
    uniform_cuts,
    equal_cuts,
    uniform_microbatches,
    equal_dp,
    enough_decoders,
    pinned_layers,
    excluded_groups,
)
