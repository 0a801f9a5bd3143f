"""A model is a graph of modules, each module a chain of layers, each layer a tuple of operators.

The operators say everything costs and parameter counts need and nothing else: a family of models is a function that
turns its published configuration into this form, and no later code knows any family's name. Widths are those of the
whole model, before any parallel split; `split` says how tensor parallelism cuts a weight.

A chain starts with an `embedding` layer and ends with a `head` layer (final norm, logits, loss) where the module has
them, so stage cuts treat them as layers with a cost of their own. Equal layers are the same object repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["column", "row", "vocab", "none"]
"""column: outputs cut by tp; row: inputs cut by tp; vocab: the words of a table or head cut by tp; none: replicated."""
Gradients = Literal["all", "input", "none"]
"""What a layer's backward pass makes: everything, its input's gradient only, or nothing (there is no such pass)."""
LayerKind = Literal["embedding", "decoder", "encoder", "projector", "mtp", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A dense product of every token with a weight of `inputs` x `outputs`."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    split: Split = "column"
    reads_new_input: bool = True
    """False when the previous linear already saved this input (fused q/k/v, gate/up): saved once."""
    tied: bool = False
    """True: the weight is another layer's (a tied head) and counts there; a bias still counts here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Scores, softmax and weighted sum; the projections around it are `Linear`s."""

    name: str
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    value_head_dim: int
    causal: bool = True
    window: int | None = None
    """Tokens a query looks back; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """Elementwise normalisation over `width` features a token; `params` as stored (0: no affine)."""

    name: str
    width: int
    params: int
    sharded: bool = False
    """True: runs on heads that tp cuts (query/key norms); parameters stay replicated all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Elementwise function between two linears; gated ones read twice `width` and write `width`."""

    name: str
    width: int
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table looked up by index (token, position or type embedding)."""

    name: str
    rows: int
    width: int
    split: Split = "vocab"
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A routed mixture: each token runs `top_k` of `num_experts` copies of the linears and activation inside."""

    name: str
    num_experts: int
    top_k: int
    router: Linear
    linears: tuple[Linear, ...]
    activation: Activation
    extra_params: int = 0
    """Buffers counted as parameters by the published figure (a router's correction bias), replicated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters that no other operator holds (layer scale, class token ...); replicated, no compute of note."""

    name: str
    params: int
    cut_by: int = 1
    """Largest tp that cuts them; its divisors do as well. 1: replicated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Softmax cross-entropy over `vocab` logits a token, computed in fp32."""

    name: str
    vocab: int


Operator = Linear | Attention | Norm | Activation | Table | Experts | Parameters | Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One link of a module's chain; `width` is the features a token carries out of it."""

    kind: LayerKind
    name: str
    width: int
    operators: tuple[Operator, ...]
    tokens_per_sample: int | None = None
    """Tokens a sample brings to this layer; None: the workload's sequence length."""
    dropout: bool = False
    counted: bool = True
    """False: trained and priced, but left out of the published parameter count (multi-token prediction)."""
    gradients: Gradients = "all"
    adapters: tuple[Linear, ...] = ()
    """Products that train beside a frozen layer's own (low-rank adapters)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A chain of layers that runs front to back."""

    name: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """A job of which only its traffic is known."""

    stages: int
    replicas: int
    gradient_bytes: float
    """Gradients of one stage on one device."""
    activation_bytes: float
    """What one microbatch sends over a boundary between stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Modules in an order in which data can flow; `edges` names (from module, to module)."""

    name: str
    modules: tuple[Module, ...]
    edges: tuple[tuple[str, str], ...] = ()
    family: str = ""
    """`model_type` of the configuration it came from."""
    max_seq_len: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)
    """Fields of the configuration it came from; launch files repeat some (rotary base), no cost reads them."""
    volumes: Volumes | None = None
    """Set: the traffic alone is known, and placements are searched for (`hetplan.search.geo`)."""

    @property
    def chain(self) -> tuple[Layer, ...]:
        """All layers in the order data flows; stage cuts index this tuple."""
        return tuple(layer for module in self.modules for layer in module.layers)


def operator_params(operator: Operator) -> int:
    """Parameters one operator holds."""
    match operator:
        case Linear():
            weight = 0 if operator.tied else operator.inputs * operator.outputs
            return weight + (operator.outputs if operator.bias else 0)
        case Norm() | Parameters():
            return operator.params
        case Table():
            return 0 if operator.tied else operator.rows * operator.width
        case Experts():
            inside = sum(operator_params(linear) for linear in operator.linears)
            return operator_params(operator.router) + operator.num_experts * inside + operator.extra_params
        case Attention() | Activation() | Loss():
            return 0


def layer_params(layer: Layer) -> int:
    """Parameters one layer holds."""
    return sum(operator_params(operator) for operator in layer.operators)


def trained_params(layer: Layer) -> int:
    """Parameters of one layer that get gradients: all, those of its adapters, or none."""
    return layer_params(layer) if layer.gradients == "all" else sum(map(operator_params, layer.adapters))


def model_params(model: Model) -> int:
    """Parameters of the whole model, as the published figures count them.

    Tied weights count once and layers that are not `counted` do not; a plan holds `layer_params` of those too.
    """
    return sum(layer_params(layer) for layer in model.chain if layer.counted)
