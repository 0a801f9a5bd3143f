"""An explanation of a plan as text and as a document: who does what, what binds, what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.plan.records import Estimate, Layout, Proof
from hetplan.report.estimates import memory_table, summary, time_table
from hetplan.report.layouts import Setting, headline, layout_table
from hetplan.report.searches import runner_up_notes
from hetplan.report.sizes import SHORT_SEARCH
from hetplan.report.tables import bullets, join_sections, percent, section, table
from hetplan.report.timelines import timeline_gantt
from hetplan.search.explain import Explanation
from hetplan.search.explain_changes import Gain
from hetplan.search.records import Candidate
from hetplan.simulate.records import Timeline
from hetplan.units import format_seconds, format_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A plan with all that is known of it."""

    layout: Layout
    estimate: Estimate
    proof: Proof | None
    explanation: Explanation
    timeline: Timeline
    next_best: Candidate | None
    """The best other plan a search finds; None: none, or not asked."""


def explanation_text(explained: Explained, setting: Setting, *, full: bool = False) -> str:
    """Return everything there is to say about a plan; `full` shows every stage."""
    layout, estimate, found = explained.layout, explained.estimate, explained.explanation
    binds = [binding.sentence for binding in found.bindings]
    helps = [change.sentence for change in found.what_ifs]
    return join_sections(
        [
            headline(layout, setting),
            layout_table(layout, estimate, setting, full=full),
            summary(estimate, explained.proof),
            timeline_gantt(explained.timeline),
            section("Where time goes", time_table(estimate)),
            section("Where memory goes (GiB of a device, fullest stages first)", memory_table(estimate, full=full)),
            section("What binds", bullets(binds)),
            section("What would help", bullets(helps)),
            section("One more node", gain_table(found.gains)),
            section("Next best", bullets(_next_best(explained))),
            section("Before it runs", bullets(found.remarks)),
            section("Idle devices", bullets([f"{count} of group {name}" for name, count in found.unused])),
        ]
    )


def gain_table(gains: Sequence[Gain]) -> str:
    """Return what one more node of each group would bring."""
    rows = [
        (
            gain.group,
            str(gain.num_devices),
            format_seconds(gain.after_s),
            percent(gain.fraction),
            format_usd(gain.usd_after) if gain.usd_after is not None else "",
        )
        for gain in gains
    ]
    if not rows:
        return ""
    lines = table(("group", "devices", "step time", "shorter by", "cost a step"), rows)
    return f"{lines}\n{bullets([f'{SHORT_SEARCH}: the gain is at least this'])}"


def _next_best(explained: Explained) -> list[str]:
    if explained.next_best is None:
        return []
    best = Candidate(layout=explained.layout, estimate=explained.estimate)
    return runner_up_notes(best, [explained.next_best])


def explanation_document(explained: Explained) -> dict[str, Any]:
    """Return the same as a document."""
    found = explained.explanation
    return {
        "step_s": explained.estimate.step_s,
        "roles": [
            {
                "replica": role.replica,
                "stage": role.stage,
                "group": role.group,
                "num_devices": role.num_devices,
                "first_layer": role.first_layer,
                "end_layer": role.end_layer,
                "num_decoder_layers": role.num_decoder_layers,
                "samples_per_step": role.samples_per_step,
                "busy_fraction": role.busy_fraction,
            }
            for role in found.roles
        ],
        "unused": dict(found.unused),
        "time": [{"part": share.part, "seconds": share.seconds, "fraction": share.fraction} for share in found.time],
        "memory": [
            {
                "replica": room.replica,
                "stage": room.stage,
                "peak_bytes": room.use.total_bytes,
                "capacity_bytes": room.capacity_bytes,
                "headroom_bytes": room.headroom_bytes,
                "largest": room.largest[0],
            }
            for room in found.memory
        ],
        "bindings": [
            {"kind": binding.kind, "seconds": binding.seconds, "sentence": binding.sentence}
            for binding in found.bindings
        ],
        "what_ifs": [{"change": change.words, "step_s": change.after_s} for change in found.what_ifs],
        "one_more_node": [{"group": gain.group, "step_s": gain.after_s} for gain in found.gains],
        "next_best": _next_best(explained),
        "remarks": list(found.remarks),
    }
