"""Why nothing fits: the binding constraint, how far off it is, the nearest change that fits, the nodes that would do.

What can be read off the request is read first (`infeasible_rules`). Then the lightest layout there is (`lightest`) says
whether memory binds, on which stage, and by how much; where it fits, the rules it breaks name the constraint. Every
change that is offered was tried (`infeasible_fixes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hetplan.costs.prices import Prices, price
from hetplan.plan.estimate import estimate
from hetplan.plan.rules import stage_place
from hetplan.search.diagnosis import Constraint, Diagnosis, Fix, Need
from hetplan.search.infeasible_fixes import attempt, changes, nodes_needed, shorter, tried
from hetplan.search.infeasible_rules import groups_in_use, structural
from hetplan.search.lightest import Near, lightest, overflow_bytes, without
from hetplan.search.problem import Problem
from hetplan.search.records import SearchRequest
from hetplan.specs.training import Rule, how_trained, with_training
from hetplan.units import format_bytes, format_seconds

GIB = 2.0**30
MOST_FIXES = 6
MOST_GROUPS = 4
ADAPTERS = Rule(how="lora", rank=16)
RULE_CONSTRAINTS: Mapping[str, Constraint] = {
    "stages reachable": "network",
    "gradients reachable": "network",
    "one vendor": "vendors",
    "tp inside a node": "devices",
    "memory": "memory",
    "degrees divide the model": "divisibility",
}


def explain_infeasible(problem: Problem, request: SearchRequest, dropped: Mapping[str, int]) -> str:
    """Return why nothing fits: one sentence that stands alone, then one indented line for each piece of advice."""
    return diagnosis_text(diagnose(problem, request), dropped)


def diagnose(problem: Problem, request: SearchRequest) -> Diagnosis:
    """Return the binding constraint of a request that nothing satisfies, with everything that was tried."""
    found = structural(problem)
    if found is not None:
        return replace(found, fixes=_fixes(problem, request))
    near = lightest(problem)
    if near is None:
        return Diagnosis(
            constraint="limits",
            sentence="no layout has the shape the limits ask for",
            fixes=_fixes(problem, request),
        )
    if near.overflow_bytes > 0:
        return _memory(problem, request, near)
    if near.violations:
        violation = near.violations[0]
        return Diagnosis(
            constraint=RULE_CONSTRAINTS.get(violation.rule, "limits"),
            sentence=f"the layout that comes nearest breaks a rule: {violation}",
            near=near,
            fixes=_fixes(problem, request),
        )
    return _beyond_memory(problem, request, near)


def _memory(problem: Problem, request: SearchRequest, near: Near) -> Diagnosis:
    worst = near.worst
    parts = {name.removesuffix("_bytes"): float(getattr(worst.memory, name)) for name in worst.memory.__slots__}
    component = max(parts, key=lambda name: parts[name])
    needs = tuple(
        need
        for group in groups_in_use(problem)[:MOST_GROUPS]
        if (need := nodes_needed(problem, request, group.name)) is not None
    )
    return Diagnosis(
        constraint="memory",
        sentence=_memory_sentence(problem, near, component, parts[component]),
        near=near,
        replica=worst.replica,
        stage=worst.stage,
        group=worst.group,
        shortfall_bytes=near.overflow_bytes,
        component=component,
        component_bytes=parts[component],
        fixes=_fixes(problem, request, shorten=True),
        devices_needed=needs,
        remarks=tuple(beyond_plans(near, problem.prices)),
    )


def _memory_sentence(problem: Problem, near: Near, component: str, component_bytes: float) -> str:
    worst, layout = near.worst, near.layout
    replica = layout.replicas[worst.replica]
    stage = replica.stages[worst.stage]
    degrees = f"tp {stage.tp}, pp {replica.pp}, {replica.copies} replica{'s' if replica.copies > 1 else ''}"
    wider = "".join(f", {name} {degree}" for name in ("cp", "ep") if (degree := getattr(stage, name)) > 1)
    held = f" of {worst.in_flight} microbatches" if component == "activations" else ""
    return (
        f"{problem.prices.model.name} does not fit: in the lightest layout ({degrees}{wider}, microbatch "
        f"{replica.microbatch}, recompute {stage.recompute}, sharding {layout.sharding}) "
        f"{stage_place(worst.replica, worst.stage)} on group {worst.group} needs "
        f"{format_bytes(worst.memory.total_bytes)} a device, {near.overflow_bytes / GIB:.2f} GiB more than the "
        f"{format_bytes(worst.capacity_bytes)} it offers; most is {component}{held} ({format_bytes(component_bytes)})"
    )


def beyond_plans(near: Near, prices: Prices) -> Iterator[str]:
    """Yield what training less, or with states elsewhere, would still need in the same layout."""
    host = sum(
        replica.copies * stage.memory.optimizer_bytes * replica.stages[stage.stage].mesh_size
        for stage in near.estimate.stages
        for replica in (near.layout.replicas[stage.replica],)
    )
    verdict = _verdict(without(near, "optimizer_bytes"))
    yield f"Optimizer states kept in host memory ({format_bytes(host)} in all): {verdict}; hetplan plans no offloading"
    whole = [module.name for module in prices.model.modules if how_trained(module) == "full"]
    if whole and prices.calibration.layers is None:
        rules = ", ".join(f"{name}: {ADAPTERS}" for name in whole)
        model = with_training(prices.model, dict.fromkeys(whole, ADAPTERS))
        found = estimate(near.layout, price(prices.cluster, model, prices.workload, prices.calibration))
        verdict = _verdict(max(overflow_bytes(stage) for stage in found.stages))
        yield f"Training adapters only (LoRA; `train: {{{rules}}}` in a model file): {verdict}"


def _verdict(lacking_bytes: float) -> str:
    return "would fit" if lacking_bytes <= 0 else f"would still lack {lacking_bytes / GIB:.2f} GiB"


def _beyond_memory(problem: Problem, request: SearchRequest, near: Near) -> Diagnosis:
    """Return what binds where a layout fits and keeps every rule."""
    if request.objective in ("cost", "cost-within-time"):
        unpriced = [g.name for g in groups_in_use(problem) if problem.prices.usd_per_s(g.name) is None]
        if unpriced:
            return Diagnosis(
                constraint="price",
                sentence=f"cost cannot be minimised: group {unpriced[0]} has no price (`price: 2.00 USD/h`)",
                near=near,
            )
    if request.objective == "cost-within-time" and request.time_budget_s is not None:
        fastest = attempt(problem.prices, replace(request, objective="time", time_budget_s=None))
        step_s = fastest.estimate.step_s if fastest is not None else near.estimate.step_s
        return Diagnosis(
            constraint="time budget",
            sentence=f"no plan takes a step within {format_seconds(request.time_budget_s)}; the fastest found takes "
            f"{format_seconds(step_s)}",
            near=near,
        )
    replica = near.layout.replicas[0]
    return Diagnosis(
        constraint="search",
        sentence=f"every layout tried breaks a rule, but one of pp {replica.pp} x {replica.copies} replicas is "
        f"valid (step {format_seconds(near.estimate.step_s)}): spend more effort, or narrow the limits to it",
        near=near,
    )


def _fixes(problem: Problem, request: SearchRequest, *, shorten: bool = False) -> tuple[Fix, ...]:
    free = replace(request, objective="time", time_budget_s=None, compare=False)
    wanted = list(changes(problem, free))
    if shorten:
        wanted += shorter(problem, free)
    return tried(iter(wanted[:MOST_FIXES]))


def diagnosis_text(diagnosis: Diagnosis, dropped: Mapping[str, int] | None = None) -> str:
    """Return a diagnosis in words: its sentence, then an indented sentence for each piece of advice."""
    lines = [*fix_lines(diagnosis.fixes), *need_lines(diagnosis.devices_needed)]
    if diagnosis.constraint == "memory" and not diagnosis.devices_needed:
        lines.append("No number of nodes makes it fit under these limits")
    lines += diagnosis.remarks
    if diagnosis.constraint in ("limits", "search") and dropped:
        lines.append("Refused: " + ", ".join(f"{reason} ({count}x)" for reason, count in dropped.items()))
    return "\n".join([f"{diagnosis.sentence}.", *(f"  {line}." for line in lines)]) if lines else diagnosis.sentence


def fix_lines(fixes: tuple[Fix, ...]) -> Iterator[str]:
    """Yield which changes fit, the fastest first, and which do not."""
    works = sorted((fix for fix in fixes if fix.step_s is not None), key=lambda fix: fix.step_s or 0.0)
    if works:
        words = (f"{fix.words} (step {format_seconds(fix.step_s or 0.0)})" for fix in works)
        yield f"What fits: {'; or '.join(words)}"
    others = [fix.words for fix in fixes if fix.step_s is None]
    if others:
        yield f"Not enough alone: {'; '.join(others)}"


def need_lines(needs: tuple[Need, ...]) -> Iterator[str]:
    """Yield how many nodes would do."""
    if needs:
        words = (
            f"{n.nodes} nodes of group {n.group} ({n.devices} devices) instead of {n.existing_nodes}" for n in needs
        )
        yield f"Devices that would do: {'; or '.join(words)}"


__all__ = ["Diagnosis", "diagnose", "diagnosis_text", "explain_infeasible", "overflow_bytes"]
