"""How far hetplan's estimates are from published runs, stratum by stratum.

    python scripts/bench/accuracy.py ROWS.csv [--calibration-set ROWS.csv] [--json] [--strata a,b] [--rows]
        [--jobs N]

Every row becomes a cluster, a model and a layout; `hetplan.plan.estimate` says what it costs. Without a calibration
set the constants are fitted on four fifths of the configurations and asked about the rest, five times over; with one
they are fitted on that set alone (rows of a stack or device it does not hold use the next more general constants).
Runs of models whose layers were measured (`layer_tables/`) are priced from these. `--leave-out` fits on all strata but
the one that is scored. The columns are those of `hetplan.calibrate.runs.Run`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from hetplan.calibrate.dataset import Dataset, dataset_of
from hetplan.calibrate.evaluate import Judged, cross_validate, judge, learn, leave_out
from hetplan.calibrate.runs import read_runs
from hetplan.calibrate.score import Score, score
from hetplan.catalog import load_calibration
from hetplan.specs.layer_table import LayerTable

FOLDS = 5
METRICS = ("time", "memory", "fits")
LAYER_TABLES = Path(__file__).parent / "layer_tables"
HEAD = f"{'stratum':26} {'n':>4} {'mape':>6} {'median':>6} {'p90':>6} {'max':>6} {'bias':>6} {'spear':>6}  {'base':>6}"


def main() -> int:
    """Run the script."""
    options = _options()
    data = dataset_of(_chosen(options.rows_file, options.strata), layer_tables())
    judged = _judged(data, options)
    document = report(data, judged)
    if options.json:
        if options.rows:
            document["rows"] = [_row(entry) for entry in judged]
        print(json.dumps(document, indent=1))
        return 0
    _show(document)
    if options.rows:
        _show_rows(judged)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows_file", type=Path, metavar="ROWS.csv")
    parser.add_argument("--calibration-set", type=Path, metavar="ROWS.csv")
    parser.add_argument("--leave-out", action="store_true", help="score each stratum on constants fitted without it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--strata", help="only these, comma-separated")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that divide the five folds")
    parser.add_argument("--rows", action="store_true", help="list every row")
    return parser.parse_args()


def layer_tables() -> tuple[LayerTable, ...]:
    """Return the measured layers that lie beside this script: runs they cover are priced from them."""
    found = (load_calibration(path)[0].layers for path in sorted(LAYER_TABLES.glob("*.yaml")))
    return tuple(table for table in found if table is not None)


def _chosen(path: Path, strata: str | None) -> list[Any]:
    names = set(strata.split(",")) if strata else None
    return [run for run in read_runs(path) if names is None or run.stack in names]


def _judged(data: Dataset, options: argparse.Namespace) -> list[Judged]:
    if options.calibration_set is not None:
        return judge(data, learn(dataset_of(read_runs(options.calibration_set), layer_tables())))
    if options.leave_out:
        return leave_out(data)
    jobs = min(options.jobs, FOLDS)
    if jobs == 1:
        return cross_validate(data, FOLDS)
    with ProcessPoolExecutor(jobs) as pool:
        parts = [pool.submit(cross_validate, data, FOLDS, (job, jobs)) for job in range(jobs)]
        return [entry for part in parts for entry in part.result()]


def report(data: Dataset, judged: list[Judged]) -> dict[str, Any]:
    """Return everything as one document; errors in percent."""
    strata = sorted({entry.setup.run.stack for entry in judged} | {left.run.stack for left in data.left})
    return {
        "pooled": _scores(judged),
        "strata": {name: _scores(entry for entry in judged if entry.setup.run.stack == name) for name in strata},
        "inexpressible": [
            {"stratum": stack, "reason": reason, "rows": count}
            for (stack, reason), count in sorted(data.reasons.items())
        ],
    }


def _scores(entries: Iterable[Judged]) -> dict[str, Any]:
    rows = list(entries)
    scores: dict[str, Any] = {}
    for metric in METRICS:
        own = [row for row in rows if row.metric == metric]
        if metric == "fits":
            scores[metric] = _fits(own)
            continue
        scores[metric] = _score(own).document()
    timed = [row for row in rows if row.metric == "time" and row.baseline]
    scores["baseline_time"] = score([row.baseline or 0.0 for row in timed], [row.observed for row in timed]).document()
    return scores


def _score(rows: list[Judged]) -> Score:
    return score([row.predicted for row in rows], [row.observed for row in rows])


def _fits(rows: list[Judged]) -> dict[str, Any]:
    """Return the share of configurations classified right; as an error, wrong ones count 100 %."""
    wrong = [100.0 * (row.predicted != row.observed) for row in rows]
    share = sum(wrong) / len(rows) if rows else None
    missed = [row for row in rows if not row.observed]
    return {
        "n": len(rows),
        "mape": share,
        "right": None if share is None else 100.0 - share,
        "n_oom": len(missed),
        "right_oom": 100.0 * sum(not row.predicted for row in missed) / len(missed) if missed else None,
        "median": sorted(wrong)[len(wrong) // 2] if wrong else None,
        "p90": sorted(wrong)[int(len(wrong) * 0.9)] if wrong else None,
        "max": max(wrong, default=None),
        "bias": 100.0 * sum(row.predicted - row.observed for row in rows) / len(rows) if rows else None,
        "spearman": None,
    }


def _show(document: dict[str, Any]) -> None:
    for metric in ("time", "memory"):
        print(f"\n{metric}: |predicted / observed - 1| in percent; base: mean error of a constant fraction of peak")
        print(HEAD)
        for name, scores in [*document["strata"].items(), ("pooled", document["pooled"])]:
            if scores[metric]["n"]:
                print(_line(name, scores[metric], scores["baseline_time"] if metric == "time" else {}))
    print("\nfits or runs out of memory: classified right, in percent (those that ran out)")
    for name, scores in [*document["strata"].items(), ("pooled", document["pooled"])]:
        fits = scores["fits"]
        if fits["n"]:
            oom = "" if fits["right_oom"] is None else f"   ({fits['right_oom']:.0f} of {fits['n_oom']})"
            print(f"{name:26} {fits['n']:4} {fits['right']:6.1f}{oom}")
    print("\nnot expressed")
    for entry in document["inexpressible"]:
        print(f"{entry['stratum']:26} {entry['rows']:4}  {entry['reason']}")


def _line(name: str, numbers: dict[str, Any], baseline: dict[str, Any]) -> str:
    cells = [numbers[key] for key in ("mape", "median", "p90", "max", "bias", "spearman")] + [baseline.get("mape")]
    words = [f"{'-':>6}" if cell is None else f"{cell:6.1f}" for cell in cells]
    return f"{name:26} {numbers['n']:4} {' '.join(words[:6])}  {words[6]}"


def _row(entry: Judged) -> dict[str, Any]:
    return {
        "id": entry.setup.run.id,
        "stratum": entry.setup.run.stack,
        "metric": entry.metric,
        "predicted": entry.predicted,
        "observed": entry.observed,
        "constants": entry.level,
    }


def _show_rows(judged: list[Judged]) -> None:
    for row in sorted(judged, key=lambda entry: (entry.metric, entry.setup.run.stack, entry.setup.run.id)):
        if row.metric != "fits" or row.predicted != row.observed:
            error = 100 * (row.predicted / row.observed - 1) if row.observed else float("nan")
            name, level = row.setup.run.id, row.level
            print(f"{row.metric:7} {name:60} {row.observed:12.5g} {row.predicted:12.5g} {error:+7.1f} {level}")


if __name__ == "__main__":
    sys.exit(main())
