"""How trainers are told to divide a model: Megatron-LM, FlagScale, HexiScale and torchtitan settings, as written.

Only what decides a layout is taken; what it means for layers a stage is `plan.imported`'s to say. A value that is not
decided in the file (a search space, a variable that is set elsewhere) is refused with its line.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hetplan.specs.decode import document_from_text
from hetplan.specs.fields import Fields
from hetplan.specs.importers.facts import SourceText
from hetplan.specs.importers.launch_flags import Flags, launch_flags, list_value
from hetplan.units import show

Trainer = Literal["megatron", "flagscale", "hexiscale", "torchtitan"]
MOST_DEGREE = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One pipeline of its own: tensor-parallel degree and layers of each stage, its share of the batch."""

    tp: tuple[int, ...]
    layers: tuple[int, ...]
    num_samples: int | None = None
    num_microbatches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """What decides a layout; None: not written."""

    source: str
    trainer: Trainer
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int | None = None
    vpp: int | None = None
    num_layers: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    sharding: Literal["none", "optimizer", "gradients", "full"] = "none"
    schedule: str | None = None
    layout: str | None = None
    """A Megatron-LM layout string."""
    stage_layers: tuple[int, ...] | None = None
    """Decoder layers of each virtual stage."""
    layers_per_virtual_stage: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    less_layers: tuple[int, int] | None = None
    """torchtitan: layers the first and the last stage hold less."""
    counts_embedding: bool = False
    counts_loss: bool = False
    meshes: tuple[int, ...] = ()
    """FlagScale: tp, cp, ep, dp, pp of each mesh in a flat list."""
    device_types: tuple[str, ...] = ()
    pipelines: tuple[Pipeline, ...] = ()


def read_settings(source: SourceText) -> LayoutSettings:
    """Return the settings in a file, whose trainer is told from its content.

    Raises:
        SpecError: the file is none of the four, or does not decide a layout.
    """
    for sign, read in _READERS:
        if re.search(sign, source.text, re.MULTILINE):
            return read(source)
    known = "Megatron-LM, FlagScale, HexiScale or torchtitan"
    raise source.error(f"found no settings of {known} that decide a layout, and no Megatron-LM layout string")


def _layout_string(source: SourceText) -> LayoutSettings:
    return LayoutSettings(source=source.name, trainer="megatron", layout="".join(source.text.split()))


def _megatron(source: SourceText) -> LayoutSettings:
    flags = launch_flags(source)
    integer = flags.integer
    recompute = flags.text("recompute-granularity")
    if recompute not in (None, "selective", "full"):
        raise flags.error("recompute-granularity", f"{show(str(recompute))} is neither selective nor full")
    chosen: Literal["none", "selective", "full"] = (
        "none" if recompute is None else "full" if recompute == "full" else "selective"
    )
    return LayoutSettings(
        source=source.name,
        trainer="megatron",
        tp=integer("tensor-model-parallel-size") or 1,
        pp=integer("pipeline-model-parallel-size") or 1,
        cp=integer("context-parallel-size") or 1,
        ep=integer("expert-model-parallel-size") or 1,
        vpp=integer("num-virtual-stages-per-pipeline-rank"),
        layers_per_virtual_stage=integer("num-layers-per-virtual-pipeline-stage"),
        num_layers=integer("num-layers"),
        micro_batch=integer("micro-batch-size"),
        global_batch=integer("global-batch-size"),
        seq_len=integer("seq-length"),
        recompute=chosen,
        sharding="optimizer" if flags.has("use-distributed-optimizer") else "none",
        layout=flags.text("pipeline-model-parallel-layout"),
        first_layers=integer("decoder-first-pipeline-num-layers", minimum=0),
        last_layers=integer("decoder-last-pipeline-num-layers", minimum=0),
        counts_embedding=flags.has("account-for-embedding-in-pipeline-split"),
        counts_loss=flags.has("account-for-loss-in-pipeline-split"),
    )


def _hexiscale(source: SourceText) -> LayoutSettings:
    flags = launch_flags(source)
    degrees = _table(flags, "hetero_configs")
    layers = _table(flags, "layer_partitions")
    if [len(row) for row in degrees] != [len(row) for row in layers]:
        raise flags.error("layer_partitions", "its pipelines and stages are not those of hetero_configs")
    samples = _each(flags, "global_bsz_size", len(degrees))
    chunks = _each(flags, "chunks", len(degrees))
    totals = {sum(row) for row in layers}
    if len(totals) != 1:
        raise flags.error("layer_partitions", f"pipelines hold {sorted(totals)} layers; each must hold the whole model")
    pipelines = tuple(
        Pipeline(tp=tp, layers=cut, num_samples=batch, num_microbatches=count)
        for tp, cut, batch, count in zip(degrees, layers, samples, chunks, strict=True)
    )
    return LayoutSettings(
        source=source.name,
        trainer="hexiscale",
        num_layers=totals.pop(),
        global_batch=sum(batch for batch in samples if batch is not None) or None,
        recompute="full" if flags.has("checkpoint-all") else "none",
        pipelines=pipelines,
    )


def _table(flags: Flags, name: str) -> tuple[tuple[int, ...], ...]:
    value = list_value(flags, name)
    rows = [row if isinstance(row, list) else None for row in value]
    if not rows or any(not row or any(not isinstance(n, int) or n < 1 for n in row) for row in rows):
        raise flags.error(name, "expected a list of lists of whole numbers, one list a pipeline")
    return tuple(tuple(n for n in row if isinstance(n, int)) for row in rows if row)


def _each(flags: Flags, name: str, num: int) -> tuple[int | None, ...]:
    """One number for all pipelines or one for each."""
    words = flags.words(name)
    numbers = [flags.whole(name, word, minimum=1) for word in words]
    if not numbers:
        return (None,) * num
    if len(numbers) not in (1, num):
        raise flags.error(name, f"{len(numbers)} numbers for {num} pipelines")
    return tuple(numbers) if len(numbers) == num else (numbers[0],) * num


def _flagscale(source: SourceText) -> LayoutSettings:
    root = document_from_text(source.text, source.name, "")
    if root.has("experiment") and root.fields("experiment").has("auto_tuner"):
        raise root.fields("experiment").error("an auto-tuner's search space decides no layout", "auto_tuner")
    system, model = root.fields("system"), root.fields("model", required=False)
    hetero = system.fields("hetero", required=False)
    recompute = system.fields("recompute", required=False)
    granularity = recompute.text("recompute_granularity", default=None)
    sharded = system.flag("use_distributed_optimizer", default=False)
    return LayoutSettings(
        source=source.name,
        trainer="flagscale",
        tp=_degree(system, "tensor_model_parallel_size") or 1,
        pp=_degree(system, "pipeline_model_parallel_size") or 1,
        cp=_degree(system, "context_parallel_size") or 1,
        ep=_degree(system, "expert_model_parallel_size") or 1,
        num_layers=_degree(model, "num_layers"),
        micro_batch=_degree(model, "micro_batch_size"),
        global_batch=_degree(model, "global_batch_size"),
        seq_len=_degree(model, "seq_length"),
        recompute="full" if granularity == "full" else "selective" if granularity == "selective" else "none",
        sharding="optimizer" if sharded else "none",
        stage_layers=hetero.integers("hetero_pipeline_layer_split", default=None, minimum=0),
        meshes=hetero.integers("hetero_process_meshes", default=(), minimum=1),
        device_types=hetero.texts("hetero_device_types", default=()),
    )


def _degree(fields: Fields, key: str) -> int | None:
    return fields.integer(key, default=None, minimum=1, maximum=10**9)


def _torchtitan(source: SourceText) -> LayoutSettings:
    try:
        document = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise source.error(f"not valid TOML: {error}", int(line[1]) if line else len(source.lines)) from None
    parallel, training = _section(source, document, "parallelism"), _section(source, document, "training")
    number = _Numbers(source)
    shard = number.take(parallel, "data_parallel_shard_degree", minimum=-1)
    replicas = number.take(parallel, "data_parallel_replicate_degree") or 1
    parts = parallel.get("module_fqns_per_model_part")
    less = (
        number.take(parallel, "pipeline_parallel_first_stage_less_layers", minimum=0),
        number.take(parallel, "pipeline_parallel_last_stage_less_layers", minimum=0),
    )
    mode = _section(source, document, "activation_checkpoint").get("mode", "none")
    return LayoutSettings(
        source=source.name,
        trainer="torchtitan",
        tp=number.take(parallel, "tensor_parallel_degree") or 1,
        pp=number.take(parallel, "pipeline_parallel_degree") or 1,
        cp=number.take(parallel, "context_parallel_degree") or 1,
        ep=number.take(parallel, "expert_parallel_degree") or 1,
        dp=None if shard == -1 else (shard or 1) * replicas,
        micro_batch=number.take(parallel, "pipeline_parallel_microbatch_size")
        or number.take(training, "local_batch_size"),
        global_batch=number.take(training, "global_batch_size", minimum=-1),
        seq_len=number.take(training, "seq_len"),
        recompute="full" if mode == "full" else "selective" if mode == "selective" else "none",
        sharding="none" if shard == 1 or (shard is None and replicas > 1) else "full",
        schedule=_schedule(source, parallel.get("pipeline_parallel_schedule", "1F1B")),
        stage_layers=_module_counts(source, parts) if parts else None,
        layers_per_virtual_stage=number.take(parallel, "pipeline_parallel_layers_per_stage"),
        less_layers=(1 if less[0] is None else less[0], 1 if less[1] is None else less[1]),
    )


_SCHEDULES: Mapping[str, str] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
    "zbvzerobubble": "zero-bubble",
}


def _schedule(source: SourceText, name: object) -> str:
    known = _SCHEDULES.get(str(name).casefold())
    if known is None:
        raise source.error(f"pipeline schedule {show(str(name))} is not one of {', '.join(_SCHEDULES)}")
    return known


def _section(source: SourceText, document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = document.get(key, {})
    if not isinstance(section, dict):
        raise source.error(f"{key} must be a table")
    return section


@dataclass(frozen=True, slots=True, kw_only=False)
class _Numbers:
    """Whole numbers of a TOML table; errors find the line of the key."""

    source: SourceText

    def take(self, table: Mapping[str, Any], key: str, *, minimum: int = 1) -> int | None:
        value = table.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= 10**9:
            line = next((n for n, text in enumerate(self.source.lines, 1) if text.strip().startswith(key)), 1)
            raise self.source.error(f"{key}: expected a whole number of at least {minimum}, found {value!r}", line)
        return value if value != 0 or minimum == 0 else None


def _module_counts(source: SourceText, parts: object) -> tuple[int, ...]:
    """Decoder layers of each part, which must hold `layers.0`, `layers.1`, ... once and in order."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise source.error("module_fqns_per_model_part must be a list of lists of module names")
    names = [str(name) for part in parts for name in part if str(name).startswith("layers.")]
    if names != [f"layers.{i}" for i in range(len(names))]:
        raise source.error("module_fqns_per_model_part must hold layers.0, layers.1, ... once and in order")
    return tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)


_READERS: tuple[tuple[str, Callable[[SourceText], LayoutSettings]], ...] = (
    (r"--hetero_configs\b", _hexiscale),
    (r"--(pipeline|tensor)-model-parallel-size\b|--pipeline-model-parallel-layout\b", _megatron),
    (r"^\s*hetero_process_meshes:|^\s*(tensor|pipeline)_model_parallel_size:", _flagscale),
    (r"^\[parallelism\]", _torchtitan),
    (r"\A\s*E[tmL|(),*0-9\s]*\Z", _layout_string),
)
