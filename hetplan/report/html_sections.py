"""The parts of a page that are words and tables: what a step takes, who does what, what else there is, what binds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetplan.plan.records import Estimate, Layout, Proof
from hetplan.report.estimates import PART_WORDS, objective_value
from hetplan.report.html import Markup, bullets, joined, number, table, tag, text
from hetplan.report.html_rows import (
    MOST_ROWS,
    StageRow,
    degrees,
    group_class,
    held_words,
    legend,
    num_decoders,
    swatch,
)
from hetplan.report.layouts import Setting, headline_parts
from hetplan.report.nodes import node_names, nodes_of
from hetplan.report.svg_bars import PART_CLASSES, parts_bar
from hetplan.report.tables import cut, percent
from hetplan.search.explain import Explanation
from hetplan.search.records import Alternative, Candidate
from hetplan.specs.hostlist import hostlist_text
from hetplan.units import format_count, format_energy, format_seconds, format_usd

LONGEST_BAR = 4.0
"""Bars of the comparison end here, in steps of this plan."""


def header(layout: Layout, estimate: Estimate, proof: Proof | None, setting: Setting) -> Markup:
    """Return title, key figures and the proof."""
    first, second = headline_parts(layout, setting)
    return tag(
        "header",
        tag("h1", setting.model.name, tag("small", f" on {setting.cluster.name}")),
        tag("p", f"{first.partition(': ')[2]}; {second}", class_="note"),
        tag("dl", *_figures(estimate), class_="figures"),
        tag("p", *_proof(proof), class_="proof"),
    )


def _figures(estimate: Estimate) -> Iterator[Markup]:
    usd, error = estimate.usd_per_step, estimate.relative_error
    step = number("step_s", estimate.step_s, format_seconds(estimate.step_s))
    give = joined([" +- ", number("relative_error", error, percent(error))]) if error is not None else ""
    yield _figure("step time", step, tag("small", give) if give else "")
    yield _figure("tokens a second", number("tokens_per_s", estimate.tokens_per_s, format_count(estimate.tokens_per_s)))
    yield _figure("MFU", number("mfu", estimate.mfu, percent(estimate.mfu)))
    cost = number("usd_per_step", usd, format_usd(usd)) if usd is not None else tag("span", "no prices", class_="nil")
    yield _figure("cost a step", cost)
    joules = estimate.joules_per_step
    yield _figure("energy a step", number("joules_per_step", joules, format_energy(joules)))


def _figure(name: str, *value: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", *value))


def _proof(proof: Proof | None) -> Iterator[Markup]:
    if proof is None:
        yield tag("span", "No proof: the layout was given, or its inputs have changed since the search.")
        return
    yield tag("b", "Proof ")
    bound = objective_value(proof.bound, proof.objective) if proof.bound > 0 else "0 (no bound yet)"
    least = number("bound_s", proof.bound, bound) if proof.objective == "time" else text(bound)
    yield joined([f"{proof.status}: no plan of the space searched is below ", least])
    yield joined([" (gap ", number("gap", proof.gap, percent(proof.gap)), ")"])
    if 0 < proof.floor < proof.bound * (1 - 1e-6):
        yield text(f"; no mix of shapes below {objective_value(proof.floor, proof.objective)}")


def stage_table(rows: Sequence[StageRow], layout: Layout, setting: Setting, step_s: float) -> Markup:
    """Return who does what, a row a stage."""
    names = node_names(setting.cluster)
    headers = (
        "stage", "group", "nodes", "layers", "degrees", "recompute", "forward", "backward", "busy", "in flight"
    )  # fmt: skip
    shown = rows[:MOST_ROWS]
    cells = [_stage_cells(row, names[row.use.group], setting, step_s) for row in shown]
    left = len(rows) - len(shown)
    more = tag("p", f"{left} more rows are not shown.", class_="note") if left else ""
    return joined([table(headers, cells, class_="cards"), more])


def _stage_cells(row: StageRow, names_d: Sequence[str], setting: Setting, step_s: float) -> Iterator[str]:
    use, stage, key = row.use, row.parts[0], f"stages.{row.index}"
    yield tag("b", row.name)
    yield tag("span", swatch(group_class(setting.cluster, use.group)), use.group)
    yield cut(hostlist_text(nodes_of(names_d, stage.devices)), 40)
    held = held_words(setting.model, row.parts)
    yield tag("span", tag("b", str(num_decoders(setting.model, row.parts))), tag("small", f" {held}"))
    yield degrees(stage)
    yield stage.recompute
    yield number(f"{key}.forward_s", use.forward_s, format_seconds(use.forward_s))
    yield number(f"{key}.backward_s", use.backward_s, format_seconds(use.backward_s))
    busy = number(f"{key}.busy_s", use.busy_s, format_seconds(use.busy_s))
    yield tag("span", busy, tag("small", f" {percent(use.busy_s / step_s)}"))
    yield number(f"{key}.in_flight", use.in_flight, str(use.in_flight))


def comparison(best: Candidate, others: Sequence[Alternative], efficiency: float | None) -> Markup:
    """Return this plan beside the best plan of each simpler kind, each split into its parts."""
    if not others:
        return Markup("")
    found = [("this plan", best)] + [(other.name, other.candidate) for other in others if other.candidate is not None]
    step_s = best.estimate.step_s
    whole_s = min(max(candidate.estimate.step_s for _, candidate in found), LONGEST_BAR * step_s)
    bars = [_compared(name, candidate.estimate, step_s, whole_s) for name, candidate in found]
    missing = [f"{other.name}: {other.reason or 'nothing fits'}" for other in others if other.candidate is None]
    shown = {name for _, candidate in found for name in PART_WORDS if getattr(candidate.estimate.parts, name) > 0}
    entries = ((PART_CLASSES[name], words) for name, words in PART_WORDS.items() if name in shown)
    notes = [bullets(missing)] if missing else []
    if efficiency is not None:
        words = f"Hetero efficiency {percent(efficiency)}: throughput over the sum of each device type alone."
        notes.append(tag("p", words))
    return joined([tag("figure", *bars, legend(entries), class_="compare"), *notes])


def _compared(name: str, estimate: Estimate, step_s: float, whole_s: float) -> Markup:
    usd = f", {format_usd(estimate.usd_per_step)} a step" if estimate.usd_per_step is not None else ""
    beyond = " (the bar goes on)" if estimate.step_s > whole_s * (1 + 1e-9) else ""
    facts = f"{format_seconds(estimate.step_s)}, {format_count(estimate.tokens_per_s)} tokens/s{usd}"
    ratio = tag("b", f"{estimate.step_s / step_s:.2f}x")
    head = tag("p", tag("span", name), tag("span", ratio, f" {facts}{beyond}"))
    return tag("div", head, parts_bar(estimate, whole_s), class_="bar")


def advice(found: Explanation) -> Markup:
    """Return what single changes and one more node of each group would bring."""
    changes = [
        (change.words + (_lacks(change.missing_bytes)), change.after_s, change.fraction, None)
        for change in found.what_ifs
    ]
    nodes = [
        (
            f"one more node of group {gain.group} ({gain.num_devices} devices)",
            gain.after_s,
            gain.fraction,
            gain.usd_after,
        )
        for gain in found.gains
    ]
    entries = [*changes, *nodes]
    if not entries:
        return Markup("")
    most = max(max(fraction for _, _, fraction, _ in entries), 0.01)
    rows = [
        (words, format_seconds(after_s), _shorter(max(0.0, fraction), most), format_usd(usd) if usd is not None else "")
        for words, after_s, fraction, usd in entries
    ]
    headers = ("change", "step time", "shorter by", "cost a step")
    num_columns = 4 if any(row[3] for row in rows) else 3
    return table(headers[:num_columns], (row[:num_columns] for row in rows), class_="cards")


def _lacks(missing_bytes: float) -> str:
    return f", but a device would lack {missing_bytes / 2**30:.2f} GiB" if missing_bytes > 0 else ""


def _shorter(fraction: float, most: float) -> Markup:
    meter = tag("span", tag("i", style=f"width:{100 * fraction / most:.3g}%"), class_="meter")
    return tag("span", tag("span", percent(fraction) if fraction > 0 else "-", class_="saved"), meter)
