"""What a search found, as text: the plan, how it compares, and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetplan.plan.records import Estimate, Layout, Replica
from hetplan.report.estimates import origin_notes, summary, time_table
from hetplan.report.layouts import Setting, count_text, headline, layout_table
from hetplan.report.tables import bullets, join_sections, percent, section, table
from hetplan.search.explain import why_lost
from hetplan.search.records import Candidate, SearchResult
from hetplan.units import format_count, format_seconds, format_usd


def search_text(result: SearchResult, setting: Setting, *, full: bool = False) -> str:
    """Return the whole answer of a search."""
    best = result.best
    return join_sections(
        [
            headline(best.layout, setting),
            layout_table(best.layout, best.estimate, setting, full=full),
            summary(best.estimate, result.proof),
            time_table(best.estimate),
            section("Compared with", comparison_table(result)),
            section("Next best", bullets(runner_up_notes(best, result.runners_up if full else result.runners_up[:1]))),
            section("Notes", bullets(_notes(result, full=full))),
        ]
    )


def comparison_table(result: SearchResult) -> str:
    """Return the answer beside the best plan of each simpler kind, and why some kinds have none."""
    if not result.alternatives:
        return ""
    best = result.best.estimate
    rows = [("this plan", *_speed_cells(best, best), "")]
    missing = []
    for other in result.alternatives:
        if other.candidate is None:
            missing.append(f"{other.name}: {other.reason or 'nothing fits'}")
        else:
            rows.append((other.name, *_speed_cells(other.candidate.estimate, best), other.reason))
    lines = [table(("plan", "step time", "tokens/s", "cost a step", "over this plan", ""), rows)]
    if missing:
        lines.append(bullets(missing))
    if result.hetero_efficiency is not None:
        together = percent(result.hetero_efficiency)
        lines.append(f"hetero efficiency {together}: throughput over the sum of each device type alone")
    return "\n".join(lines)


def _speed_cells(estimate: Estimate, best: Estimate) -> tuple[str, str, str, str]:
    usd = estimate.usd_per_step
    return (
        format_seconds(estimate.step_s),
        format_count(estimate.tokens_per_s),
        format_usd(usd) if usd is not None else "",
        f"{estimate.step_s / best.step_s:.2f}x",
    )


def runner_up_notes(best: Candidate, others: Sequence[Candidate]) -> list[str]:
    """Return one sentence for each runner-up: what it is and why it lost."""
    return [
        f"{layout_words(other.layout)}: {why_lost(best.estimate, other.estimate)}{_close_words(best, other)}"
        for other in others
    ]


def closer_than_error(best: Candidate, other: Candidate) -> bool | None:
    """Return whether two plans' step times differ by less than the calibration errs; None where it states no error."""
    error = best.estimate.relative_error
    return None if error is None else abs(other.estimate.step_s / best.estimate.step_s - 1.0) < error


def _close_words(best: Candidate, other: Candidate) -> str:
    if not closer_than_error(best, other):
        return ""
    return f" (closer than the calibration can tell, +- {percent(best.estimate.relative_error or 0.0)})"


def layout_words(layout: Layout) -> str:
    """Return a layout in one line: `2x (8a100 tp8 + 4v100 tp4), 16 x 4 samples, full recompute, optimizer sharded`."""
    shapes = "; ".join(_replica_words(replica) for replica in layout.replicas)
    sharding = "nothing sharded" if layout.sharding == "none" else f"{layout.sharding} sharded"
    return f"{shapes}; {sharding}"


def _replica_words(replica: Replica) -> str:
    stages = []
    for stage in replica.stages[: replica.pp]:
        degrees = "".join(
            f" {name}{degree}" for name in ("tp", "dp", "cp", "ep") if (degree := getattr(stage, name)) > 1
        )
        recompute = "" if stage.recompute == "none" else f" {stage.recompute} recompute"
        stages.append(f"{stage.group}{degrees}{recompute}")
    batches = count_text(replica.num_microbatches, "microbatch", "es")
    return f"{replica.copies}x ({_folded(stages)}), {batches} of {replica.microbatch}"


def _folded(stages: Sequence[str]) -> str:
    """Return equal neighbours written once with their count."""
    runs: list[tuple[str, int]] = []
    for text in stages:
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return " -> ".join(text if count == 1 else f"{count} x {text}" for text, count in runs)


def _notes(result: SearchResult, *, full: bool) -> list[str]:
    notes = []
    if result.batches and result.best.layout.num_samples > result.batches[0]:
        asked, taken = result.batches[0], result.best.layout.num_samples
        notes.append(f"the step takes {taken:,} samples, {percent(taken / asked - 1)} more than {asked:,} as asked")
    if result.proof.status == "limit":
        notes.append("the time limit cut the search short: another run may end elsewhere")
    notes.append(f"space searched: {result.space}; {format_seconds(result.search_s)}, effort {result.proof.effort:.3g}")
    if full:
        notes += dropped_notes(result.dropped)
    return notes + origin_notes(result.best.estimate)


def dropped_notes(dropped: Mapping[str, int]) -> list[str]:
    """Return one sentence for each reason candidates were dropped for, the most frequent first."""
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return [f"{count} candidates dropped: {reason}" for reason, count in ordered if count]
