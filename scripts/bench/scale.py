"""How long a search takes as the cluster grows: H100, A100-80GB and V100-32GB in 2 : 2 : 1, nodes of 8, one fabric.

python scripts/bench/scale.py [DEVICES ...]

Each search runs in a process of its own, start-up included, and the global batch grows with the devices (4096 at
10,240). The figures are printed and written to scripts/bench/results/scale-<date>.json.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

SIZES = (64, 320, 1280, 5120, 10240, 25600, 102400)
LARGE = 1024
"""Devices from which the model is the 175B GPT-3; smaller clusters train the 8B Llama."""
DEVICES_PER_NODE = 8
CLUSTER = """hetplan: cluster/v1
name: scale-{devices}
groups:
  h100: {{device: H100-SXM5-80GB, nodes: {h100}, devices_per_node: 8, site: main}}
  a100: {{device: A100-SXM4-80GB, nodes: {a100}, devices_per_node: 8, site: main}}
  v100: {{device: V100-SXM2-32GB, nodes: {v100}, devices_per_node: 8, site: main}}
networks:
  fabric: {{joins: [h100, a100, v100], kind: infiniband, bandwidth: 200 Gbit/s, latency: 3 us, nics_per_node: 8}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search."""

    devices: int
    model: str
    global_batch: int
    seq_len: int
    wall_s: float
    cpu_s: float
    resident_bytes: int
    search_s: float
    step_s: float
    bound_s: float
    gap: float
    space: str
    mfu: float


def main() -> None:
    """Search every size, print a table and write the results."""
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    print(" devices         model  batch    wall     CPU       RSS     gap       step  MFU")
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for devices in sizes:
            runs.append(search(devices, Path(folder)))
            print(line(runs[-1]), flush=True)
    write(runs)


def line(run: Run) -> str:
    """Return one row of the table."""
    resident = f"{run.resident_bytes / 2**20:5.0f} MiB"
    spent = f"{run.wall_s:6.1f}s {run.cpu_s:6.1f}s"
    found = f"{100 * run.gap:6.2f}% {run.step_s:9.3f}s {100 * run.mfu:3.0f}%"
    return f"{run.devices:8} {run.model:>13} {run.global_batch:6} {spent} {resident} {found}"


def cluster_text(devices: int) -> str:
    """Return a cluster of about so many devices (whole nodes, at least one of each type)."""
    nodes = devices // DEVICES_PER_NODE
    fast = max(1, round(0.4 * nodes))
    return CLUSTER.format(devices=devices, h100=fast, a100=fast, v100=max(1, nodes - 2 * fast))


def search(devices: int, folder: Path) -> Run:
    """Run one search in a fresh process and measure it from outside."""
    path, answer = folder / f"{devices}.yaml", folder / f"{devices}.json"
    path.write_text(cluster_text(devices))
    model = "gpt3-175b" if devices >= LARGE else "llama-3.1-8b"
    batch, seq_len = 8 * max(1, round(0.05 * devices)), 2048
    words = ["search", str(path), model, "--global-batch", str(batch), "--seq-len", str(seq_len)]
    start = time.perf_counter()
    with answer.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "hetplan", *words, "--no-compare", "--json"], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(words)}: exit code {os.waitstatus_to_exitcode(status)}")
    found = json.loads(answer.read_text())
    return Run(
        devices=devices,
        model=model,
        global_batch=batch,
        seq_len=seq_len,
        wall_s=round(wall_s, 3),
        cpu_s=round(usage.ru_utime + usage.ru_stime, 3),
        resident_bytes=usage.ru_maxrss * 1024,
        search_s=round(found["search_s"], 3),
        step_s=found["step_s"],
        bound_s=found["bound_s"],
        gap=found["gap"],
        space=found["space"],
        mfu=found["mfu"],
    )


def write(runs: list[Run]) -> None:
    """Write the runs with what they ran on."""
    now = datetime.now(UTC)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    document = {
        "date": now.isoformat(timespec="seconds"),
        "hardware": {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "versions": {
            "python": platform.python_version(),
            "hetplan": version("hetplan"),
            "numpy": version("numpy"),
            "ortools": version("ortools"),
        },
        "runs": [asdict(run) for run in runs],
    }
    path = results / f"scale-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path}")


def processor() -> str:
    """Return the processor's name, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
