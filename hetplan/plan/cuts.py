"""Where to cut a chain of layers into stages: by the user's counts of decoder layers, or balanced by time.

A balanced cut has the least possible largest stage; among those, the least sum of squares (so that no stage is left
empty or overfull where another choice costs nothing); among those, more layers on earlier stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from hetplan.costs.records import Floats
from hetplan.errors import UsageError
from hetplan.plan.rules import listed
from hetplan.specs.model import Model

_ALIKE = 1e-12
"""Values this close (relative) are taken as equal, so that rounding decides nothing."""


def balanced_cut(layer_s: Sequence[Floats]) -> tuple[int, ...]:
    """Return stage starts and the end: `layer_s[s][l]` is what layer `l` costs on stage `s`; every stage gets a layer.

    Raises:
        UsageError: there are more stages than layers.
    """
    num_layers = len(layer_s[0])
    if len(layer_s) > num_layers:
        raise UsageError(f"{len(layer_s)} stages need as many layers; the model has {num_layers}")
    spans_s = [_spans(costs) for costs in layer_s]
    largest = _least(spans_s, combine=np.maximum)[-1][num_layers]
    allowed = [np.where(spans <= largest * (1 + _ALIKE), spans**2, np.inf) for spans in spans_s]
    best = _least(allowed, combine=np.add)
    return _walk_back(allowed, best)


def _spans(costs: Floats) -> Floats:
    """Return the cost of every span (first, end); spans without layers are infinite."""
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    spans = sums[None, :] - sums[:, None]
    return np.where(np.tri(len(sums), dtype=bool), np.inf, spans)


def _least(spans_s: Sequence[Floats], *, combine: np.ufunc) -> list[Floats]:
    """Return, for each number of stages, the least combined cost of the layers before each place."""
    best = [spans_s[0][0]]
    for spans in spans_s[1:]:
        best.append(np.min(combine(best[-1][:, None], spans), axis=0))
    return best


def _walk_back(spans_s: Sequence[Floats], best: Sequence[Floats]) -> tuple[int, ...]:
    end = len(spans_s[0]) - 1
    cuts = [end]
    for stage in range(len(spans_s) - 1, 0, -1):
        totals = best[stage - 1] + spans_s[stage][:, end]
        alike = np.flatnonzero(totals <= best[stage][end] * (1 + _ALIKE))
        end = int(alike[-1])
        cuts.append(end)
    return (0, *reversed(cuts))


def pinned_cut(model: Model, decoders: Sequence[int]) -> tuple[int, ...]:
    """Return stage starts and the end for given counts of decoder layers a stage.

    Layers before the first decoder layer go to the first stage, layers after the last to the last one; where several
    last stages have no decoder layer, each gets one of the layers at the end and the first of them the rest.

    Raises:
        UsageError: the counts do not add up, or leave a stage without any layer.
    """
    places = [index for index, layer in enumerate(model.chain) if layer.kind == "decoder"]
    if sum(decoders) != len(places) or min(decoders) < 0:
        raise UsageError(
            f"{listed(decoders)} decoder layers a stage make {sum(decoders)}; {model.name} has {len(places)}"
        )
    inner = [_after(places, count) for count in accumulate(decoders[:-1])]
    empty = len(decoders) - max((stage + 1 for stage, count in enumerate(decoders) if count), default=0)
    for behind in range(1, empty):
        inner[-behind] = max(inner[-behind], len(model.chain) - behind)
    cuts = (0, *inner, len(model.chain))
    for stage, (first, end) in enumerate(pairwise(cuts)):
        if end <= first:
            raise UsageError(f"{listed(decoders)} decoder layers a stage leave stage {stage} without any layer")
    return cuts


def _after(places: Sequence[int], count: int) -> int:
    """Return the place after the `count`-th decoder layer; before any, the place of the first."""
    return places[count - 1] + 1 if count else places[0]
