"""Where the benches beside other planners are, so that tests can use their formulas and data."""

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
if str(BENCH) not in sys.path:
    sys.path.insert(0, str(BENCH))
