"""Seconds and bytes of a module as a function of what its samples bring.

A microbatch of `k` samples with `tokens` tokens in all and `squares`, the sum of its items' squared tokens, takes

    seconds = max(floor, fixed + per_token * tokens) + per_square * squares

on one rank that holds the whole module. Line and floor come from the cost model with full attention left out: the
line through two large sizes (GEMMs are affine in their rows once they are bound by arithmetic), the floor at one
token, where weights must be read all the same; full attention alone, at the same two sizes, gives the squares and
what it adds to the line. Attention with a window shorter than an item grows with tokens and stays in the line. What a
stage of a pipeline takes is its `share`: the largest part of the module's seconds that the best cut into `pp` runs of
layers leaves on one stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hetplan.costs.prices import Prices, price
from hetplan.costs.records import Floats, LayerCosts, StageOption
from hetplan.costs.samples import SQUARES, TOKENS
from hetplan.specs.model import Attention, Layer, Model, Module
from hetplan.specs.workload import Recompute

LARGE_TOKENS = 8192
"""Tokens at which GEMMs of the widths in use are bound by arithmetic on every device of the catalog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`max(floor, fixed + per_token * tokens) + per_square * squares`."""

    floor: float
    fixed: float
    per_token: float
    per_square: float

    def at(self, features: Floats) -> Floats:
        """Return the values for features (.., 3); nothing where there are no tokens."""
        tokens = features[..., TOKENS]
        line: Floats = np.maximum(self.floor, self.fixed + self.per_token * tokens)
        return line * (tokens > 0) + self.per_square * features[..., SQUARES]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCosts:
    """One module on one rank of a tp group, all its layers together."""

    forward: Line
    """Seconds, communication inside the mesh included."""
    backward: Line
    saved_bytes: Line
    """Activations kept for the backward pass."""
    logits_bytes: Line
    params: float
    """A rank trains, before pipeline stages divide them."""
    frozen_params: float
    mean_l: Floats
    """Seconds of each layer, both passes, in the mean microbatch."""


def largest_run(values_l: Floats, parts: int) -> float:
    """Return the least possible largest sum of `parts` runs of consecutive values."""
    low, high = float(values_l.max()), float(values_l.sum())
    for _ in range(50):
        middle = (low + high) / 2
        if _runs_needed(values_l, middle) <= parts:
            high = middle
        else:
            low = middle
    return high


def _runs_needed(values_l: Floats, limit: float) -> int:
    runs, held = 1, 0.0
    for value in values_l.tolist():
        if held + value > limit * (1 + 1e-12):
            runs, held = runs + 1, 0.0
        held += value
    return runs


class ModulePrices:
    """Answers for the modules of one model on one cluster; remembers what repeats."""

    def __init__(self, prices: Prices, mean_f: dict[str, Floats]) -> None:
        """Price around microbatches that bring `mean_f[module]` (items, tokens, squares)."""
        self.prices = prices
        self._mean_f = mean_f
        self._known: dict[tuple[str, str, int, Recompute], ModuleCosts] = {}
        self._shares: dict[tuple[object, ...], float] = {}

    def module(self, name: str) -> Module:
        """Return a module by name."""
        return next(module for module in self.prices.model.modules if module.name == name)

    def costs(self, name: str, group: str, tp: int, recompute: Recompute = "none") -> ModuleCosts:
        """Return the costs of a module on a rank of `group` within a tp group."""
        key = (name, group, tp, recompute)
        if key not in self._known:
            self._known[key] = self._costs(*key)
        return self._known[key]

    def share(
        self, parts: tuple[tuple[str, int], ...], group: str, recompute: Recompute, pp: int, cut: tuple[int, ...] = ()
    ) -> float:
        """Return the largest part of the seconds of `parts` (module, tp) that a stage has, under a cut or the best."""
        key = (parts, group, recompute, pp, cut)
        if key not in self._shares:
            mean_l = np.concatenate([self.costs(name, group, tp, recompute).mean_l for name, tp in parts])
            ends = np.cumsum((0, *cut))
            stages = [float(mean_l[first:end].sum()) for first, end in pairwise(ends.tolist())]
            largest = max(stages) if cut else largest_run(mean_l, pp)
            self._shares[key] = largest / max(float(mean_l.sum()), 1e-300)
        return self._shares[key]

    def _costs(self, name: str, group: str, tp: int, recompute: Recompute) -> ModuleCosts:
        _, tokens, squares = (float(value) for value in self._mean_f[name])
        tokens = max(1.0, tokens)
        sizes = (LARGE_TOKENS, 2 * LARGE_TOKENS)
        length = max(1.0, squares / tokens)
        module = self.module(name)
        option = StageOption(group=group, tp=tp, samples=1, recompute=recompute)
        straight = [self._layers(_without_attention(module, length), size, option) for size in (1, *sizes)]
        whole, twice = (self._layers(_without_windows(module, length), size, option) for size in sizes)
        bare, bare_twice = (self._layers(_bare(module), size, option) for size in sizes)
        square = float(sizes[0]) ** 2

        def line(get: str) -> Line:
            floor, low, high = (float(getattr(costs, get).sum()) for costs in straight)
            per_token = (high - low) / (sizes[1] - sizes[0])
            once = float(getattr(whole, get).sum() - getattr(bare, get).sum())
            double = float(getattr(twice, get).sum() - getattr(bare_twice, get).sum())
            per_square = max(0.0, (double - 2 * once) / (2 * square))
            fixed = max(0.0, low - per_token * sizes[0])
            per_token += max(0.0, once - per_square * square) / sizes[0]
            return Line(floor=floor, fixed=fixed, per_token=per_token, per_square=per_square)

        attention_l = whole.forward_total_s + whole.backward_total_s - bare.forward_total_s - bare.backward_total_s
        attention_l = np.maximum(0.0, attention_l) * (squares / square)
        mean_l = (straight[1].forward_total_s + straight[1].backward_total_s) * (tokens / sizes[0]) + attention_l
        return ModuleCosts(
            forward=line("forward_total_s"),
            backward=line("backward_total_s"),
            saved_bytes=line("saved_bytes"),
            logits_bytes=line("logits_bytes"),
            params=float((whole.params + whole.expert_params).sum()),
            frozen_params=float(whole.frozen_params.sum()),
            mean_l=mean_l,
        )

    def _layers(self, module: Module, tokens: int, option: StageOption) -> LayerCosts:
        model = Model(name=module.name, modules=(module,))
        workload = replace(self.prices.workload, seq_len=tokens)
        return price(self.prices.cluster, model, workload, self.prices.calibration).layers(option)


def _mapped(module: Module, keeps: object, length: float) -> Module:
    """Return the module on sequences of the workload's length, with the attention operators `keeps` chooses."""
    made: dict[int, Layer] = {}
    for layer in module.layers:
        if id(layer) not in made:
            operators = tuple(
                one
                for one in layer.operators
                if not isinstance(one, Attention) or (callable(keeps) and keeps(one, length))
            )
            made[id(layer)] = replace(layer, operators=operators, tokens_per_sample=None)
    return replace(module, layers=tuple(made[id(layer)] for layer in module.layers))


def _is_windowed(attention: Attention, length: float) -> bool:
    return attention.window is not None and attention.window < length


def _without_attention(module: Module, length: float) -> Module:
    return _mapped(module, _is_windowed, length)


def _without_windows(module: Module, length: float) -> Module:
    return _mapped(module, lambda one, at: not _is_windowed(one, at), length)


def _bare(module: Module) -> Module:
    return _mapped(module, None, 0.0)
