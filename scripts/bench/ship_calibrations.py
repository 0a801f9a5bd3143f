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

WORDS = {
    "amp-het": "deepspeed-2022-mixed",
    "amp-homo": "deepspeed-2022",
    "bs": "megatron-deepspeed-2022",
    "bs-log": "megatron-deepspeed-2022-logs",
    "dlperf": "megatron-lm-2021-ib100",
    "fperf": "flagperf",
    "kor-t5": "megatron-lm-2022",
    "megascale-t2-megascale": "megascale",
    "megascale-t2-megatron": "megatron-lm-2023",
    "mpt": "llm-foundry",
    "nemo-bridge": "megatron-bridge",
    "nemo2407": "nemo-24.07",
    "nemolaunch": "nemo-launcher",
    "sailor-clariden": "megatron-deepspeed-slingshot",
    "sailor-mit": "megatron-deepspeed-ethernet",
    "sc21-t1": "megatron-lm-2021",
    "sc21-t2": "megatron-lm-2021-large",
    "simumax-a100": "megatron-lm-2025",
    "simumax-b200": "megatron-lm-2025",
    "tr3m": "megatron-lm-2021-omni-path",
    "tt": "torchtitan",
    "zb": "zero-bubble",
}
"""Readable names of systems."""


def main(rows: str, accuracy: str, out: str) -> None:
    """Run the script."""
    data = dataset_of(read_runs(Path(rows)))
    strata = json.loads(Path(accuracy).read_text(encoding="utf-8"))["strata"]
    errors = {name: scores["time"]["mape"] / 100 for name, scores in strata.items() if scores["time"]["n"]}
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, calibration in calibrations(data.times, learn(data), errors, WORDS).items():
        (folder / f"{name}.yaml").write_text(calibration_text(calibration), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main(*sys.argv[1:4])
