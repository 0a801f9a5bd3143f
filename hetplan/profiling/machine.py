"""What this rank runs on: device, memory, driver and software, as torch and Linux tell."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path
from typing import Literal

import torch

from hetplan.catalog.devices import find_device
from hetplan.errors import HetplanError, UsageError
from hetplan.profiling.records import Machine

CPU_INFO, MEMORY_INFO, STATUS = Path("/proc/cpuinfo"), Path("/proc/meminfo"), Path("/proc/self/status")
MOST_NAME = 64
DeviceKind = Literal["auto", "cpu", "cuda"]


def torch_device(kind: DeviceKind, local_rank: int) -> str:
    """Return the torch name of a rank's device.

    Raises:
        UsageError: a GPU was asked for and torch sees none.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA or ROCm device here; leave --device out, or say --device cpu")
    return f"cuda:{local_rank % torch.cuda.device_count()}"


def num_devices(kind: DeviceKind) -> int:
    """Return how many devices this host has: its GPUs, else its cores (4 at most)."""
    if torch_device(kind, 0) == "cpu":
        return max(1, min(4, cores()))
    return int(torch.cuda.device_count())


def cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def look(device: str, name: str | None) -> Machine:
    """Return what a rank runs on; `name` is what the calibration is to call its device."""
    memory_bytes = _host_memory_bytes()
    threads = int(torch.get_num_threads())
    software = f"torch {torch.__version__}, python {platform.python_version()}"
    if device == "cpu":
        return Machine(
            host=socket.gethostname(),
            device=name or cpu_name(_text(CPU_INFO), threads),
            kind="cpu",
            memory_bytes=memory_bytes,
            host_memory_bytes=memory_bytes,
            threads=threads,
            reserve_bytes=_resident_bytes(),
            software=software,
            driver=f"Linux {platform.release()}",
        )
    properties = torch.cuda.get_device_properties(device)
    hip = getattr(torch.version, "hip", None)
    return Machine(
        host=socket.gethostname(),
        device=name or card_name(str(properties.name)),
        kind="rocm" if hip else "cuda",
        memory_bytes=float(properties.total_memory),
        host_memory_bytes=memory_bytes,
        threads=threads,
        reserve_bytes=float(properties.total_memory - torch.cuda.mem_get_info(device)[0]),
        software=software,
        driver=f"HIP {hip}" if hip else f"CUDA {torch.version.cuda}",
    )


def card_name(stated: str) -> str:
    """Return the catalog's name of a card its driver states, else the driver's."""
    words = stated.removeprefix("NVIDIA ").removeprefix("AMD ").removeprefix("Instinct ")
    for candidate in (stated, words, words.replace(" ", "-")):
        try:
            return find_device(candidate).name
        except HetplanError:
            continue
    return stated[:MOST_NAME]


def cpu_name(info: str, threads: int) -> str:
    """Return a device name for a CPU, from the text of `/proc/cpuinfo`."""
    found = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", info, re.MULTILINE)
    model = found[1] if found else platform.machine() or "CPU"
    plain = re.sub(r"\((R|TM|tm)\)|@.*$|\bCPU\b|\bProcessor\b", "", model)
    words = re.sub(r"[^A-Za-z0-9.+-]+", " ", plain).split()
    return f"{' '.join(words)[: MOST_NAME - 16]} {threads} {'thread' if threads == 1 else 'threads'}"


def _host_memory_bytes() -> float:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _text(MEMORY_INFO), re.MULTILINE)
    if found:
        return int(found[1]) * 1024.0
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _resident_bytes() -> float:
    """Memory of this process, as Linux counts it."""
    found = re.search(r"^VmRSS:\s*(\d+) kB", _text(STATUS), re.MULTILINE)
    return int(found[1]) * 1024.0 if found else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
