"""`hetplan calibrate`: constants of the cost model from runs someone has seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetplan.cli.options import JsonFlag, one_of
from hetplan.errors import UsageError

if TYPE_CHECKING:
    from hetplan.calibrate.calibration import ConstantReport, FittedCalibration

SHOWN_ROWS = 12


def calibrate(
    runs: Annotated[
        Path,
        typer.Argument(metavar="RUNS", help="CSV table or JSON-lines log of observed steps.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the calibration there.")
    ] = None,
    stack: Annotated[
        str | None, typer.Option("--stack", metavar="NAME", help="The system to fit, where the table holds several.")
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            "--network", metavar="NAME", help="What your cluster file calls the network between nodes; *: any."
        ),
    ] = "*",
    as_json: JsonFlag = False,
) -> None:
    """Fit the cost model's constants to observed step times and peaks.

    Rows name the device, the model's dimensions, the degrees of the layout and the seconds of a step, in the columns
    device, n_devices, devices_per_node, inter_net, model, layers, hidden, ffn, heads, kv_heads, vocab, seq, tp, pp,
    vpp, dp, cp, ep, micro_batch, global_batch, recompute, sharding, precision, schedule, iter_time_s (and for peaks:
    kind, measured_value, unit).
    """
    from hetplan.calibrate.calibration import calibrate as fit_calibration
    from hetplan.calibrate.calibration import stacks_of
    from hetplan.calibrate.runs import read_runs
    from hetplan.cli.output import require_writable, show, show_json, write_whole
    from hetplan.specs.read_calibration import calibration_text

    require_writable(out)
    rows = read_runs(runs)
    names = stacks_of(rows)
    if stack is None and len(names) > 1:
        raise UsageError(f"{runs} holds runs of {len(names)} systems; choose one with --stack: {', '.join(names)}")
    chosen = one_of(stack, "--stack", names) if stack is not None else names[0]
    fitted = fit_calibration(
        [row for row in rows if row.stack == chosen], network=network, source=f"{runs.name}, {chosen}"
    )
    text = calibration_text(fitted.calibration)
    if out is not None:
        write_whole(out, text)
    if as_json:
        show_json(_document(fitted, text))
    else:
        show(_report(fitted, text, out))


def _document(fitted: FittedCalibration, text: str) -> dict[str, Any]:
    return {
        "calibration": text,
        "held_out_error": fitted.held_out_error,
        "constants": [
            {"owner": c.owner, "name": c.name, "value": c.value, "low": c.low, "high": c.high, "known": c.known}
            for c in fitted.constants
        ],
        "rows": [
            {
                "id": row.id,
                "observed_s": row.observed_s,
                "predicted_s": row.predicted_s,
                "error": row.error,
                "disagrees": row.disagrees,
            }
            for row in fitted.rows
        ],
        "left_out": [{"id": name, "reason": reason} for name, reason in fitted.left_out],
    }


def _report(fitted: FittedCalibration, text: str, out: Path | None) -> str:
    from hetplan.report.tables import table

    if out is None:
        return text
    sizes = sorted(abs(row.error) for row in fitted.rows)
    parts = [
        f"{len(sizes)} step times fitted: error {sum(sizes) / len(sizes):.1%} mean, {sizes[len(sizes) // 2]:.1%} median"
        + (f"; {fitted.held_out_error:.1%} on runs left out" if fitted.held_out_error is not None else "")
    ]
    told = [constant for constant in fitted.constants if constant.known > 0.05]
    lines = [_constant_line(constant) for constant in told]
    parts.append(table(("of", "constant", "value", "from", "to"), lines) if lines else "nothing is told apart")
    silent = len(fitted.constants) - len(told)
    if silent:
        parts.append(f"{silent} constants keep their assumed values: the runs say nothing about them")
    disagree = sorted((row for row in fitted.rows if row.disagrees), key=lambda row: -abs(row.error))
    if disagree:
        cells = [(row.id, f"{row.observed_s:.4g}", f"{row.predicted_s:.4g}", f"{row.error:+.1%}") for row in disagree][
            :SHOWN_ROWS
        ]
        parts.append(table(("row that disagrees", "observed s", "predicted s", "error"), cells))
    reasons = [f"not used: {name}: {reason}" for name, reason in fitted.left_out[:SHOWN_ROWS]]
    if len(fitted.left_out) > SHOWN_ROWS:
        reasons.append(f"... and {len(fitted.left_out) - SHOWN_ROWS} more")
    parts.extend(["\n".join(reasons)] if reasons else [])
    parts.append(f"written: {out}")
    return "\n\n".join(parts)


def _constant_line(constant: ConstantReport) -> tuple[str, ...]:
    numbers = (f"{number:.3g}" for number in (constant.value, constant.low, constant.high))
    return (constant.owner, constant.name, *numbers)
