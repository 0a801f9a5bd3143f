"""The layers of a model in plain torch, built from its operator form, each rank its own slices.

How to build and run one layer of any model the runtime knows (`numerics_of` refuses others)::

    from hetplan.runtime.attention import Tokens, positions_of
    from hetplan.runtime.model import build_layer, start_values
    from hetplan.runtime.parallel import Axis, Mesh

    mesh = Mesh(tp=Axis(degree=2, rank=dist.get_rank(), group=group), sequence_parallel=True)   # Mesh() for tp 1
    layer = build_layer(model, index, mesh, dtype=torch.float32, device=torch.device("cpu"))
    tokens = Tokens(num_samples=b, positions=positions_of(seq_len, 1, 0, device), ids=ids, labels=labels)
    out = layer(rows, tokens)            # forward
    out.backward(gradient)               # backward; gradients land in `parameter.grad`

`index` is the layer's place in ``model.chain``: 0 is the embedding, the last is the head. What goes in and out:

==========  =============================================  =============================================
embedding   rows: None; ``tokens.ids`` ``[b * seq]``       rows ``[b * seq, width]``
decoder     rows ``[b * seq, width]``                      rows of the same shape
head        rows; ``tokens.labels`` ``[b * seq]``          the sum of the tokens' losses, a scalar
==========  =============================================  =============================================

Rows are tokens, sample by sample; with tp and sequence parallelism each tp rank has an equal run of ``b * seq / tp`` of
them between layers (`ids` and `labels` are always whole). A tied head shares the embedding's parameter where one rank
holds both (pass it in `shared`), else it holds a slice of its own under the same name. `start_values` fills parameters
with what every layout starts from. Dropout is not applied: a run is a function of its data, seed and plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hetplan.runtime.attention import Attention, Norm, Parameters, Tokens
from hetplan.runtime.experts import Experts
from hetplan.runtime.linear import Linear, activation
from hetplan.runtime.losses import cross_entropy_sum
from hetplan.runtime.numerics import Numerics, numerics_of
from hetplan.runtime.parallel import Mesh, enter, leave
from hetplan.runtime.parameters import Cut, Held, model_parameters
from hetplan.specs.model import Attention as AttentionSpec
from hetplan.specs.model import Experts as ExpertsSpec
from hetplan.specs.model import Layer, Model
from hetplan.specs.workload import Recompute

DEVIATION = 0.02
"""Of starting values (Radford 2019, GPT-2)."""


def cut_of(mesh: Mesh) -> Cut:
    """Return which part of each layer the ranks of a mesh hold."""
    return Cut(
        tp=mesh.tp.degree,
        tp_rank=mesh.tp.rank,
        ep=mesh.ep.degree,
        ep_rank=mesh.ep.rank,
        sequence_parallel=mesh.sequence_parallel and mesh.tp.degree > 1,
    )


def build_layer(
    model: Model,
    index: int,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shared: dict[str, nn.Parameter] | None = None,
) -> Block:
    """Return layer `index` of a model's chain with parameters of undefined value.

    `shared` holds parameters by full name: those found there are used, new ones are added.

    Raises:
        UsageError: the runtime does not build this model.
    """
    numerics = numerics_of(model)
    known = {} if shared is None else shared
    own: dict[str, nn.Parameter] = {}
    for held in model_parameters(model, index, cut_of(mesh)):
        if held.name not in known:
            known[held.name] = nn.Parameter(torch.empty(held.box_shape, dtype=dtype, device=device))
            known[held.name].held = held
        own[held.local] = known[held.name]
    layer = model.chain[index]
    kind = {"embedding": Embedding, "decoder": Decoder, "head": Head}[layer.kind]
    return kind(layer, own, mesh, numerics)


def start_values(parameters: Iterable[nn.Parameter], seed: int, num_decoders: int) -> None:
    """Fill parameters with the values every layout starts from: drawn whole by name, then cut."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(start_value(parameter.held, seed, num_decoders))


def start_value(held: Held, seed: int, num_decoders: int) -> torch.Tensor:
    """Return the slice of a parameter's first value."""
    if held.start in ("ones", "zeros"):
        return torch.full(held.box_shape, float(held.start == "ones"))
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{held.name}".encode()))
    deviation = DEVIATION / (2 * num_decoders) ** 0.5 if held.start == "output" else DEVIATION
    if len(held.shape) == 2:
        whole = torch.randn(held.shape, generator=generator)
        return whole[tuple(slice(*side) for side in held.box)] * deviation
    experts = [torch.randn(held.shape[1:], generator=generator) for _ in range(held.box[0][1])]
    inside = tuple(slice(*side) for side in held.box[1:])
    return torch.stack([whole[inside] for whole in experts[held.box[0][0] :]]) * deviation


class Block(nn.Module):
    """A layer of the chain; `recompute` says what its backward pass makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.recompute: Recompute = "none"

    def forward(self, rows: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
        """Return what the layer makes of rows."""
        if self.recompute == "full" and torch.is_grad_enabled() and rows is not None:
            return checkpoint(self.run, rows, tokens, use_reentrant=False, preserve_rng_state=False)
        return self.run(rows, tokens)

    def run(self, rows: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
        """Return what the layer makes of rows, keeping what its backward pass needs."""
        raise NotImplementedError


class Embedding(Block):
    """Words of one tp rank, and learned positions where the model has them."""

    def __init__(self, layer: Layer, parameters: Parameters, mesh: Mesh, numerics: Numerics) -> None:
        super().__init__()
        self.mesh = mesh
        self.words = parameters["tokens.weight"]
        self.positions = parameters.get("positions.weight")

    def run(self, rows: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
        """Return the rows of `tokens.ids`; `rows` is not read."""
        if tokens.ids is None:
            raise ValueError("the embedding reads tokens.ids")
        out = leave(_words(self.words, tokens.ids), self.mesh)
        if self.positions is None:
            return out
        where = tokens.positions.repeat(tokens.num_samples)
        if out.shape[0] != where.shape[0]:
            where = where.view(self.mesh.tp.degree, -1)[self.mesh.tp.rank]
        return out + functional.embedding(where, self.positions)


def _words(table: nn.Parameter, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of words this rank holds, zeros for the others."""
    (first, end), _ = table.held.box
    if (first, end) == (0, table.held.shape[0]):
        return functional.embedding(ids, table)
    mine = (ids >= first) & (ids < end)
    return functional.embedding(torch.where(mine, ids - first, 0), table) * mine[:, None]


class _Mlp(nn.Module):
    """Up (and gate), activation, down; `prefix` names a shared expert's."""

    def __init__(self, parameters: Parameters, numerics: Numerics, prefix: str = "") -> None:
        super().__init__()

        def linear(name: str) -> Linear:
            return Linear(parameters[f"{prefix}{name}.weight"], parameters.get(f"{prefix}{name}.bias"))

        self.up, self.down = linear("up"), linear("down")
        self.gate = linear("gate") if f"{prefix}gate.weight" in parameters else None
        self.activation = activation(numerics.activation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product with `down`, without its bias."""
        up = self.up.with_bias(rows)
        if self.gate is None:
            return self.down(self.activation(up))
        return self.down(self.activation(self.gate.with_bias(rows)) * up)


class _Mixture(nn.Module):
    """Routed experts and, where the model has one, the shared expert beside them."""

    def __init__(self, spec: ExpertsSpec, parameters: Parameters, mesh: Mesh, numerics: Numerics) -> None:
        super().__init__()
        self.routed = Experts(spec, parameters, mesh, numerics)
        self.shared = _Mlp(parameters, numerics, "shared_") if "shared_up.weight" in parameters else None
        has_gate = "shared_router.weight" in parameters
        self.shared_gate = Linear(parameters["shared_router.weight"]) if has_gate else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the experts' outputs."""
        out = self.routed(rows)
        if self.shared is None:
            return out
        beside = self.shared(rows)
        if self.shared_gate is not None:
            beside = beside * torch.sigmoid(self.shared_gate(rows))
        return out + beside


class Decoder(Block):
    """Attention and MLP or experts, with the norms the family puts before, behind or between them."""

    def __init__(self, layer: Layer, parameters: Parameters, mesh: Mesh, numerics: Numerics) -> None:
        super().__init__()
        self.mesh = mesh
        (scores,) = (operator for operator in layer.operators if isinstance(operator, AttentionSpec))
        self.attention = Attention(scores, parameters, mesh, numerics)
        routed = [operator for operator in layer.operators if isinstance(operator, ExpertsSpec)]
        self.mlp = _Mixture(routed[0], parameters, mesh, numerics) if routed else _Mlp(parameters, numerics)
        self.down_bias = parameters.get("down.bias")
        self.attention_norm = Norm(parameters, "attention_norm", numerics.norm_epsilon)
        self.mlp_norm = Norm(parameters, "mlp_norm", numerics.norm_epsilon)

    def run(self, rows: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
        """Return the rows after both parts."""
        if rows is None:
            raise ValueError("a decoder layer reads rows")
        rows = rows + self.attention(self.attention_norm(rows), tokens)
        out = leave(self.mlp(enter(self.mlp_norm(rows), self.mesh)), self.mesh)
        return rows + (out if self.down_bias is None else out + self.down_bias)


class Head(Block):
    """Final norm, logits of the words of one tp rank, and the loss."""

    def __init__(self, layer: Layer, parameters: Parameters, mesh: Mesh, numerics: Numerics) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = Norm(parameters, "final_norm", numerics.norm_epsilon)
        self.logits = Linear(parameters["logits.weight"], parameters.get("logits.bias"))

    def run(self, rows: torch.Tensor | None, tokens: Tokens) -> torch.Tensor:
        """Return the sum of the losses of all tokens, the same on every tp rank."""
        if rows is None or tokens.labels is None:
            raise ValueError("the head reads rows and tokens.labels")
        logits = self.logits.with_bias(enter(self.norm(rows), self.mesh))
        first_word = self.logits.weight.held.box[0][0]
        return cross_entropy_sum(logits, tokens.labels, first_word, self.mesh)
