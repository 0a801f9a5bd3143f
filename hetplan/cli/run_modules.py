"""`hetplan run` of a module plan: its encoder and language model trained on this machine's processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetplan.cli.options import refuse_given
from hetplan.errors import CheckFailedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import typer

    from hetplan.plan.module_job import ModuleJob
    from hetplan.plan.module_text import ModulePlan
    from hetplan.runtime.modular_launch import ModularStep
    from hetplan.specs.model import Model

KEPT = frozenset({"plan", "data", "steps", "seed", "learning_rate", "quiet", "as_json"})
WHY = "has no effect on a module plan"
MOST_SAMPLES = 20_000
"""Samples drawn where the data is a mixture."""


def is_module_plan(plan: str) -> bool:
    """Return whether a file says it is a module plan."""
    from hetplan.plan.module_text import is_module_plan as says_so

    return says_so(Path(plan))


def run_module_plan(context: typer.Context) -> None:
    """Train a module plan and show what was measured.

    Raises:
        UsageError: an option has no effect, or the plan asks for what cannot be run.
        CheckFailedError: the plan breaks a rule.
    """
    from hetplan.catalog.load_data import load_data
    from hetplan.cli.modules import load_module_plan
    from hetplan.cli.output import show, show_json
    from hetplan.plan.modules import check_modules
    from hetplan.runtime.modular_launch import ModularJob, run_modules

    refuse_given(context, KEPT, WHY)
    asked = context.params
    plan, job, modular, _ = load_module_plan(Path(asked["plan"]))
    broken = check_modules(plan.layout, job.model, job.cluster)
    if broken:
        raise CheckFailedError(f"the plan breaks {len(broken)} rules: {broken[0]}")
    found, _ = load_data(asked["data"])
    steps = run_modules(
        ModularJob(
            model=job.model,
            layout=plan.layout,
            rows=found.rows or _drawn(found, job.model, plan),
            steps=asked["steps"],
            theta=_theta(modular, plan),
            balanced=plan.assign == "balanced",
            learning_rate=asked["learning_rate"],
            seed=asked["seed"],
        )
    )
    document = _document(plan, steps)
    show_json(document) if asked["as_json"] else show(_text(document))


def _drawn(data: Any, model: Model, plan: ModulePlan) -> tuple[Any, ...]:
    """Return rows of a mixture: texts and items of mean size where a sample has several."""
    from hetplan.costs.samples import ITEMS, TOKENS, draw_samples
    from hetplan.specs.data import Row

    if data.packing is not None:
        raise UsageError(f"{data.name}: packed samples cannot be run; give the lengths as they are")
    count = min(MOST_SAMPLES, max(plan.layout.num_samples * 64, 1024))
    samples = draw_samples(data, count, plan.seed)
    rows = []
    for i in range(count):
        items = {
            name: _split(int(features[i, ITEMS]), int(features[i, TOKENS]))
            for name, features in samples.items_sf.items()
            if features[i, ITEMS] > 0
        }
        rows.append(Row(text=max(2, int(samples.text_s[i])), items=items))
    return tuple(rows)


def _split(count: int, tokens: int) -> tuple[int, ...]:
    """Return `count` sizes that sum to `tokens` and differ by one at most."""
    return tuple(tokens // count + (1 if i < tokens % count else 0) for i in range(count))


def _theta(modular: ModuleJob, plan: ModulePlan) -> tuple[tuple[float, ...], ...]:
    """Return seconds a unit of each feature, from the plan's prices: encoder unit, then language model."""
    rows = []
    for unit, placement in enumerate(plan.layout.placements):
        lines = [
            getattr(modular.prices.costs(name, placement.group, placement.tp, placement.recompute), way)
            for name in placement.modules[:1]
            for way in ("forward", "backward")
        ]
        own = [0.0, sum(line.per_token for line in lines), sum(line.per_square for line in lines)]
        rows.append((0.0, 0.0, 0.0, *own) if unit else (*own, 0.0, 0.0, 0.0))
    return tuple(rows)


def _document(plan: ModulePlan, steps: Sequence[ModularStep]) -> dict[str, Any]:
    return {
        "predicted_step_s": plan.step_s,
        "assign": plan.assign,
        "steps": [
            {"step": step.step, "loss": step.loss, "slowest_s": step.slowest_s, "mean_s": step.mean_s} for step in steps
        ],
    }


def _text(document: Mapping[str, Any]) -> str:
    from hetplan.report.tables import percent, table
    from hetplan.units import format_seconds

    rows = [
        [
            str(step["step"]),
            f"{step['loss']:.4f}",
            format_seconds(step["slowest_s"]),
            percent(step["slowest_s"] / step["mean_s"] - 1) if step["mean_s"] else "-",
        ]
        for step in document["steps"]
    ]
    head = f"samples {document['assign']}; processor seconds of a rank, which other work on the machine changes little"
    return f"{head}\n" + table(["step", "loss", "busiest rank", "over the mean"], rows)
