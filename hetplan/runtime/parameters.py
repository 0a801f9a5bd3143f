"""Which parameters a layer has, and which box of each a rank holds; arithmetic on shapes, no tensors.

A parameter is named by its layer's place in the model's chain, so that its name, its initial value and its place in a
checkpoint are the same in every layout. A *box* is one half-open range a dimension. Tensor parallelism cuts the
dimension that `split` names into near equal ranges ``[n r // tp, n (r + 1) // tp)``: heads and projections divide
exactly, words of a vocabulary need not, so nothing is padded. Experts are cut along their first dimension by `ep`.

A parameter that `tp` does not cut is replicated. Its gradient is then either *whole* on every rank (all saw the same
tokens and the same gradient) or *partial* (each saw its own tokens or heads, and the sum over ranks is the gradient);
`copies_of_gradient` is by how much the sum over the ranks that hold it counts the gradient too often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hetplan.specs.model import Attention, Experts, Layer, Linear, Model, Norm, Table

Box = tuple[tuple[int, int], ...]
Start = Literal["normal", "output", "ones", "zeros"]
"""normal: deviation 0.02; output: that over the square root of twice the decoder layers (Radford 2019, GPT-2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which part of every layer a rank holds."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter as one rank holds it."""

    name: str
    """The same in every layout; a tied head names the embedding's table."""
    local: str
    """What the layer calls it: `q.weight`."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    box: Box
    start: Start
    copies_of_gradient: int = 1
    decays: bool = True
    """Weight decay applies (matrices, not norms or biases)."""

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of what the rank holds."""
        return tuple(end - first for first, end in self.box)


def model_parameters(model: Model, index: int, cut: Cut) -> tuple[Held, ...]:
    """Return the parameters of layer `index` of the chain as a rank with this cut holds them."""
    return tuple(_held(model, index, cut))


def share(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return the half-open range of `count` things that part `part` of `parts` has."""
    return count * part // parts, count * (part + 1) // parts


def table_name(model: Model) -> str:
    """Return the full name of the token table's weight."""
    for index, layer in enumerate(model.chain):
        if any(isinstance(operator, Table) and operator.name == "tokens" for operator in layer.operators):
            return f"layers.{index}.tokens.weight"
    return ""


def _held(model: Model, index: int, cut: Cut) -> Iterator[Held]:
    layer = model.chain[index]
    for operator in layer.operators:
        match operator:
            case Linear():
                yield from _linear(operator, index, cut, _name_of(model, index, operator))
            case Experts():
                yield from _experts(operator, index, cut)
            case Norm() if operator.params:
                yield from _norm(operator, index, cut, layer)
            case Table():
                yield _table(operator, index, cut)


def _name_of(model: Model, index: int, linear: Linear) -> str:
    return table_name(model) if linear.tied else f"layers.{index}.{linear.name}.weight"


def _linear(linear: Linear, index: int, cut: Cut, name: str) -> Iterator[Held]:
    rows, columns = (0, linear.outputs), (0, linear.inputs)
    if linear.split in ("column", "vocab"):
        rows = share(linear.outputs, cut.tp, cut.tp_rank)
    elif linear.split == "row":
        columns = share(linear.inputs, cut.tp, cut.tp_rank)
    yield Held(
        name=name,
        local=f"{linear.name}.weight",
        shape=(linear.outputs, linear.inputs),
        box=(rows, columns),
        start="output" if linear.split == "row" else "normal",
    )
    if linear.bias:
        whole = linear.split == "row" and not cut.sequence_parallel
        yield Held(
            name=f"layers.{index}.{linear.name}.bias",
            local=f"{linear.name}.bias",
            shape=(linear.outputs,),
            box=(rows,),
            start="zeros",
            copies_of_gradient=cut.tp if whole else 1,
            decays=False,
        )


def _experts(experts: Experts, index: int, cut: Cut) -> Iterator[Held]:
    yield from _linear(experts.router, index, cut, f"layers.{index}.{experts.router.name}.weight")
    mine = share(experts.num_experts, cut.ep, cut.ep_rank)
    for linear in experts.linears:
        (inside, *_) = _linear(linear, index, cut, "")
        name = f"{experts.name}.{linear.name}.weight"
        yield Held(
            name=f"layers.{index}.{name}",
            local=name,
            shape=(experts.num_experts, *inside.shape),
            box=(mine, *inside.box),
            start=inside.start,
        )


def _norm(norm: Norm, index: int, cut: Cut, layer: Layer) -> Iterator[Held]:
    width = head_width(norm, layer)
    copies = 1 if norm.sharded or cut.sequence_parallel else cut.tp
    kinds: tuple[tuple[str, Start], ...] = (("weight", "ones"), ("bias", "zeros"))
    for kind, start in kinds[: norm.params // width]:
        yield Held(
            name=f"layers.{index}.{norm.name}.{kind}",
            local=f"{norm.name}.{kind}",
            shape=(width,),
            box=((0, width),),
            start=start,
            copies_of_gradient=copies,
            decays=False,
        )


def head_width(norm: Norm, layer: Layer) -> int:
    """Return the features a norm sees at once: one head's for query and key norms."""
    if not norm.sharded:
        return norm.width
    (head,) = {operator.qk_head_dim for operator in layer.operators if isinstance(operator, Attention)}
    return head


def _table(table: Table, index: int, cut: Cut) -> Held:
    by_word = table.split == "vocab"
    rows = share(table.rows, cut.tp, cut.tp_rank) if by_word else (0, table.rows)
    return Held(
        name=f"layers.{index}.{table.name}.weight",
        local=f"{table.name}.weight",
        shape=(table.rows, table.width),
        box=(rows, (0, table.width)),
        start="normal",
        copies_of_gradient=1 if by_word or cut.sequence_parallel else cut.tp,
    )
