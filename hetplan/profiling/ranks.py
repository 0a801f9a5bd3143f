"""The processes that measure together: started by torchrun, by Slurm, or by `hetplan profile` itself on one machine."""

from __future__ import annotations

import os
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed

from hetplan.profiling.machine import DeviceKind, torch_device
from hetplan.profiling.place import Place

TIMEOUT = timedelta(seconds=120)
"""A rank that has not come by then will not come."""


class Ranks:
    """This process among all ranks, from joining to leaving."""

    def __init__(self, place: Place, kind: DeviceKind) -> None:
        self.place = place
        self.device = torch_device(kind, place.local_rank)
        self._groups: dict[tuple[int, ...], Any] = {}

    def __enter__(self) -> Self:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = self.place.address, str(self.place.port)
        if self.device != "cpu":
            torch.cuda.set_device(self.device)
        backend = "gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, rank=self.place.rank, world_size=self.place.num_ranks, timeout=TIMEOUT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def gather(self, thing: object) -> list[Any]:
        """Return what every rank gave, in rank order, on every rank."""
        found: list[Any] = [None] * self.place.num_ranks
        distributed.all_gather_object(found, thing)
        return found

    def meet(self) -> None:
        """Wait until all ranks are here."""
        distributed.all_reduce(torch.zeros(1))

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of some ranks; every rank must ask for the same groups in the same order."""
        if ranks not in self._groups:
            self._groups[ranks] = distributed.new_group(list(ranks), timeout=TIMEOUT)
        return self._groups[ranks]
