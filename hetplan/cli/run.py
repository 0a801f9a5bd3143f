"""`hetplan run`: a plan trained for real, on this machine's ranks or as one rank a launcher started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hetplan.cli.options import JsonFlag, PlanArgument, Quiet
from hetplan.cli.run_modules import is_module_plan, run_module_plan
from hetplan.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from hetplan.cli.pricing import Priced
    from hetplan.runtime.train import Job

_HINT = "hetplan run needs torch, which planning does not: pip install 'hetplan[torch]' (CPU builds are enough)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The command line."""

    data: Path
    steps: int
    tokens: str
    seed: int
    learning_rate: float
    warmup: int
    decay: str
    weight_decay: float
    clip: float
    checkpoint: Path | None
    every: int
    keep: int
    resume: Path | None
    timeout_s: float
    device: str


def run(
    context: typer.Context,
    plan: PlanArgument,
    data: Annotated[Path, typer.Option("--data", metavar="FILE", help="Tokens (.bin) or any file, read as bytes.")],
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Train up to this optimizer step.")] = 100,
    tokens: Annotated[
        Literal["auto", "bytes", "uint16", "uint32"],
        typer.Option("--tokens", help="What the file holds; auto: .bin by the vocabulary, else bytes."),
    ] = "auto",
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of first weights and sample order.")] = 0,
    learning_rate: Annotated[float, typer.Option("--lr", metavar="X", min=0.0, help="Peak learning rate.")] = 3e-4,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", min=0, help="Steps up to the peak.")] = 0,
    decay: Annotated[
        Literal["constant", "linear", "cosine"], typer.Option("--decay", help="How the rate falls to a tenth.")
    ] = "cosine",
    weight_decay: Annotated[float, typer.Option("--weight-decay", metavar="X", min=0.0, help="Of matrices.")] = 0.1,
    clip: Annotated[float, typer.Option("--clip", metavar="X", min=0.0, help="Most gradient norm; 0: any.")] = 1.0,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="Write checkpoints here (shared by all hosts).")
    ] = None,
    every: Annotated[int, typer.Option("--every", metavar="N", min=0, help="Steps from one to the next.")] = 0,
    keep: Annotated[int, typer.Option("--keep", metavar="N", min=1, help="Checkpoints to keep.")] = 2,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR", help="Go on from a checkpoint (or the last in DIR), of any plan."),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option("--metrics", metavar="FILE", help="Append a JSON line for each step.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=1.0, help="Seconds without progress that end the job.")
    ] = 120.0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="auto: CUDA or ROCm where there is one a rank.")
    ] = "auto",
    update_calibration: Annotated[
        Path | None,
        typer.Option("--update-calibration", metavar="FILE", help="Write the calibration, corrected by this run."),
    ] = None,
    quiet: Quiet = False,
    debug_ranks: Annotated[bool, typer.Option("--debug-ranks", help="Show the traceback of a rank.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a plan's model on a plan's ranks; compare measured with predicted."""
    if find_spec("torch") is None:
        raise UsageError(_HINT)
    if is_module_plan(plan):
        run_module_plan(context)
        return
    words = _Words(
        data=data,
        steps=steps,
        tokens=tokens,
        seed=seed,
        learning_rate=learning_rate,
        warmup=warmup,
        decay=decay,
        weight_decay=weight_decay,
        clip=clip,
        checkpoint=checkpoint,
        every=every,
        keep=keep,
        resume=resume,
        timeout_s=timeout,
        device=device,
    )
    from hetplan.cli.output import require_writable

    measured = Path(plan).with_suffix(".measured.json")
    for path in (metrics, update_calibration, measured):
        require_writable(path)
    priced, job = _job(plan, words)
    log = _Log(metrics, job, quiet=quiet)
    document = _measured(priced, job, log, debug=debug_ranks)
    if document is not None:
        _finish(priced, document, measured, update_calibration, as_json=as_json)


def _job(plan: str, words: _Words) -> tuple[Priced, Job]:
    """Return the plan as priced now, and what its ranks must know."""
    from typing import cast

    from hetplan.cli.inputs import load_plan
    from hetplan.cli.pricing import priced_plan
    from hetplan.runtime.buckets import AdamSettings
    from hetplan.runtime.data import TokenKind, open_tokens
    from hetplan.runtime.numerics import numerics_of
    from hetplan.runtime.ranks import Task, require_runnable, seats_of_plan
    from hetplan.runtime.schedule import Decay, LearningRate
    from hetplan.runtime.train import Job, Saving, checkpoint_at

    priced = priced_plan(load_plan(plan))
    if priced.violations:
        raise priced.broken
    inputs = priced.job
    if any(layer.gradients != "all" for layer in inputs.model.chain):
        raise UsageError("`hetplan run` trains all of a model; this plan's has frozen modules or adapters")
    numerics_of(inputs.model)
    require_runnable(priced.layout, inputs.workload)
    vocab = _vocab(priced)
    resume = checkpoint_at(words.resume) if words.resume else None
    task = Task(
        layout=priced.layout,
        seats=seats_of_plan(priced.layout, inputs.cluster, inputs.model, inputs.workload),
        seq_len=inputs.workload.seq_len,
        sequence_parallel=inputs.workload.sequence_parallel,
    )
    estimate = priced.sound_estimate
    return priced, Job(
        model=inputs.model,
        task=task,
        workload=inputs.workload,
        data=open_tokens(words.data, cast(TokenKind, words.tokens), inputs.workload.seq_len, vocab, words.seed),
        steps=words.steps,
        rate=LearningRate(
            peak=words.learning_rate, steps=words.steps, warmup=words.warmup, decay=cast(Decay, words.decay)
        ),
        saving=Saving(root=words.checkpoint, every=words.every, keep=words.keep, resume=resume),
        adam=AdamSettings(weight_decay=words.weight_decay),
        clip_norm=words.clip,
        seed=words.seed,
        mfu_s=estimate.mfu * estimate.step_s,
        threads=_threads(len(task.seats)),
        timeout_s=words.timeout_s,
        device=words.device,
    )


def _vocab(priced: Priced) -> int:
    from hetplan.specs.model import Loss

    return next(op.vocab for layer in priced.job.model.chain for op in layer.operators if isinstance(op, Loss))


def _threads(num_ranks: int) -> int:
    """Return the threads of one rank's arithmetic: those the user set, else an equal share of the cores."""
    if "OMP_NUM_THREADS" in os.environ:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return max(1, cores // local)


def _measured(priced: Priced, job: Job, log: _Log, *, debug: bool) -> Mapping[str, Any] | None:
    """Train; return measured beside predicted, on the process that speaks."""
    from hetplan.runtime.launch import run_as_rank, run_here
    from hetplan.runtime.traces import measured_document

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world_size != len(job.task.seats):
            raise UsageError(f"the plan has {len(job.task.seats)} ranks, the launcher started {world_size}")
        tell = log.tell if rank == 0 else _nobody
        traces = run_as_rank(job, rank, tell)
    else:
        traces = run_here(job, log.tell, debug=debug)
    if not traces or not traces[0].steps:
        return None
    return measured_document(priced.layout, priced.sound_estimate, traces)


def _nobody(event: Mapping[str, Any]) -> None:
    """Only rank 0 speaks."""


class _Log:
    """A line a step on stderr, and one of JSON in the metrics file."""

    def __init__(self, metrics: Path | None, job: Job, *, quiet: bool) -> None:
        self._metrics, self._job, self._quiet = metrics, job, quiet
        self._every = 1 if job.steps <= 50 or sys.stderr.isatty() else max(1, job.steps // 50)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Note what rank 0 tells."""
        from hetplan.cli.output import json_text, remark

        if self._metrics is not None:
            try:
                with self._metrics.open("a", encoding="utf-8") as file:
                    file.write(json_text(event) + "\n")
            except OSError as error:
                raise UsageError(f"cannot write {self._metrics}: {error.strerror or error}") from error
        if self._quiet:
            return
        text = _line(event, self._job, self._every)
        if text:
            remark(text)


def _line(event: Mapping[str, Any], job: Job, every: int) -> str:
    """Return what a reader sees of an event; empty: nothing."""
    from hetplan.units import format_bytes, format_seconds

    if event["event"] == "start":
        num_ranks = len(job.task.seats)
        ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}, {job.steps} steps, {job.task.global_batch} samples a step"
        went_on = f", from step {event['step']}" if event["step"] else ""
        return f"{ranks}{went_on}\n  step      loss  grad norm   step time    tokens/s     MFU    memory"
    if event["event"] == "checkpoint":
        return f"checkpoint {event['path']}"
    if event["step"] % every and event["step"] != job.steps:
        return ""
    return (
        f"{event['step']:6d}  {event['loss']:8.4f}  {event['grad_norm']:9.4f}  {format_seconds(event['step_s']):>10}"
        f"  {event['tokens_per_s']:10.0f}  {100 * event['mfu']:5.1f} %  {format_bytes(event['memory_bytes']):>8}"
    )


def _finish(
    priced: Priced, document: Mapping[str, Any], measured: Path, calibration: Path | None, *, as_json: bool
) -> None:
    """Save and show what was measured."""
    from hetplan.cli.output import json_text, remark, show, show_json, write_whole

    write_whole(measured, json_text(document, indent=2) + "\n")
    if calibration is not None:
        from hetplan.runtime.corrected import Run, corrected
        from hetplan.specs.read_calibration import calibration_text

        job = priced.job
        ran = Run(cluster=job.cluster, model=job.model, workload=job.workload, layout=priced.layout)
        write_whole(calibration, calibration_text(corrected(job.calibration, ran, document)))
        remark(f"{calibration}: the calibration, corrected by this run")
    if as_json:
        show_json(document)
    else:
        from hetplan.report.measured import measured_text

        show(measured_text(document, str(measured)))
