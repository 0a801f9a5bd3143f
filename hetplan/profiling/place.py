"""This process's place among all ranks, as torchrun or Slurm tell it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hetplan.errors import UsageError
from hetplan.specs.hostlist import expand_hostlist

PORT = 29533
"""Assumed free where Slurm names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank among all."""

    rank: int
    num_ranks: int
    local_rank: int
    address: str
    port: int


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return the place torchrun or Slurm gave this process; None: it was started alone.

    Raises:
        UsageError: the launcher's variables make no sense.
    """
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return Place(
                rank=int(environment["RANK"]),
                num_ranks=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", "0")),
                address=environment.get("MASTER_ADDR", "127.0.0.1"),
                port=int(environment.get("MASTER_PORT", str(PORT))),
            )
        if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
            nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
            return Place(
                rank=int(environment["SLURM_PROCID"]),
                num_ranks=int(environment["SLURM_NTASKS"]),
                local_rank=int(environment.get("SLURM_LOCALID", "0")),
                address=environment.get("MASTER_ADDR") or expand_hostlist(nodes)[0],
                port=int(environment.get("MASTER_PORT", str(PORT))),
            )
    except (ValueError, IndexError) as error:
        raise UsageError(f"the launcher's rank variables are not usable: {error}") from None
    return None


def free_port() -> int:
    """Return a port of this machine nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
