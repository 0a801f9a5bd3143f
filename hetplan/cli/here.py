"""What the machine this runs on has: accelerators, network ports, memory and cores, as its own tools state them."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetplan.errors import HetplanError

if TYPE_CHECKING:
    from hetplan.specs.importers.facts import Facts, SourceText

TIMEOUT_S = 30
INFINIBAND = Path("/sys/class/infiniband")
QUERY = "name,memory.total,power.limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What was found, and what is to be said of it."""

    facts: tuple[Facts, ...]
    remarks: tuple[str, ...]


def look_here() -> Here:
    """Return the facts of this machine."""
    from hetplan.specs.importers.facts import Facts, NodeSheet

    name = socket.gethostname() or "localhost"
    found, remarks = _accelerators()
    ports, said = _ports()
    host = NodeSheet(source="this machine", host_memory_bytes=_memory_bytes(), cores=_cores())
    parts = [*found, *ports, Facts(sheets=(host,))]
    if not found:
        remarks = [*remarks, "no accelerator was found here (neither nvidia-smi nor rocm-smi lists one)"]
    return Here(facts=tuple(_named(part, name) for part in parts), remarks=(*remarks, *said))


def _named(facts: Facts, name: str) -> Facts:
    return replace(facts, sheets=tuple(replace(sheet, nodes=(name,)) for sheet in facts.sheets))


def _accelerators() -> tuple[list[Facts], list[str]]:
    from hetplan.specs.importers.nvidia_smi import read_nvlink_status, read_query, read_topo
    from hetplan.specs.importers.rocm import read_showtopo

    tools: tuple[tuple[list[str], Callable[[SourceText], Facts]], ...] = (
        (["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"], read_query),
        (["nvidia-smi", "topo", "-m"], read_topo),
        (["nvidia-smi", "nvlink", "--status"], read_nvlink_status),
        (["rocm-smi", "--showtopo"], read_showtopo),
    )
    found: list[Facts] = []
    remarks: list[str] = []
    for words, read in tools:
        if shutil.which(words[0]) is None:
            continue
        try:
            found.append(read(_output(words)))
        except HetplanError as error:
            remarks.append(str(error))
    return found, remarks


def _output(words: list[str]) -> SourceText:
    """Return what a tool prints.

    Raises:
        HetplanError: it fails or hangs.
    """
    from hetplan.errors import UsageError
    from hetplan.specs.importers.facts import SourceText, without_colours

    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{words[0]} could not be run: {error}") from None
    if done.returncode:
        first = (done.stdout + done.stderr).strip().splitlines()[:1]
        raise UsageError(f"{' '.join(words[:2])} failed: {' '.join(first) or f'exit code {done.returncode}'}")
    return SourceText(name=words[0], text=without_colours(done.stdout))


def _ports() -> tuple[list[Facts], list[str]]:
    from hetplan.specs.importers.facts import SourceText
    from hetplan.specs.importers.infiniband import read_sysfs

    lines = list(_attributes(sorted(INFINIBAND.glob("*/ports/*/*")) if INFINIBAND.is_dir() else ()))
    if not lines:
        return [], []
    try:
        return [read_sysfs(SourceText(name=str(INFINIBAND), text="\n".join(lines)))], []
    except HetplanError as error:
        return [], [str(error)]


def _attributes(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if path.name in ("rate", "state", "link_layer"):
            try:
                yield f"{path.relative_to(INFINIBAND)}: {path.read_text(encoding='utf-8').strip()}"
            except (OSError, ValueError):
                continue


def _memory_bytes() -> float | None:
    """Memory of the host as Linux counts it."""
    for line in _lines(Path("/proc/meminfo")):
        words = line.split()
        if words[:1] == ["MemTotal:"] and len(words) == 3 and words[1].isdigit():
            return int(words[1]) * 1024.0
    return None


def _cores() -> int | None:
    """Physical cores: different pairs of package and core; None where Linux does not list them."""
    pairs: set[tuple[str, str]] = set()
    package = ""
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        if key.strip() == "physical id":
            package = value.strip()
        elif key.strip() == "core id":
            pairs.add((package, value.strip()))
    return len(pairs) or None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
