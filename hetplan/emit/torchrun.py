"""Plain `torchrun`: one script a node, started by hand, ssh or anything that runs a command on every node."""

from __future__ import annotations

from hetplan.emit.records import Launched, LaunchFiles


def launch_torchrun(launched: Launched) -> LaunchFiles:
    """Return the steps of a run; there are no further files."""
    steps = (
        "Fill in `site.sh` (and `env-NODE.sh` where a node's names differ), and put this folder on every node.",
        "On every node: `bash launch-NODE.sh preflight`; all must say so before training starts.",
        "On every node: `bash launch-NODE.sh`.",
    )
    return LaunchFiles(steps=steps)
