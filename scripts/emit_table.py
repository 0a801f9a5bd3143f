"""What came of emitted folders, as a table: by engine and launcher, by reason of refusal, by problem."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

RESULTS = ("passed", "refused", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One folder that was asked for."""

    cluster: str
    model: str
    engine: str
    kind: str
    """free: a plan without restrictions; own: one searched for the engine."""
    via: str
    result: str
    """passed, refused, rejected (by a parser), no plan, or cut off (the pair took too long)."""
    said: str

    def document(self) -> dict[str, str]:
        """Return the fields as a mapping."""
        return asdict(self)


def reason(message: str) -> str:
    """Return the kind of a refusal: its phrases without the numbers and names of one plan."""
    text = re.sub(r"\s+", " ", message).removeprefix("error: ")
    suffix = " [nearest plan named]" if "nearest plan" in text else ""
    suffix = " [no plan it can run on this cluster]" if "no plan it can run" in text else suffix
    text = re.split(r"; (?:nearest plan|no plan it can run)|\. (?:Nearest|No plan)|\n", text)[0]
    while (shorter := re.sub(r" ?\([^()]*\)", "", text)) != text:
        text = shorter
    text = re.sub(r"\b\d[\d,.]*", "N", text)
    return text[:160] + suffix


def table(outcomes: Sequence[Outcome], all_pairs: int) -> str:
    """Return what was run and what came of it, as Markdown."""
    pairs = {(outcome.cluster, outcome.model) for outcome in outcomes}
    cut = {(outcome.cluster, outcome.model) for outcome in outcomes if outcome.result == "cut off"}
    folders = [outcome for outcome in outcomes if outcome.result in RESULTS]
    total = Counter(outcome.result for outcome in folders)
    lines = [
        f"{len(pairs)} of {all_pairs} pairs ({len(pairs) - len(cut)} complete, {len(cut)} cut off by their time), "
        f"{len({c for c, _ in pairs})} clusters, {len({m for _, m in pairs})} models. "
        f"{len(folders)} folders asked for: " + ", ".join(f"{total[name]} {name}" for name in RESULTS) + ".",
        "",
        "free: a plan without restrictions; own: a plan searched for the engine.",
        "",
        "| engine | plan | launcher | passed | refused | rejected |",
        "|---|---|---|--:|--:|--:|",
    ]
    counts = Counter((o.engine, o.kind, o.via, o.result) for o in folders)
    for key in sorted({(o.engine, o.kind, o.via) for o in folders}):
        lines.append("| " + " | ".join([*key, *(str(counts[(*key, name)]) for name in RESULTS)]) + " |")
    lines += _counted("Refused, by reason", ((o.engine, o.said) for o in folders if o.result == "refused"))
    lines += _counted("No plan to emit", ((o.engine, o.said) for o in outcomes if o.result == "no plan"))
    lines += _counted("Rejected", ((o.engine, o.said[:300]) for o in folders if o.result == "rejected"))
    lines += _matrix(outcomes)
    if cut:
        lines += ["", "Cut off: " + ", ".join(f"{cluster} x {model}" for cluster, model in sorted(cut)) + "."]
    return "\n".join(lines)


def _counted(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    counts = sorted(Counter(rows).items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
    if not counts:
        return []
    body = [f"| {engine} | {said.replace('|', '/')} | {count} |" for (engine, said), count in counts]
    return ["", f"## {title}", "", "| engine | said | count |", "|---|---|--:|", *body]


def _matrix(outcomes: Sequence[Outcome]) -> list[str]:
    counts = Counter((o.cluster, o.result) for o in outcomes)
    models = {c: len({o.model for o in outcomes if o.cluster == c}) for c in {o.cluster for o in outcomes}}
    body = [
        f"| {cluster} | {models[cluster]} | " + " | ".join(str(counts[cluster, name]) for name in RESULTS) + " |"
        for cluster in sorted(models)
    ]
    return [
        "",
        "## By cluster",
        "",
        "| cluster | models | passed | refused | rejected |",
        "|---|--:|--:|--:|--:|",
        *body,
    ]
