"""What of a model trains: whole modules, none of a module, or low-rank adapters beside its weights.

A frozen layer makes no weight gradients. It passes gradients on to what stands before it only where something there
trains: a frozen encoder under a trained projector runs forward only, a frozen language model behind a trained
projector still makes input gradients. Adapters (Hu 2021, arXiv:2106.09685) of rank `r` beside every dense product
`inputs x outputs` of a layer are two products `inputs x r` and `r x outputs` that train, while the layer is frozen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hetplan.errors import UsageError
from hetplan.specs.model import Gradients, Layer, Linear, Model, Module

How = Literal["full", "frozen", "lora"]
MOST_RANK = 65_536
_RULE = re.compile(r"full|frozen|lora\(([1-9][0-9]{0,5})\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one module trains."""

    how: How = "full"
    rank: int = 0
    """Of the adapters (`lora`)."""

    def __str__(self) -> str:
        return f"lora({self.rank})" if self.how == "lora" else self.how


def parse_rule(text: str) -> Rule:
    """Return the rule that `full`, `frozen` or `lora(16)` names.

    Raises:
        UsageError: the text names none.
    """
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no way to train a module; write full, frozen or lora(RANK)")
    if match[1]:
        return Rule(how="lora", rank=int(match[1]))
    return Rule(how="frozen" if text.strip() == "frozen" else "full")


def with_training(model: Model, rules: Mapping[str, Rule]) -> Model:
    """Return `model` with modules trained as `rules` say; a module without a rule trains in full.

    Raises:
        UsageError: a rule names no module, or nothing is left to train.
    """
    names = tuple(module.name for module in model.modules)
    unknown = sorted(set(rules) - set(names))
    if unknown:
        raise UsageError(f"there is no module {unknown[0]!r}; the model has {', '.join(names)}")
    if all(rules.get(name, Rule()).how == "frozen" for name in names):
        raise UsageError("every module is frozen: nothing is left to train")
    upstream = {name: any(_trains(rules, other) for other in _before(model, name)) for name in names}
    modules = tuple(_ruled(module, rules.get(module.name, Rule()), upstream[module.name]) for module in model.modules)
    return replace(model, modules=modules)


def how_trained(module: Module) -> str:
    """Return `full`, `frozen` or `lora`, as the module's layers are marked."""
    if any(layer.adapters for layer in module.layers):
        return "lora"
    return "full" if any(layer.gradients == "all" for layer in module.layers) else "frozen"


def _trains(rules: Mapping[str, Rule], name: str) -> bool:
    return rules.get(name, Rule()).how != "frozen"


def _before(model: Model, name: str) -> set[str]:
    """Return the modules whose output reaches module `name`."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        senders = {sender for sender, receiver in model.edges if receiver == ahead[-1]} - found
        ahead.pop()
        found |= senders
        ahead.extend(senders)
    return found


def _ruled(module: Module, rule: Rule, upstream_trains: bool) -> Module:  # noqa: FBT001 - one caller, same file
    if rule.how == "full":
        return module
    made: dict[int, Layer] = {}
    layers = []
    for place, layer in enumerate(module.layers):
        key = id(layer)
        first = place == 0 and not upstream_trains
        if key not in made or first:
            made[key] = _frozen(layer, rule, passes_on=upstream_trains or rule.how == "lora")
        layers.append(made[key])
    return replace(module, layers=tuple(layers))


def _frozen(layer: Layer, rule: Rule, *, passes_on: bool) -> Layer:
    gradients: Gradients = "input" if passes_on else "none"
    adapters: tuple[Linear, ...] = ()
    if rule.how == "lora" and layer.kind in ("encoder", "decoder", "projector"):
        adapters = tuple(part for operator in layer.operators for part in _adapter(operator, rule.rank))
    return replace(layer, gradients=gradients, adapters=adapters)


def _adapter(operator: object, rank: int) -> tuple[Linear, ...]:
    """Return the two products beside a dense one; routed experts get none."""
    if not isinstance(operator, Linear):
        return ()
    row = operator.split == "row"
    return (
        Linear(
            name=f"{operator.name}_down",
            inputs=operator.inputs,
            outputs=rank,
            split="row" if row else "none",
            reads_new_input=False,
        ),
        Linear(name=f"{operator.name}_up", inputs=rank, outputs=operator.outputs, split="none" if row else "column"),
    )
