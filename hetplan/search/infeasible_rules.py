"""Reasons for which no plan can exist that can be read off the request, before any memory is counted.

One function a reason, asked in this order; the first that finds something names the binding constraint.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from hetplan.errors import UsageError
from hetplan.plan.check import degree_errors, valid_ep, valid_tp
from hetplan.plan.cuts import pinned_cut
from hetplan.plan.rules import listed
from hetplan.search.diagnosis import Diagnosis
from hetplan.search.lightest import room_for
from hetplan.search.problem import Problem
from hetplan.specs.cluster import Group


def structural(problem: Problem) -> Diagnosis | None:
    """Return what forbids every plan whatever memory there is, or None."""
    for rule in RULES:
        found = rule(problem)
        if found is not None:
            return found
    return None


def groups_in_use(problem: Problem) -> list[Group]:
    """Return the groups the request does not exclude."""
    return [group for group in problem.prices.cluster.groups if group.name not in problem.limits.exclude]


def _precision(problem: Problem) -> Diagnosis | None:
    precision = problem.prices.workload.precision
    groups = groups_in_use(problem)
    if any(precision in group.device.peak_flop_per_s for group in groups):
        return None
    able = "; ".join(
        f"{group.device.name} (group {group.name}) only in {listed(sorted(group.device.peak_flop_per_s))}"
        for group in groups
    )
    return Diagnosis(constraint="precision", sentence=f"no device of the request computes in {precision}: {able}")


def _able(problem: Problem) -> list[Group]:
    precision = problem.prices.workload.precision
    return [group for group in groups_in_use(problem) if precision in group.device.peak_flop_per_s]


def _degrees(problem: Problem) -> Diagnosis | None:
    """The tp, cp and ep the limits leave must divide the model."""
    model, limits, seq_len = problem.prices.model, problem.limits, problem.prices.workload.seq_len
    for name, asked, valid in (("tp", limits.tp, valid_tp(model)), ("ep", limits.ep, valid_ep(model))):
        if asked is not None and not set(asked) & set(valid):
            reasons = "; ".join(error for degree in asked for error in degree_errors(model, **{name: degree}))
            return Diagnosis(constraint="divisibility", sentence=f"{model.name} cannot be cut as asked: {reasons}")
    if not any(seq_len % (2 * cp if cp > 1 else 1) == 0 for cp in limits.cp):
        reasons = "; ".join(error for cp in limits.cp for error in degree_errors(model, cp=cp, seq_len=seq_len))
        return Diagnosis(constraint="sequence", sentence=f"a sample cannot be cut as asked: {reasons}")
    return None


def _batch(problem: Problem) -> Diagnosis | None:
    """The microbatch sizes the limits leave must make up the global batch."""
    sizes, batch = problem.limits.microbatch, problem.batch
    if sizes is None:
        return None
    able = [size for size in sizes if 1 <= size <= batch]
    if able and batch % gcd(*able) == 0:
        return None
    divisors = [size for size in range(1, min(batch, 64) + 1) if batch % size == 0]
    return Diagnosis(
        constraint="batch",
        sentence=f"microbatches of {listed(sizes)} samples cannot make up a global batch of {batch}; "
        f"sizes that divide it: {listed(divisors[:12])}",
    )


def _layers(problem: Problem) -> Diagnosis | None:
    """The pipeline depths and cuts the limits leave must suit the layers."""
    limits, model = problem.limits, problem.prices.model
    decoders = sum(layer.kind == "decoder" for layer in model.chain)
    if limits.pinned_layers is not None:
        return _pinned(problem, decoders)
    depths = limits.pp or tuple(range(1, problem.num_layers + 1))
    able = [depth for depth in depths if depth <= problem.num_layers]
    if not able:
        return Diagnosis(
            constraint="layers",
            sentence=f"{min(depths)} stages need as many layers; {model.name} has {problem.num_layers}, embedding and "
            "head included",
        )
    if limits.equal_cuts and not any(decoders % depth == 0 for depth in able):
        return Diagnosis(
            constraint="divisibility",
            sentence=f"{decoders} decoder layers cannot be cut into {listed(able)} equal stages; allow unequal stages "
            f"or use a pp of {listed(d for d in range(1, decoders + 1) if decoders % d == 0)}",
        )
    least = limits.min_decoder_layers
    if least * min(able) > decoders:
        return Diagnosis(
            constraint="layers",
            sentence=f"{min(able)} stages of at least {least} decoder layers need {least * min(able)}; "
            f"{model.name} has {decoders}",
        )
    return None


def _pinned(problem: Problem, decoders: int) -> Diagnosis | None:
    pinned, model = problem.limits.pinned_layers, problem.prices.model
    if pinned is None:
        return None
    try:
        pinned_cut(model, pinned)
    except UsageError as error:
        return Diagnosis(constraint="pinned layers", sentence=str(error))
    depths = problem.limits.pp
    if depths is not None and len(pinned) not in depths:
        return Diagnosis(
            constraint="pinned layers",
            sentence=f"{listed(pinned)} pins {len(pinned)} stages, but only a pp of {listed(depths)} is allowed",
        )
    if problem.limits.equal_cuts and len(set(pinned)) > 1:
        return Diagnosis(
            constraint="pinned layers",
            sentence=f"{listed(pinned)} pins unequal stages, but stages must hold equal shares of {decoders} layers",
        )
    return None


def _meshes(problem: Problem) -> Diagnosis | None:
    """Some group must have room for a mesh, and all together for a pipeline."""
    model, limits = problem.prices.model, problem.limits
    if not problem.meshes:
        tps = [tp for tp in valid_tp(model) if limits.tp is None or tp in limits.tp]
        largest = max((size for size, group in _domains(problem)), default=0)
        if limits.tp_within_node and min(tps) > largest:
            return Diagnosis(
                constraint="devices",
                sentence=f"tp {min(tps)} needs {min(tps)} devices joined by fast links; "
                f"the largest such domain has {largest}",
            )
        return Diagnosis(
            constraint="devices",
            sentence=f"no group has room for one stage of tp {min(tps)} x cp {min(limits.cp)}; the cluster has "
            f"{sum(problem.devices_g)} devices",
        )
    depth = len(limits.pinned_layers) if limits.pinned_layers is not None else min(limits.pp or (1,))
    room = sum(
        max(room_for(problem, mesh) for mesh in problem.meshes if mesh.group == g)
        for g in {mesh.group for mesh in problem.meshes}
    )
    if depth > room:
        least = min(mesh.size for mesh in problem.meshes)
        return Diagnosis(
            constraint="devices",
            sentence=f"{depth} stages need {depth * least} devices (meshes of {least}); there is room for {room} such "
            f"meshes on {sum(group.num_devices for group in _able(problem))} devices",
        )
    return None


def _domains(problem: Problem) -> list[tuple[int, Group]]:
    able = {group.name for group in _able(problem)}
    return [
        (domain, group)
        for domain, group in zip(problem.domain_g, problem.prices.cluster.groups, strict=True)
        if group.name in able
    ]


RULES: tuple[Callable[[Problem], Diagnosis | None], ...] = (_precision, _degrees, _batch, _layers, _meshes)
