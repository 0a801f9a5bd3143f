"""A job planned again: what became of the old plan, the new one, and what must move between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetplan.plan.difference import Difference
from hetplan.plan.document import plan_document, ranges_text
from hetplan.plan.moves import Move, Moves
from hetplan.plan.records import Estimate, Plan
from hetplan.report.differences import difference_document
from hetplan.report.documents import estimate_document, finite
from hetplan.report.estimates import summary, time_table
from hetplan.report.layouts import Setting, headline, layout_table
from hetplan.report.tables import bullets, join_sections, pairs, percent, section, table
from hetplan.units import format_bytes, format_seconds

MOST_MOVES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """A job's old and new plan."""

    lost: tuple[str, ...]
    """Nodes and devices that are gone."""
    saved: Estimate
    """The old plan's cost when it was made."""
    old: Estimate | None
    """The old plan's cost under the new facts; None: it cannot run."""
    old_problems: tuple[str, ...]
    """Why the old plan is no longer valid."""
    resized: Estimate | None
    """The old plan's pipelines on what is left, the batch divided over them; None: that is not possible."""
    plan: Plan
    """The new plan."""
    difference: Difference
    moves: Moves
    search_s: float
    space: str
    """The plans the search looked at, in words."""


def replan_text(found: Replanned, setting: Setting, *, full: bool = False) -> str:
    """Return everything about a job planned again."""
    plan = found.plan
    lost = f"without {', '.join(found.lost)}\n" if found.lost else ""
    return join_sections(
        [
            lost + headline(plan.layout, setting),
            layout_table(plan.layout, plan.estimate, setting, full=full),
            summary(plan.estimate, plan.proof),
            time_table(plan.estimate),
            section("Old and new", _comparison(found)),
            section("Why the old plan cannot go on as it is", bullets(found.old_problems)),
            section("What must move (weights and optimizer states)", moves_text(found.moves, full=full)),
            section("Notes", bullets(_notes(found))),
        ]
    )


def _comparison(found: Replanned) -> str:
    new = found.plan.estimate
    rows = [
        ("old plan, as it was saved", *_cells(found.saved, new)),
        ("old plan under the new facts", *_cells(found.old if not found.old_problems else None, new)),
        ("old plan's pipelines on what is left", *_cells(found.resized, new)),
        ("new plan", *_cells(new, new)),
    ]
    return table(("", "step time", "over the new plan"), rows)


def _cells(estimate: Estimate | None, new: Estimate) -> tuple[str, str]:
    if estimate is None:
        return "not valid", "-"
    return format_seconds(estimate.step_s), f"{estimate.step_s / new.step_s:.3f}x"


def moves_text(moves: Moves, *, full: bool = False) -> str:
    """Return what must move, from where, and how long that takes at least."""
    if not moves.moves:
        return "nothing: every device holds what it needs"
    shown = sorted(moves.moves, key=lambda move: -move.num_bytes)[: None if full else MOST_MOVES]
    rows: list[tuple[str, ...] | str] = [_move_row(move) for move in shown]
    if len(shown) < len(moves.moves):
        rest = sum(move.num_bytes for move in moves.moves) - sum(move.num_bytes for move in shown)
        rows.append(f"(and {len(moves.moves) - len(shown)} smaller ones, {format_bytes(rest)} in all)")
    lines = [
        table(("layers", "from", "to", "devices", "bytes"), rows),
        pairs(
            [
                ("between devices", format_bytes(moves.moved_bytes)),
                ("from a checkpoint", format_bytes(moves.checkpoint_bytes)),
                ("stays", format_bytes(moves.kept_bytes)),
                ("time", _time_text(moves)),
            ]
        ),
    ]
    return "\n".join(lines)


def _time_text(moves: Moves) -> str:
    if finite(moves.transfer_s) is None:
        return f"some of it cannot travel: {moves.busiest}"
    if not moves.busiest:
        return "nothing crosses the network"
    minutes = f" ({moves.transfer_s / 60:.1f} min)" if moves.transfer_s >= 60 else ""
    return f"at least {format_seconds(moves.transfer_s)}{minutes} over the network; slowest: {moves.busiest}"


def _move_row(move: Move) -> tuple[str, ...]:
    layers = ranges_text([(move.first_layer, move.end_layer)])
    return (layers, move.sender, move.receiver, str(move.num_devices), format_bytes(move.num_bytes))


def _notes(found: Replanned) -> list[str]:
    notes = [f"space searched, starting from the old plan: {found.space}; {format_seconds(found.search_s)}"]
    if found.moves.checkpoint_bytes > 0:
        notes.append("what comes from a checkpoint was held by lost devices alone: the job goes on from its last one")
    stay = found.old if not found.old_problems else None
    gain_s = stay.step_s - found.plan.estimate.step_s if stay is not None else 0.0
    if gain_s > 0 and finite(found.moves.transfer_s):
        notes.append(f"against staying, moving pays off after {math.ceil(found.moves.transfer_s / gain_s):,} steps")
    slower = found.plan.estimate.step_s / found.saved.step_s - 1.0
    pace = f"{percent(abs(slower))} {'slower' if slower > 0 else 'faster'} than the old plan as it was saved"
    return [*notes, f"a step is {pace}"]


def replan_document(found: Replanned) -> dict[str, Any]:
    """Return the same for JSON."""
    plan = found.plan
    return {
        **estimate_document(plan.estimate, plan.proof, plan_document(plan)),
        "lost": list(found.lost),
        "search_s": found.search_s,
        "space": found.space,
        "saved_step_s": found.saved.step_s,
        "old_step_s": found.old.step_s if found.old is not None and not found.old_problems else None,
        "old_problems": list(found.old_problems),
        "resized_step_s": found.resized.step_s if found.resized is not None else None,
        "difference": difference_document(found.difference),
        "moves": {
            "moved_bytes": found.moves.moved_bytes,
            "kept_bytes": found.moves.kept_bytes,
            "checkpoint_bytes": found.moves.checkpoint_bytes,
            "transfer_s": finite(found.moves.transfer_s),
            "busiest": found.moves.busiest,
            "layers": _move_documents(found.moves.moves),
        },
    }


def _move_documents(moves: Sequence[Move]) -> list[dict[str, Any]]:
    return [
        {
            "layers": ranges_text([(move.first_layer, move.end_layer)]),
            "from": move.sender,
            "to": move.receiver,
            "devices": move.num_devices,
            "bytes": move.num_bytes,
        }
        for move in moves
    ]
