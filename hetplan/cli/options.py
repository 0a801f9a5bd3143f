"""Options several commands share, and how their texts become values; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from hetplan.errors import UsageError
from hetplan.units import hint, show

Word = TypeVar("Word", bound=str)

PrecisionWord = Literal["auto", "bf16", "fp16", "fp32", "tf32", "fp8"]
AttentionWord = Literal["auto", "flash", "materialised"]

ClusterArgument = Annotated[str, typer.Argument(metavar="CLUSTER", help="Cluster YAML.", show_default=False)]
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Catalog name, model YAML or Hugging Face config.json.", show_default=False),
]
PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A saved plan.", show_default=False)]

GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", metavar="N", help="Samples a step, over all replicas.")
]
SeqLen = Annotated[int | None, typer.Option("--seq-len", metavar="S", help="Tokens a sample.")]
WorkloadFile = Annotated[
    Path | None, typer.Option("--workload", metavar="FILE", help="Workload YAML; options given here override it.")
]
PrecisionOption = Annotated[
    PrecisionWord | None,
    typer.Option("--precision", help="GEMM precision; auto: the best all groups support.  [default: auto]"),
]
GradientPrecision = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    typer.Option("--gradient-precision", help="Precision gradients are kept and reduced in."),
]
AttentionOption = Annotated[
    AttentionWord | None, typer.Option("--attention", help="Attention kernel.  [default: auto]")
]
NoSequenceParallel = Annotated[
    bool, typer.Option("--no-sequence-parallel", help="Do not split norms and residuals over the tp group.")
]
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", metavar="FILE", help="Measured or fitted constants; a file or a name.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no remarks on stderr.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Every stage, every runner-up, what was dropped.")]


def refuse_given(context: typer.Context, kept: Collection[str], reason: str) -> None:
    """Refuse options that would have no effect; `kept` names the parameters that have one.

    Raises:
        UsageError: the user gave another one.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in kept:
            raise UsageError(f"{max(parameter.opts, key=len)} {reason}")


def parse_counts(text: str | None, option: str, *, minimum: int = 1) -> tuple[int, ...] | None:
    """Return the whole numbers of a comma list; None where the option was not given.

    Raises:
        UsageError: an entry is no whole number of at least `minimum`.
    """
    if text is None:
        return None
    return tuple(_count(word.strip(), option, minimum) for word in text.split(","))


def _count(word: str, option: str, minimum: int) -> int:
    if not (word.isascii() and word.isdigit()) or len(word) > 9 or int(word) < minimum:
        raise UsageError(f"{option}: {show(word)} is not a whole number of at least {minimum}")
    return int(word)


def parse_words(text: str | None, option: str, known: Sequence[Word]) -> tuple[Word, ...] | None:
    """Return the words of a comma list, each one of `known`; None where the option was not given.

    Raises:
        UsageError: an entry is not known.
    """
    if text is None:
        return None
    return tuple(one_of(word.strip(), option, known) for word in text.split(","))


def one_of(word: str, option: str, known: Sequence[Word]) -> Word:
    """Return `word` as one of `known`.

    Raises:
        UsageError: it is none of them; the message names a near match or all there are.
    """
    for candidate in known:
        if candidate == word:
            return candidate
    near = hint(word, known) or f"; there are {', '.join(known)}"
    raise UsageError(f"{option}: unknown {show(word)}{near}")
