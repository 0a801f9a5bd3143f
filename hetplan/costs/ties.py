"""Weights that several layers of a chain share: which layers own them and which use them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetplan.costs.memory import Tie
from hetplan.specs.model import Layer, Linear, Operator, Table


def find_ties(chain: Sequence[Layer], tp: int) -> tuple[Tie, ...]:
    """Return the tied weights of a chain, as a rank of a tp group holds them.

    A tied operator uses the weight of any untied table or vocabulary-cut linear of its size.
    """
    sizes = sorted({size for layer in chain for operator in layer.operators if (size := _size(operator, tied=True))})
    return tuple(
        Tie(
            params=size / tp,
            owners_l=np.array([any(_size(op, tied=False) == size for op in layer.operators) for layer in chain]),
            users_l=np.array([any(_size(op, tied=True) == size for op in layer.operators) for layer in chain]),
        )
        for size in sizes
    )


def _size(operator: Operator, *, tied: bool) -> int:
    """Return the size of a vocabulary-cut weight that is (or is not) tied, 0 for anything else."""
    match operator:
        case Table(split="vocab") if operator.tied is tied:
            return operator.rows * operator.width
        case Linear(split="vocab") if operator.tied is tied:
            return operator.inputs * operator.outputs
        case _:
            return 0
