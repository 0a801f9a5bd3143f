"""What `blocks` asks of the cost tables: seconds of spans in the fastest mode, and what recompute must add.

A stage of n decoder layers can only run in a recompute mode in which n layers fit, so its layers take at least the
least seconds such a mode adds; together the stages of a block add at least the lower convex hull of the points (most
layers, seconds added) of all modes.

Legend: M meshes, L layers, R recompute modes, H classes of microbatches held.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetplan.costs.records import Floats
from hetplan.plan.stages import whole_params
from hetplan.search.after import Ending
from hetplan.search.patterns import MOST_HELD, Ints
from hetplan.search.problem import Problem, Tables

Bools = npt.NDArray[np.bool_]
HELD = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, MOST_HELD])
"""Classes of microbatches held: each stands for all up to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """Costs by mesh; meshes nothing fits on hold no layers."""

    decoders: Ints
    """Decoder layers before each layer, (L + 1,)."""
    forward: Floats
    backward: Floats
    """Seconds of the layers before each in the fastest mode, (M, L + 1)."""
    layer_s: Floats
    layer_backward_s: Floats
    """Least seconds of a decoder layer, (M,)."""
    ending_s: Floats
    """Least A of a decoder layer, (M,)."""
    beta: Floats
    most: Ints
    """Decoder layers that fit on a stage, (H, M)."""
    layer_extra_s: Floats
    """Seconds recompute adds at least to each layer of a stage of n layers, (H, M, L + 1)."""
    added_s: Floats
    """Seconds recompute adds at least to a stage of n layers on average, (H, M, L + 1)."""
    hidden: float
    """Part of a backward pass under which gradients may hide."""
    opening_s: Floats
    """A of the first layer where that is no decoder layer, (M,)."""
    opening_reduced_s: Floats
    """Of it, the reduction that its backward pass does not hide, (M,)."""
    gather_s: Floats
    """Least seconds to gather a decoder layer, (M,)."""
    lost_s: Floats
    """Reduction that other layers before each hide for their neighbours, (M, L + 1)."""
    ending: Ending

    def ties_s(self, mesh: Ints, count: Ints) -> Floats:
        """Return seconds in which tied tables on the first and the last stage are added up, (S,)."""
        pairs, pair = np.unique(mesh[:, 0] * len(self.layer_s) + mesh[:, -1], return_inverse=True)
        ties = np.array([self.ending.tie_s(*divmod(both, len(self.layer_s))) for both in pairs.tolist()])
        return np.asarray(np.where(count.sum(axis=1) > 1, ties[pair], 0.0))

    def tied_s(self, mesh: Ints, ties_s: Floats) -> Floats:
        """Return what a tied table makes the last stage wait for after the first one's last pass, (S,); 0: no tie."""
        return np.asarray(np.where(ties_s > 0, ties_s + self.opening_reduced_s[mesh[:, 0]], 0.0))

    def front_s(self, mesh: Ints, count: Ints, ties_s: Floats) -> Floats:
        """Return A of what the first stage holds beside decoder layers, tied tables included, (S,)."""
        several = count.sum(axis=1) > 1
        return np.asarray(np.where(several, self.opening_s[mesh[:, 0]], 0.0) + ties_s)


def block_costs(problem: Problem, tables: Tables, ending: Ending) -> BlockCosts:
    """Return the costs of every mesh."""
    if "seconds" not in tables.block_memo:
        tables.block_memo["seconds"] = _seconds(problem, tables)
    forward, backward, layer_s, layer_backward_s, beta, most, layer_extra, added = tables.block_memo["seconds"]
    decoder, inner = _decoders(problem)
    num_m = len(problem.meshes)
    ending_s, opening_s, reduced_s, gather_s = (np.zeros(num_m) for _ in range(4))
    lost = np.zeros((num_m, problem.num_layers))
    dense = whole_params(problem.prices)[0]
    for m in np.flatnonzero(tables.usable_m).tolist():
        each = ending.of_layers(tables, m)
        least = float(each[inner].min()) if decoder.any() else 0.0
        lost[m, ~inner] = np.maximum(0.0, -each[~inner])
        if not inner[0]:
            opening_s[m] = float(dense[0]) * ending.gather_per_param_s(m)
        if not inner[0] and least >= 0:
            opening_s[m] = max(opening_s[m], float(each[0]))
            slowest = tables.backward_mrl[m][:, 0]
            reduced_s[m] = float(ending.reduced_s(m, dense[:1], slowest[np.isfinite(slowest)].max(initial=0.0)).min())
        gather_s[m] = float(dense[inner].min()) * ending.gather_per_param_s(m)
        ending_s[m] = max(0.0, least)
    return BlockCosts(
        decoders=np.concatenate([[0], np.cumsum(decoder)]),
        forward=forward,
        backward=backward,
        layer_s=layer_s,
        layer_backward_s=layer_backward_s,
        ending_s=ending_s,
        beta=beta,
        most=most,
        layer_extra_s=layer_extra,
        added_s=added,
        opening_s=opening_s,
        opening_reduced_s=reduced_s,
        gather_s=gather_s,
        lost_s=_prefix(lost),
        ending=ending,
        hidden=problem.prices.calibration.overlap.gradients,
    )


def _decoders(problem: Problem) -> tuple[Bools, Bools]:
    """Return which layers are decoder layers, and these or, where there are none, all."""
    decoder = np.array([layer.kind == "decoder" for layer in problem.prices.model.chain])
    return decoder, decoder if decoder.any() else np.ones_like(decoder)


def _seconds(problem: Problem, tables: Tables) -> tuple[np.ndarray, ...]:
    """Return what does not depend on how a step ends: the first fields of `BlockCosts`."""
    decoder, inner = _decoders(problem)
    num_m = len(problem.meshes)
    total = tables.forward_mrl + tables.backward_mrl
    fastest, forward, backward = total.min(axis=1), tables.forward_mrl.min(axis=1), tables.backward_mrl.min(axis=1)
    layer_s, layer_backward_s, beta = np.zeros(num_m), np.zeros(num_m), np.ones(num_m)
    extra = np.zeros((num_m, len(tables.recomputes)))
    for m in np.flatnonzero(tables.usable_m).tolist():
        layer_s[m] = fastest[m, inner].min() if decoder.any() else 0.0
        layer_backward_s[m] = backward[m, inner].min()
        with np.errstate(invalid="ignore"):
            beta[m] = np.nanmin(backward[m] / np.maximum(fastest[m], 1e-300))
            extra[m] = np.nan_to_num((total[m] - fastest[m])[:, inner], nan=0.0).min(axis=1)
    most = _most_by_mode(tables, decoder)
    return (
        _prefix(np.where(tables.usable_m[:, None], forward, 0.0)),
        _prefix(np.where(tables.usable_m[:, None], backward, 0.0)),
        layer_s,
        layer_backward_s,
        beta,
        most.max(axis=2),
        *_recompute(most, extra, problem.num_layers),
    )


def _prefix(seconds_ml: Floats) -> Floats:
    return np.concatenate([np.zeros((len(seconds_ml), 1)), np.cumsum(seconds_ml, axis=1)], axis=1)


def _most_by_mode(tables: Tables, decoder: Bools) -> Ints:
    """Return the most decoder layers of a stage, (H, M, R)."""
    layers = np.concatenate([[0], np.cumsum(decoder)])
    starts = np.arange(len(layers))
    found = []
    for held in HELD.tolist():
        if held not in tables.most_memo:
            ends = tables.furthest_fit(max(1, held))
            tables.most_memo[held] = (layers[ends] - layers[np.minimum(starts, ends)]).max(axis=2)
        found.append(tables.most_memo[held])
    return np.stack(found)


def _recompute(most: Ints, extra_mr: Floats, num_layers: int) -> tuple[Floats, Floats]:
    """Return the two tables of seconds recompute adds, (H, M, L + 1) each."""
    n = np.arange(num_layers + 1)
    allowed = np.where(most[..., None] >= n, extra_mr[None, :, :, None], np.inf)
    each = allowed.min(axis=2)
    each = np.where(np.isfinite(each), each, 0.0)
    added = np.zeros_like(each)
    for m in np.flatnonzero(extra_mr.any(axis=1)).tolist():
        kinds, kind = np.unique(most[:, m], axis=0, return_inverse=True)
        added[:, m] = np.array([np.interp(n, *_hull(some, extra_mr[m])) for some in kinds])[kind.ravel()]
    return each, added


def _hull(most_r: Ints, extra_r: Floats) -> tuple[list[float], list[float]]:
    """Return the lower convex hull of (layers, seconds added) a stage can be at, from (0, 0)."""
    points = sorted({(0.0, 0.0), *((float(n), float(n * e)) for n, e in zip(most_r, extra_r, strict=True))})
    hull: list[tuple[float, float]] = []
    for point in points:
        if hull and point[0] == hull[-1][0]:
            continue
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [x for x, _ in hull], [y for _, y in hull]


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])
