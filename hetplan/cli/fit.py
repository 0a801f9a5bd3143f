"""`hetplan fit`: whether the weights of a model fit devices for inference, and which layers each stage would hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import ClusterArgument, JsonFlag, ModelArgument, parse_counts, parse_words, refuse_given
from hetplan.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from hetplan.specs.cluster import Group
    from hetplan.specs.model import Model

MOST_RANKS = 64
OF_RATIOS = frozenset({"cluster", "model", "bits", "fraction", "groups", "ratios", "as_json"})
"""Parameters that mean something with `--ratios`."""


def fit(
    context: typer.Context,
    cluster: ClusterArgument,
    model: ModelArgument,
    bits: Annotated[
        float | None,
        typer.Option("--bits", metavar="B", min=0.5, max=64, help="Bits a parameter.  [default: 8 with fp8, else 16]"),
    ] = None,
    fraction: Annotated[
        float, typer.Option("--fraction", metavar="F", min=0.01, max=1.0, help="Part of memory weights may take.")
    ] = 0.9,
    tp: Annotated[
        int | None, typer.Option("--tp", metavar="N", min=1, help="One pipeline of stages of this tp over the groups.")
    ] = None,
    pp: Annotated[
        int | None, typer.Option("--pp", metavar="N", min=1, help="Stages.  [default: all there is room for]")
    ] = None,
    groups: Annotated[
        str | None, typer.Option("--groups", metavar="LIST", help="Groups to use, in this order.  [default: all]")
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            "--ratios", metavar="LIST", help="One tp group of all devices with unequal shares: 2,1,1, or best."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say of each group whether it holds a model's weights, or cut the layers over unlike devices (--tp)."""
    from hetplan.catalog.load import load_cluster, load_model
    from hetplan.cli.output import show, show_json
    from hetplan.report.capacities import serving_document, serving_text, verdict_document, verdict_text

    where, _ = load_cluster(cluster)
    what, _ = load_model(model)
    names = [group.name for group in where.groups]
    wanted = list(parse_words(groups, "--groups", names) or names)
    if len(set(wanted)) < len(wanted):
        raise UsageError(f"--groups: {groups} names a group twice")
    used = [where.group(name) for name in wanted]
    if ratios is not None:
        refuse_given(context, OF_RATIOS, "does not go with --ratios, which makes one tensor-parallel group")
        if (count := sum(group.num_devices for group in used)) > MOST_RANKS:
            raise UsageError(f"--ratios: {count} devices are more than one tp group of {MOST_RANKS}; choose --groups")
        _ratios(used, what, ratios, (bits, fraction), as_json=as_json)
        return
    if tp is None and pp is None:
        from hetplan.plan.serving import verdicts

        found = [verdict for verdict in verdicts(where, what, bits, fraction=fraction) if verdict.name in wanted]
        if as_json:
            show_json(verdict_document(what, found))
        else:
            show(verdict_text(what, found, fraction))
        if not any(verdict.fits for verdict in found):
            raise InfeasibleError(f"{what.name}: {'; '.join(f'{v.name}: {v.reason}' for v in found)}")
        return
    from hetplan.plan.serving import BITS_OF_16, default_bits, serving_stages

    stored = bits if bits is not None else max((default_bits(group, None) for group in used), default=BITS_OF_16)
    capacities = _capacities(used, tp or 1, pp)
    stages = serving_stages(what, [size for _, size in capacities], stored, tp=tp or 1, fraction=fraction)
    if as_json:
        show_json(serving_document(what, stored, [name for name, _ in capacities], stages))
    else:
        show(serving_text(what, stored, [name for name, _ in capacities], stages))


def _capacities(groups: list[Group], tp: int, pp: int | None) -> list[tuple[str, float]]:
    """Return the group and the memory of each stage's devices.

    Raises:
        InfeasibleError: there are too few devices.
    """
    from hetplan.plan.serving import num_tp_groups

    room = [(group.name, group.usable_memory_bytes) for group in groups for _ in range(num_tp_groups(group, tp))]
    if not room or (pp is not None and len(room) < pp):
        raise InfeasibleError(f"the devices give {len(room)} tp groups of {tp}, {pp or 1} stages need as many")
    return room if pp is None else room[:pp]


def _ratios(groups: list[Group], model: Model, text: str, room: tuple[float | None, float], *, as_json: bool) -> None:
    """Show what unequal shares of one tensor-parallel group use of its devices' memory; `room`: bits and fraction.

    Raises:
        UsageError: the ratios do not suit the devices or the model's widths.
        InfeasibleError: the weights do not fit.
    """
    from hetplan.cli.output import show, show_json
    from hetplan.costs.capacity import best_tp_ratios, tp_ratio_errors, usable_tp_bytes, weight_bytes
    from hetplan.plan.serving import BITS_OF_16, default_bits
    from hetplan.report.capacities import SharedWeights, Shares, ratio_document, ratio_text

    capacities = tuple(group.usable_memory_bytes for group in groups for _ in range(group.num_devices))
    best = best_tp_ratios(capacities, model)
    asked = best if text == "best" else _asked_ratios(groups, text, len(capacities))
    bits, fraction = room
    stored = bits if bits is not None else max((default_bits(group, None) for group in groups), default=BITS_OF_16)
    what = SharedWeights(
        model=model.name,
        bits=stored,
        weights_bytes=weight_bytes(model, stored),
        fraction=fraction,
        capacities=capacities,
    )
    if errors := tp_ratio_errors(model, asked):
        raise UsageError(f"--ratios: {errors[0]}")
    rows = {"even": (1,) * len(capacities), "asked": asked, "best": best}
    choices = [
        Shares(
            name=name,
            ratios=ratios,
            usable_bytes=(usable := usable_tp_bytes(capacities, ratios)),
            holds=what.weights_bytes <= fraction * usable,
            error=next(iter(tp_ratio_errors(model, ratios)), ""),
        )
        for name, ratios in rows.items()
    ]
    if as_json:
        show_json(ratio_document(what, choices))
    else:
        show(ratio_text(what, choices))
    if not choices[1].holds:
        raise InfeasibleError(f"--ratios {text}: the weights of {model.name} do not fit these shares")


def _asked_ratios(groups: list[Group], text: str, num_devices: int) -> tuple[int, ...]:
    """Return the shares given, one a device.

    Raises:
        UsageError: there are not as many as devices, or too many devices.
    """
    ratios = parse_counts(text, "--ratios") or ()
    if len(ratios) != num_devices:
        counts = ", ".join(f"{group.num_devices} of {group.name}" for group in groups)
        raise UsageError(f"--ratios: {len(ratios)} shares for {num_devices} devices ({counts}); give one each")
    return ratios
