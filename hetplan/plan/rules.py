"""What a broken rule looks like, and what every rule is given to look at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hetplan.costs.prices import Prices
from hetplan.plan.limits import Limits
from hetplan.plan.records import Layout, Replica, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One rule a layout breaks, where, and what would keep it."""

    rule: str
    where: str
    """Empty: the layout as a whole."""
    message: str
    unpriceable: bool = False
    """True: `estimate` cannot say what the layout costs."""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout under check."""

    layout: Layout
    prices: Prices
    limits: Limits

    def stages(self) -> Iterator[tuple[str, Replica, Stage]]:
        """Yield every (virtual) stage with where it stands."""
        for row, replica in enumerate(self.layout.replicas):
            for v, stage in enumerate(replica.stages):
                yield stage_place(row, v), replica, stage

    def decoders(self) -> list[list[int]]:
        """Return the decoder layers of each stage of each row."""
        is_decoder = [layer.kind == "decoder" for layer in self.prices.model.chain]
        return [
            [sum(is_decoder[stage.first_layer : stage.end_layer]) for stage in replica.stages]
            for replica in self.layout.replicas
        ]


def row_place(row: int) -> str:
    """Return how messages name a row of the layout (a replica shape): A, B .. Z, A1 .."""
    letter = chr(ord("A") + row % 26)
    return f"replica {letter}" if row < 26 else f"replica {letter}{row // 26}"


def stage_place(row: int, stage: int) -> str:
    """Return how messages name a stage."""
    return f"{row_place(row)} stage {stage}"


def listed(values: Iterable[object]) -> str:
    """Return values as words: `1, 2, 4`."""
    return ", ".join(str(value) for value in values)
