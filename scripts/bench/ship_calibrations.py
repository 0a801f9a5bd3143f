"""Write the calibrations that ship with hetplan.

    python scripts/bench/ship_calibrations.py ROWS.csv ACCURACY.json OUT

ACCURACY.json is what `accuracy.py ROWS.csv --json` printed: it holds the error each calibration states.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hetplan.calibrate.dataset import dataset_of
from hetplan.calibrate.evaluate import learn
from hetplan.calibrate.runs import read_runs
from hetplan.calibrate.ship import calibrations
from hetplan.specs.read_calibration import calibration_text


def main(rows: str, accuracy: str, out: str) -> None:
    """Run the script."""
    data = dataset_of(read_runs(Path(rows)))
    strata = json.loads(Path(accuracy).read_text(encoding="utf-8"))["strata"]
    errors = {name: scores["time"]["mape"] / 100 for name, scores in strata.items() if scores["time"]["n"]}
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, calibration in calibrations(data.times, learn(data), errors).items():
        (folder / f"{name}.yaml").write_text(calibration_text(calibration), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main(*sys.argv[1:4])
