"""`hetplan env`: the versions that matter when something looks wrong."""

from __future__ import annotations

from typing import Annotated

import typer

PACKAGES = ("numpy", "scipy", "ortools", "typer", "PyYAML", "torch")


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the versions that matter in a report."""
    from hetplan.cli.output import show, show_json
    from hetplan.report.tables import pairs

    found = _versions()
    if as_json:
        show_json(found)
    else:
        show(pairs([(name, version or "not installed") for name, version in found.items()]))


def _versions() -> dict[str, str | None]:
    import os
    import platform
    from importlib import metadata

    import hetplan

    found: dict[str, str | None] = {
        "hetplan": hetplan.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
