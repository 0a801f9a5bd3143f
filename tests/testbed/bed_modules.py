"""The testbed's scripts as modules."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts" / "testbed"
sys.path.insert(0, str(SCRIPTS))
bed_kernel, bed_spec, paced, relay = (import_module(name) for name in ("bed_kernel", "bed_spec", "paced", "relay"))
