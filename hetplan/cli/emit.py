"""`hetplan emit`: a plan as a folder that a launcher runs with an engine; written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.modules import module_files
from hetplan.cli.options import JsonFlag, one_of
from hetplan.errors import CheckFailedError, HetplanError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hetplan.cli.inputs import SavedPlan
    from hetplan.emit.records import Job
    from hetplan.plan.limits import Limits
    from hetplan.plan.records import Estimate

LIST_WIDTH = 80
MOST_DEVICES_FOR_NEAREST = 20_000
"""Above this many devices a refusal does not search for the nearest plan; `hetplan search --engine` does."""


def emit(
    plan: Annotated[str | None, typer.Argument(metavar="PLAN", help="A saved plan.", show_default=False)] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="ENGINE", help="Engine that runs the plan.")] = None,
    via: Annotated[str, typer.Option("--via", metavar="LAUNCHER", help="Launcher that starts it.")] = "torchrun",
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Folder to make.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List engines, what each can run, and launchers.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a plan as scripts and settings for an engine and a launcher."""
    from hetplan.cli.output import show, show_json

    if show_list:
        show_json(_list_document()) if as_json else show(_list_text())
        return
    if plan is None or to is None or out is None:
        raise UsageError("emit needs PLAN, --to ENGINE and -o DIR (`hetplan emit --list` names engines)")
    files, notes = _files(plan, to, via)
    write_folder(out, files)
    if as_json:
        show_json({"folder": str(out), "files": sorted(files), "notes": list(notes)})
    else:
        show("\n".join([f"{out}: {len(files)} files for {to}, started by {via}; read README.md", *_bullets(notes)]))


def _files(plan: str, to: str, via: str) -> tuple[Mapping[str, str], tuple[str, ...]]:
    from hetplan.cli.inputs import load_plan
    from hetplan.cli.pricing import priced_plan
    from hetplan.emit.emit import EMITTERS, LAUNCHERS
    from hetplan.emit.emit import emit as files_of
    from hetplan.plan.module_text import is_module_plan

    if is_module_plan(Path(plan)):
        return module_files(Path(plan), to, via), ()
    engine, launcher = one_of(to, "--to", tuple(EMITTERS)), one_of(via, "--via", tuple(LAUNCHERS))
    saved = load_plan(plan)
    priced = priced_plan(saved)
    if priced.violations:
        raise priced.broken
    job = job_of(saved, plan)
    try:
        return files_of(job, engine, launcher)
    except CheckFailedError as error:
        raise CheckFailedError(f"{error}{_nearest(saved, job, engine)}") from error


def job_of(saved: SavedPlan, path: str) -> Job:
    """Return a saved plan with the files it names, as they will lie beside it."""
    from dataclasses import replace

    from hetplan.catalog.load import cluster_files, model_files
    from hetplan.cli.inputs import found
    from hetplan.emit.records import Job
    from hetplan.plan.placement import place
    from hetplan.plan.text import plan_text

    plan = saved.plan
    cluster = cluster_files(found(plan.cluster.name, path))
    model = model_files(found(plan.model.name, path))
    calibration = (Path(found(plan.calibration.name, path)),) if plan.calibration else ()
    inputs: dict[str, str] = {}
    names = [
        _add(inputs, files, kind) for files, kind in ((cluster, "cluster"), (model, "model"), (calibration, "cal"))
    ]
    moved = replace(
        plan,
        layout=place(plan.layout, saved.job.cluster),
        cluster=replace(plan.cluster, name=names[0] or plan.cluster.name),
        model=replace(plan.model, name=names[1] or plan.model.name),
        calibration=replace(plan.calibration, name=names[2] or "") if plan.calibration else None,
    )
    text = plan_text(moved)
    return Job(
        layout=moved.layout,
        cluster=saved.job.cluster,
        model=saved.job.model,
        workload=saved.job.workload,
        plan_text=text,
        plan_sha256=sha256(text.encode()).hexdigest(),
        peak_bytes=_peaks(plan.estimate),
        inputs=inputs,
    )


def _add(inputs: dict[str, str], files: tuple[Path, ...], kind: str) -> str:
    """Add a file and those it names; return how the plan then calls it (empty: a catalog name stays).

    Raises:
        UsageError: a file it names cannot lie beside it.
    """
    if not files:
        return ""
    first, *others = files
    name = f"{kind}{first.suffix}"
    for file, beside in ((first, name), *((other, other.name) for other in others)):
        if file is not first and file.parent.resolve() != first.parent.resolve():
            raise UsageError(f"{first} names {file}, which must lie in the same folder to travel with the plan")
        inputs[beside] = file.read_text(encoding="utf-8")
    return name


def _nearest(saved: SavedPlan, job: Job, engine: str) -> str:
    """Return what the nearest plan the engine can run costs over this one, in words."""
    from dataclasses import replace

    from hetplan.emit.capability import PROFILES
    from hetplan.emit.emit import emit as files_of
    from hetplan.plan.limits import ENGINES
    from hetplan.plan.placement import place
    from hetplan.report.layouts import replica_text
    from hetplan.search.quick import quick
    from hetplan.search.records import SearchRequest

    advice = f"`hetplan search --engine {engine}`" if engine in ENGINES else ""
    if saved.job.cluster.num_devices > MOST_DEVICES_FOR_NEAREST:
        return f"; {advice} finds plans it can run" if advice else ""
    best = None
    for limits in narrowed(PROFILES[engine].limits):
        try:
            found = quick(saved.job.prices, SearchRequest(limits=limits, engine=engine, compare=False))
            if found is None:
                continue
            placed = replace(job, layout=place(found.layout, job.cluster), peak_bytes=_peaks(found.estimate))
            files_of(placed, engine)
        except HetplanError:
            continue
        if best is None or found.estimate.step_s < best.estimate.step_s:
            best = found
        if limits == PROFILES[engine].limits:
            break
    if best is None:
        return "; no plan it can run was found on this cluster"
    change = best.estimate.step_s / saved.plan.estimate.step_s - 1
    shapes = "; ".join(
        f"{replica_text(row)}, {' -> '.join(f'{s.group} tp{s.tp}' for s in row.stages)}" for row in best.layout.replicas
    )
    return f"; nearest plan it can run costs {100 * change:+.0f} %: {shapes}{f' ({advice})' if advice else ''}"


def narrowed(limits: Limits) -> Iterator[Limits]:
    """Yield an engine's limits, then each way of recomputing alone: some engines cannot mix them between stages."""
    from dataclasses import replace

    yield limits
    for word in limits.recompute:
        yield replace(limits, recompute=(word,))


def _peaks(estimate: Estimate) -> dict[tuple[int, int], float]:
    return {(use.replica, use.stage): use.memory.total_bytes for use in estimate.stages}


def write_folder(out: Path, files: Mapping[str, str]) -> None:
    """Write a folder whole or not at all: beside its place, then renamed.

    Raises:
        UsageError: the folder holds something already, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"cannot write {out}: it exists and is not an empty folder")
    if not out.resolve().parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.resolve().parent}")
    beside: Path | None = None
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{out.resolve().name}.", dir=out.resolve().parent))
        for name, text in files.items():
            path = beside / name
            path.write_text(text, encoding="utf-8", newline="\n")
            if path.suffix in (".sh", ".sbatch"):
                path.chmod(0o755)
        beside.chmod(0o755)
        os.replace(beside, out.resolve())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        if beside is not None and beside.exists():
            shutil.rmtree(beside, ignore_errors=True)


def _bullets(notes: tuple[str, ...]) -> list[str]:
    return [f"- {note}" for note in notes]


def _list_document() -> dict[str, object]:
    from hetplan.emit.capability import PROFILES
    from hetplan.emit.emit import LAUNCHERS

    engines = {
        name: {
            "runs": profile.says,
            "schedules": list(profile.schedules),
            "sharding": list(profile.limits.sharding),
            "recompute": list(profile.limits.recompute),
            "precisions": list(profile.precisions),
            "mixed_vendors": profile.limits.allow_mixed_vendors,
        }
        for name, profile in PROFILES.items()
    }
    return {"engines": engines, "launchers": list(LAUNCHERS)}


def _list_text() -> str:
    from hetplan.emit.capability import PROFILES
    from hetplan.emit.emit import LAUNCHERS

    lines = []
    for name, profile in PROFILES.items():
        vendors = "vendors mixed" if profile.limits.allow_mixed_vendors else "one vendor"
        lines += [
            *wrap(f"{name}: {profile.says}", LIST_WIDTH, subsequent_indent="  "),
            f"  schedules {', '.join(profile.schedules)}",
            f"  sharding {', '.join(profile.limits.sharding)}",
            f"  recompute {', '.join(profile.limits.recompute)}",
            f"  {', '.join(profile.precisions)}; {vendors}",
        ]
    return "\n".join([*lines, "", f"launchers: {', '.join(LAUNCHERS)}"])
