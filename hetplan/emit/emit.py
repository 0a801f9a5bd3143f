"""A plan, an engine and a launcher -> the whole folder as texts, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetplan.emit.capability import PROFILES, refusals
from hetplan.emit.deepspeed import emit_deepspeed
from hetplan.emit.fabric import fabric_notes, used_groups
from hetplan.emit.flagscale import emit_flagscale
from hetplan.emit.folder import base_files, job_fabric, node_notes, node_scripts, readme
from hetplan.emit.hetplan_executor import emit_hetplan
from hetplan.emit.hexiscale import emit_hexiscale
from hetplan.emit.kubernetes import launch_kubernetes
from hetplan.emit.megatron import emit_megatron
from hetplan.emit.ranks import agents_of
from hetplan.emit.records import Engine, Job, Launched, LaunchFiles
from hetplan.emit.skypilot import launch_skypilot
from hetplan.emit.slurm import launch_slurm
from hetplan.emit.torchrun import launch_torchrun
from hetplan.emit.torchtitan import emit_torchtitan
from hetplan.emit.vllm import emit_vllm
from hetplan.errors import CheckFailedError, UsageError
from hetplan.specs.training import how_trained

EMITTERS: Mapping[str, Callable[[Job], Engine]] = {
    "hetplan": emit_hetplan,
    "megatron": emit_megatron,
    "torchtitan": emit_torchtitan,
    "flagscale": emit_flagscale,
    "hexiscale": emit_hexiscale,
    "deepspeed": emit_deepspeed,
    "vllm": emit_vllm,
}
LAUNCHERS: Mapping[str, Callable[[Launched], LaunchFiles]] = {
    "torchrun": launch_torchrun,
    "slurm": launch_slurm,
    "kubernetes": launch_kubernetes,
    "skypilot": launch_skypilot,
}


def require_runnable(job: Job, engine: str) -> None:
    """Refuse a plan an engine cannot run.

    Raises:
        UsageError: no plan for this model and precision would suit it.
        CheckFailedError: another plan might; the message says what of this one it cannot run.
    """
    layers = job.model.chain
    if job.model.volumes is not None or not layers:
        raise UsageError(f"{job.model.name} is known by its traffic alone: there is nothing to launch")
    if any(layer.gradients != "all" or layer.adapters for layer in layers):
        raise UsageError(f"{engine} cannot be told of frozen layers and adapters; it would train all layers")
    precisions = PROFILES[engine].precisions
    if job.workload.precision not in precisions:
        raise UsageError(f"{engine} cannot run {job.workload.precision} (it has {', '.join(precisions)})")
    found = refusals(job, engine)
    if found:
        raise CheckFailedError(f"{engine} cannot run {'; nor '.join(found)}")


def _untrained(job: Job) -> tuple[str, ...]:
    """Return what of the model must be frozen by hand: these files train all of it."""
    partly = [f"{module.name} ({how_trained(module)})" for module in job.model.modules if how_trained(module) != "full"]
    if not partly:
        return ()
    return (f"the plan does not train all of {', '.join(partly)}; tell the engine so, these files do not",)


def emit(job: Job, engine: str, launcher: str = "torchrun") -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files of a folder by name, and what whoever launches it must know.

    Raises:
        CheckFailedError: the engine cannot run the plan.
        UsageError: the launcher cannot start the engine or the nodes.
    """
    require_runnable(job, engine)
    made = EMITTERS[engine](job)
    launched = Launched(job=job, engine=made, agents=agents_of(made.ranks))
    if not made.program and launcher != "torchrun":
        raise UsageError(f"{engine} starts its processes itself; leave --via {launcher} out")
    files = base_files(launched)
    wrapped = LAUNCHERS[launcher](launched)
    if made.program:
        files |= node_scripts(launched)
    files |= wrapped.files
    notes = (
        *_untrained(job),
        *made.notes,
        *wrapped.notes,
        *fabric_notes(job_fabric(launched), used_groups(launched)),
        *node_notes(launched),
    )
    files["README.md"] = readme(launched, wrapped.steps if made.program else made.steps, notes)
    return files, notes
