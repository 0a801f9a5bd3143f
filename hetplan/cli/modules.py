"""Jobs of several modules on the command line: what `search --data`, `check` and `emit` do with module plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetplan.cli.options import parse_counts, parse_words, refuse_given
from hetplan.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import typer

    from hetplan.cli.inputs import Job, WorkloadWords
    from hetplan.plan.drift import Finding
    from hetplan.plan.module_job import ModuleJob, Sampling
    from hetplan.plan.module_text import ModulePlan
    from hetplan.plan.module_time import Assign
    from hetplan.plan.modules import ModuleLayout
    from hetplan.plan.records import Input
    from hetplan.report.checks import Verdict
    from hetplan.report.modules import ModuleReport, Rival
    from hetplan.search.modules import ModuleRequest, ModuleResult

KEPT = frozenset(
    {
        "cluster", "model", "global_batch", "workload", "precision", "gradient_precision", "attention",
        "no_sequence_parallel", "calibration", "out", "exclude", "tp", "pp", "recompute", "sharding", "seed",
        "no_compare", "as_json", "quiet", "verbose", "data", "draws", "balanced", "arrangement", "microbatches",
        "prices",
    }
)  # fmt: skip
"""Options of `search` that mean something with --data."""
WHY = "has no effect with --data, which lays modules out on grids of their own"
TOLERANCE = 0.01
"""Relative drift of a module plan's step time that is still no failure."""


def search_with_data(context: typer.Context, words: WorkloadWords) -> None:
    """Search the layouts of a model's modules as the options of `search` ask, write the plan and show the best.

    Raises:
        InfeasibleError: no layout fits.
        UsageError: an option makes no sense.
    """
    from hetplan.catalog.load_data import load_data
    from hetplan.cli.inputs import load_job
    from hetplan.plan.module_job import Sampling, mean_tokens, module_job
    from hetplan.plan.records import Input
    from hetplan.search.modules import search_modules

    refuse_given(context, KEPT, WHY)
    asked = context.params
    exclude = tuple(asked["exclude"] or ())
    data, source = load_data(asked["data"])
    words = replace(words, seq_len=mean_tokens(data))
    names = (asked["cluster"], asked["model"])
    job = load_job(*names, words, asked["calibration"], is_used=lambda name: name not in exclude)
    if len(job.model.modules) < 2:
        raise UsageError(f"model {job.model.name!r} has one module; --data is for models of several")
    assign: Assign = "balanced" if asked["balanced"] else "arrival"
    sampling = Sampling(num_draws=asked["draws"], seed=asked["seed"], assign=assign)
    modular = module_job(job.prices, data, sampling)
    request = _request(asked, job.workload.global_batch)
    result = search_modules(modular.prices, modular.draws, request)
    plan = _plan(job, Input(name=source.name, sha256=source.sha256), sampling, result)
    rivals = () if asked["no_compare"] else tuple(_rivals(modular, request))
    _show(_report(job, modular, sampling, (result, rivals)), plan, (asked["out"], asked["as_json"]))


def _show(report: ModuleReport, plan: ModulePlan, answer: tuple[Path | None, bool]) -> None:
    from hetplan.cli.output import show, show_json, write_whole
    from hetplan.plan.module_text import module_plan_document, module_plan_text
    from hetplan.report.modules import module_document, module_search_text

    out, as_json = answer
    if out is not None:
        write_whole(out, module_plan_text(plan))
    if as_json:
        show_json(module_document(report, module_plan_document(plan)))
    else:
        show(module_search_text(report))


def _request(asked: Mapping[str, Any], batch: int) -> ModuleRequest:
    from hetplan.search.modules import ModuleRequest
    from hetplan.specs.workload import RECOMPUTES, SHARDINGS

    sharding = parse_words(asked["sharding"], "--sharding", SHARDINGS) or ("optimizer",)
    if len(sharding) != 1 or sharding[0] not in ("none", "optimizer"):
        raise UsageError("--sharding: with --data give one of none, optimizer")
    kinds = parse_words(asked["arrangement"], "--arrangement", ("disjoint", "colocated"))
    return ModuleRequest(
        global_batch=batch,
        effort=asked["prices"],
        microbatches=parse_counts(asked["microbatches"], "--microbatches"),
        tp=parse_counts(asked["tp"], "--tp"),
        pp=parse_counts(asked["pp"], "--pp"),
        recompute=parse_words(asked["recompute"], "--recompute", RECOMPUTES) or ("none", "full"),
        sharding=sharding[0],
        arrangement=kinds or ("disjoint", "colocated"),
        exclude=frozenset(asked["exclude"] or ()),
    )


def _plan(job: Job, data_input: Input, sampling: Sampling, result: ModuleResult) -> ModulePlan:
    from hetplan.cli.inputs import stated_fields
    from hetplan.plan.module_text import ModulePlan

    return ModulePlan(
        layout=result.layout,
        cluster=job.cluster_input,
        model=job.model_input,
        data=data_input,
        calibration=job.calibration_input,
        workload=stated_fields(job.workload),
        assign=sampling.assign,
        num_draws=sampling.num_draws,
        seed=sampling.seed,
        step_s=result.estimate.step_s,
        spread_s=result.estimate.spread_s,
        bound_s=result.bound_s,
        proved=result.proved,
    )


def _report(
    job: Job, modular: ModuleJob, sampling: Sampling, found: tuple[ModuleResult, tuple[Rival, ...]]
) -> ModuleReport:
    from hetplan.report.modules import ModuleReport
    from hetplan.units import escape

    origins = sorted({f"{name} {origin}" for name, origin in modular.prices.prices.origins().items()})
    return ModuleReport(
        title=f"{escape(job.model.name)} on {escape(job.cluster.name)}: {job.workload.global_batch} samples of "
        f"{escape(modular.data.name)} a step",
        result=found[0],
        rivals=found[1],
        assign=sampling.assign,
        num_draws=sampling.num_draws,
        mean_tokens=_language_tokens(modular),
        origins=f"numbers: {', '.join(origins)}",
    )


def _language_tokens(modular: ModuleJob) -> float:
    from hetplan.costs.samples import TOKENS, is_language

    name = next((m.name for m in modular.prices.prices.model.modules if is_language(m)), None)
    features = modular.draws.features_dbf
    return float(features[name or next(iter(features))][..., TOKENS].mean())


def _rivals(modular: ModuleJob, request: ModuleRequest) -> Iterator[Rival]:
    """Yield the best of each arrangement, one grid for all, and the encoder in the bubbles of that grid."""
    from hetplan.report.modules import Rival
    from hetplan.search.modules import search_modules

    for name in ("disjoint", "colocated", "joint"):
        kinds = ("disjoint",) if name == "joint" else (name,)
        title = {"joint": "one grid, one chain", "disjoint": "ranks of their own", "colocated": "the same ranks"}[name]
        try:
            asked = replace(request, arrangement=kinds)
            found = search_modules(modular.prices, modular.draws, asked, joint=name == "joint")
        except InfeasibleError:
            yield Rival(name=title, step_s=None, note="nothing fits")
            continue
        grids = " | ".join(f"tp{p.tp} pp{p.pp} dp{p.dp}" for p in found.layout.placements)
        yield Rival(name=title, step_s=found.estimate.step_s, note=f"{found.layout.num_microbatches} x {grids}")
        if name == "joint":
            yield from _bubbles(modular, found.layout)


def _bubbles(modular: ModuleJob, layout: ModuleLayout) -> Iterator[Rival]:
    """Yield the encoder in bubbles on the grid of the best chain, for the mean sample, where there are bubbles."""
    from hetplan.costs.prices import price
    from hetplan.plan.module_job import with_mean_tokens
    from hetplan.report.modules import Rival
    from hetplan.report.tables import percent
    from hetplan.search.encoder_bubbles import Grid, encoder_in_bubbles

    joint = layout.placements[0]
    if joint.pp == 1:
        return
    grid = Grid(
        group=joint.group,
        tp=joint.tp,
        pp=joint.pp,
        dp=joint.dp,
        microbatch=layout.samples // joint.dp,
        recompute=joint.recompute,
    )
    model, workload = with_mean_tokens(modular)
    prices = modular.prices.prices
    try:
        found = encoder_in_bubbles(price(prices.cluster, model, workload, prices.calibration), grid)
    except UsageError:
        return
    idle = percent(sum(found.bubbles.values()))
    note = f"mean sample: idle {idle} of {found.joint_s:.3g} s; memory {100 * found.memory_overhead:+.0f} %"
    yield Rival(name="encoder in its bubbles", step_s=found.filled_s, note=note)


def load_module_plan(path: Path) -> tuple[ModulePlan, Job, ModuleJob, tuple[str, ...]]:
    """Return a saved module plan, its job as it is now, and the files that have changed since.

    Raises:
        SpecError: the plan, or a file it names, cannot be read.
    """
    from hetplan.catalog.load_data import load_data
    from hetplan.cli.inputs import WorkloadWords, found, load_job
    from hetplan.plan.module_job import Sampling, module_job
    from hetplan.plan.module_text import read_module_plan

    plan = read_module_plan(path)
    known = {name: plan.workload.get(name) for name in ("seq_len", "global_batch", "precision", "gradient_precision")}
    words = WorkloadWords(
        **known,  # type: ignore[arg-type]  # read as the fields' own types
        attention=plan.workload.get("attention"),  # type: ignore[arg-type]
        sequence_parallel=plan.workload.get("sequence_parallel"),  # type: ignore[arg-type]
    )
    names = [found(source.name, str(path)) for source in (plan.cluster, plan.model)]
    calibration = Path(found(plan.calibration.name, str(path))) if plan.calibration else None
    data_path = Path(found(plan.data.name, str(path)))
    job = load_job(names[0], names[1], words, calibration)
    sampling = Sampling(num_draws=plan.num_draws, seed=plan.seed, assign=plan.assign)
    data, data_source = load_data(data_path)
    modular = module_job(job.prices, data, sampling)
    saved = {"cluster": plan.cluster, "model": plan.model, "data": plan.data}
    now = {"cluster": job.cluster_input.sha256, "model": job.model_input.sha256}
    now["data"] = data_source.sha256
    return plan, job, modular, tuple(name for name, source in saved.items() if source.sha256 != now[name])


def module_verdict(path: str) -> Verdict:
    """Return what a check finds in a module plan.

    Raises:
        SpecError: it, or a file it names, cannot be read.
    """
    from hetplan.plan.drift import Finding
    from hetplan.plan.module_time import estimate_modules
    from hetplan.plan.modules import check_modules
    from hetplan.report.checks import Located, Verdict
    from hetplan.units import format_seconds

    plan, job, modular, changed = load_module_plan(Path(path))
    found: list[Finding] = [
        Finding(aspect="inputs", message=f"the {name} file is not what the plan was made from") for name in changed
    ]
    broken = check_modules(plan.layout, job.model, job.cluster)
    found += [Finding(aspect="rules", message=str(violation), rule=violation.rule) for violation in broken]
    notes = [f"step time {format_seconds(plan.step_s)} when saved"]
    if not broken:
        estimate = estimate_modules(plan.layout, modular.prices, modular.draws)
        notes.append(f"{format_seconds(estimate.step_s)} now")
        found += _drift(plan, estimate.step_s, estimate.fits)
    return Verdict(
        path=path, findings=tuple(Located(finding=finding, file=path) for finding in found), notes=("; ".join(notes),)
    )


def _drift(plan: ModulePlan, now_s: float, fits: bool) -> Iterator[Finding]:
    from hetplan.plan.drift import Finding
    from hetplan.units import format_seconds

    if abs(now_s - plan.step_s) > TOLERANCE * plan.step_s:
        change = 100 * (now_s / plan.step_s - 1)
        yield Finding(aspect="time", message=f"a step takes {format_seconds(now_s)} now, {change:+.1f} %")
    if not fits:
        yield Finding(aspect="memory", message="a unit's peak is above what its devices offer")


def module_files(path: Path, engine: str, launcher: str) -> Mapping[str, str]:
    """Return the files of a module plan for an engine.

    Raises:
        UsageError: the engine or launcher cannot run it.
        CheckFailedError: this layout is beyond what MegatronMIMO runs, or breaks a rule.
    """
    from hetplan.emit.mimo import MimoJob, emit_mimo, refuse_engine
    from hetplan.errors import CheckFailedError
    from hetplan.plan.modules import check_modules

    refuse_engine(engine)
    if launcher not in ("torchrun", "slurm"):
        raise UsageError(f"--via {launcher}: a MegatronMIMO job is started by slurm (one srun of several programs)")
    plan, job, _, _ = load_module_plan(path)
    broken = check_modules(plan.layout, job.model, job.cluster)
    if broken:
        raise CheckFailedError(f"the plan breaks {len(broken)} rules: {broken[0]}")
    return emit_mimo(
        MimoJob(
            layout=plan.layout,
            cluster=job.cluster,
            model=job.model,
            plan_text=path.read_text(encoding="utf-8"),
            seq_len=job.workload.seq_len,
        )
    )
