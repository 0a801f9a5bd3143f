"""Which plans a search may return: an engine's profile narrowed by the words of the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetplan.cli.options import one_of, parse_counts, parse_words
from hetplan.cli.stage_counts import stage_counts
from hetplan.errors import UsageError
from hetplan.specs.workload import RECOMPUTES, SHARDINGS

if TYPE_CHECKING:
    from hetplan.plan.limits import Limits
    from hetplan.specs.cluster import Cluster
    from hetplan.specs.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitWords:
    """What the user wrote; None or empty: nothing."""

    engine: str = "hetplan"
    tp: str | None = None
    pp: str | None = None
    cp: str | None = None
    ep: str | None = None
    micro_batch: str | None = None
    recompute: str | None = None
    schedule: str | None = None
    sharding: str | None = None
    pin: str | None = None
    exclude: tuple[str, ...] = ()
    uniform: bool = False
    uniform_microbatches: bool = False
    replicas: str | None = None
    equal_dp: bool = False
    max_shapes: int | None = None


def limits_from(words: LimitWords, cluster: Cluster, model: Model) -> Limits:
    """Return the engine's profile narrowed by the user's words.

    Raises:
        UsageError: a word is unknown, or the words leave nothing.
    """
    from hetplan.plan.limits import ENGINES
    from hetplan.plan.records import SCHEDULES

    engine = ENGINES[one_of(words.engine, "--engine", tuple(ENGINES))]
    given: dict[str, Any] = {
        "tp": parse_counts(words.tp, "--tp"),
        "pp": parse_counts(words.pp, "--pp"),
        "cp": parse_counts(words.cp, "--cp"),
        "ep": parse_counts(words.ep, "--ep"),
        "replicas": parse_counts(words.replicas, "--replicas"),
        "microbatch": parse_counts(words.micro_batch, "--micro-batch"),
        "schedules": parse_words(words.schedule, "--schedule", SCHEDULES),
        "recompute": _allowed(parse_words(words.recompute, "--recompute", RECOMPUTES), engine.recompute, words),
        "sharding": _allowed(parse_words(words.sharding, "--sharding", SHARDINGS), engine.sharding, words),
        "pinned_layers": _pinned(words, model),
        "exclude": _excluded(words.exclude, cluster),
        "max_shapes": words.max_shapes,
    }
    if words.uniform:
        given |= {"uniform_degrees": True, "uniform_cuts": True, "equal_cuts": True, "uniform_microbatches": True}
    given |= {name: True for name in ("uniform_microbatches", "equal_dp") if getattr(words, name)}
    return replace(engine, **{name: value for name, value in given.items() if value is not None})


def _allowed(asked: tuple[str, ...] | None, offered: tuple[str, ...], words: LimitWords) -> tuple[str, ...] | None:
    """Refuse what the engine cannot do."""
    missing = [word for word in asked or () if word not in offered]
    if missing:
        raise UsageError(f"engine {words.engine} does not do {missing[0]!r}; it does {', '.join(offered)}")
    return asked


def _pinned(words: LimitWords, model: Model) -> tuple[int, ...] | None:
    total = sum(layer.kind == "decoder" for layer in model.chain)
    depths = parse_counts(words.pp, "--pp") or ()
    pinned = stage_counts(words.pin, "--pin", total, depths[0] if len(depths) == 1 else None)
    if pinned is not None and sum(pinned) != total:
        raise UsageError(f"--pin: {words.pin} is {sum(pinned)} decoder layers, {model.name} has {total}")
    return pinned


def _excluded(names: tuple[str, ...], cluster: Cluster) -> frozenset[str] | None:
    groups = [group.name for group in cluster.groups]
    excluded = frozenset(one_of(name, "--exclude", groups) for name in names)
    if excluded == set(groups):
        raise UsageError("--exclude: every group is left out")
    return excluded or None
