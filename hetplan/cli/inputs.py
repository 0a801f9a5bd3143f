"""What a command works on: cluster, model, workload and calibration, read from files or named by a plan."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hetplan.errors import Location, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from hetplan.catalog.load import Source
    from hetplan.costs.prices import Prices
    from hetplan.plan.limits import Limits
    from hetplan.plan.records import Estimate, Input, Layout, Plan, Proof
    from hetplan.report.layouts import Setting
    from hetplan.specs.calibration import Calibration
    from hetplan.specs.cluster import Cluster
    from hetplan.specs.model import Model
    from hetplan.specs.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadWords:
    """Workload options as given; None: not given."""

    file: Path | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    precision: str | None = None
    gradient_precision: str | None = None
    attention: str | None = None
    sequence_parallel: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that is priced, with the files it came from."""

    cluster: Cluster
    model: Model
    workload: Workload
    calibration: Calibration | None
    cluster_input: Input
    model_input: Input
    calibration_input: Input | None
    stray_names: tuple[str, ...] = ()
    """What is said of names in the calibration that nothing answers to."""

    @property
    def setting(self) -> Setting:
        """What reports name."""
        from hetplan.report.layouts import Setting

        return Setting(cluster=self.cluster, model=self.model, workload=self.workload)

    @property
    def prices(self) -> Prices:
        """The cost model."""
        from hetplan.costs.prices import price

        return price(self.cluster, self.model, self.workload, self.calibration)

    def warn(self) -> None:
        """Say on stderr what is allowed but hardly meant."""
        from hetplan.cli.output import remark
        from hetplan.units import escape

        for sentence in self.stray_names:
            remark(f"warning: {sentence}")
        most = self.model.max_seq_len
        if most is not None and self.workload.seq_len > most:
            name = escape(self.model.name)
            remark(f"note: {self.workload.seq_len:,} tokens a sample are more than the {most:,} positions of {name}")


def load_job(
    cluster_name: str,
    model_name: str,
    words: WorkloadWords,
    calibration: Path | None,
    *,
    is_used: Callable[[str], bool] = bool,
) -> Job:
    """Return what the command line names; only groups that are used have a say in the precision.

    Raises:
        SpecError: a file is not what its kind demands.
        UsageError: an option is missing or senseless.
    """
    from hetplan.catalog.load import load_calibration, load_cluster, load_model
    from hetplan.catalog.strays import stray_names

    cluster, cluster_source = load_cluster(cluster_name)
    model, model_source = load_model(model_name)
    constants, calibration_source = load_calibration(calibration) if calibration else (None, None)
    return Job(
        stray_names=stray_names(calibration, cluster) if calibration else (),
        cluster=cluster,
        model=model,
        workload=_workload(words, cluster, is_used),
        calibration=constants,
        cluster_input=_input(cluster_source),
        model_input=_input(model_source),
        calibration_input=_input(calibration_source) if calibration_source else None,
    )


def _input(source: Source) -> Input:
    from hetplan.plan.records import Input

    return Input(name=source.name, sha256=source.sha256)


def _workload(words: WorkloadWords, cluster: Cluster, is_used: Callable[[str], bool]) -> Workload:
    """Return the workload file's fields with the options over them."""
    from hetplan.specs.read_workload import WorkloadFields, make_workload, workload_fields

    given = {
        field.name: value
        for field in fields(WorkloadWords)
        if field.name != "file" and (value := getattr(words, field.name)) is not None
    }
    written: WorkloadFields = workload_fields(words.file) if words.file else {}
    excluded = [group.name for group in cluster.groups if not is_used(group.name)]
    return make_workload(cast(WorkloadFields, {**written, **given}), cluster, excluded)


FP32_GRADIENT_ENGINES = frozenset({"megatron", "flagscale"})
"""Engines that keep and reduce bf16 gradients in fp32 unless told otherwise (megatron/training/arguments.py)."""


def for_engine(job: Job, engine: str) -> Job:
    """Return a job with what an engine does where the user says nothing: the width of gradients."""
    workload = job.workload
    silent = workload.gradient_precision is None and workload.precision in ("bf16", "fp8")
    if engine not in FP32_GRADIENT_ENGINES or not silent:
        return job
    return replace(job, workload=replace(workload, gradient_precision="fp32"))


def plan_of(job: Job, layout: Layout, estimate: Estimate, proof: Proof | None) -> Plan:
    """Return a layout together with what it was made from."""
    from hetplan.plan.records import Plan

    return Plan(
        layout=layout,
        cluster=job.cluster_input,
        model=job.model_input,
        calibration=job.calibration_input,
        workload=stated_fields(job.workload),
        estimate=estimate,
        proof=proof,
    )


ALWAYS_STATED = frozenset({"seq_len", "global_batch", "precision"})


def stated_fields(workload: Workload) -> Mapping[str, str | int | bool]:
    """Return the fields that are not at their defaults, and those a reader always wants to see."""
    return {
        field.name: value
        for field in fields(workload)
        if (value := getattr(workload, field.name)) != field.default or field.name in ALWAYS_STATED
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """A plan read from a file, with what it was made from as that is now."""

    plan: Plan
    job: Job
    changed: tuple[str, ...]
    """Files whose content is no longer what the plan was made from."""

    @property
    def limits(self) -> Limits:
        """What the plan's engine can run; what the user once narrowed is not asked again."""
        from hetplan.plan.limits import ENGINES

        engine = ENGINES[self.plan.proof.engine if self.plan.proof else "hetplan"]
        stages = [stage for replica in self.plan.layout.replicas for stage in replica.stages]
        widened = replace(engine, cp=tuple({stage.cp for stage in stages}), schedules=(self.plan.layout.schedule,))
        return (
            replace(widened, stage_dp=tuple({stage.dp for stage in stages}))
            if engine == ENGINES["hetplan"]
            else widened
        )


def load_plan(path: str, *, cluster: str | None = None, calibration: Path | None = None) -> SavedPlan:
    """Return a saved plan; a cluster or calibration given here takes the place of the plan's own.

    Raises:
        SpecError: the plan, or a file it names, cannot be read.
    """
    from hetplan.plan.read_plan import read_plan
    from hetplan.specs.read_workload import WorkloadFields, make_workload

    plan = read_plan(Path(path))
    _require_inputs(plan, path, [kind for kind, other in (("cluster", cluster), ("calibration", calibration)) if other])
    constants = calibration or (Path(found(plan.calibration.name, path)) if plan.calibration else None)
    words = WorkloadWords(seq_len=1, global_batch=1)
    job = load_job(cluster or found(plan.cluster.name, path), found(plan.model.name, path), words, constants)
    inputs = (
        (None if cluster else plan.cluster, job.cluster_input),
        (plan.model, job.model_input),
        (None if calibration else plan.calibration, job.calibration_input),
    )
    return SavedPlan(
        plan=plan,
        job=replace(job, workload=make_workload(cast(WorkloadFields, dict(plan.workload)), job.cluster)),
        changed=tuple(before.name for before, after in inputs if before and after and before.sha256 != after.sha256),
    )


def found(name: str, plan_path: str) -> str:
    """Return where a file named in a plan is: beside the plan, else as seen from the current folder.

    A catalog name, of which no file exists in either, stays as it is.
    """
    if os.path.isabs(name):
        return name
    beside = os.path.join(os.path.dirname(plan_path), name)
    return beside if os.path.isfile(beside) else name


def _require_inputs(plan: Plan, path: str, replaced: Collection[str]) -> None:
    """Refuse a plan whose files are not there; `replaced` names inputs that others take the place of.

    Raises:
        SpecError: a file is neither beside the plan nor in the current folder.
    """
    from hetplan.catalog.load import is_path
    from hetplan.plan.drift import line_of
    from hetplan.specs.nodes import nodes_from_bytes, read_bytes
    from hetplan.units import escape, show

    named = {"cluster": plan.cluster, "model": plan.model, "calibration": plan.calibration}
    for kind, source in named.items():
        if source is None or kind in replaced or (kind != "cluster" and not is_path(source.name)):
            continue
        if not os.path.exists(found(source.name, path)):
            is_plain = os.path.isfile(path)
            root = nodes_from_bytes(read_bytes(Path(path)), path) if is_plain else None
            line, column = line_of(root, (kind, "name")) if root is not None else (1, 1)
            where = " at that path" if os.path.isabs(source.name) else " beside the plan or in the current folder"
            raise SpecError(
                f"there is no file {show(source.name)}{where}",
                location=Location(file=escape(path), line=line, column=column),
                path=f"{kind}.name",
            )
