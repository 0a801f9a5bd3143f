"""Workload YAML -> `Workload`; the command line lays its options over what a file says.

`precision: auto` is bf16 where every device has it, else fp16: ranks that share gradients must use one type, so one
V100 (Volta has no bf16) moves the whole job to fp16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, TypedDict

from hetplan.errors import UsageError
from hetplan.specs.cluster import Cluster, Precision
from hetplan.specs.decode import Fields, document_from_text, read_document
from hetplan.specs.workload import AttentionKernel, Workload

PrecisionChoice = Precision | Literal["auto"]
PRECISION_CHOICES: tuple[PrecisionChoice, ...] = ("auto", "bf16", "fp16", "fp32", "tf32", "fp8")
GRADIENT_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = ("auto", "flash", "materialised")
MAX_SEQ_LEN = 100_000_000
MAX_GLOBAL_BATCH = 100_000_000


class WorkloadFields(TypedDict, total=False):
    """What a workload file, or a command line, says; what is missing keeps its default."""

    seq_len: int
    global_batch: int
    precision: PrecisionChoice
    gradient_precision: Precision
    attention: AttentionKernel
    sequence_parallel: bool


def workload_fields(path: Path) -> WorkloadFields:
    """Return what a workload file says.

    Raises:
        SpecError: the file is not a valid workload.
    """
    return _fields(read_document(path, "workload"))


def workload_fields_from_text(text: str, file_name: str) -> WorkloadFields:
    """Return what the text of a workload file says.

    Raises:
        SpecError: the text is not a valid workload.
    """
    return _fields(document_from_text(text, file_name, "workload"))


def _fields(root: Fields) -> WorkloadFields:
    """Decode the keys that are written."""
    values: WorkloadFields = {}
    if root.has("seq_len"):
        values["seq_len"] = root.integer("seq_len", minimum=1, maximum=MAX_SEQ_LEN)
    if root.has("global_batch"):
        values["global_batch"] = root.integer("global_batch", minimum=1, maximum=MAX_GLOBAL_BATCH)
    if root.has("precision"):
        values["precision"] = root.choice("precision", PRECISION_CHOICES)
    if root.has("gradient_precision"):
        values["gradient_precision"] = root.choice("gradient_precision", GRADIENT_PRECISIONS)
    if root.has("attention"):
        values["attention"] = root.choice("attention", ATTENTION_KERNELS)
    if root.has("sequence_parallel"):
        values["sequence_parallel"] = root.flag("sequence_parallel")
    root.finish(known=WorkloadFields.__annotations__)
    return values


def make_workload(fields: WorkloadFields, cluster: Cluster, excluded: Collection[str] = ()) -> Workload:
    """Return the workload `fields` asks of a cluster; `excluded` groups have no say in its precision.

    Raises:
        UsageError: sequence length or batch are missing or out of bounds.
    """
    for key, what, maximum in (
        ("seq_len", "sequence length", MAX_SEQ_LEN),
        ("global_batch", "global batch", MAX_GLOBAL_BATCH),
    ):
        value = fields.get(key)
        if not isinstance(value, int):
            raise UsageError(f"the {what} is missing; give '{key}' in a workload file or --{key.replace('_', '-')}")
        if not 1 <= value <= maximum:
            raise UsageError(f"the {what} must be between 1 and {maximum}, found {value}")
    return Workload(
        seq_len=fields["seq_len"],
        global_batch=fields["global_batch"],
        precision=resolve_precision(cluster, fields.get("precision", "auto"), excluded),
        gradient_precision=fields.get("gradient_precision"),
        attention=fields.get("attention", "auto"),
        sequence_parallel=fields.get("sequence_parallel", True),
    )


def resolve_precision(cluster: Cluster, precision: PrecisionChoice, excluded: Collection[str] = ()) -> Precision:
    """Return `precision`, or for `auto` the best type all groups but `excluded` have: bf16, else fp16, else fp32."""
    if precision != "auto":
        return precision
    peaks: list[Mapping[Precision, float]] = [
        group.device.peak_flop_per_s for group in cluster.groups if group.name not in excluded
    ]
    choices: tuple[Precision, ...] = ("bf16", "fp16")
    return next((choice for choice in choices if all(choice in peak for peak in peaks)), "fp32")
